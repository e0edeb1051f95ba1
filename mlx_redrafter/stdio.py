"""`python -m mlx_redrafter.stdio`: sessions for another program, over lines of JSON.

Only a door: what it does lives in `mlx_redrafter.lines`, and nothing imports this file.
"""

from __future__ import annotations

from . import parent
from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    parent.note()
    guarded("mlx_redrafter.lines")


if __name__ == "__main__":
    main()
