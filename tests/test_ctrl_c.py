"""A Ctrl-C at any place of what wraps a model leaves the model, MLX and the lock as they were."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_threads import workers
from toys import make_model

from mlx_redrafter import kv, positions, seams
from mlx_redrafter.anatomy import anatomy
from mlx_redrafter.positions import ASKED, Nodes
from mlx_redrafter.seams import reading, tapped

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BRANCHED = Nodes(0, mx.array([0, 1, 1]), mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, branched=True)


def interrupted(call: Callable[[], object], place: int, files: Sequence[str | None]) -> KeyboardInterrupt | None:
    """The Ctrl-C that came into `call`: before instruction, line, call or return number `place` in those files.

    Who holds it holds its frames, too, as an interactive Python does: nothing is put back by chance.
    """
    events, came = itertools.count(), list[KeyboardInterrupt]()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        """Called by the interpreter; what it raises is raised there."""
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event != "exception" and next(events) == place:
            came.append(KeyboardInterrupt())
            raise came[0]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return came[0] if came else None  # Python drops one that comes as a generator is closed


def test_wherever_ctrl_c_comes_nothing_of_a_tree_is_left_behind() -> None:
    model = make_model()
    parent, name = anatomy(model).tap
    norm, asked = parent[name], [getattr(owner, name) for owner, name in ASKED]
    cache: kv.Cache = []

    def verify() -> None:
        cache[:] = make_prompt_cache(model)
        tokens = mx.array([[1, 2, 3]])
        reading(cache, BRANCHED, lambda views: tapped((parent, name), lambda: model(tokens, cache=views)))  # type: ignore[arg-type]

    wrapped, count = 0, 0
    with workers(1) as (other,):
        for place in itertools.count():
            if (held := interrupted(verify, place, (seams.__file__, positions.__file__))) is None:
                break
            count += 1
            wrapped += any(c.offset for c in cache)
            assert parent[name] is norm, place
            assert [getattr(owner, name) for owner, name in ASKED] == asked, place
            assert other.submit(free).result(), place
            del held
    assert count > 500 and 50 < wrapped < count - 50, "it came while the model was wrapped, and at other times"


def free() -> bool:
    """Whether a thread that wraps nothing may wrap a model."""
    if not seams._building.acquire(blocking=False):
        return False
    seams._building.release()
    return True


def test_an_interruption_is_seen_where_it_is_not_mended() -> None:
    """The control of the test above: the same tracing finds what a context manager leaves behind."""
    wrapped = []

    @contextmanager
    def wrapping() -> Iterator[None]:
        wrapped.append(True)
        try:
            yield
        finally:
            wrapped.clear()

    def body() -> None:
        with wrapping():
            pass

    left = 0
    for place in itertools.count():
        wrapped.clear()
        if (held := interrupted(body, place, (__file__, contextlib.__file__))) is None:
            break
        left += bool(wrapped)
        del held
    assert left


@pytest.mark.parametrize("branched", [False, True])
def test_what_fails_within_a_forward_puts_everything_back(branched: bool) -> None:
    model = make_model()
    before = [getattr(owner, name) for owner, name in ASKED]
    norm = anatomy(model).tap.parent[anatomy(model).tap.name]

    def fail(views: Any) -> None:
        raise ValueError("a layer")

    with pytest.raises(ValueError, match="a layer"):
        reading(
            make_prompt_cache(model),
            BRANCHED._replace(branched=branched),
            lambda views: tapped(anatomy(model).tap, lambda: fail(views)),
        )
    assert [getattr(owner, name) for owner, name in ASKED] == before and free()
    assert anatomy(model).tap.parent[anatomy(model).tap.name] is norm
