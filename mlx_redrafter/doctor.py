"""`python -m mlx_redrafter.doctor`: what drafting can do on this machine for a model, before a drafter is trained.

Only a door: what it finds out lives in `mlx_redrafter.diagnosis`, and nothing imports this file.
"""

from __future__ import annotations

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.checkup")


if __name__ == "__main__":
    main()
