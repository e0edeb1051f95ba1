"""`python -m mlx_redrafter.convert`: a trained drafter, wherever it comes from, as a directory that MLX loads.

sources     what only PyTorch or TensorRT-LLM writes: pickles, no code executed, and slices of ranks
conversion  all steps in order, with cast, quantization and measurements; `command` is its flags
output      the directory that is written, whole or not at all
"""
