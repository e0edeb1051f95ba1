"""What a drafter's tensors and config say of it: sizes read off the tensors, and what must hold for both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .drafters.recurrent import Drafter, DrafterArgs
from .engine.plan import MAX_DRAFT_DEPTH
from .errors import CheckpointError, one_line

GROUP_SIZES = (16, 32, 64, 128)
"""How many weights may share a scale in MLX."""
DRAFT_IDS = "draft_ids"
"""The tensor that names the tokens a drafter can guess."""
MOST_TOKENS = 2**24
"""More than any vocabulary has: what a config says beyond it is an error."""

DTYPES = ("float16", "bfloat16", "float32")
"""What a drafter may be written in."""

CHUNK = 1 << 21
"""How many numbers of a tensor are in memory at a time, where it need not be whole."""


def name_of(dtype: mx.Dtype) -> str:
    """Its name, as `--dtype` and configs have it."""
    return str(dtype).removeprefix("mlx.core.")


def chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows that are read at a time."""
    # An even number: some quantisations pack two rows together.
    step = 2 * max(1, CHUNK // max(1, 2 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def derive_args(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> DrafterArgs:
    """The drafter's sizes, from the shapes of its tensors; its defaults, from the config.

    Args:
        config: whose `quantization` says how packed tensors are; sizes in it are not believed.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: not a drafter.
    """
    for name, shape in shapes.items():
        if not shape:
            raise CheckpointError(f"{where}: expected {name} to be an array, got a single number")
    quantization = config.get("quantization") or {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where}/config.json: quantization must be an object, got {quantization!r}")
    heads = [int(k.split(".")[1]) for k in shapes if k.startswith("lm_head.") and k.split(".")[1].isdigit()]
    layers = max(heads, default=-1)
    head = shapes.get(f"lm_head.{layers}.weight")
    if head is None:
        raise CheckpointError(f"not a drafter: {where} has no lm_head.N.weight; its tensors begin {sorted(shapes)[:3]}")

    def inner(name: str) -> int:
        """The length of a layer's rows as it computes, packed or not."""
        scales = shapes.get(f"{name}.scales")
        own = quantization.get(name)
        if scales is None:
            return shapes[f"{name}.weight"][-1]
        group_size = (own if isinstance(own, dict) else quantization).get("group_size", 64)
        if type(group_size) is not int or group_size not in GROUP_SIZES:
            raise CheckpointError(
                f"{where}/config.json: group_size must be one of {GROUP_SIZES}, got {one_line(repr(group_size))[:40]}"
            )
        return scales[-1] * group_size

    rnn = "rnn_w.weight" in shapes
    guessed: int | None = None
    vocab_size: Any = head[0]
    if DRAFT_IDS in shapes:
        # How many tokens the target has is then the one size that no tensor tells.
        guessed, vocab_size = head[0], config.get("vocab_size")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not guessed <= vocab_size <= MOST_TOKENS:
            raise CheckpointError(
                f"{where}: with {DRAFT_IDS}, config.json must say vocab_size, at least {guessed}, "
                f"got {one_line(repr(vocab_size))[:40]}"
            )
    exit_dim = (
        shapes["lm_head.0.linear.weight"][0]
        if layers and "lm_head.0.linear.weight" in shapes
        else inner(f"lm_head.{layers}")
    )
    if rnn:
        hidden_size = shapes["rnn_w.weight"][0]
    else:
        hidden_size = (inner("input_proj") if "input_proj.weight" in shapes else exit_dim) // 2
    return DrafterArgs(
        hidden_size,
        vocab_size,
        exit_dim,
        layers,
        rnn,
        draft_vocab_size=guessed,
        **said_of(config, where),
    )


def said_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """What only the config can tell of a drafter: the arguments of that name, None where it does not say.

    Raises:
        CheckpointError: one of them means nothing.
    """
    depth, base = config.get("draft_depth"), config.get("base_model")
    if depth is not None and (
        isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MAX_DRAFT_DEPTH
    ):
        raise CheckpointError(
            f"{where}/config.json: draft_depth must be from 1 to {MAX_DRAFT_DEPTH}, got {one_line(depth)[:40]}"
        )
    if base is not None and not (isinstance(base, str) and base.isprintable()):
        raise CheckpointError(f"{where}/config.json: base_model must be a name, got {ascii(base)[:40]}")
    acceptance = config.get("acceptance")
    if acceptance is not None and not is_acceptance(acceptance):
        raise CheckpointError(
            f"{where}/config.json: acceptance must be a row of shares from 0 to 1 for each depth, "
            f"got {one_line(repr(acceptance))[:40]}"
        )
    return {"draft_depth": depth, "base_model": base, "acceptance": acceptance}


def is_acceptance(value: Any) -> bool:
    """Whether a config's `acceptance` is one: rows of shares, as many in each."""
    rows = value if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else [[]]
    shares = [share for row in rows for share in row]
    numbers = all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares)
    return bool(shares) and numbers and len({len(row) for row in rows}) == 1 and all(0 <= x <= 1 for x in shares)


def expected_shapes(args: DrafterArgs) -> dict[str, tuple[int, ...]]:
    """Apple's name -> shape of every tensor of a drafter of these sizes that is not quantised."""
    hidden, exit_dim, layers = args.hidden_size, args.exit_dim, range(args.num_draft_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    if exit_dim != 2 * hidden:
        shapes |= {"input_proj.weight": (exit_dim, 2 * hidden), "input_proj.bias": (exit_dim,)}
    for i in layers:
        shapes |= {f"lm_head.{i}.linear.weight": (exit_dim, exit_dim), f"lm_head.{i}.linear.bias": (exit_dim,)}
    shapes[f"lm_head.{len(layers)}.weight"] = (args.n_guesses, exit_dim)
    if args.draft_vocab_size is not None:
        shapes[DRAFT_IDS] = (args.n_guesses,)
    if args.rnn:
        shapes |= {"rnn_u.weight": (hidden, hidden), "rnn_u.bias": (hidden,), "rnn_w.weight": (hidden, hidden)}
    return shapes


def disagreements(args: DrafterArgs, config: dict[str, Any]) -> Iterator[str]:
    """What the config says otherwise than the tensors, a clause each; -1 in it means "not said"."""
    for key, value in vars(args).items():
        said = config.get(key, -1)
        if said not in (-1, None, value):
            yield f"says {key} {one_line(repr(said))[:40]}, its tensors say {value}"


def check_weights(path: Path, drafter: Drafter) -> None:
    """Refuses weights that are not finite numbers.

    Raises:
        CheckpointError: naming the tensor.
    """
    weights = cast(dict[str, mx.array], dict(tree_flatten(drafter.parameters())))
    for name, array in weights.items():
        packed = array.dtype in (mx.uint32, mx.uint8) and f"{name.rpartition('.')[0]}.scales" in weights
        if packed:
            continue
        if name == DRAFT_IDS:
            check_draft_ids(array, drafter.args.vocab_size, f"{path}")
            continue
        if not mx.issubdtype(array.dtype, mx.floating):
            raise CheckpointError(f"{path}: expected {name} in floating point, got {array.dtype}")
        # A few rows at a time: the answer for a whole head would need half of its memory again.
        if not all(mx.isfinite(array[start:stop]).all().item() for start, stop in chunks(array.shape)):
            raise CheckpointError(f"{path}: {name} holds NaN or infinity")


def check_draft_ids(ids: mx.array, vocab_size: int, where: str) -> None:
    """Refuses a draft vocabulary that is none: (V',) token ids, all different.

    Raises:
        CheckpointError: saying what they are.
    """
    if ids.dtype != mx.int32 or ids.ndim != 1:
        raise CheckpointError(f"{where}: expected {DRAFT_IDS} as a row of int32, got {ids.dtype} of shape {ids.shape}")
    known = np.array(ids)
    if known.min(initial=0) < 0 or known.max(initial=0) >= vocab_size:
        raise CheckpointError(
            f"{where}: expected {DRAFT_IDS} from 0 to {vocab_size - 1}, got {known.min()} to {known.max()}"
        )
    if len(np.unique(known)) != len(known):
        raise CheckpointError(f"{where}: {DRAFT_IDS} names a token twice")
