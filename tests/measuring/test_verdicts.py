"""Where the kernel for a few rows is used: what is found out, kept, and made of it.

In place of the kernel, rows are computed one by one; no time is measured.
"""

import json
import logging
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from helpers.few_rows import FakeMetal, fake_metal
from helpers.small import small_drafter, small_llama
from helpers.toys import assert_same_steps, decode_steps, ids
from mlx_redrafter.decoding import recipe
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import get_cache_row_classes
from mlx_redrafter.measuring import store, verdicts
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.measuring.verdicts import (
    ForwardTimes,
    Verdict,
    Verdicts,
    join_ranks,
    make_inputs,
    parse_verdicts,
)
from mlx_redrafter.target import few_rows as kernel
from mlx_redrafter.target.few_rows import NO_FEW_ROWS, Matmul

SHAPES = {(96, 96), (192, 96), (96, 192), (64, 96)}
"""Outputs and inputs of a small Llama's layers, apart from small ones."""

ROW_COUNTS = (2, 3, 4, 5, 6, 7, 8)


@pytest.fixture
def metal(monkeypatch, tmp_path) -> FakeMetal:
    """A machine with Metal and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return fake_metal(monkeypatch)


def make_model(dtype: mx.Dtype = mx.float32):
    """A small Llama in 4 bits."""
    model = small_llama(hidden=96, tie_word_embeddings=True)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=4)
    return model


def list_used(pair: Pair) -> dict[int, set[tuple[int, int]]]:
    """Row count -> the shapes of the matmuls that the kernel computes."""
    used = {}
    for matmul in pair.get_or_measure_few_rows().used:
        used.setdefault(matmul.n_rows, set()).add(matmul[1:3])
    return used


def test_without_metal_nothing_is_tried(monkeypatch, caplog):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(store, "measure_verdicts", lambda model: pytest.fail("tried"))
    monkeypatch.setattr(store.Measurement, "read", lambda kept: pytest.fail("read"))
    caplog.set_level(logging.INFO)
    assert Pair(make_model()).get_or_measure_few_rows() is NO_FEW_ROWS
    assert caplog.messages == []


def test_without_quantized_layers_nothing_is_tried(metal):
    assert Pair(small_llama()).get_or_measure_few_rows() is NO_FEW_ROWS
    assert metal.races == []


def test_off_tries_nothing(metal):
    pair = Pair(make_model()).with_few_rows(False)
    assert pair.get_or_measure_few_rows() is NO_FEW_ROWS and metal.races == []
    assert pair.with_few_rows(True).get_or_measure_few_rows().used, "negative control"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_equal_and_faster_is_used(metal, dtype, caplog):
    caplog.set_level(logging.INFO)
    pair = Pair(make_model(dtype))
    assert list_used(pair) == dict.fromkeys(ROW_COUNTS, SHAPES)
    assert pair.get_or_measure_few_rows().row_counts == ROW_COUNTS
    assert {matmul.dtype for matmul in pair.get_or_measure_few_rows().used} == {dtype}
    assert {matmul.dtype for matmul in metal.matmuls} == {dtype, mx.float32}
    assert len(caplog.messages) == 1 and "once for this model" in caplog.messages[0]


def test_enough_outputs_are_compared(monkeypatch):
    metal = fake_metal(monkeypatch, compared_outputs=100_000)
    w, scales, biases = mx.quantize(mx.random.normal((4096, 64)), group_size=32, bits=3)
    matmul = Matmul(2, 4096, 64, 3, 32, mx.float16)
    weights = (w, scales.astype(mx.float16), biases.astype(mx.float16))
    verdict = next(verdicts.try_matmuls({matmul: [weights]}, float("inf")))
    assert verdict.is_equal
    for dtype in (mx.float16, mx.float32):
        own = [each for each in metal.matmuls if each == matmul._replace(dtype=dtype)]
        n_timed = 1 if dtype == mx.float16 else 0
        assert (len(own) - n_timed) * 2 * 4096 >= 100_000


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_inputs_reach_down_to_denormals(dtype):
    x = make_inputs(64, 96, dtype).astype(mx.float32)
    least = 2.0**-14 if dtype == mx.float16 else 2.0**-120
    assert mx.abs(x[::2]).max() > 1
    assert mx.logical_and(mx.abs(x[1::2]) < least, x[1::2] != 0).sum() > 10


@pytest.mark.parametrize("wrong", [mx.float16, mx.float32])
def test_one_wrong_bit_keeps_a_matmul_off(metal, wrong):
    """The float32 of a model in 16 bits counts, too."""

    def change(matmul, y):
        if matmul[:3] == (3, 192, 96) and matmul.dtype == wrong:
            y[..., -1, -1] = mx.where(y[..., -1, -1] > 0, -0.0, 7.0).astype(y.dtype)
        return y

    metal.change = change
    pair = Pair(make_model(mx.float16))
    expected = dict.fromkeys(ROW_COUNTS, SHAPES)
    assert list_used(pair) == expected | {3: SHAPES - {(192, 96)}}
    found = pair.get_or_measure_verdicts()
    assert [line["matmul"] for line in found.list_lines() if line["verdict"] == "other bits"] == [
        "192 x 96, 4 bits in 32s, float16"
    ]


def test_what_is_hardly_faster_is_neither_compared_nor_used(metal):
    metal.ms = lambda matmuls: 1 / 1.09 if {each.n_rows for each in matmuls} == {2} else 1 / 1.11
    pair = Pair(make_model())
    assert list_used(pair) == dict.fromkeys(ROW_COUNTS[1:], SHAPES)
    n_rows = [matmul.n_rows for matmul in metal.matmuls]
    assert n_rows.count(2) == len(SHAPES) < n_rows.count(8)


def test_it_is_used_from_the_first_forward_that_gains(metal):
    metal.ms = lambda matmuls: 0.99 if len(matmuls) > 1 and min(matmuls).n_rows < 4 else 0.5
    pair = Pair(make_model())
    assert list_used(pair) == dict.fromkeys(ROW_COUNTS[2:], SHAPES)
    assert [len(raced) for raced in metal.races[-3:]] == [len(SHAPES)] * 3
    found = pair.get_or_measure_verdicts()
    assert [each.n_rows for each in found.forwards] == [2, 3, 4]


def test_it_is_not_used_where_no_forward_gains(metal):
    metal.ms = lambda matmuls: 1.0 if len(matmuls) > 1 else 0.5
    assert Pair(make_model()).get_or_measure_few_rows() is NO_FEW_ROWS
    assert len(metal.races) == 7 * len(SHAPES) + 7


def test_what_time_does_not_reach_goes_to_mlx(metal, monkeypatch):
    now = 0.0

    def read_clock():
        nonlocal now
        now += 0.1
        return now

    monkeypatch.setattr(verdicts, "VERDICT_SECONDS", 3.0)
    monkeypatch.setattr(verdicts, "perf_counter", read_clock)
    monkeypatch.setattr(verdicts, "compute_seconds_left", lambda end: end - now)
    used = list_used(Pair(make_model()))
    assert {2, 4, 8} <= used.keys() < {*ROW_COUNTS}
    assert used[2] == used[4] == used[8] == SHAPES


def test_a_kernel_that_does_not_compile_costs_one_line(metal):
    def fail(matmul, y):
        raise RuntimeError("Unable to build\n  metal library\n" + "x" * 1000)

    metal.change = fail
    with pytest.warns(UserWarning, match="is not used: Unable to build metal library") as warnings:
        assert Pair(make_model()).get_or_measure_few_rows() is NO_FEW_ROWS
    (warning,) = warnings
    assert "\n" not in str(warning.message) and len(str(warning.message)) < 300
    metal.change = lambda matmul, y: y
    assert Pair(make_model()).get_or_measure_few_rows() is NO_FEW_ROWS, "read from disk"
    pair = Pair(make_model())
    assert pair.get_or_measure_verdicts(refresh=True) and pair.get_or_measure_few_rows().used


def test_verdicts_are_kept_on_disk(metal, monkeypatch):
    few_rows = Pair(make_model()).get_or_measure_few_rows()
    n_races = len(metal.races)
    pair = Pair(make_model())
    assert pair.get_or_measure_few_rows() == few_rows and len(metal.races) == n_races

    for of, name in ((store.platform, "version"), (store, "digest_kernels")):
        monkeypatch.setattr(of, name, lambda: ["another"])
        assert Pair(make_model()).get_or_measure_verdicts(measure=False) is None, name
        monkeypatch.undo()
        metal = fake_metal(monkeypatch)


def test_verdicts_survive_json():
    matmul = Matmul(3, 96, 64, 5, 32, mx.bfloat16)
    found = Verdicts(
        (Verdict(matmul, 0.5, 1.0, True), Verdict(matmul._replace(n_rows=2), 2.0, 1.0, None)),
        (ForwardTimes(3, 8.0, 9.0),),
    )
    assert parse_verdicts(json.loads(json.dumps(found.to_json()))) == found
    assert found.make_few_rows().used == {matmul}


def test_only_what_all_ranks_have_compared_is_used(monkeypatch):
    good = Verdict(Matmul(2, 96, 64, 5, 32, mx.bfloat16), 0.5, 1.0, True)
    others = [good._replace(matmul=good.matmul._replace(n_rows=count)) for count in (3, 4)]
    slow = good._replace(ms=2.0, is_equal=None)
    all_found = (Verdicts((good, *others)), Verdicts((good, others[0])), Verdicts((slow, *others)))
    sent = []
    monkeypatch.setattr(verdicts.ranks, "gather", lambda value: sent.append(value) or [value])
    for found in all_found:
        assert join_ranks(found) == found
    monkeypatch.setattr(verdicts.ranks, "gather", lambda value: sent)
    for found in all_found:
        assert join_ranks(found).list_equal() == [others[0].matmul]
    sent.append(("broken", set()))
    assert join_ranks(all_found[0]) == Verdicts(failure="broken")


def test_verdicts_on_another_kernel_are_not_kept(monkeypatch, tmp_path):
    digest = verdicts.digest_kernels.__wrapped__
    before = digest()
    assert digest() == before
    other = tmp_path / "few_rows.py"
    other.write_text(Path(kernel.__file__).read_text() + " ")
    monkeypatch.setattr(kernel, "__file__", str(other))
    assert digest() != before


def test_costs_and_row_classes_are_measured_with_it(metal, monkeypatch):
    measured = []

    def measure(*args, few_rows, **how):
        measured.append(few_rows)
        raise ZeroDivisionError

    def compare(model, quantization, max_kv_size, few_rows):
        measured.append(few_rows)
        return ((1, 2), (3, 4)) if few_rows.used else ((1,),)

    monkeypatch.setattr(store, "measure_costs", measure)
    monkeypatch.setattr(store, "compare_row_counts", compare)
    model = make_model()
    pair = Pair(model, small_drafter(hidden=96, vocab=64))
    off = pair.with_few_rows(False)
    few_rows = pair.get_or_measure_few_rows()
    for own in (pair, off):
        with pytest.raises(ZeroDivisionError):
            own.get_or_measure_costs(trees=False)
    assert get_cache_row_classes(pair, Options()) == ((1, 2), (3, 4))
    assert get_cache_row_classes(off, Options()) == ((1,),)
    assert measured == [few_rows, NO_FEW_ROWS] * 2
    assert get_cache_row_classes(pair, Options()) == ((1, 2), (3, 4)), "from memory"
    assert get_cache_row_classes(Pair(model), Options()) == ((1, 2), (3, 4)), "from disk"
    off = Pair(model, uses_few_rows=False)
    assert get_cache_row_classes(off, Options()) == ((1,),), "from disk"


def test_unknown_verdicts_leave_row_classes_unknown(metal):
    """What would be measured is not started by a question."""
    assert get_cache_row_classes(Pair(make_model()), Options(), measure=False) == ()
    assert metal.races == []


@pytest.mark.parametrize("exact", [False, True])
def test_drafts_use_it_and_leave_the_text_unchanged(metal, monkeypatch, exact):
    monkeypatch.setattr(verdicts, "MIN_OUTPUTS", 48)  # all layers
    monkeypatch.setattr(recipe, "load_row_counts", lambda *of, refresh: of[1][0])  # not by costs
    model = make_model()
    prompt = [5, 6, 7, 8, 5, 6, 7]
    shared = {"max_tokens": 24, "exact": exact}
    plain = decode_steps(prompt, model, None, Options(plan="off", **shared))
    expected = ids(list(plain))
    assert plain.recipe.few_rows.row_counts == (ROW_COUNTS if exact else ())
    for few_rows in ("auto", "off"):
        drafter = small_drafter(hidden=96, vocab=64)
        options = Options(plan=(1, 3), few_rows=few_rows, **shared)
        metal.matmuls.clear()
        drafted = decode_steps(prompt, model, drafter, options)
        assert ids(list(drafted)) == expected
        # Without it, MLX may compute no other number of rows as one row.
        assert drafted.output.stats.drafted > 0 or (exact and few_rows == "off")
        assert drafted.recipe.few_rows.row_counts == (ROW_COUNTS if few_rows == "auto" else ())
        assert bool(metal.matmuls) == (few_rows == "auto")


def test_exact_drafts_where_mlx_sums_several_rows_in_another_order(metal, monkeypatch):
    """As on M3 and newer; there prompts are read in that order, with and without drafts."""
    original = mx.quantized_matmul

    def multiply(x, *weights, **how):
        y = original(x, *weights, **how)
        return y if x.size == x.shape[-1] else y * (1 + 2.0**-18)

    monkeypatch.setattr(mx, "quantized_matmul", multiply)
    monkeypatch.setattr(verdicts, "MIN_OUTPUTS", 48)  # all layers
    monkeypatch.setattr(recipe, "load_row_counts", lambda *of, refresh: of[1][0])  # not by costs
    pair = Pair(make_model())
    shared = {"max_tokens": 24, "exact": True}
    assert get_cache_row_classes(pair.with_few_rows(False), Options())[0] == (1,)
    assert get_cache_row_classes(pair, Options())[0] == tuple(range(1, 9))

    prompt = [5, 6, 7, 8, 5, 6, 7]
    plain = list(decode_steps(prompt, pair.model, None, Options(plan="off", **shared)))
    drafter = small_drafter(hidden=96, vocab=64)
    drafted = decode_steps(prompt, pair.model, drafter, Options(plan=(1, 3), **shared))
    assert_same_steps(list(drafted), plain, tolerance=1e-38)
    assert drafted.output.stats.drafted > 0
