"""`python -m mlx_redrafter.doctor`."""

from .cli.main import main

if __name__ == "__main__":
    main("doctor")
