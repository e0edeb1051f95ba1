"""`python -m mlx_redrafter COMMAND`."""

from .cli.main import main

main()
