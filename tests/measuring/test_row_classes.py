"""Numbers of rows that are computed alike: found by comparing bits, and kept to with `exact`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact import DTYPES, compare_rows, make_long_family
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from helpers.cost_curves import make_costs
from helpers.small import small_drafter, small_llama
from helpers.toys import ScriptedContext, ids, make_model, make_prompt, run
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.generation import open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import choose_row_counts, get_cache_row_classes, resolve_recipe
from mlx_redrafter.engine.tree import chain
from mlx_redrafter.machine.cuda import THRASHING_CHECK, disable_thrashing_check
from mlx_redrafter.measuring import row_classes
from mlx_redrafter.measuring.pair import Pair, get_pair
from mlx_redrafter.measuring.row_classes import (
    COMPARED_OUTPUTS,
    MAX_COMPARED_ROWS,
    compare_row_counts,
    format_row_counts,
)
from mlx_redrafter.planning.auto_planner import choose_fastest_class
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.target import forward
from mlx_redrafter.target.recurrence import Recording
from mlx_redrafter.target.row_attention import attend_by_row
from mlx_redrafter.target.supported_models import CHAINS, TREES
from mlx_redrafter.target.target import KVQuantization, Target

ALL = tuple(range(1, MAX_COMPARED_ROWS + 1))


class ByRow(nn.Module):
    """A model that computes each row alone, and adds `change(rows, keys)` last-place units."""

    def __init__(self, change: Callable[[int, int], int]):
        super().__init__()
        self.inner = small_llama(max_position_embeddings=4096)
        self._change = change
        self.args = self.inner.args

    @property
    def layers(self) -> list[nn.Module]:
        """Of the inner model."""
        layers = self.inner.layers
        return layers

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        cache = cache or make_prompt_cache(self)
        count = tokens.shape[1]
        if count > MAX_COMPARED_ROWS:
            return self.inner(tokens, cache=cache)
        rows = [self.inner(tokens[:, i : i + 1], cache=cache) for i in range(count)]
        logits = mx.concatenate(rows, axis=1)
        bits = logits.view(mx.int32) + self._change(count, cache[0].offset)
        return bits.view(mx.float32)


@pytest.fixture
def rows_attend_alone(monkeypatch):
    """`ByRow` has no attention of several rows whose keys could be checked."""
    monkeypatch.setattr("mlx_redrafter.measuring.row_classes.attends_to_cache", lambda model: True)


@pytest.mark.usefixtures("rows_attend_alone")
@pytest.mark.parametrize(("change", "expected"), [
    (lambda rows, keys: 0, (ALL,)),
    (lambda rows, keys: int(rows > 3), (ALL[:3], ALL[3:])),
    (lambda rows, keys: int(rows > 3 and keys > 1024), (ALL[:3], ALL[3:])),
    (lambda rows, keys: rows in (2, 5), ((1, 3, 4, *ALL[5:]), (2, 5))),
    (lambda rows, keys: int(rows == 2 and keys % 1040 == 72), ((1, *ALL[2:]),)),
], ids=["alike", "above 3", "above 3 after 1,024 keys", "2 and 5", "2, in the sixth chain"]
)  # fmt: skip
def test_classes_are_found_by_bits(change, expected):
    """One unit in the last place is enough, also if only long contexts show it."""
    assert compare_row_counts(ByRow(change)) == expected


class Shifted(ByRow):
    """Adds one to all logits of three rows, which log-probabilities do not show."""

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        return super().__call__(tokens, cache) + float(tokens.shape[1] == 3)


@pytest.mark.usefixtures("rows_attend_alone")
def test_raw_logits_are_compared():
    assert compare_row_counts(Shifted(lambda rows, keys: 0)) == ((1, 2, *ALL[3:]), (3,))


class OtherKeys(nn.Module):
    """A projection whose outputs for several rows are one unit in the last place larger."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __call__(self, x: mx.array) -> mx.array:
        out = self.layer(x)
        bits = out.view(mx.int32) + int(1 < x.shape[1] <= MAX_COMPARED_ROWS)
        return bits.view(mx.float32)


def test_cached_rows_are_compared():
    """The last layer's values, which logits of zeros do not show."""
    model = small_llama(max_position_embeddings=4096)
    model.model.norm.weight = mx.zeros_like(model.model.norm.weight)
    assert compare_row_counts(model) == (ALL,)
    attention = model.layers[-1].self_attn
    attention.v_proj = OtherKeys(attention.v_proj)
    assert compare_row_counts(model) == ((1,), ALL[1:])


@pytest.fixture
def all_outputs(monkeypatch):
    """Compares as many outputs as commands do."""
    monkeypatch.setattr(row_classes, "COMPARED_OUTPUTS", COMPARED_OUTPUTS)


class TwoSums(nn.Module):
    """A projection in float32 of 16-bit rows, whose sums have two parts if there are several."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.weight = layer.weight

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[1] > MAX_COMPARED_ROWS:
            return x @ self.weight.T
        middle = self.weight.shape[1] // 2
        wide = self.weight.T.astype(mx.float32)
        rows = []
        for row in mx.split(x.astype(mx.float32), x.shape[1], axis=1):
            if x.shape[1] == 1:
                rows.append(row @ wide)
            else:
                rows.append(row[..., :middle] @ wide[:middle] + row[..., middle:] @ wide[middle:])
        return mx.concatenate(rows, axis=1).astype(x.dtype)


@pytest.mark.usefixtures("all_outputs")
def test_sums_that_16_bits_hide_are_found():
    """About one row in 400 shows them."""
    model = small_llama(hidden=128, max_position_embeddings=4096)
    model.set_dtype(mx.bfloat16)
    assert compare_row_counts(model) == (ALL,)
    attention = model.layers[1].self_attn
    attention.k_proj = TwoSums(attention.k_proj)
    assert compare_row_counts(model) == ((1,), ALL[1:])


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("empty_cache")
def test_rows_that_are_not_finite_are_not_alike():
    """Nothing drafts, and nothing is kept: the model may be repaired."""
    model = small_llama(max_position_embeddings=4096)
    embedding = model.model.embed_tokens
    right = embedding.weight
    embedding.weight = mx.where(mx.arange(64)[:, None] == 3, mx.nan, right)
    assert compare_row_counts(model) == ()
    with pytest.warns(UserWarning, match="logits are not finite"):
        assert get_cache_row_classes(Pair(model), Options()) == ((1,),)
    embedding.weight = right
    assert get_cache_row_classes(Pair(model), Options()) == compare_row_counts(model) != ()


class NotByRow(Recording):
    """Recurrences that read all rows at once."""

    def __init__(self, *args, by_row: bool, n_padding: int, **kwargs):
        super().__init__(*args, **kwargs)


def test_recurrences_that_read_several_rows_at_once_are_found(monkeypatch):
    """`ssm_update` computes them in another form than one."""
    model = make_long_family("mamba2")
    model.set_dtype(mx.bfloat16)
    assert compare_row_counts(model) == (ALL,)
    monkeypatch.setattr(forward, "Recording", NotByRow)
    assert compare_row_counts(model) == ((1,),)


def test_row_counts_are_not_probed_where_padding_or_attention_forbid_it():
    # Its cache cannot drop rows.
    assert Pair(make_long_family("mamba")).get_row_classes(KVQuantization(), None) == ((1,),)
    # It computes keys from all cached rows.
    assert compare_row_counts(make_long_family("deepseek_v3")) == ((1,),)
    # The ring is full before 76 tokens.
    assert compare_row_counts(make_model("qwen2"), max_kv_size=64) == ((1,),)
    # A ring is not padded.
    assert len(compare_row_counts(make_model("qwen2"), max_kv_size=200)) == 1


def test_row_counts_in_words():
    assert format_row_counts((1, 2, 3, 8)) == "1 to 3, 8"
    assert format_row_counts((16,)) == "16"


@pytest.mark.usefixtures("all_outputs")
@pytest.mark.parametrize("name", sorted({*TREES, *CHAINS})[::6])
def test_drafts_change_no_bit(name):
    """In each class of this machine, with contexts that cross 1,024 tokens.

    `tests/exact.py` runs every family.
    """
    model = make_long_family(name)
    model.set_dtype(list(DTYPES.values())[len(name) % 3])
    try:
        mx.eval(model(mx.zeros((1, 1), mx.int32)))
    except RuntimeError:  # a CPU cannot compute its experts in 16 bits
        model.set_dtype(mx.float32)
    for each in compare_rows(model):
        assert not each.differ, each
        assert each.accepted or each.row_counts[-1] < 3, each


@pytest.mark.parametrize("counts", [(1, 2, 3), (4, 5, 6)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_every_forward_has_an_allowed_number_of_rows(counts, kv_bits, monkeypatch):
    """Whatever is drafted: by a drafter with a fixed plan, by the context, or by both."""
    monkeypatch.setattr(recipe, "choose_row_counts", lambda *args: counts)
    model = make_model("llama")
    drafter = small_drafter(hidden=64, vocab=40)
    prompt = make_prompt(20)
    seen = set()
    options = {"max_tokens": 24, "temp": 0.7, "seed": 5, "kv_bits": kv_bits}
    options |= {"kv_group_size": 32, "quantized_kv_start": 30}
    plain = run(model, prompt, **options)
    tokens = prompt + ids(run(model, prompt, **options | {"max_tokens": 32}))
    monkeypatch.setattr(recipe, "ContextSource", partial(ScriptedContext, tokens))
    forward = type(model).__call__

    def count_rows(self, tokens: mx.array, cache=None) -> mx.array:
        if cache is own:
            seen.add(tokens.shape[1])
        return forward(self, tokens, cache=cache)

    monkeypatch.setattr(type(model), "__call__", count_rows)
    for more in (
        {"plan": (4, 5)},
        {"plan": (1, 8), "context": True},
        {"plan": "auto", "context": True},
    ):
        own = make_prompt_cache(model)
        steps = run(model, prompt, drafter, prompt_cache=own, **options | more)
        assert ids(steps) == ids(plain)
        assert own[0].offset == len(prompt) + len(steps)
        assert seen <= {19, *counts}, more
        seen.clear()


def test_the_fastest_class_is_chosen():
    verify = ((10.0, 11.0, 11.0, 12.0),)
    costs = CostTable((64,), (1, 2, 3, 4), verify, (10.0,), (1,), (0.1,), (0.0, 0.0))
    choose = partial(choose_fastest_class, costs)
    good = ((0.9,),)
    # Plain steps are padded to two rows, unless the drafter does not pay.
    assert choose(good, [(1,), (2, 3, 4)]) == (2, 3, 4)
    assert choose(((0.05,),), [(1,), (2, 3, 4)]) == (1,)
    # Longer drafts against mlx-lm's own text.
    assert choose(good, [(1, 2, 3), (4, 5)]) == (4, 5)
    assert choose(((0.5,),), [(1, 2, 3), (4, 5)]) == (1, 2, 3)
    # Five rows are not measured; two have no room for the context.
    assert choose(good, [(1,), (5, 6)]) == (1,)
    assert choose(good, [(1,), (2,), (3, 4)]) == (3, 4)


def test_exact_without_room_decodes_plainly(monkeypatch):
    monkeypatch.setattr(Pair, "get_row_classes", lambda *args, **options: ((1,), (2, 3)))
    model = small_llama()
    prompt = [1, 2, 3, 1, 2, 3]
    options = Options(exact=True, max_tokens=8)
    only = Pair(model)
    assert choose_row_counts(only, options) == (1,)
    choice = resolve_recipe(only, options)
    assert choice.row_counts == (1,)
    assert not choice.sources
    assert "nothing drafts" in choice.notes[0]
    steps = run(model, prompt, exact=True, context=True, max_tokens=8)
    assert ids(steps) == ids(run(model, prompt, max_tokens=8))


@pytest.mark.parametrize(("classes", "expected"), [((), None), (((1, 2),), None), ((ALL,), ALL)])
def test_exact_is_the_default_where_it_costs_nothing(classes, expected, monkeypatch):
    """All counts are known to be alike, and nothing drafts trees."""
    monkeypatch.setattr(Pair, "get_row_classes", lambda *args, **options: classes)
    pair = Pair(small_llama())
    assert choose_row_counts(pair, Options()) == expected
    assert choose_row_counts(pair, Options(exact=False)) is None
    # Drafts would end with a full ring.
    assert choose_row_counts(pair, Options(max_kv_size=64)) is None
    # Its drafter drafts trees.
    assert choose_row_counts(Pair(small_llama(), small_drafter()), Options()) is None


def test_classes_are_found_once(monkeypatch):
    """In memory, and on disk for the next process; a quantized cache has its own."""
    calls = []

    def find(model: nn.Module, quantization: KVQuantization, *others):
        calls.append(quantization.bits)
        return ((1, 2), (3,))

    monkeypatch.setattr("mlx_redrafter.measuring.store.compare_row_counts", find)
    model = small_llama()
    assert get_cache_row_classes(Pair(model), Options(), measure=False) == ()
    assert not calls
    for _ in range(2):
        one = Pair(model)
        for _ in range(2):
            assert get_cache_row_classes(one, Options()) == ((1, 2), (3,))
    assert calls == [None]
    cache = [QuantizedKVCache(64, 4) for _ in model.layers]
    in_4_bits = get_cache_row_classes(one, Options(kv_bits=4))
    assert get_cache_row_classes(one, Options(), cache) == in_4_bits
    assert calls == [None, 4]


@pytest.mark.parametrize("damaged", [[], [[1, 17]], 5])
def test_damaged_classes_are_found_again(damaged, empty_cache, monkeypatch):
    found = ((1, 3), (2, 4))
    monkeypatch.setattr("mlx_redrafter.measuring.store.compare_row_counts", lambda *_: found)
    model = small_llama()
    get_cache_row_classes(Pair(model), Options())
    (file,) = empty_cache.glob("*/rows/*.json")
    file.write_text(json.dumps({"classes": damaged}))
    with pytest.warns(UserWarning, match=f"{file.name} is damaged: expected classes"):
        assert get_cache_row_classes(Pair(model), Options()) == found
    assert get_cache_row_classes(Pair(model), Options()) == found


CHANGES = {
    "dtype": lambda model: model.set_dtype(mx.bfloat16),
    "quantized": lambda model: nn.quantize(model, group_size=32),
    "other weights": lambda model: model.load_weights(list_copies(model)),
    "another layer": lambda model: model.layers.append(small_llama(layers=1).layers[0]),
}


def list_copies(model: nn.Module):
    """Names and copies of a model's weights."""
    weights = tree_flatten(model.parameters())
    return [(name, mx.array(array)) for name, array in weights]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_measured_outlives_a_change_of_arrays(change):
    """Of the model or of the drafter."""
    for changed in (0, 1):
        modules = (small_llama(), small_drafter())
        pair, _ = get_pair(*modules)
        measured = iter(range(9))
        measure = partial(pair.findings.get_or_make, "costs", measured.__next__)
        assert measure() == 0
        get_pair(*modules)
        list(open_generation(pair, [1, 2], Options(max_tokens=2)))
        assert measure() == 0
        if changed and change == "another layer":
            continue
        CHANGES[change](modules[changed])
        get_pair(*modules)
        assert measure() == 1
        modules[changed].update(modules[changed].parameters())
        assert measure() == 1
        CHANGES["other weights"](modules[changed])
        list(open_generation(pair, [1, 2], Options(max_tokens=2)))
        assert measure() == 2


def test_a_failure_while_planning_keeps_the_row_counts(empty_cache, monkeypatch):
    classes = ((1,), (2, 3, 4))
    monkeypatch.setattr(Pair, "get_row_classes", lambda *args, **options: classes)
    monkeypatch.setattr(Pair, "get_or_measure_costs", lambda *args, **options: make_costs())
    monkeypatch.setattr(recipe, "choose_fastest_class", lambda *args: classes[1])
    pair = Pair(small_llama(), small_drafter(seed=9))
    failures = []
    options = Options(exact=True, on_drafter_failure=failures.append)
    assert choose_row_counts(pair, options) == classes[1]
    monkeypatch.delattr(Pair, "get_or_measure_costs")
    choice = resolve_recipe(pair, options, pair.open_source())
    assert choice.row_counts == classes[1]
    assert len(failures) == 1
    assert all(source.drafter is None for source in choice.sources)


def test_other_threads_attend_as_before():
    """While a padded forward is built, another thread's forward of as many rows is not padded."""
    model = small_llama()
    tokens = mx.array([[5, 9, 7]])

    def read():
        return model(tokens, cache=make_prompt_cache(model)).tolist()

    expected = read()
    with attend_by_row(3, 1), ThreadPoolExecutor(1) as other:
        assert other.submit(read).result() == expected


def test_a_chain_within_a_ring_is_computed_as_single_rows():
    """Only until the ring is full, as it then has its rows in another order."""
    model = make_model("qwen2")
    tokens = mx.array(make_prompt(20))
    target = Target(model, make_prompt_cache(model, 24), row_counts=(1, 2, 3, 4))
    target.forward(tokens)
    assert target.has_room(4)
    assert not target.has_room(5)
    target.verify(chain(tokens[0], tokens[1:3]), is_tree=False)
    target.keep_path([0, 1], tokens[:2].tolist())
    assert target.has_room(2)
    assert not target.has_room(3)


def test_mlx_keeps_its_graphs_on_cuda(monkeypatch):
    """The variable is set before MLX is imported, by the package alone.

    Later there is a warning, on CUDA only.
    """
    shown = f"'mlx.core' in sys.modules, os.environ.get('{THRASHING_CHECK}')"
    command = [sys.executable, "-c", f"import os, sys, mlx_redrafter; print({shown})"]
    environment = {name: value for name, value in os.environ.items() if name != THRASHING_CHECK}
    unset = "0" if sys.platform == "linux" else "None"
    for given, expected in ({}, unset), ({THRASHING_CHECK: "1"}, "1"):
        variables = environment | given
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", expected]

    monkeypatch.setattr(sys, "platform", "linux")
    core = ModuleType("mlx.core")
    core.cuda = ModuleType("cuda")
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    for has_cuda in (False, True):
        monkeypatch.delenv(THRASHING_CHECK, raising=False)
        core.cuda.is_available = lambda found=has_cuda: found
        if has_cuda:
            with pytest.warns(UserWarning, match="import mlx_redrafter before mlx"):
                disable_thrashing_check()
        else:
            disable_thrashing_check()
