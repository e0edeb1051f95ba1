"""`python -m mlx_redrafter.convert`: writes a trained drafter from any source as a directory that MLX loads.

sources     formats of PyTorch and TensorRT-LLM: pickles, without executing code, and slices of ranks
conversion  all steps in order, with cast, quantization and measurements; `command` has its flags
output      the directory that is written, completely or not at all
"""
