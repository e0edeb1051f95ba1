"""`python -m mlx_redrafter.train`."""

from .cli.main import main

if __name__ == "__main__":
    main("train")
else:
    raise ImportError(
        "mlx_redrafter.train is a command; the function: from mlx_redrafter import train"
    )
