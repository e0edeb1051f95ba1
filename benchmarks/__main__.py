"""`python -m benchmarks COMMAND`: OpenBLAS is loaded first where MLX computes on a CPU."""

from .blas import load_openblas

load_openblas()

from mlx_redrafter.cli.main import run_module  # noqa: E402

if __name__ == "__main__":
    run_module("benchmarks.command")
