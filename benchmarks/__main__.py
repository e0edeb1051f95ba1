"""`python -m benchmarks COMMAND`."""

from mlx_redrafter.cli.main import run_module

run_module("benchmarks.command")
