"""`python -m mlx_redrafter.convert`: converts a trained drafter to a directory that MLX loads.

Modules:
    sources: reads PyTorch pickles, without executing code, and TensorRT-LLM files with one slice
        per rank.
    conversion: all steps in order, with cast, quantization and measurements.
    output: writes the directory, completely or not at all.
    command: flags and report.
"""
