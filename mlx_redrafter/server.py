"""`python -m mlx_redrafter.server`."""

from .cli.main import main

if __name__ == "__main__":
    main("server")
