"""Which process has started this one."""

from __future__ import annotations

import os

_noted: list[int] = []


def note() -> None:
    """Notes it, before it can go: loading takes seconds, and an orphan has another parent."""
    _noted[:] = [os.getppid()]


def noted() -> int:
    """Its id, as noted first."""
    if not _noted:
        note()
    return _noted[0]
