"""`python -m mlx_redrafter.server`: mlx_lm.server, with recurrent drafters.

Only a door: what it does lives in `mlx_redrafter.serving`, and nothing imports this file.
"""

from __future__ import annotations

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.serving.command")


if __name__ == "__main__":
    main()
