"""Models and drafters from directories or the Hugging Face hub, checked before they are used."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _download, load_model
from mlx_lm.utils import load as load_target

from .drafter import MODEL_TYPE, Drafter, DrafterArgs
from .errors import CheckpointError, one_line
from .plan import DEEPEST
from .target import sizes

WEIGHTS = "model*.safetensors"
GROUP_SIZES = (16, 32, 64, 128)
"""How many weights may share a scale in MLX."""
DRAFT_IDS = "draft_ids"
"""The tensor that names the tokens a drafter can guess."""
MOST_TOKENS = 2**24
"""More than any vocabulary has: what a config says beyond it is an error."""


def load(path_or_hf_repo: str | Path, **options: Any) -> tuple[nn.Module, Any]:
    """The target and its tokenizer, by mlx-lm's own loader.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        options: see `mlx_lm.load`.

    Raises:
        CheckpointError: there is no such model, or it cannot be read.
    """
    path = find(path_or_hf_repo)
    check_directory(path)
    try:
        model, tokenizer, *_ = load_target(str(path), **options)
    except Exception as error:  # whatever a damaged directory makes mlx-lm, transformers and their like say
        raise CheckpointError(f"cannot load the model in {path}: {one_line(error)}") from error
    return model, tokenizer


def load_drafter(path_or_hf_repo: str | Path, model: nn.Module | None = None) -> Drafter:
    """A drafter, plain or quantised, with its weights evaluated.

    Its sizes are read off its tensors; the config is only compared with them.

    Args:
        path_or_hf_repo: a local directory or a hub id, in Apple's names (see docs/checkpoints.md).
        model: the target it is for; sizes are checked against it.

    Raises:
        CheckpointError: missing, damaged, not a drafter, not finite, or of another size than `model`.
    """
    path = find(path_or_hf_repo)
    config = check_directory(path)
    if (kind := config.get("model_type", MODEL_TYPE)) != MODEL_TYPE:
        raise CheckpointError(f"expected a drafter (model_type {MODEL_TYPE!r}) in {path}, got model_type {kind!r}")
    args = derive_args(stored_shapes(path), config, f"{path}")
    for disagreement in disagreements(args, config):
        raise CheckpointError(f"{path / 'config.json'} {disagreement}")
    try:
        loaded, _ = load_model(
            path,
            model_config=dict(vars(args)),
            get_model_classes=lambda config: (Drafter, DrafterArgs),
        )
    except Exception as error:  # whatever a damaged directory makes mlx-lm say
        raise CheckpointError(f"cannot load the drafter in {path}: {one_line(error)}") from error
    drafter = cast(Drafter, loaded)
    check_weights(path, drafter)
    if model is not None:
        check_fit(drafter, model, f"{path}")
    return drafter


def check_fit(drafter: Drafter, model: nn.Module, name: str = "the drafter") -> None:
    """Holds a drafter's sizes against a target's.

    Raises:
        CheckpointError: they differ.
    """
    hidden_size, vocab_size = sizes(model)
    for what, expected, got in (
        ("hidden size", drafter.args.hidden_size, hidden_size),
        ("vocabulary size", drafter.args.vocab_size, vocab_size),
    ):
        if expected != got:
            raise CheckpointError(f"{name} expects {what} {expected}, the target has {got}")


def save_drafter(
    directory: Path, drafter: Drafter, *, dtype: mx.Dtype | None = None, extra: dict[str, Any] | None = None
) -> None:
    """Writes `config.json` and `model.safetensors`, each under a temporary name first, the weights last.

    Args:
        dtype: of the floating-point weights as stored; None keeps theirs.
        extra: more keys for the config.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    weights = cast(dict[str, mx.array], dict(tree_flatten(drafter.parameters())))
    if dtype is not None:
        weights = {k: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w for k, w in weights.items()}
    stored = next(str(w.dtype) for w in weights.values() if mx.issubdtype(w.dtype, mx.floating))
    config = {**drafter.args.said, "dtype": stored.removeprefix("mlx.core."), **(extra or {})}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
            written = Path(scratch)
            (written / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            mx.save_safetensors(str(written / "model.safetensors"), weights, {"format": "mlx"})
            for name in ("config.json", "model.safetensors"):
                os.replace(written / name, directory / name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write the drafter to {directory}: {one_line(error)}") from error


def find(path_or_hf_repo: str | Path) -> Path:
    """The local directory of a model, fetched from the hub when the name is not a path.

    Raises:
        CheckpointError: neither a directory here nor reachable on the hub.
    """
    name = str(path_or_hf_repo)
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    except (OSError, RuntimeError) as error:  # no path on this system, or nobody's home
        raise CheckpointError(f"no such directory: {name[:200]!r}: {one_line(error)[:200]}") from error
    if not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        raise CheckpointError(f"no such directory: {name!r}")
    try:
        return Path(_download(name))
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no directory here, and the hub has not given it: {one_line(error)}"
        ) from error


def check_directory(path: Path) -> dict[str, Any]:
    """The config of a model directory whose files are all there.

    Raises:
        CheckpointError: no directory, no readable config, no weights, or a shard that the index names is missing.
    """
    if not path.is_dir():
        raise CheckpointError(f"expected a model directory, got a file: {path}")
    config = read_object(path / "config.json")
    present = {file.name for file in path.glob(WEIGHTS)}
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = read_object(index).get("weight_map", {})
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index}: weight_map must give each tensor a file name, got {one_line(shards)[:60]}")
        if missing := sorted(set(shards.values()) - present):
            raise CheckpointError(f"half a checkpoint: {index.name} names {missing[0]}, which is not in {path}")
    if not present:
        raise CheckpointError(f"no {WEIGHTS} in {path}")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name} in {file.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or numbers beyond what Python reads
        raise CheckpointError(f"{file} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold an object, got {type(value).__name__}")
    return value


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor in a directory.

    Raises:
        CheckpointError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob(WEIGHTS)):
        try:
            shapes |= {name: array.shape for name, array in cast(dict[str, mx.array], mx.load(str(file))).items()}
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {one_line(error)}") from error
    return shapes


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
    depth, base = config.get("draft_depth"), config.get("base_model")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= DEEPEST):
        raise CheckpointError(
            f"{where}/config.json: draft_depth must be from 1 to {DEEPEST}, got {one_line(depth)[:40]}"
        )
    if base is not None and not (isinstance(base, str) and base.isprintable()):
        raise CheckpointError(f"{where}/config.json: base_model must be a name, got {ascii(base)[:40]}")
    acceptance = config.get("acceptance")
    if acceptance is not None and not is_acceptance(acceptance):
        raise CheckpointError(
            f"{where}/config.json: acceptance must be a row of shares from 0 to 1 for each depth, "
            f"got {one_line(repr(acceptance))[:40]}"
        )
    return DrafterArgs(
        hidden_size,
        vocab_size,
        exit_dim,
        layers,
        rnn,
        draft_depth=depth,
        base_model=base,
        draft_vocab_size=guessed,
        acceptance=acceptance,
    )


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
    guessed = args.vocab_size if args.draft_vocab_size is None else args.draft_vocab_size
    shapes[f"lm_head.{len(layers)}.weight"] = (guessed, exit_dim)
    if args.draft_vocab_size is not None:
        shapes[DRAFT_IDS] = (guessed,)
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
        step = max(1, 2**21 * len(array) // max(1, array.size))
        if not all(mx.isfinite(array[at : at + step]).all().item() for at in range(0, len(array), step)):
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
