"""`python -m mlx_redrafter.train`."""

from .cli.main import main

if __name__ == "__main__":
    main("train")
