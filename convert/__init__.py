"""`python -m mlx_redrafter.convert`: converts a trained drafter to a directory that MLX loads.

Modules:
    tensors: reads PyTorch pickles, without executing code, and TensorRT-LLM files with one slice
        per rank.
    conversion: all steps in order, with cast, quantization and measurements.
    directory: writes the directory, completely or not at all.
"""
