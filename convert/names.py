"""One mapping from every known style of tensor names to Apple's. Pure: names in, names out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import CheckpointError

INSERTED = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod)\.")
"""What DDP and torch.compile put before the names of what they wrap, at any depth."""

WRAPPER = re.compile(r"((?:(?:model|drafter|state_dict|model_state_dict)\.)*)(.*)")
"""What trainers and dictionaries of dictionaries put in front, in any order."""

LAST = "lm_head.last.weight"

STYLES = (
    (r"(rnn_u\.weight|rnn_u\.bias|rnn_w\.weight|draft_ids)", r"\1"),
    (r"input_projs?\.(?:0\.)?(weight|bias)", r"input_proj.\1"),
    (r"(?:lm_heads?\.(?:0\.)?|0\.|layers\.)(\d{1,3})\.linear\.(weight|bias)", r"lm_head.\1.linear.\2"),
    (r"(?:lm_heads?\.(?:0\.)?|0\.)(\d{1,3})\.weight", r"lm_head.\1.weight"),
    (r"lm_head\.weight", LAST),
)
"""(a name without its wrappers, Apple's name for it): Apple's own, its older ones, and TensorRT-LLM's."""

DROPPED = {"emb_norm.weight": "no forward pass uses it"}

FOREIGN = (
    (
        r".*(weight_scale(_2)?|input_scale|weight_quantizer\..*|_amax)",
        "ModelOpt has quantized it: convert the checkpoint from before, and quantize with -q",
    ),
    (
        r".*medusa_?heads?\..*|[1-9]\d*\.\d+\.(linear\.)?(weight|bias)",
        "it holds Medusa heads, which are no recurrent drafter",
    ),
    (r".*hydra.*", "it holds Hydra heads, which are no recurrent drafter"),
    (r"(.*\.)?(fc\.weight|midlayer\..*|d2t|t2d)", "it holds an EAGLE head, which is no recurrent drafter"),
    (
        r"(.*\.)?(embed_tokens\.weight|layers\.\d+\.(self_attn|mlp|input_layernorm)\..*)",
        "it is a base model without a drafter",
    ),
)
"""(a tensor that tells, what it tells); the first that fits."""


class Mapping(NamedTuple):
    """Attributes:
    names: Apple's name -> the stored one.
    dropped: stored names that are left out, each with the reason.
    """

    names: dict[str, str]
    dropped: dict[str, str]


def map_names(stored: Iterable[str], where: str) -> Mapping:
    """The drafter among these tensors; others are a base model's when the drafter's have a name of their own.

    Raises:
        CheckpointError: no drafter, two of them, another kind of head, or tensors that no drafter has.
    """
    split = {name: WRAPPER.fullmatch(INSERTED.sub("", name)).groups() for name in stored}  # type: ignore[union-attr]
    inside = {name: tail for name, (scope, tail) in split.items() if "drafter." in scope}
    others = {name: tail for name, (_, tail) in split.items() if name not in inside}
    outside = [name for name, tail in others.items() if renamed(tail) not in (None, LAST)]
    # One under a wrapper that is not known is another one too.
    outside += [name for name in others if "drafter." in name and renamed(name.rpartition("drafter.")[2])]
    if inside and outside:
        raise CheckpointError(f"{where} holds two drafters: {min(inside)} and {min(outside)}")
    tails = inside or {name: tail for name, (_, tail) in split.items()}
    for pattern, told in FOREIGN:
        if any(re.fullmatch(pattern, tail) for tail in tails.values()):
            raise CheckpointError(f"{where} is no drafter: {told}")
    names: dict[str, str] = {}
    dropped: dict[str, str] = {}
    unknown = []
    for name, tail in tails.items():
        if tail in DROPPED:
            dropped[name] = DROPPED[tail]
        elif (canonical := renamed(tail)) is None:
            unknown.append(name)
        elif canonical in names:
            raise CheckpointError(f"{where} holds two drafters: {names[canonical]} and {name}")
        else:
            names[canonical] = name
    if names.keys() == {LAST} and not inside:
        raise CheckpointError(f"{where} is no drafter: {names[LAST]} alone is the last shard of a base model")
    if LAST in names:
        blocks = {int(name.split(".")[1]) for name in names if name.startswith("lm_head.") and ".linear." in name}
        head = f"lm_head.{len(blocks)}.weight"
        if head in names:
            raise CheckpointError(f"{where} holds two drafters: {names[head]} and {names[LAST]}")
        names[head] = names.pop(LAST)
    if not names:
        raise CheckpointError(f"{where} is no drafter: its tensors begin {sorted(unknown)[:3]}")
    if unknown:
        raise CheckpointError(f"{where} holds {len(unknown)} tensors that no drafter has: {sorted(unknown)[0]}, ...")
    return Mapping(names, dropped)


def renamed(tail: str) -> str | None:
    """Apple's name for a tensor, or None for one that no drafter has."""
    for pattern, canonical in STYLES:
        if match := re.fullmatch(pattern, tail):
            return match.expand(canonical)
    return None
