"""`python -m mlx_redrafter.generate`: text from a prompt, with the drafter or without.

Only a door: the functions live in `mlx_redrafter.generation`, and nothing imports this file. Importing it puts a
module where the package's function `generate` was; that module can be called just as the function can.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .doors import guarded


def main() -> None:
    """Runs the command on `sys.argv`; exits with 1 and one line on bad input."""
    guarded("mlx_redrafter.command")


class _Door(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> str:
        from .generation import generate

        return generate(*args, **kwargs)


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = _Door
