"""Small random stateless drafters of every kind."""

import mlx.core as mx

from helpers.small import randomised
from mlx_redrafter.drafters import medusa, recurrent
from mlx_redrafter.drafters.protocol import Drafter

KINDS = ("recurrent", "medusa")


def make_head(kind: str, hidden: int = 64, vocab: int = 40) -> Drafter:
    """A random drafter that drafts at most four tokens."""
    made = {
        "recurrent": lambda: recurrent.Drafter(recurrent.DrafterArgs(hidden, vocab, 32, 1)),
        "medusa": lambda: medusa.Drafter(
            medusa.DrafterArgs(hidden, vocab, num_heads=4, num_layers=1)
        ),
    }
    return randomised(made[kind](), 0)


def draft_logits(drafter: Drafter, hidden: mx.array, tokens: mx.array) -> mx.array:
    """(K, W, V) logits after each of tokens (W, K), given hidden states (W, D)."""
    advance = drafter.begin(hidden, lambda tokens: mx.zeros((*tokens.shape, hidden.shape[-1])))
    state = None
    found = []
    for depth in range(tokens.shape[1]):
        logits, state = advance(tokens[:, depth], state)
        found.append(logits)
    return mx.stack(found)
