"""The kinds of drafters, one file each, and drafting from the context.

Modules shared by the kinds: config.py (configs), checkpoint.py (tensors), layers.py (activations,
RoPE), protocol.py (the interface for decoding), trainable.py (the interface for training),
cached.py (heads with a KV cache).
"""

from types import ModuleType
from typing import Any

from . import block, eagle, gemma4_assistant, medusa, mtp, recurrent
from .config import DrafterArgs
from .protocol import Drafter
from .trainable import TrainableArgs

KINDS: dict[str, ModuleType] = {
    recurrent.MODEL_TYPE: recurrent,
    medusa.MODEL_TYPE: medusa,
    eagle.MODEL_TYPE: eagle,
    mtp.MODEL_TYPE: mtp,
    **dict.fromkeys(block.MODEL_TYPES, block),
    **dict.fromkeys(gemma4_assistant.MODEL_TYPES, gemma4_assistant),
}
"""`model_type` in a drafter's config -> its module.

The last one that recognizes a published head reads it.
"""

TRAINABLE: dict[str, type[TrainableArgs]] = {
    module.__name__.rpartition(".")[2]: module.DrafterArgs
    for module in KINDS.values()
    if issubclass(module.DrafterArgs, TrainableArgs)
}
"""Name of a kind that can be trained, as in `--drafter-type` -> the class of its config."""

DEFAULT = next(iter(TRAINABLE))
"""The kind that is trained by default."""


PUBLISHED = {"architectures", "medusa_num_heads", "speculators_model_type"}
"""Keys of configs in the format of a drafter's authors."""


def get_converted_kind(config: dict[str, Any]) -> ModuleType | None:
    """The kind of a drafter whose config is in our format, unless that is its authors' too."""
    kind = KINDS.get(str(config.get("model_type")))
    is_ours = kind is not recurrent and "hidden_size" in config and PUBLISHED.isdisjoint(config)
    return kind if is_ours else None


def make_drafter(args: DrafterArgs) -> Drafter:
    """An untrained drafter of these sizes."""
    return KINDS[args.model_type].Drafter(args)
