"""`python -m mlx_redrafter COMMAND`."""

from .cli import main

main()
