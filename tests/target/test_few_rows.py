"""Which quantized matmuls the kernel for a few rows covers, and that forwards use it.

In place of the kernel, which `tests/metal` runs, rows are computed one by one.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import (
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
)
from mlx_lm.tuner.lora import LoRALinear

from helpers.families import make_family
from helpers.few_rows import OneByOne
from helpers.small import make_tree, small_llama
from helpers.threads import workers
from mlx_redrafter.engine.tree import chain
from mlx_redrafter.measuring.row_classes import compare_row_counts
from mlx_redrafter.target.few_rows import MAX_ROWS, FewRows, Matmul, Order, get_matmul
from mlx_redrafter.target.target import Target

LARGE_SCALES = dict.fromkeys(("scales", "biases"), mx.zeros((2**23, 16), mx.float16))
FAST = "affine_qmv_fast"
GENERAL = "affine_qmv"


def make_call(
    n_rows: int = 2, n_inputs: int = 512, bits: int = 4, dtype: mx.Dtype = mx.float16
) -> dict[str, Any]:
    """Arguments of a quantized matmul with 8 outputs and groups of 32."""
    weights = mx.zeros((8, n_inputs), dtype)
    w, scales, biases = mx.quantize(weights, group_size=32, bits=bits)
    x = mx.zeros((1, n_rows, n_inputs), dtype)
    return {
        "x": x,
        "w": w,
        "scales": scales,
        "biases": biases,
        "bits": bits,
        "group_size": 32,
    }


@pytest.mark.parametrize(
    ("n_inputs", "bits", "order"),
    [
        (512, 4, Order(FAST, 16)),
        (768, 4, Order(GENERAL, 8)),
        (1024, 3, Order(FAST, 16)),
        (256, 5, Order(GENERAL, 8)),
        (512, 2, Order(FAST, 16)),
        (544, 2, Order(GENERAL, 16)),
        (256, 8, Order(FAST, 8)),
        (288, 8, Order(GENERAL, 4)),
        (768, 6, Order(FAST, 8)),
        (64, 6, Order(GENERAL, 4)),
        (32, 4, Order(GENERAL, 8)),
    ],
)
def test_the_number_of_inputs_decides_the_order(n_inputs, bits, order):
    matmul = get_matmul(**make_call(n_inputs=n_inputs, bits=bits))
    assert matmul is not None and matmul.order == order


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_2_to_8_rows_are_covered(dtype):
    covered = [n for n in range(1, 12) if get_matmul(**make_call(n, dtype=dtype)) is not None]
    assert covered == list(range(2, MAX_ROWS + 1))


def test_rows_may_be_spread_over_a_batch():
    call = make_call()
    assert get_matmul(**call | {"x": mx.zeros((3, 2, 512), mx.float16)})
    assert get_matmul(**call | {"x": mx.zeros((3, 3, 512), mx.float16)}) is None


@pytest.mark.parametrize("n_inputs", [64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_inputs_have_another_kernel(n_inputs, bits):
    assert get_matmul(**make_call(n_inputs=n_inputs, bits=bits)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "mxfp4"},
        {"transpose": False},
        {"stream": mx.cpu},
        {"group_size": 16},
        {"bits": 1},
        {"biases": None},
        {"biases": mx.zeros((8, 16), mx.bfloat16)},
        {"x": mx.zeros((2, 512), mx.float32)},
        {"w": mx.zeros((1, 8, 64), mx.uint32)},
        {"w": mx.zeros((8, 65), mx.uint32)},
        {"scales": mx.zeros((8, 15), mx.float16)},
        {"w": mx.zeros((2**23, 64), mx.uint32)} | LARGE_SCALES,
    ],
)
def test_other_calls_are_not_covered(changed):
    assert get_matmul(**make_call()) is not None, "negative control"
    assert get_matmul(**make_call() | changed) is None


def test_bits_and_groups_have_the_defaults_of_mlx():
    w, scales, biases = mx.quantize(mx.zeros((8, 512), mx.float16))
    expected = Matmul(2, 8, 512, bits=4, group_size=64, dtype=mx.float16)
    assert get_matmul(mx.zeros((2, 512), mx.float16), w, scales, biases) == expected


SHAPES = ((96, 96), (48, 96), (192, 96), (96, 192), (64, 96))
"""Outputs and inputs of a small Llama's layers."""

USED = frozenset(
    Matmul(n_rows, *shape, bits=4, group_size=32, dtype=mx.float32)
    for n_rows in range(2, MAX_ROWS + 1)
    for shape in SHAPES
)


@pytest.fixture
def one_by_one() -> OneByOne:
    return OneByOne()


@pytest.fixture
def few_rows(one_by_one) -> Iterator[FewRows]:
    """All matmuls of the Llama, with the function of MLX in place afterwards."""
    original = mx.quantized_matmul
    yield FewRows(USED, one_by_one)
    assert mx.quantized_matmul is original


@pytest.fixture
def model():
    """A small Llama in 4 bits, whose output layer is its embedding: 15 matmuls."""
    model = small_llama(hidden=96, tie_word_embeddings=True)
    nn.quantize(model, group_size=32, bits=4)
    return model


def make_linear() -> nn.QuantizedLinear:
    return nn.QuantizedLinear(96, 48, bias=False, group_size=32, bits=4)


def read(model, tokens: list[int], few_rows: FewRows) -> mx.array:
    """Logits of a chain in one forward, after a prompt."""
    target = Target(model, few_rows=few_rows)
    target.forward(mx.arange(12))
    return target.verify(chain(mx.array(tokens[0]), mx.array(tokens[1:])), is_tree=False).logits


def is_close(y: mx.array, expected: mx.array) -> bool:
    """Whether both are the same but for the order of sums: some chips' is another for one row."""
    return mx.allclose(y, expected, rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("n_rows", [2, 5, 8])
def test_all_layers_of_a_forward_are_replaced(model, few_rows, one_by_one, n_rows):
    tokens = list(range(20, 20 + n_rows))
    expected = read(model, tokens, FewRows())
    assert one_by_one.matmuls == []
    assert is_close(read(model, tokens, few_rows), expected)
    assert len(one_by_one.matmuls) == 15
    assert {matmul.n_rows for matmul in one_by_one.matmuls} == {n_rows}
    assert {(matmul.n_outputs, matmul.n_inputs) for matmul in one_by_one.matmuls} == {*SHAPES}


def test_trees_are_replaced(model, few_rows, one_by_one):
    target = Target(model, few_rows=few_rows)
    target.forward(mx.arange(12))
    tree = make_tree([20, 21, 22, 23], [0, 0, 0, 1])
    logits = target.verify(tree, is_tree=True).logits
    assert logits.shape == (4, 64) and len(one_by_one.matmuls) == 15


def test_layers_of_hybrids_are_replaced(one_by_one):
    model = make_family("lfm2", hidden_size=96, block_dim=96)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, x: isinstance(x, nn.Linear))
    quantized = [each for each in model.modules() if isinstance(each, nn.QuantizedLinear)]
    layers = [each for each in quantized if each.weight.shape[1] > 8]  # more than 64 inputs
    shapes = {(x.weight.shape[0], 8 * x.weight.shape[1]) for x in layers}
    how = {"bits": 4, "group_size": 32, "dtype": mx.float32}
    few_rows = FewRows(frozenset(Matmul(4, *shape, **how) for shape in shapes), one_by_one)
    target = Target(model, few_rows=few_rows, rolls_back=True)
    target.forward(mx.arange(12))
    mx.eval(target.verify(make_tree([20, 21, 22, 23], [0, 0, 0, 1]), is_tree=True).logits)
    assert len(one_by_one.matmuls) == len(layers)
    target.keep_path([0, 2], [20, 22])
    target.forward(mx.arange(1))
    assert len(one_by_one.matmuls) == len(layers), "a rollback reads no weights"


def test_padding_counts_as_rows(model, few_rows, one_by_one):
    target = Target(model, few_rows=few_rows, row_counts=(4,))
    target.forward(mx.array([1]))
    assert {matmul.n_rows for matmul in one_by_one.matmuls} == {4}


def test_other_numbers_of_rows_go_to_mlx(model, few_rows, one_by_one):
    Target(model, few_rows=few_rows).forward(mx.arange(1))
    read(model, list(range(MAX_ROWS + 1)), few_rows)
    assert one_by_one.matmuls == []


def test_prompts_go_to_mlx(model, few_rows, one_by_one):
    """So that they have the same bits with and without drafts."""
    Target(model, few_rows=few_rows).forward(mx.arange(4))
    assert one_by_one.matmuls == []


def test_only_what_is_used_is_replaced(model, one_by_one):
    (used,) = (matmul for matmul in USED if matmul[:3] == (3, 192, 96))
    read(model, [20, 21, 22], FewRows(frozenset({used}), one_by_one))
    assert one_by_one.matmuls == [used] * 4
    one_by_one.matmuls.clear()
    read(model, [20, 21, 22, 23], FewRows(frozenset({used}), one_by_one))
    assert one_by_one.matmuls == []


@pytest.mark.parametrize("shape", [(3, 96), (1, 3, 96), (3, 1, 96), (2, 2, 2, 96)])
def test_outputs_have_the_shape_of_inputs(few_rows, one_by_one, shape):
    layer = make_linear()
    x = mx.random.normal(shape)
    expected = layer(x)
    with few_rows.replace_matmul(3):
        y = layer(x)
    assert y.shape == (*shape[:-1], 48) and is_close(y, expected)
    assert len(one_by_one.matmuls) == 1


def test_rows_are_compared_with_the_kernel(model, one_by_one):
    def multiply(matmul, x, *weights):
        y = one_by_one(matmul, x, *weights)
        return y * (1 + 2.0**-20) if matmul.n_rows == 3 else y

    alike = compare_row_counts(model, few_rows=FewRows(USED, one_by_one))[0]
    assert set(range(1, MAX_ROWS + 1)) <= {*alike}
    found = compare_row_counts(model, few_rows=FewRows(USED, multiply))
    assert found[0] == tuple(n for n in alike if n != 3) and found[1] == (3,)


def test_wrapped_layers_are_replaced(few_rows, one_by_one):
    linear = make_linear()
    layers = {
        "lora": LoRALinear.from_base(linear),
        "sharded inputs": QuantizedShardedToAllLinear.from_quantized_linear(linear),
        "sharded outputs": QuantizedAllToShardedLinear.from_quantized_linear(linear),
    }
    x = mx.random.normal((1, 3, 96))
    for name, layer in layers.items():
        one_by_one.matmuls.clear()
        with few_rows.replace_matmul(3):
            y = layer(x)
        assert len(one_by_one.matmuls) == 1, name
        assert is_close(y, layer(x)), name


def test_quantized_attention_goes_to_mlx(few_rows, one_by_one):
    """Its keys are a batch of matrices."""
    keys = mx.quantize(mx.zeros((1, 2, 48, 96)), group_size=32)
    with few_rows.replace_matmul(3):
        scores = mx.quantized_matmul(mx.zeros((1, 2, 3, 96)), *keys, group_size=32)
    assert scores.shape == (1, 2, 3, 48) and one_by_one.matmuls == []


def test_other_threads_call_mlx(few_rows, one_by_one):
    layer = make_linear()

    def call():
        with mx.stream(mx.new_stream(mx.cpu)):
            layer(mx.zeros((3, 96)))

    with workers(1) as (other,), few_rows.replace_matmul(3):
        other.submit(call).result()
        assert one_by_one.matmuls == []
        call()
    assert len(one_by_one.matmuls) == 1


def test_an_error_restores_the_function(model):
    def fail(*arguments):
        raise ZeroDivisionError

    original = mx.quantized_matmul
    with pytest.raises(ZeroDivisionError):
        read(model, [20, 21], FewRows(USED, fail))
    assert mx.quantized_matmul is original


@pytest.mark.parametrize("columns", [11, 13])
def test_wrong_shapes_raise_the_error_of_mlx(few_rows, columns):
    layer = make_linear()
    layer.weight = mx.zeros((48, columns), mx.uint32)
    x = mx.zeros((3, 96))
    with pytest.raises(ValueError) as expected:
        layer(x)
    with few_rows.replace_matmul(3), pytest.raises(ValueError) as error:
        layer(x)
    assert str(error.value) == str(expected.value)
