"""`python -m mlx_redrafter.generate`."""

from .cli.main import main

if __name__ == "__main__":
    main("generate")
else:
    raise ImportError(
        "mlx_redrafter.generate is a command; the function: from mlx_redrafter import generate"
    )
