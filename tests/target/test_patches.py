"""Functions and modules that are replaced in one thread, and restored."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from helpers.small import small_llama
from helpers.threads import workers
from mlx_redrafter.target.patches import MODEL_LOCK, Slot, replace_functions

ARANGE = Slot(vars(mx), "arange")


def add(amount: int):
    """A replacement that adds to the original's result."""
    return lambda original, *args, **kwargs: original(*args, **kwargs) + amount


def count_up():
    return mx.arange(3).tolist()


def test_replacements_nest_and_end():
    original = mx.arange
    with replace_functions([(ARANGE, add(1))]):
        assert count_up() == [1, 2, 3]
        with replace_functions([(ARANGE, add(10)), (ARANGE, add(100))]):
            assert count_up() == [111, 112, 113]
        assert count_up() == [1, 2, 3]
    assert mx.arange is original


def test_functions_are_restored_after_an_exception():
    original = mx.arange
    model = small_llama()
    norm = model.model.norm
    replacements = [(ARANGE, add(1)), (Slot(model.model, "norm"), add(1))]
    with pytest.raises(ZeroDivisionError), replace_functions(replacements):
        assert mx.arange is not original
        assert model.model.norm is not norm
        raise ZeroDivisionError
    with pytest.raises(KeyError), replace_functions([*replacements, (Slot({}, "none"), add(1))]):
        raise AssertionError("never entered")
    assert mx.arange is original
    assert model.model.norm is norm


def test_other_threads_call_the_original():
    with workers(1) as (other,), replace_functions([(ARANGE, add(1))]):
        assert other.submit(count_up).result() == [0, 1, 2]
        assert other.submit(lambda: MODEL_LOCK.acquire(blocking=False)).result() is False
        assert count_up() == [1, 2, 3]


def test_a_replaced_module_looks_like_the_original():
    model = small_llama()
    layers = model.layers
    names = list(model.model)
    with replace_functions([(Slot(layers, 0), add(0)), (Slot(model.model, "norm"), add(1))]):
        assert isinstance(layers[0], type(layers[1]))
        assert isinstance(model.model.norm, nn.RMSNorm)
        assert layers[0].self_attn.scale == layers[1].self_attn.scale
        assert list(model.model) == names
        shifted = model(mx.array([[1, 2]]))
    assert not mx.allclose(shifted, model(mx.array([[1, 2]])))
