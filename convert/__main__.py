"""`python -m mlx_redrafter.convert`."""

from mlx_redrafter.cli.main import main

main("convert")
