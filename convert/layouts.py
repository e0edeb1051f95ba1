"""The drafter among the tensors of a checkpoint: names of every known source mapped to Apple's, sizes checked.

Each source's naming of a recurrent drafter is one function (`apple`, `older_apple`, `tensorrt_llm`). The other kinds
are read by `heads`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import DRAFT_IDS, check_draft_ids, compare_config, derive_args, load_drafter
from ..drafters import KINDS, protocol
from ..drafters.recurrent import MODEL_TYPE, Drafter, DrafterArgs
from ..errors import CheckpointError, one_line
from .heads import read_head
from .sources import Source
from .tensors import Stored, read_file, read_tensor

INSERTED = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod)\.")
"""What DDP and torch.compile put before the names of what they wrap, at any depth."""

WRAPPERS = re.compile(r"(?:(?:model|drafter|state_dict|model_state_dict)\.)*")
"""What trainers and nested dictionaries put in front, in any order."""

APPLE = re.compile(
    r"rnn_u\.(weight|bias)|rnn_w\.weight|input_proj\.(weight|bias)|draft_ids"
    r"|lm_head\.\d{1,3}\.(linear\.weight|linear\.bias|weight)"
)

HEAD = "lm_head.weight"
"""TensorRT-LLM's name of the output matrix, which Apple numbers; also that of many base models."""

UNUSED = "emb_norm.weight"
"""A tensor of Apple's internal trainer that no forward pass uses."""

OTHER_KINDS = (
    (
        r".*(weight_scale(_2)?|input_scale|weight_quantizer\..*|_amax)",
        "is quantized by ModelOpt: convert the checkpoint from before, and quantize with -q",
    ),
    (r".*hydra.*", "holds Hydra heads, which are not supported"),
    (r"(.*\.)?(fc\.weight|midlayer\..*|d2t|t2d)", "holds an EAGLE head, which is not supported"),
    (r"(.*\.)?(embed_tokens\.weight|layers\.\d+\.(self_attn|mlp|input_layernorm)\..*)", "is {model}, not a drafter"),
)
"""(a tensor that tells what else it is, what to say); the first that fits."""

TENSORRT_LLM_KEYS = {
    "redrafter_exit_dim": "exit_dim",
    "redrafter_num_layers": "num_draft_layers",
    "redrafter_is_rnn": "rnn",
}
"""Keys of TensorRT-LLM's config and Apple's."""

PADDING = 64
"""TensorRT-LLM pads a vocabulary by fewer rows than this for each rank; more is an error in the config."""


class Found(NamedTuple):
    """The drafter in a checkpoint.

    Attributes:
        drafter: as it is stored, evaluated.
        is_quantized: whether MLX has quantized it.
        notes: what was left out, and where the config is wrong.
    """

    drafter: protocol.Drafter
    is_quantized: bool
    notes: tuple[str, ...]


def apple(name: str) -> str | None:
    """Apple's names, NeMo-Skills' and ModelOpt's too."""
    return name if APPLE.fullmatch(name) else None


def older_apple(name: str) -> str | None:
    """Apple's first names: lists of heads and of projections, or bare numbers."""
    name = re.sub(r"^(lm_heads?\.(0\.)?|0\.)(?=\d)", "lm_head.", name)
    return apple(re.sub(r"^input_projs\.(0\.)?", "input_proj.", name))


def tensorrt_llm(name: str) -> str | None:
    """TensorRT-LLM's names: the blocks apart from the output matrix, which has no number."""
    return HEAD if name == HEAD else apple(re.sub(r"^layers\.(?=\d+\.linear\.)", "lm_head.", name))


def rename(name: str) -> str | None:
    """Apple's name for a tensor without its wrappers, or None for one that no drafter has; `HEAD` stays."""
    return next((found for style in (apple, older_apple, tensorrt_llm) if (found := style(name))), None)


def map_names(stored: Iterable[str], where: str, model: str) -> dict[str, str]:
    """Apple's name -> the stored one, for the drafter; other tensors may be those of the base model beside it.

    Args:
        model: what to call a base model.

    Raises:
        CheckpointError: no drafter, two of them, another kind of head, or tensors that no drafter has.
    """
    bare = {name: INSERTED.sub("", name) for name in stored}
    tails = {name: WRAPPERS.sub("", text, count=1) for name, text in bare.items()}
    if inside := [name for name, text in bare.items() if "drafter." in text.removesuffix(tails[name])]:
        for name in sorted(tails.keys() - set(inside)):
            # Another drafter may have no wrapper, or one that is not known.
            if rename(tails[name].rpartition("drafter.")[2]) not in (None, HEAD):
                raise CheckpointError(f"{where} holds two drafters: {min(inside)} and {name}")
        tails = {name: tails[name] for name in inside}
    for pattern, kind in OTHER_KINDS:
        if any(re.fullmatch(pattern, tail) for tail in tails.values()):
            raise CheckpointError(f"{where} {kind.format(model=model)}")
    names: dict[str, str] = {}
    unknown = []
    for name, tail in sorted(tails.items()):
        canonical = rename(tail)
        if canonical in names:
            raise CheckpointError(f"{where} holds two drafters: {names[canonical]} and {name}")
        if canonical is not None:
            names[canonical] = name
        elif tail != UNUSED:
            unknown.append(name)
    if names.keys() <= {HEAD} and not inside:
        raise CheckpointError(f"{where} holds no drafter: its tensors begin {sorted(tails)[:3]}")
    if unknown:
        raise CheckpointError(f"{where} holds {len(unknown)} tensors that no drafter has: {unknown[0]}, ...")
    if HEAD in names:
        head = f"lm_head.{sum(name.endswith('.linear.weight') for name in names)}.weight"
        if head in names:
            raise CheckpointError(f"{where} holds two drafters: {names[head]} and {names[HEAD]}")
        names[head] = names.pop(HEAD)
    return names


def read_checkpoint(source: Source, model: nn.Module | None = None) -> Found:
    """The drafter in a source.

    Args:
        model: the target, whose output matrix some Medusa heads use.

    Raises:
        CheckpointError: damaged, not one drafter, or of shapes that do not fit each other.
    """
    if source.config.get("model_type") in KINDS.keys() - {MODEL_TYPE} and "hidden_size" in source.config:
        drafter = load_drafter(source.path)  # a directory that was converted before
        return Found(drafter, any(hasattr(layer, "bits") for _, layer in drafter.named_modules()), ())
    files = [read_file(file) for file in source.files]
    mapping = source.config.get("mapping")
    size = mapping.get("tp_size") if source.has_ranks and isinstance(mapping, dict) else None
    if type(size) is int and 0 < size != len(files):
        raise CheckpointError(f"half a checkpoint: {source.path} says tp_size {size}, and has {len(files)} ranks")
    if source.has_ranks:
        return read_redrafter(source, files)
    merged = merge(files, source.files)
    bare = {WRAPPERS.sub("", INSERTED.sub("", name), count=1): stored for name, stored in merged.items()}
    head = read_head(bare, source.config, str(source.path), model)
    return read_redrafter(source, [merged]) if head is None else Found(head, False, ())


def read_redrafter(source: Source, slices: Sequence[Mapping[str, Stored]]) -> Found:
    """A recurrent drafter.

    Args:
        slices: the tensors of each rank; of other sources than TensorRT-LLM one of all tensors.

    Raises:
        CheckpointError: see `read_checkpoint`.
    """
    where, first = str(source.path), slices[0]
    kind = source.config.get("model_type")
    model = f"a {kind}" if isinstance(kind, str) and kind.isidentifier() and kind != MODEL_TYPE else "a base model"
    mappings = [map_names(drop_scales(part), where, model) for part in slices]
    names = mappings[0]
    for rank, mapping in enumerate(mappings):
        if mapping != names:
            name = min(set(mapping.items()) ^ set(names.items()))[1]
            raise CheckpointError(f"{where}: ranks 0 and {rank} do not hold the same tensors: {name}")
    if any(f"{name.removesuffix('.weight')}.scales" in first for name in names.values()):
        return Found(load_drafter(source.path if source.path.is_dir() else source.path.parent), True, ())

    def read(key: str, name: str, parts: Sequence[Stored]) -> mx.array:
        return read_tensor(name, parts, where, integers=key == DRAFT_IDS, axes=2 if key.endswith(".weight") else 1)

    arrays = {key: read(key, name, [part[name] for part in slices]) for key, name in names.items()}
    config = {TENSORRT_LLM_KEYS.get(key, key): value for key, value in source.config.items()}
    config["quantization"] = None  # TensorRT-LLM's entry of this name is another
    args = derive_args(DrafterArgs, {key: array.shape for key, array in arrays.items()}, config, where)
    notes = [f"{name} is left out: no forward pass uses it" for name in first if name.endswith(UNUSED)]
    size = config.get("vocab_size")
    padding = args.n_guesses - size if source.has_ranks and type(size) is int and size > 0 else 0
    if 0 < padding < PADDING * len(slices):
        notes.append(f"the last {padding} rows of the head are left out: config.json says vocab_size {size}")
        args = replace(args, vocab_size=args.vocab_size - padding)
        head = f"lm_head.{args.num_draft_layers}.weight"
        arrays[head] = arrays[head][: args.vocab_size]
    for difference in compare_config(args, config):
        # Without its cell a drafter may look whole, but of another hidden size.
        if not args.rnn and difference.startswith(("says rnn True", "says hidden_size")):
            raise CheckpointError(f"half a drafter: {where}/config.json {difference}")
        notes.append(f"config.json {difference}; the tensors are believed")
    if DRAFT_IDS in arrays:
        check_draft_ids(arrays[DRAFT_IDS], args.vocab_size, where)
    drafter = Drafter(args)
    try:
        drafter.load_weights(list(arrays.items()))
    except ValueError as error:
        raise CheckpointError(f"half a drafter: {where}: {one_line(error)}") from error
    return Found(drafter, False, tuple(notes))


def drop_scales(names: Iterable[str]) -> list[str]:
    """The names without those that MLX adds for a quantized layer."""
    known = set(names)
    return [name for name in known if not (name.endswith((".scales", ".biases")) and f"{name[:-7]}.weight" in known)]


def merge(files: Sequence[dict[str, Stored]], paths: Sequence[Path]) -> dict[str, Stored]:
    merged: dict[str, Stored] = {}
    for file, path in zip(files, paths, strict=True):
        if twice := sorted(set(file) & set(merged)):
            raise CheckpointError(f"{path} holds {twice[0]}, which another shard has already")
        merged |= file
    return merged
