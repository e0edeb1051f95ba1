"""Worker threads that use MLX."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import mlx.core as mx


@contextmanager
def workers(count: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Pools of one thread each.

    Each thread clears its MLX streams before it ends; otherwise the process may abort at exit (with
    mlx-lm alone, too).
    """
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(count)]
        for pool in pools:
            stack.callback(lambda pool=pool: pool.submit(mx.clear_streams).result())
        yield pools
