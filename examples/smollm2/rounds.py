"""Counts the rounds in which a drafter makes the answers of stored examples."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.smollm2.stored_states import StoredExample, join_examples
from examples.smollm2.torch_drafter import TorchDrafter
from mlx_redrafter.drafters.protocol import SHARPNESS

CHUNK = 256


@torch.no_grad()
def count_rounds(
    drafter: TorchDrafter,
    example: StoredExample,
    draft_ids: Tensor,
    index: Tensor,
    beam_width: int,
    depth: int,
) -> tuple[int, int]:
    """(tokens, rounds) of generating an answer with drafts of a beam search.

    A drafted token is accepted if it is the answer's.

    Args:
        draft_ids: (V',), the tokens that the drafter can guess.
        index: (V,), see `make_index`.
    """
    batch = join_examples([example], index)
    tokens = torch.cat([batch.tokens, torch.full((depth + 1,), -1)])
    positions = torch.arange(example.lead, len(example.tokens) - 2)
    if not len(positions):
        return 0, 0
    sharpness = SHARPNESS if example.temp == 0 else 1.0
    projected = drafter.project(batch.hidden)[positions][:, None]
    last = tokens[positions + 1][:, None]
    state = None
    scores = torch.zeros(len(positions), 1)
    is_right = torch.ones(len(positions), 1, dtype=torch.bool)
    accepted = torch.zeros(len(positions), dtype=torch.long)
    for k in range(depth):
        state = drafter.next_state(drafter.read_tokens(last), state)
        features = drafter.features(projected, state).flatten(0, 1)
        guesses = [
            choose_guesses(part @ drafter.head.T * sharpness, beam_width)
            for part in features.split(CHUNK)
        ]
        logprobs = torch.cat([each[0] for each in guesses]).unflatten(0, last.shape)
        ids = torch.cat([each[1] for each in guesses]).unflatten(0, last.shape)
        scores, order = (scores[..., None] + logprobs).flatten(1).topk(beam_width)
        parents = order // beam_width
        last = draft_ids[ids.flatten(1).gather(1, order)]
        state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
        is_right = is_right.gather(1, parents) & (last == tokens[positions + k + 2][:, None])
        accepted += is_right.any(1)
    rounds = 0
    at = 0
    while at < len(accepted):
        rounds += 1
        at += 1 + int(accepted[at])
    return len(accepted), rounds


def choose_guesses(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(N, count) log-probabilities and (N, count) indices of the likeliest guesses.

    Args:
        logits: (N, V').
    """
    if count == 1:  # faster than topk
        values, ids = logits.max(-1, keepdim=True)
    else:
        values, ids = logits.topk(count)
    return values - logits.logsumexp(-1, keepdim=True), ids
