"""`python -m mlx_redrafter.convert`."""

from ..cli.main import main

main("convert")
