"""Wrong versions of the kernel, each of which the comparison must find."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from mlx_redrafter.target import few_rows

PAST_THE_END = "reads past the last output"
"""This one stops the process."""

FOUR = """            float four = inputs[1] * weights[o][1];
            four = fma(inputs[0], weights[o][0], four);
"""
BLOCK = "fma(scale, sums[row][o], input_sums[row] * bias)"

SUMS = "inputs_per_sum = bits == 8 ? 1 : (bits == 3 || bits == 5 ? 8 : 4)"

WRONG = {
    "blocks descend": (
        "int first = lane * lane_inputs; first < n_inputs; first += 32 * lane_inputs",
        "int first = (n_inputs / lane_inputs - 1 - lane) * lane_inputs; first >= 0;"
        " first -= 32 * lane_inputs",
    ),
    "one sum for all blocks": (
        f"results[row][o] += {BLOCK};",
        "results[row][o] = fma(scale, sums[row][o], fma(input_sums[row], bias, results[row][o]));",
    ),
    "a product is rounded before it is added": (
        BLOCK,
        "(scale * sums[row][o] + input_sums[row] * bias)",
    ),
    "the bias is added by fma": (
        BLOCK,
        "fma(input_sums[row], bias, scale * sums[row][o])",
    ),
    "four products in their order": (
        FOUR,
        """            float four = inputs[0] * weights[o][0];
            four = fma(inputs[1], weights[o][1], four);
""",
    ),
    "four products without a sum of their own": (
        FOUR,
        """            float four = fma(inputs[1], weights[o][1], sums[row][o]);
            sums[row][o] = 0.0f;
            four = fma(inputs[0], weights[o][0], four);
""",
    ),
    "a weight that crosses words is one term": (
        "sums[row][o] = fma(inputs[i], weights[o][i], sums[row][o]);",
        """if ((start + i) * bits % word_bits + bits > word_bits) {
                const float weight = fma(next_words[o][i], 256.0f, weights[o][i]);
                sums[row][o] = fma(inputs[i], weight, sums[row][o]);
                continue;
              }
              sums[row][o] = fma(inputs[i], weights[o][i], sums[row][o]);""",
    ),
    "inputs are summed one by one": (SUMS, "inputs_per_sum = 1"),
    "four inputs are summed at a time": (SUMS, "inputs_per_sum = 4"),
    "inputs are summed in their own type": (
        "partial_sums[row] = starts_sum ? value : partial_sums[row] + value;",
        "partial_sums[row] = starts_sum ? value : float(T(partial_sums[row] + value));",
    ),
    "weights are shifted in place of inputs": (
        "inputs[i] = value * inverse_power((start + i) * bits % word_bits);",
        """inputs[i] = value;
          UNROLL for (int o = 0; row == 0 && o < lane_outputs; o++) {
            weights[o][i] *= inverse_power((start + i) * bits % word_bits);
          }""",
    ),
    "all groups have the first one's scale": (
        "const float scale = float(scales[group]);",
        "const float scale = float(scales[group - group % groups_per_output]);",
    ),
    "outputs past the last are stored": (
        "first_output + o < n_outputs) {",
        "row * n_outputs + first_output + o < n_rows * n_outputs) {",
    ),
    PAST_THE_END: ("uint(min(first_output + o, n_outputs - 1))", "uint(first_output + o)"),
}
"""By what is wrong: a part of the source, and what replaces it."""


@contextmanager
def replace_source(wrong: str) -> Iterator[None]:
    """In this context the kernel has this fault."""
    old, new = WRONG[wrong]
    assert few_rows.SOURCE.count(old) == 1, wrong
    few_rows._make_kernel.cache_clear()
    try:
        with patch.object(few_rows, "SOURCE", few_rows.SOURCE.replace(old, new)):
            yield
    finally:
        few_rows._make_kernel.cache_clear()
