"""The drafter among the tensors of a checkpoint: of which kind it is, and what we call its tensors.

Each layout that somebody publishes is a table of names; another one is another table. `heads` makes drafters of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from mlx_redrafter.drafters import arctic_lstm, dflash, dspark, eagle, medusa, mlp_speculator, recurrent
from mlx_redrafter.drafters.config import DRAFT_IDS
from mlx_redrafter.errors import CheckpointError

from .block_configs import ARCHITECTURE, find_block_kind, name_architecture

T = TypeVar("T")

Renames = Sequence[tuple[str, str]]
"""(pattern of a published name, our name); an empty one for what is left out."""

INSERTED = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod)\.")
"""What DDP and torch.compile put before the names of what they wrap, at any depth."""

WRAPPERS = re.compile(r"(?:(?:model|state_dict|model_state_dict|drafter|speculator|medusa_head)\.)*")
"""What trainers and nested dictionaries put in front, in any order."""

DRAFTERS = re.compile(r"(?:drafter|speculator|medusa_head)\.")
"""Where one of these stands in front, the other tensors are those of the base model beside it."""

HEAD = "lm_head.weight"
"""TensorRT-LLM's name of a recurrent drafter's output matrix, which Apple numbers; also that of many base models."""

RECURRENT: Renames = (
    (r"rnn_u\.(?:weight|bias)|rnn_w\.weight|draft_ids|lm_head\.weight", r"\g<0>"),
    (r"input_proj(?:s(?:\.0)?)?\.(weight|bias)", r"input_proj.\1"),
    (r"(?:lm_heads?\.(?:0\.(?=\d))?|0\.)(\d{1,3}\.(?:linear\.(?:weight|bias)|weight))", r"lm_head.\1"),
    (r"layers\.(\d{1,3}\.linear\.(?:weight|bias))", r"lm_head.\1"),
    (r"emb_norm\.weight", ""),  # of Apple's internal trainer; no forward pass uses it
)
"""Apple's names and their older forms, NeMo-Skills', ModelOpt's and TensorRT-LLM's."""

MEDUSA: Renames = (
    (r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"(\d{1,3})\.\d{1,3}\.weight", r"output.\1.weight"),
    (r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"lm_heads\.(\d{1,3})\.weight", r"output.\1.weight"),
    ("token_map", DRAFT_IDS),
)
"""The authors' names, and vLLM's."""

SPECULATOR: Renames = ((r"(emb|proj|ln|head)\.(\d{1,3})(?:\.0)?\.(weight|bias)", r"\1.\2.\3"),)

TIED_SPECULATOR: Renames = ((r"(?:(?:emb|ln|head)\.(?!0\.)|proj\.(?![01]\.))\d{1,3}\..*", ""), *SPECULATOR)

ARCTIC_LSTM: Renames = (
    (r"forget_emb\.0\.weight", "emb.weight"),
    (r"(?:input|output|cell)_emb\.0\.weight|head\.(?!0\.)\d{1,3}\.weight", ""),
    (r"(forget|input|output|cell)_proj\.([01])\.weight", r"proj.\2.weight \1"),
    (r"(cell_ln|state_ln)\.0\.(weight|bias)", r"\1.\2"),
    (r"head\.0\.weight", "head.weight"),
)

EAGLE: Renames = (
    (r"(?:midlayer|layers\.0)\.(.*)", r"layer.\1"),
    (r"layers\.[1-9]\d{0,2}\..*", r"\g<0>"),  # which `make_eagle` refuses
    (r"fc\.(?:weight|bias)|(?:input_)?norm\.weight|lm_head\.weight|embed_tokens\.weight|fc_norm\.\d\.weight", r"\g<0>"),
    ("d2t", DRAFT_IDS),
    (r"t2d|(?:layer\.|layers\.0\.|midlayer\.)?.*\.rotary_emb\.inv_freq", ""),
)
"""The authors' names, SpecForge's and vLLM's."""

BLOCK: Renames = (
    (r"(?:encoder\.)?fc\.weight", "fc.weight"),
    (r"hidden_norm\.weight|encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
    (r"norm\.weight|lm_head\.weight|embed_tokens\.weight", r"\g<0>"),
    (r"(?:midlayer|layers\.0)\.(.*)", r"layers.0.\1"),
    (r"layers\.\d{1,3}\..*", r"\g<0>"),
    (r"candidate_selector\.(predecessor|successor)_codebook(?:\.weight)?", r"selector.\1.weight"),
    (r"candidate_selector\.hidden_projection\.weight", "selector.hidden_projection.weight"),
    (r"(?:logit_head\.)?(?:markov_head\.)?(markov_w[12])\.weight", r"\1.weight"),
    (r"(?:logit_head\.)?confidence_head\..*", ""),  # see `drafters.dspark`
    ("d2t", DRAFT_IDS),
    (r"t2d|(?:.*\.)?rotary_emb\.inv_freq", ""),
)
"""The names of DFlash's authors, and those of Muse's; DSpark's authors', and SpecForge's older ones."""

BLOCK_NAME = re.compile(
    r"hidden_norm\.weight|encoder\.(?:fc|output_norm_enc)\.weight|candidate_selector\..*|.*\bmarkov_w1\.weight"
)
"""What a block drafter may have, and no other kind: EAGLE's norm of this name is in its layer."""

PACKED_PARTS = ("scales", "biases")
"""What a layer that MLX has quantized has beside its weight."""

EAGLE_NAME = re.compile(r"fc\.weight|(?:midlayer|layers\.0)\.hidden_norm\.weight")

NEEDED: dict[str, tuple[str, ...]] = {
    eagle.MODEL_TYPE: ("fc.weight",),
    dflash.MODEL_TYPE: ("fc.weight", "hidden_norm.weight"),
    dspark.MODEL_TYPE: ("fc.weight", "hidden_norm.weight"),
}
"""The kinds that have layers as base models do -> what each has, whatever its sizes."""

OTHER_KINDS = (
    (
        r".*(weight_scale(_2)?|input_scale|weight_quantizer\..*|_amax)",
        "is quantized by ModelOpt: convert the checkpoint from before, and quantize with -q",
    ),
    (r".*hydra.*", "holds Hydra heads, which are not supported"),
    (
        r"(.*\.)?(embed_tokens\.weight|layers\.\d+\.(self_attn|mlp|input_layernorm)\..*)",
        "is {model}, not a drafter: a smaller language model is given as --draft-model",
    ),
)
"""(a tensor that tells what else it is, what to say); the first that fits."""


def find_drafter(
    tensors: Mapping[str, T], config: dict[str, Any], where: str
) -> tuple[str, dict[str, T], dict[str, str]]:
    """(`model_type`, tensors by our names, what each is called in the files) of the drafter in a checkpoint.

    Args:
        tensors: by the names in the files.
        config: the checkpoint's.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: no drafter, two of them, another kind of head, or tensors that no drafter has.
    """
    bare = {name: INSERTED.sub("", name) for name in tensors}
    tails = {name: WRAPPERS.sub("", text, count=1) for name, text in bare.items()}
    if inside := {name for name, text in bare.items() if DRAFTERS.search(text.removesuffix(tails[name]))}:
        tails = {name: tail for name, tail in tails.items() if name in inside}
    kind = config.get("model_type")
    says_other = isinstance(kind, str) and kind.isidentifier() and kind != recurrent.MODEL_TYPE
    model_type, renames = find_kind(tails.values(), config, where)
    for pattern, verdict in OTHER_KINDS:
        if model_type not in NEEDED and any(re.fullmatch(pattern, tail) for tail in tails.values()):
            raise CheckpointError(f"{where} {verdict.format(model=f'a {kind}' if says_other else 'a base model')}")
    if not inside and set(tails.values()) <= {HEAD}:
        raise CheckpointError(f"{where} holds no drafter: its tensors are {sorted(tails)}")
    names, present = dict[str, str](), set(tails.values())
    for name, tail in sorted(tails.items()):
        layer, _, part = tail.rpartition(".")
        is_packed = part in PACKED_PARTS and f"{layer}.weight" in present
        ours = rename(f"{layer}.weight" if is_packed else tail, renames)
        if ours and is_packed:
            ours = f"{ours.removesuffix('weight')}{part}"
        if ours is None:
            raise CheckpointError(f"{where} holds a tensor that no {model_type} has: {name!r}")
        if ours == HEAD and model_type == recurrent.MODEL_TYPE:
            ours = f"lm_head.{sum(each.endswith('.linear.weight') for each in tails.values())}.weight"
        if ours in names:
            raise CheckpointError(f"{where} holds two drafters: {names[ours]!r} and {name!r}")
        if ours:
            names[ours] = name
    for ours in NEEDED.get(model_type, ()):
        if ours not in names:
            raise CheckpointError(f"half a drafter: {where} is of kind {model_type}, and has no {ours}")
    return model_type, {ours: tensors[name] for ours, name in names.items()}, names


def find_kind(names: Collection[str], config: dict[str, Any], where: str) -> tuple[str, Renames]:
    """(`model_type`, how its tensors are called) of the drafter with tensors of these names.

    Raises:
        CheckpointError: see `find_block_kind`.
    """
    if any(map(BLOCK_NAME.fullmatch, names)) or ARCHITECTURE.fullmatch(name_architecture(config)):
        return find_block_kind(config, where, has_markov_head=any("markov_w1" in name for name in names)), BLOCK
    if any(map(EAGLE_NAME.fullmatch, names)):
        return eagle.MODEL_TYPE, EAGLE
    if "forget_emb.0.weight" in names:
        return arctic_lstm.MODEL_TYPE, ARCTIC_LSTM
    if {"emb.0.weight", "emb.0.0.weight"} & set(names):
        return mlp_speculator.MODEL_TYPE, TIED_SPECULATOR if config.get("tie_weights") is True else SPECULATOR
    # One Medusa head alone has the names of an old recurrent drafter, but for what the config says.
    pattern = r"blocks\.\d+\.layers\..*|[1-9]\d*\.\d+\.(linear\.)?weight"
    if "medusa_num_heads" in config or any(re.fullmatch(pattern, name) for name in names):
        return medusa.MODEL_TYPE, MEDUSA
    return recurrent.MODEL_TYPE, RECURRENT


def rename(name: str, renames: Renames) -> str | None:
    """Our name of a tensor, "" for one that is left out; None where no pattern fits."""
    for pattern, ours in renames:
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return None
