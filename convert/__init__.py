"""`python -m mlx_redrafter.convert`: a trained drafter, wherever it comes from, as a directory that MLX loads.

sources     which files a path or hub id means, and which are refused
tensors     the tensors in a safetensors file or a pickle, no code executed
layouts     the drafter among them: its kind, and every source's names mapped to ours
block_configs what the configs of block drafters say
heads       a drafter of each kind, made of them
conversion  all steps in order, with cast, quantization and measurements; `command` is its flags
output      the directory that is written, whole or not at all
"""
