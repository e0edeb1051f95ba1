"""`python -m mlx_redrafter.chat`: a conversation in the terminal, drafted.

Only a door: what it does lives in `mlx_redrafter.talk`, and nothing imports this file.
"""

from __future__ import annotations

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.talk")


if __name__ == "__main__":
    main()
