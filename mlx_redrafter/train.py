"""`python -m mlx_redrafter.train`: a drafter for a target of your own, trained on what that target says.

Only a door: what it does lives in `mlx_redrafter.training`, and nothing imports this file.
"""

from __future__ import annotations

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.training.command")


if __name__ == "__main__":
    main()
