"""The kinds of drafters, one file each, what they share in protocol.py; and drafts from the context."""

from . import arctic_lstm, medusa, mlp_speculator, recurrent
from .protocol import Drafter, DrafterArgs

KINDS: dict[str, tuple[type[Drafter], type[DrafterArgs]]] = {
    kind.MODEL_TYPE: (kind.Drafter, kind.DrafterArgs) for kind in (recurrent, medusa, mlp_speculator, arctic_lstm)
}
"""`model_type` in a drafter's config -> its classes."""

TYPES = {"recurrent": recurrent.MODEL_TYPE} | {name: name for name in KINDS if name != recurrent.MODEL_TYPE}
"""Name of a kind, as people give it -> its `model_type`."""


def make_drafter(args: DrafterArgs) -> Drafter:
    """An untrained drafter of these sizes, of their kind."""
    return KINDS[args.model_type][0](args)
