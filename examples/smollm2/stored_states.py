"""What the target computed at the tokens of examples, as `make_states.py` stores it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

PACKAGED = Path(__file__).parents[2] / "mlx_redrafter" / "demo" / "smollm2" / "model.safetensors"
"""The drafter whose vocabulary all drafters here have."""


class StoredExample(NamedTuple):
    """An example of L tokens, from 5 before the first that is learned on.

    Attributes:
        tokens: (L,) int32.
        hidden: (L, D) float16, the target's hidden state after the final norm at each token.
        ids: (L, 32) int16, indices of the likeliest next tokens in the drafter's vocabulary; -1 for
            tokens that it lacks.
        probs: (L, 32) float16, their probabilities among all tokens of the target.
        lead: how many positions precede the learned ones.
        temp: the temperature of the answer.
    """

    tokens: np.ndarray
    hidden: np.ndarray
    ids: np.ndarray
    probs: np.ndarray
    lead: int
    temp: float


class Batch(NamedTuple):
    """Examples one after the other, P positions in all.

    Attributes:
        tokens: (P,) int64.
        hidden: (P, D) float32.
        ids: (P, 32) int64; 0 for tokens that the drafter lacks.
        probs: (P, 32) float32; 0 for tokens that the drafter lacks.
        next_ids: (P,) int64, the index of the next token in the drafter's vocabulary, or -1.
        columns: (P,) int64, each position's number in its example.
        leads: (P,) int64, `lead` of its example.
        sizes: (P,) int64, tokens of its example.
    """

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    probs: Tensor
    next_ids: Tensor
    columns: Tensor
    leads: Tensor
    sizes: Tensor


def load_draft_ids(drafter: Path) -> Tensor:
    """(V',) int64: the tokens that a drafter can guess."""
    return load_file(drafter)["draft_ids"].long()


def make_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """(V,) int64: each token's index in the drafter's vocabulary, or -1."""
    index = torch.full((vocab_size,), -1)
    index[draft_ids] = torch.arange(len(draft_ids))
    return index


def load_examples(folders: Iterable[Path]) -> list[StoredExample]:
    """All examples of some folders, in the order of their files."""
    examples = []
    for folder in folders:
        for path in sorted(folder.glob("[0-9]*.npz")):
            shard = dict(np.load(path))
            start = 0
            for i, size in enumerate(shard["sizes"].tolist()):
                span = slice(start, start + size)
                arrays = (shard[name][span] for name in ("tokens", "hidden", "ids", "probs"))
                lead = int(shard["leads"][i])
                examples.append(StoredExample(*arrays, lead, float(shard["temps"][i])))
                start += size
    return examples


def join_examples(examples: Sequence[StoredExample], index: Tensor) -> Batch:
    """The arrays of some examples.

    Args:
        index: (V,), see `make_index`.
    """

    def join(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(getattr(example, name)) for example in examples])

    tokens = join("tokens").long()
    ids = join("ids").long()
    counts = torch.tensor([len(example.tokens) for example in examples])
    leads = torch.tensor([example.lead for example in examples])
    return Batch(
        tokens=tokens,
        hidden=join("hidden").float(),
        ids=ids.clamp(min=0),
        probs=join("probs").float() * (ids >= 0),
        next_ids=torch.cat([index[tokens[1:]], torch.tensor([-1])]),
        columns=torch.cat([torch.arange(count) for count in counts.tolist()]),
        leads=leads.repeat_interleave(counts),
        sizes=counts.repeat_interleave(counts),
    )
