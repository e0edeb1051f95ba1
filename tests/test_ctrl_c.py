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
from mlx_lm import sample_utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler as make_own
from test_threads import workers
from toys import make_model

from mlx_redrafter.engine import kv_cache as kv
from mlx_redrafter.engine import locks
from mlx_redrafter.engine import positions
from mlx_redrafter.engine import tree_attention as seams
from mlx_redrafter.engine.anatomy import anatomy
from mlx_redrafter.engine.positions import ASKED, Nodes
from mlx_redrafter.engine.sampling import make_sampler
from mlx_redrafter.engine.tree_attention import reading, tapped

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BRANCHED = Nodes(0, mx.array([0, 1, 1]), mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0, branched=True)


def interrupted(
    call: Callable[[], object], place: int, files: Sequence[str | None], *, instructions: bool = True
) -> KeyboardInterrupt | None:
    """The Ctrl-C that came into `call`: before instruction, line, call or return number `place` in those files; or line
    or call alone, which is more than where a signal is really looked for.

    Who holds it holds its frames, too, as an interactive Python does: nothing is put back by chance.
    """
    events, came = itertools.count(), list[KeyboardInterrupt]()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        """Called by the interpreter; what it raises is raised there."""
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = instructions
        counts = event != "exception" if instructions else event in ("line", "call")
        if counts and next(events) == place:
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
            if (held := interrupted(verify, place, (seams.__file__, positions.__file__, locks.__file__))) is None:
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


@pytest.mark.parametrize("own", [False, True])
def test_wherever_ctrl_c_comes_while_filters_are_compiled_tokens_can_still_be_drawn(own: bool) -> None:
    """They are compiled for each size of a vocabulary, so another one each time."""
    filters: dict[str, Any] = {"temp": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 5, "xtc_probability": 0.5}
    filters["xtc_threshold"] = 0.05
    sampler = make_sampler(seed=1, sampler=make_own(**filters)) if own else make_sampler(seed=1, **filters)
    count = 0
    for place in range(0, 10**6, 3):
        logprobs = mx.log(mx.softmax(mx.arange(200 + place).astype(mx.float32)[None] / 10, axis=-1))
        draws = sampler.draws(mx.array(7), 1, logprobs.shape[-1])

        def choose(logprobs: mx.array = logprobs, draws: Any = draws) -> mx.array:
            return sampler.choose(logprobs, draws, mx.zeros((1,), mx.int32))

        mx.random.seed(place)
        expected = mx.random.uniform().item()
        mx.random.seed(place)
        if interrupted(choose, place, (sample_utils.__file__,)) is None:
            break
        count += 1
        assert mx.random.uniform().item() == expected, place
        assert 0 <= choose().item() < logprobs.shape[-1]
    assert count > 20


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
