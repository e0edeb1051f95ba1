"""`python -m mlx_redrafter.race`."""

from .cli.main import main

if __name__ == "__main__":
    main("race")
