"""`python -m mlx_redrafter.answers`."""

from .cli.main import main

if __name__ == "__main__":
    main("answers")
