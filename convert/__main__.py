"""`python -m mlx_redrafter.convert`."""

from . import main

main()
