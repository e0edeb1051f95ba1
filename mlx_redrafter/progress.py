"""The lock of tqdm's progress bars, without a process of its own on macOS."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from tqdm import tqdm


class BarLock:
    """A lock between threads, with one between processes as its `mp_lock`, which is made when it is asked for.

    tqdm's own lock has both from the first bar on. Where processes are spawned, the second starts one that tracks it.
    """

    def __init__(self) -> None:
        self.th_lock = threading.RLock()
        self.acquire, self.release = self.th_lock.acquire, self.th_lock.release

    @cached_property
    def mp_lock(self) -> Any:
        """What `tqdm.contrib.concurrent.process_map` hands to its workers."""
        from multiprocessing import RLock

        return RLock()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def set_bar_lock() -> None:
    """Gives all of tqdm's bars a `BarLock`, unless they have a lock."""
    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(BarLock())
