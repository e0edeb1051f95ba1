"""`python -m mlx_redrafter.race`: plain and drafted decoding side by side, on a page of one's own server.

Only a door: what it does lives in `mlx_redrafter.serving`, and nothing imports this file.
"""

from __future__ import annotations

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.serving.race")


if __name__ == "__main__":
    main()
