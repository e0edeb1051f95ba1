"""The table of published drafters by their targets' names, and whether a drafter's config fits.

`published.json` has a list for each target, in the order in which its drafters are tried: the
repository, the kind, and where the pair is named. Of a kind, the smaller files come first; drafters
of single users come last. Names are compared as `normalize_name` returns them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ..drafters import block, eagle
from ..drafters.checkpoint import Config
from ..drafters.config import get_object, merge_parts
from ..drafters.gemma4_assistant import Drafter, DrafterArgs, read_fields
from ..errors import CheckpointError
from ..target.model_parts import get_model_sizes

FILE = Path(__file__).with_name("published.json")

FORMATS = re.compile(
    r"""(?:[-_.](?:
        (?:mixed[-_])?\d(?:[-_.]\d)*[-_]?bits?   # 4bit, 8-bit, mixed-3-4-bit
        | mixed(?:_\d)+ | (?:unsloth[-_])?bnb
        | (?:bf|fp|f)(?:4|8|16|32) | float(?:16|32) | int[48] | w\d+a\d+
        | (?:mx|nv)fp[48](?:a16)? | q\d(?:_\w+)? | qx\d\w* | g(?:s|roup)?\d{2,3}
        | dwq(?:[-_]\w+)? | awq | gptq | optiq | dynamic | quantized | unquantized
        | mlx | gguf | hi | ud
    ))+$""",
    re.VERBOSE,
)
"""The suffixes of formats and quantizations."""

FAMILY = re.compile(r"^meta-(?=llama)")
"""The part of Meta's older names that is left out in newer ones."""

UNREAD = ("attention_sink_bias", "gating")
"""Keys of block drafters' configs for parts that no drafter here has."""

QAT = "-qat"
"""In names of models that were trained to be quantized, which have their own drafters."""


class Published(NamedTuple):
    """A published drafter.

    Attributes:
        repo: its hub id, or its name in `PACKAGED`.
        kind: "eagle3", "dflash", "dflash2", "dspark", "mtp", "recurrent" or a `model_type`.
        source: who names it for this target.
    """

    repo: str
    kind: str
    source: str


class TargetSizes(NamedTuple):
    """The numbers of a target that a drafter's config is compared with.

    Attributes:
        hidden_size, vocab_size: D and V.
        n_layers: how many layers it has.
        model: the target, whose cache an assistant reads.
    """

    hidden_size: int
    vocab_size: int
    n_layers: int
    model: nn.Module


@cache
def read_table() -> dict[str, list[Published]]:
    """Names of targets -> their drafters, in the order in which they are tried; read once."""
    table: dict[str, list[dict[str, str]]] = json.loads(FILE.read_bytes())
    return {name: [Published(**each) for each in drafters] for name, drafters in table.items()}


def list_published(name: str, *, smallest_first: bool = True) -> list[Published]:
    """The published drafters for a target of this name, a hub id or the name of a folder.

    Args:
        smallest_first: of a kind, those in fewer bits come first.
    """
    wanted = normalize_name(name)
    table = read_table()
    found = next((table[each] for each in table if normalize_name(each) == wanted), [])
    if smallest_first:
        return found
    ordered = list[Published]()
    for _, group in groupby(found, key=lambda each: each.kind):
        ordered += sorted(group, key=lambda each: -get_bits(each.repo))
    return ordered


def get_bits(name: str) -> int:
    """The bits of a weight by the format in a name; 16 if it names none."""
    suffix = FORMATS.search(name.lower())
    number = re.search(r"\d+", suffix[0]) if suffix else None
    return int(number[0]) if number else 16


def normalize_name(name: str) -> str:
    """A model's name in lower case, without its owner and suffixes of its format."""
    short = name.rstrip("/").rpartition("/")[2].lower()
    return FAMILY.sub("", FORMATS.sub("", short))


def read_target_sizes(model: nn.Module) -> TargetSizes:
    """The sizes of a target, from its modules; nothing is computed."""
    hidden_size, vocab_size = get_model_sizes(model)
    return TargetSizes(hidden_size, vocab_size, len(getattr(model, "layers", [])), model)


def explain_misfit(config: Config, target: TargetSizes) -> str | None:
    """Why a drafter with this `config.json` does not fit a target; None if it may.

    Sizes that only its tensors show are compared when it is loaded.
    """
    flat = merge_parts(merge_parts(config, "dflash_config"), "eagle_config")
    sizes = get_object(config, "text_config") | flat
    widths = ("backbone_hidden_size", "target_hidden_size", "hidden_size")
    expected: dict[str, Any] = {
        "hidden size": next((sizes[key] for key in widths if key in sizes), None),
        "vocabulary size": sizes.get("vocab_size"),
        "number of layers": sizes.get("num_target_layers"),
    }
    for (what, number), got in zip(expected.items(), target, strict=False):
        if number not in (None, -1, got):  # -1 in Apple's format: not given
            return f"it expects {what} {number}, the target has {got}"

    for key in UNREAD:
        if flat.get(key):
            return f"{key} {flat[key]!r:.40} is not supported"
    layers = block.get_capture_layers(flat) or eagle.get_capture_layers(flat)
    if layers and max(layers) >= target.n_layers:
        return f"it reads the output of layer {max(layers)}, the target has {target.n_layers}"
    if "backbone_hidden_size" in config:
        args = DrafterArgs.from_dict(read_fields(config))
        try:
            Drafter(args).check_fit(target.model, "it")
        except CheckpointError as error:
            return str(error)
    return None
