"""The kinds of drafters, one file each, what they share in protocol.py; and drafts from the context."""

from . import arctic_lstm, medusa, mlp_speculator, recurrent
from .protocol import Drafter, DrafterArgs

KINDS: dict[str, tuple[type[Drafter], type[DrafterArgs]]] = {
    kind.MODEL_TYPE: (kind.Drafter, kind.DrafterArgs) for kind in (recurrent, medusa, mlp_speculator, arctic_lstm)
}
"""`model_type` in a drafter's config -> its classes."""
