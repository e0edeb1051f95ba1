"""The recurrent drafter in torch, with the names of `mlx_redrafter/drafters/recurrent.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def initialize_weights(
    embedding: Tensor, draft_ids: Tensor, exit_dim: int, blocks: int, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights of an untrained drafter, and the (D, exit_dim) projection of a target's hidden
    state to the features it should give; float32.

    Args:
        embedding: (V, D), the target's.
        draft_ids: (V',), the tokens that the drafter can guess.

    Source: `initialize_drafter` in `mlx_redrafter/training/targets.py`.
    """
    torch.manual_seed(seed)
    width = embedding.shape[1]
    shapes = {
        "rnn_w": (width, width, False),
        "rnn_u": (width, width, True),
        "input_proj": (exit_dim, 2 * width, True),
    }
    shapes |= {f"lm_head.{i}.linear": (exit_dim, exit_dim, True) for i in range(blocks)}
    weights = {}
    for name, (outputs, inputs, has_bias) in shapes.items():
        scale = inputs**-0.5
        weights[f"{name}.weight"] = torch.empty(outputs, inputs).uniform_(-scale, scale)
        if has_bias:
            weights[f"{name}.bias"] = torch.empty(outputs).uniform_(-scale, scale)
    centred = embedding[draft_ids] - embedding[draft_ids].mean(0)
    vectors = torch.linalg.eigh(centred.T.double() @ centred.double())[1]
    axes = vectors.flip(1)[:, :exit_dim].float()
    weights[f"lm_head.{blocks}.weight"] = centred @ axes
    return weights, axes.contiguous()


class TorchDrafter:
    """The drafter as functions of its weights.

    What depends on one position only is computed apart, once for all depths.

    Args:
        weights: float32 tensors by name.
        embedding: (V, D) float32, the target's.
    """

    def __init__(self, weights: dict[str, Tensor], embedding: Tensor) -> None:
        self.weights = weights
        self.embedding = embedding
        self.blocks = sum(name.endswith(".linear.weight") for name in weights)
        self.head = weights[f"lm_head.{self.blocks}.weight"]

    def read_tokens(self, tokens: Tensor) -> Tensor:
        """(...) tokens -> (..., D), their part of the next state."""
        return self.embedding[tokens] @ self.weights["rnn_w.weight"].T + self.weights["rnn_u.bias"]

    def project(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states of the target -> (..., exit_dim), their part of the features."""
        weight = self.weights["input_proj.weight"][:, : hidden.shape[-1]]
        return hidden @ weight.T + self.weights["input_proj.bias"]

    def next_state(self, read: Tensor, state: Tensor | None) -> Tensor:
        """(..., D), the state after a token.

        Args:
            read: (..., D), see `read_tokens`.
            state: (..., D), the state before; None at the first token.
        """
        if state is not None:
            read = read + state @ self.weights["rnn_u.weight"].T
        return silu(read)

    def features(self, projected: Tensor, state: Tensor) -> Tensor:
        """(..., exit_dim), the input of the output matrix."""
        weight = self.weights["input_proj.weight"][:, -state.shape[-1] :]
        y = projected + state @ weight.T
        for i in range(self.blocks):
            weight = self.weights[f"lm_head.{i}.linear.weight"]
            bias = self.weights[f"lm_head.{i}.linear.bias"]
            y = y + silu(y @ weight.T + bias)
        return y
