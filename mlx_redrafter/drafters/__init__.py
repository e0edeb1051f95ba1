"""The kinds of drafters, one file each, and drafting from the context.

Modules shared by the kinds: config.py (configs), protocol.py (the interface for decoding), trainable.py (the interface
for training), cached.py (heads with a KV cache), block.py (block drafters).
"""

from typing import Any

from . import arctic_lstm, dflash, dspark, eagle, medusa, mlp_speculator, mtp, recurrent
from .config import DrafterArgs
from .protocol import Drafter
from .trainable import TrainableArgs

MODULES = (recurrent, medusa, mlp_speculator, arctic_lstm, eagle, mtp, dflash, dspark)

KINDS: dict[str, tuple[type[Drafter], type[DrafterArgs]]] = {
    kind.MODEL_TYPE: (kind.Drafter, kind.DrafterArgs) for kind in MODULES
}
"""`model_type` in a drafter's config -> its classes."""

TRAINABLE: dict[str, type[TrainableArgs]] = {
    module.__name__.rpartition(".")[2]: module.DrafterArgs
    for module in MODULES
    if issubclass(module.DrafterArgs, TrainableArgs)
}
"""Name of a kind that can be trained, as in `--drafter-type` -> the class of its config."""

DEFAULT = next(iter(TRAINABLE))
"""The kind that is trained by default."""


def is_converted(config: dict[str, Any]) -> bool:
    """Whether a config is in our format, not in that of the drafter's authors."""
    if "medusa_num_heads" in config or "speculators_model_type" in config:
        return False
    model_type = config.get("model_type", recurrent.MODEL_TYPE)
    if model_type == recurrent.MODEL_TYPE:
        return True
    return (
        isinstance(model_type, str)
        and model_type in KINDS
        and "hidden_size" in config
        and "architectures" not in config
    )


def make_drafter(args: DrafterArgs) -> Drafter:
    """An untrained drafter of these sizes."""
    return KINDS[args.model_type][0](args)
