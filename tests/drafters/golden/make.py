"""Generates the golden arrays in this folder. Tests do not run it.

    pip install torch transformers git clone https://github.com/apple/ml-recurrent-drafter && git -C
    ml-recurrent-drafter checkout bd8586b PYTHONPATH=ml-recurrent-drafter python make.py
    OUTPUT_DIRECTORY

Apple's classes compute everything; this file draws the weights, calls them and stores the results.
"""

import json
import sys
from pathlib import Path

import torch
from recurrent_drafting.configuration_drafter import DrafterConfig
from recurrent_drafting.modeling_drafter import BeamShape, Drafter
from safetensors.torch import save_file

SEED = 7
VOCAB = 64
HIDDEN = 16
DRAFTERS = {
    "rnn": {"exit_dim": 32, "num_draft_layers": 2, "rnn": True},
    "rnn-input-proj": {"exit_dim": 24, "num_draft_layers": 1, "rnn": True},
    "sum": {"exit_dim": 32, "num_draft_layers": 2, "rnn": False},
    "no-blocks": {"exit_dim": 32, "num_draft_layers": 0, "rnn": True},
}
BEAMS = [BeamShape(width=1, length=5), BeamShape(width=3, length=4), BeamShape(width=5, length=5)]


@torch.no_grad()
def make(name: str, sizes: dict, directory: Path) -> None:
    # float64, so that the stored float32 values are accurate to about the last bit.
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, **sizes}
    drafter = Drafter(DrafterConfig(**config)).double().eval()
    for key, weight in drafter.named_parameters():
        # Large enough that no two hypotheses nearly tie.
        weight.normal_(0, 0.1 if key.endswith("bias") else 0.3)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    hidden = torch.randn(3, HIDDEN)
    token = torch.tensor([5, 17, 40])
    arrays = {f"drafter.{key}": weight for key, weight in drafter.named_parameters()}
    arrays |= {"embedding": embedding.weight, "hidden": hidden, "token": token}
    arrays |= chain(drafter, embedding, hidden, token)
    for shape in BEAMS:
        arrays |= beams(drafter, embedding, hidden, token, shape)
    stored = {
        key: array.detach()
        .to(torch.int32 if not array.is_floating_point() else torch.float32)
        .contiguous()
        for key, array in arrays.items()
    }
    metadata = {
        "torch": torch.__version__,
        "source": "apple/ml-recurrent-drafter bd8586b, PyTorch classes, float64",
        "seed": str(SEED),
        "config": json.dumps(config),
    }
    save_file(stored, str(directory / f"{name}.safetensors"), metadata)


def chain(
    drafter: Drafter, embedding: torch.nn.Embedding, hidden: torch.Tensor, token: torch.Tensor
) -> dict:
    """Teacher forcing: the drafter is fed these tokens, starting with the root, whatever it
    predicts.
    """
    tokens = torch.cat([token[:, None], torch.randint(VOCAB, (3, 3))], dim=1)
    state = torch.zeros_like(hidden)
    logits = []
    log_probs = []
    for fed in tokens.unbind(dim=1):
        if drafter.config.rnn:
            state = torch.nn.functional.silu(drafter.rnn_w(embedding(fed)) + drafter.rnn_u(state))
        else:
            state = embedding(fed) + state
        joined = torch.cat([hidden, state], dim=-1)
        projected = drafter.input_proj(joined) if hasattr(drafter, "input_proj") else joined
        logits.append(drafter.lm_head(projected))
        # `compute_logits` subtracts each row's maximum, keeps the top 50 and expects a beam axis.
        log_probs.append(drafter.compute_logits(joined[:, None])[:, 0].log_softmax(dim=-1))
    return {
        "chain_tokens": tokens,
        "chain_logits": torch.stack(logits, dim=1),
        "chain_log_probs_top50": torch.stack(log_probs, dim=1),
    }


def beams(
    drafter: Drafter,
    embedding: torch.nn.Embedding,
    hidden: torch.Tensor,
    token: torch.Tensor,
    shape: BeamShape,
) -> dict:
    """Apple's beam search: beams, best first, and the sum of each beam's log-probabilities."""
    found, log_probs = drafter.beam_search_candidates(hidden, token, embedding, shape)
    scores = log_probs.gather(-1, found[..., 1:, None]).squeeze(-1).sum(dim=-1)
    order = scores.argsort(dim=-1, descending=True)
    name = f"{shape.width}_{shape.length}"
    return {
        f"beams_{name}": found.gather(1, order[..., None].expand_as(found)),
        f"beam_scores_{name}": scores.gather(1, order),
    }


if __name__ == "__main__":
    for drafter_name, drafter_sizes in DRAFTERS.items():
        make(drafter_name, drafter_sizes, Path(sys.argv[1]))
