"""A Metal kernel for a quantized matmul of 2 to 8 rows, with the bits of MLX's kernel for one row.

MLX's kernels for one row, `affine_qmv_fast` and `affine_qmv`, read and unpack every weight again
for each further row. Its kernel for several rows, `affine_qmv_wide`, shares weights but sums in
another order. This one reads and unpacks a weight once for all rows, and sums each output as the
kernels for one row do, operation by operation.

The order of one output (read from `kernels/quantized.h` of MLX 0.32.4):

- A simdgroup's 32 lanes divide the inputs into blocks. In each block a lane has a run of
  `lane_inputs` neighbours, so that it reads them, and their weights, in one piece. No run crosses
  a group. Blocks ascend; in the last one, lanes without inputs are idle.
- MLX does not shift a weight to the right. It masks its bits in a word (16 bits for 4-bit weights,
  otherwise 8) and multiplies the input by the power of two that is missing. A weight that crosses
  into the next word is two terms.
- With 2 and 4 bits, four neighbours are one sum: x1 w1, then x0 w0, x2 w2, x3 w3 are added by
  `fma`; this is added to the sum of the block. Otherwise each term is added to that by `fma`.
- The inputs themselves are summed too, in float32: eight (3 and 5 bits), four (2, 4, 6) or one (8)
  at a time. A block adds fma(scale, sum of terms, (sum of inputs) bias) to the lane's result.
- `simd_sum` adds the 32 lanes, whose sum is rounded to the output's type.

The two kernels differ in `lane_inputs` only, and which one MLX runs depends on the number of
inputs (before 0.32.4 on that of outputs too). All products that are added are written as `fma`, so
that no compiler chooses. The order within `simd_sum` is the hardware's, the same for both.

What a lane holds, for R rows and O outputs: R O results, R O sums of a block, 4 O weights as
float32 (up to 6 O where weights cross words), 4 inputs of one row, R sums of inputs. Four weights
are unpacked, then used by all rows in turn; a row's four inputs are used by all outputs. More
outputs share a loaded input, fewer leave registers free, so there are 4 up to 4 rows and 2 beyond.
At 2, 4 and 8 rows in 4 bits that makes 38, 56 and 52 registers of 32 bits. Clang, for another
processor, keeps 51, 69 and 61 values at once, indices included (61, 81 and 73 in other bits), and
64-bit addresses besides; how many registers Apple's compiler takes is not known. A lane of an M1
has 128, as the Asahi project found, and the more a kernel takes, the fewer lanes run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from .patches import Slot, replace_functions

QUANTIZED_MATMUL = Slot(vars(mx), "quantized_matmul")
"""The function that layers call: `nn.QuantizedLinear`, sharded ones, `nn.QuantizedEmbedding` as the
output layer, and whatever wraps them.
"""

MAX_ROWS = 8
"""The most rows of a call; the fewest are 2."""

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)

MAX_BYTES = 2**31
"""Of packed weights; MLX's kernels index them with 32-bit integers."""

N_LANES = 32
"""Lanes of a simdgroup."""

N_SIMDGROUPS = 2
"""Simdgroups of a threadgroup, each with outputs of its own."""

HEADER = """
#define UNROLL _Pragma("clang loop unroll(full)")

// 2^-exponent. A constant once the loops are unrolled.
inline float inverse_power(int exponent) {
  return 1.0f / float(1 << exponent);
}

// The unsigned integers in which weights are masked.
template <int bits>
struct Word {
  typedef uint8_t type;
};

template <>
struct Word<4> {
  typedef uint16_t type;
};
"""

SOURCE = """
  typedef typename Word<bits>::type word;
  constexpr int word_bits = 8 * sizeof(word);
  constexpr int all_bits = (1 << bits) - 1;
  constexpr bool sums_fours = bits == 2 || bits == 4;
  constexpr int inputs_per_sum = bits == 8 ? 1 : (bits == 3 || bits == 5 ? 8 : 4);

  const int n_inputs = x_shape[1];
  const int n_outputs = w_shape[0];
  const int lane = int(thread_index_in_simdgroup);
  const int simdgroup = int(threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup);
  const int first_output = simdgroup * lane_outputs;
  if (first_output >= n_outputs) {
    return;
  }

  // Past the last output, the last one is computed again and not stored.
  uint outputs[lane_outputs];
  UNROLL for (int o = 0; o < lane_outputs; o++) {
    outputs[o] = uint(min(first_output + o, n_outputs - 1));
  }

  const device word* words = (const device word*)w;
  const uint words_per_output = uint(n_inputs) / word_bits * bits;
  const uint groups_per_output = uint(n_inputs) / group_size;

  float results[n_rows][lane_outputs] = {};

  for (int first = lane * lane_inputs; first < n_inputs; first += 32 * lane_inputs) {
    float input_sums[n_rows] = {};
    float partial_sums[n_rows] = {};
    float sums[n_rows][lane_outputs] = {};

    UNROLL for (int start = 0; start < lane_inputs; start += 4) {
      float weights[lane_outputs][4];
      float next_words[lane_outputs][4];  // of a weight that crosses into the next word
      UNROLL for (int o = 0; o < lane_outputs; o++) {
        const device word* own = words + outputs[o] * words_per_output
            + uint(first) * bits / word_bits;
        UNROLL for (int i = 0; i < 4; i++) {
          const int bit = (start + i) * bits;
          const int offset = bit % word_bits;
          const word mask = word(all_bits << offset);
          weights[o][i] = float(own[bit / word_bits] & mask);
          if (offset + bits > word_bits) {
            next_words[o][i] = float(own[bit / word_bits + 1] & (all_bits >> (word_bits - offset)));
          }
        }
      }

      UNROLL for (int row = 0; row < n_rows; row++) {
        const device T* own = x + uint(row) * uint(n_inputs) + uint(first + start);
        float inputs[4];
        UNROLL for (int i = 0; i < 4; i++) {
          const float value = float(own[i]);
          const bool starts_sum = (start + i) % inputs_per_sum == 0;
          const bool ends_sum = (start + i + 1) % inputs_per_sum == 0;
          partial_sums[row] = starts_sum ? value : partial_sums[row] + value;
          if (ends_sum) {
            input_sums[row] += partial_sums[row];
          }
          inputs[i] = value * inverse_power((start + i) * bits % word_bits);
        }

        UNROLL for (int o = 0; o < lane_outputs; o++) {
          if (sums_fours) {
            float four = inputs[1] * weights[o][1];
            four = fma(inputs[0], weights[o][0], four);
            four = fma(inputs[2], weights[o][2], four);
            four = fma(inputs[3], weights[o][3], four);
            sums[row][o] += four;
          } else {
            UNROLL for (int i = 0; i < 4; i++) {
              sums[row][o] = fma(inputs[i], weights[o][i], sums[row][o]);
              if ((start + i) * bits % word_bits + bits > word_bits) {
                sums[row][o] = fma(inputs[i] * 256.0f, next_words[o][i], sums[row][o]);
              }
            }
          }
        }
      }
    }

    UNROLL for (int o = 0; o < lane_outputs; o++) {
      const uint group = outputs[o] * groups_per_output + uint(first) / group_size;
      const float scale = float(scales[group]);
      const float bias = float(biases[group]);
      UNROLL for (int row = 0; row < n_rows; row++) {
        results[row][o] += fma(scale, sums[row][o], input_sums[row] * bias);
      }
    }
  }

  UNROLL for (int row = 0; row < n_rows; row++) {
    UNROLL for (int o = 0; o < lane_outputs; o++) {
      const float result = simd_sum(results[row][o]);
      if (lane == 0 && first_output + o < n_outputs) {
        y[uint(row) * uint(n_outputs) + uint(first_output + o)] = T(result);
      }
    }
  }
"""


class Order(NamedTuple):
    """How one output is summed: as MLX's kernel `name` does.

    Attributes:
        lane_inputs: how many neighbouring inputs a lane takes.
    """

    name: str
    lane_inputs: int


class Matmul(NamedTuple):
    """A quantized matmul that the kernel covers."""

    n_rows: int
    n_outputs: int
    n_inputs: int
    bits: int
    group_size: int
    dtype: mx.Dtype

    @property
    def order(self) -> Order:
        """The order in which MLX 0.32.4 sums an output of one row."""
        lane_inputs = 8 if self.bits in (6, 8) else 16
        if self.n_inputs % (N_LANES * lane_inputs) == 0:
            return Order("affine_qmv_fast", lane_inputs)
        return Order("affine_qmv", lane_inputs if self.bits == 2 else lane_inputs // 2)

    @property
    def lane_outputs(self) -> int:
        """How many outputs a lane computes."""
        return 4 if self.n_rows <= 4 else 2


def get_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    stream: Any = None,
) -> Matmul | None:
    """The matmul of these arguments of `mx.quantized_matmul`; None if the kernel does not cover it.

    It does not cover MLX's other modes, a batch of matrices, mixed dtypes, and 64 or 128 inputs in
    2, 4 or 8 bits, which have a kernel of their own for one row (`affine_qmv_quad`).
    """
    bits = 4 if bits is None else bits
    group_size = 64 if group_size is None else group_size
    n_inputs = x.shape[-1]
    n_rows = x.size // n_inputs
    is_covered = (
        mode == "affine"
        and transpose
        and stream is None
        and 2 <= n_rows <= MAX_ROWS
        and w.ndim == 2
        and w.nbytes < MAX_BYTES
        and w.shape[1] * 32 == n_inputs * bits
        and scales.shape == (w.shape[0], n_inputs // group_size)
        and bits in BITS
        and group_size in GROUP_SIZES
        and x.dtype in DTYPES
        and biases is not None
        and biases.shape == scales.shape
        and biases.dtype == scales.dtype == x.dtype
    )
    if not is_covered or (n_inputs in (64, 128) and bits in (2, 4, 8)):
        return None
    return Matmul(n_rows, w.shape[0], n_inputs, bits, group_size, x.dtype)


def multiply(
    matmul: Matmul,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    lane_outputs: int | None = None,
    verbose: bool = False,
) -> mx.array:
    """Computes a matmul with the kernel, on Metal.

    Args:
        x: (..., K), with 2 to `MAX_ROWS` rows in all.
        w: (N, K bits / 32), as `mx.quantize` packs it.
        scales, biases: (N, K / group_size).
        lane_outputs: in place of the matmul's; it changes no bit.
        verbose: print the text that MLX compiles.

    Returns:
        (..., N), each row with the bits that MLX's kernel for one row gives.
    """
    lane_outputs = lane_outputs or matmul.lane_outputs
    n_threadgroups = -(-matmul.n_outputs // (N_SIMDGROUPS * lane_outputs))
    constants: list[tuple[str, Any]] = [
        ("T", matmul.dtype),
        ("bits", matmul.bits),
        ("group_size", matmul.group_size),
        ("n_rows", matmul.n_rows),
        ("lane_inputs", matmul.order.lane_inputs),
        ("lane_outputs", lane_outputs),
    ]
    (y,) = _make_kernel()(
        inputs=[x.reshape(matmul.n_rows, matmul.n_inputs), w, scales, biases],
        template=constants,
        grid=(N_LANES, N_SIMDGROUPS * n_threadgroups, 1),
        threadgroup=(N_LANES, N_SIMDGROUPS, 1),
        output_shapes=[(matmul.n_rows, matmul.n_outputs)],
        output_dtypes=[matmul.dtype],
        verbose=verbose,
    )
    return y.reshape(*x.shape[:-1], matmul.n_outputs)


@cache
def _make_kernel() -> Any:
    return mx.fast.metal_kernel(
        name="few_rows",
        input_names=["x", "w", "scales", "biases"],
        output_names=["y"],
        header=HEADER,
        source=SOURCE,
    )


class FewRows(NamedTuple):
    """Which matmuls are computed by the kernel.

    Attributes:
        used: those found equal to MLX's, and faster, on this machine.
        multiply: what computes them, called as `multiply` is.
    """

    used: frozenset[Matmul] = frozenset()
    multiply: Callable[..., mx.array] = multiply

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The numbers of rows of which at least one matmul is used."""
        return tuple(sorted({matmul.n_rows for matmul in self.used}))

    def replace_matmul(self, n_rows: int) -> AbstractContextManager[None]:
        """In this context, forwards of `n_rows` that this thread builds use the kernel.

        What it is not used for goes to MLX.
        """
        if not self.used or not 2 <= n_rows <= MAX_ROWS:
            return nullcontext()
        return replace_functions([(QUANTIZED_MATMUL, partial(_multiply_few, self))])


NO_FEW_ROWS = FewRows()
"""All matmuls go to MLX."""


def _multiply_few(
    few_rows: FewRows,
    original: Callable[..., mx.array],
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *args: Any,
    **kwargs: Any,
) -> mx.array:
    """`mx.quantized_matmul`, or the kernel's."""
    matmul = get_matmul(x, w, scales, biases, *args, **kwargs)
    if matmul in few_rows.used:
        return few_rows.multiply(matmul, x, w, scales, biases)
    return original(x, w, scales, biases, *args, **kwargs)
