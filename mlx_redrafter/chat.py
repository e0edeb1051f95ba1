"""`python -m mlx_redrafter.chat`."""

from .cli.main import main

if __name__ == "__main__":
    main("chat")
