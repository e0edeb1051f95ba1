"""`python -m mlx_redrafter.stdio`."""

from .cli.main import main

if __name__ == "__main__":
    main("stdio")
