"""Heads as others publish them, from the golden files; and small random drafters of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from small import randomised

from mlx_redrafter.drafters import arctic_lstm, medusa, mlp_speculator, recurrent
from mlx_redrafter.drafters.protocol import Drafter

GOLDEN = Path(__file__).parent / "golden" / "heads"
NAMES = sorted(file.stem for file in GOLDEN.glob("*.safetensors"))

Arrays = dict[str, mx.array]


def read_golden(name: str) -> tuple[Arrays, Arrays, dict[str, str]]:
    """(tensors by their published names, what the original computes of them, the metadata) of a golden file."""
    arrays, metadata = mx.load(str(GOLDEN / f"{name}.safetensors"), return_metadata=True)
    weights, golden = (
        {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        for prefix in ("weights.", "golden.")
    )
    return weights, golden, metadata


def publish(name: str, directory: Path, *, arrays: Arrays | None = None, **config: Any) -> Path:
    """A head in its published directory.

    Args:
        arrays: other tensors than those of the golden file.
        config: other values than the published; None leaves a key out.
    """
    weights, _, metadata = read_golden(name)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / metadata["file"]), weights if arrays is None else arrays, {"format": "pt"})
    said = json.loads(metadata["config"]) | config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    return directory


KINDS = ("recurrent", "medusa", "mlp_speculator", "tied mlp_speculator", "arctic_lstm")


def make_head(kind: str, hidden: int = 64, vocab: int = 40, *, inner_dim: int = 24) -> Drafter:
    """A drafter of random weights that drafts four tokens at most."""
    speculator: dict[str, Any] = {"inner_dim": inner_dim, "n_predict": 4, "scale_input": True}
    made: dict[str, Any] = {
        "recurrent": lambda: recurrent.Drafter(recurrent.DrafterArgs(hidden, vocab, 32, 1)),
        "medusa": lambda: medusa.Drafter(medusa.DrafterArgs(hidden, vocab, num_heads=4, num_layers=1)),
        "mlp_speculator": lambda: mlp_speculator.Drafter(mlp_speculator.DrafterArgs(hidden, vocab, **speculator)),
        "tied mlp_speculator": lambda: mlp_speculator.Drafter(
            mlp_speculator.DrafterArgs(hidden, vocab, tie_weights=True, **speculator)
        ),
        "arctic_lstm": lambda: arctic_lstm.Drafter(arctic_lstm.DrafterArgs(hidden, vocab, **speculator)),
    }
    drafter: Drafter = randomised(made[kind](), 0)
    return drafter


def draft_logits(drafter: Drafter, hidden: mx.array, tokens: mx.array) -> mx.array:
    """(K, W, V) what it says after each of tokens (W, K), at hidden states (W, D)."""
    advance, state, found = drafter.begin(hidden, lambda tokens: mx.zeros((*tokens.shape, hidden.shape[-1]))), None, []
    for depth in range(tokens.shape[1]):
        logits, state = advance(tokens[:, depth], state)
        found.append(logits)
    return mx.stack(found)
