"""Training an EAGLE head: the parallel loss equals that of drafts made one by one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cached import make_cached
from small import small_llama

from mlx_redrafter.drafters import TRAINABLE, eagle
from mlx_redrafter.engine.model_parts import find_parts
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.loss import draft_loss
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import Batch, compute_targets, initialize_drafter

DEPTH, LENGTH, VOCAB = 3, 9, 23


def draft(drafter: Any, model: Any, text: mx.array, start: int) -> list[mx.array]:
    """(V,) logits of each guess of a draft from `start` in which every earlier token was right."""
    source: Any = drafter.open(model)
    hidden = Target(model, capture=source.capture).forward(text[: start + 1]).hidden
    source.keep(Kept(text[: start + 1], hidden, None, start + 1, 0))
    advance, state, found = source.begin(text[start + 1]), None, []
    for depth in range(min(DEPTH, LENGTH - 1 - start)):
        logits, state = advance(text[start + 1 + depth : start + 2 + depth], state)
        found.append(logits[0])
    return found


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0]])
def test_the_loss_matches_drafts_made_one_by_one(weights: list[float] | None) -> None:
    model = small_llama(hidden=64, vocab=VOCAB, tie_word_embeddings=False)
    drafter: Any = make_cached("eagle 1", 64, VOCAB)
    drafter.share(model)
    texts = mx.array(np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH + 1)).astype(np.int32))
    batch = Batch(texts, mx.arange(2 * LENGTH))
    targets = compute_targets(model, batch, TrainingArgs())
    found = draft_loss(drafter, targets, DEPTH, weights)
    total = mass = 0.0
    reached = np.ones((2, LENGTH))
    probs = np.array(targets.probs).reshape(2, LENGTH, VOCAB)
    for row in range(2):
        for start in range(LENGTH - 1):
            for depth, logits in enumerate(draft(drafter, model, texts[row], start)):
                p, log_q = probs[row, start + 1 + depth], np.array(logits - mx.logsumexp(logits))
                weight = reached[row, start] if weights is None else weights[depth]
                total, mass = total - weight * float(p @ log_q), mass + weight
                reached[row, start] *= np.minimum(p, np.exp(log_q)).sum()
                choice = targets.choices[row * LENGTH + start + 1 + depth].item()
                rank = found.ranks[depth, row * LENGTH + start + 1 + depth].item()
                assert rank == (logits > logits[choice]).sum().item()
    assert found.loss.item() == pytest.approx(total / mass, rel=1e-4)


def test_it_starts_from_the_targets_guess_and_learns() -> None:
    model = small_llama(hidden=64, vocab=VOCAB, tie_word_embeddings=False)
    args = TRAINABLE["eagle"].for_training(64, VOCAB, depth=DEPTH, draft_vocab_size=None, intermediate_size=48)
    assert isinstance(args, eagle.DrafterArgs) and args.num_attention_heads * args.head_dim == 64
    drafter: Any = initialize_drafter(model, args)
    hidden = mx.random.normal((1, 4, 64))
    tokens = mx.zeros((1, 4), mx.int32)
    features = drafter.read_token(tokens, find_parts(model).embedding, hidden, None, 0)[0]
    assert mx.abs(features - hidden).mean().item() < 0.5
    assert "_shared" not in dict(drafter.parameters()), "the target's matrix is not saved"
    with pytest.raises(RedrafterError, match="leave out draft_vocab_size"):
        TRAINABLE["eagle"].for_training(64, VOCAB, depth=DEPTH, draft_vocab_size=8, intermediate_size=48)
