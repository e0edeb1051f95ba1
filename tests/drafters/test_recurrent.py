"""The drafter and its beam search, against Apple's PyTorch code and against a second implementation in NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from small import hypotheses, small_drafter

from benchmarks.acceptance import keep_top
from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.beam_search import search
from mlx_redrafter.engine.types import Beams

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("no-blocks", "rnn", "rnn-input-proj", "sum")
VARIANTS = {
    "rnn": {"exit_dim": 64, "layers": 2, "rnn": True},
    "input_proj": {"exit_dim": 32, "layers": 1, "rnn": True},
    "sum": {"exit_dim": 64, "layers": 2, "rnn": False},
    "no blocks": {"exit_dim": 64, "layers": 0, "rnn": True},
    "sum, input_proj, no blocks": {"exit_dim": 32, "layers": 0, "rnn": False},
}


def apple(name: str, directory: Path) -> tuple[Drafter, dict[str, mx.array]]:
    """(the drafter of a golden file, read from a checkpoint directory made of it; all arrays of the file)."""
    arrays, metadata = mx.load(str(GOLDEN / f"{name}.safetensors"), return_metadata=True)
    weights = {k.removeprefix("drafter."): w for k, w in arrays.items() if k.startswith("drafter.")}
    config = {"model_type": "recurrent_drafting_drafter", **json.loads(metadata["config"])}
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return load_drafter(directory), arrays


def drafted(
    drafter: Drafter, embedding: mx.array, hidden: mx.array, token: mx.array, width: int, depth: int, top: int | None
) -> Beams:
    """Our beam search, all the way from an embedding table."""

    def advance(tokens: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        state = drafter.advance(embedding[tokens], state)
        return drafter.logits(hidden, state), state

    adjust = None if top is None else lambda logits, level: keep_top(logits, top)
    return search(advance, token, width, depth, adjust=adjust)


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_logits_are_apples(name: str, tmp_path: Path) -> None:
    drafter, golden = apple(name, tmp_path)
    state = None
    for t in range(4):
        state = drafter.advance(golden["embedding"][golden["chain_tokens"][:, t]], state)
        logits = drafter.logits(golden["hidden"], state)
        np.testing.assert_allclose(logits, golden["chain_logits"][:, t], atol=2e-5, rtol=1e-5)
        kept = keep_top(logits, 50)
        log_probs = kept - mx.logsumexp(kept, axis=-1, keepdims=True)
        np.testing.assert_allclose(log_probs, golden["chain_log_probs_top50"][:, t], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize(("width", "length"), [(1, 5), (3, 4), (5, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_beam_search_finds_apples_beams_and_scores(
    name: str, width: int, length: int, row: int, tmp_path: Path
) -> None:
    drafter, golden = apple(name, tmp_path)
    token = golden["token"][row]
    beams = drafted(drafter, golden["embedding"], golden["hidden"][row], token, width, length - 1, 50)
    # Apple's length counts the token that the target chose.
    expected = golden[f"beams_{width}_{length}"][row].tolist()
    assert [[token.item(), *spelled] for spelled in hypotheses(beams)] == expected
    np.testing.assert_allclose(beams.scores[-1], golden[f"beam_scores_{width}_{length}"][row], atol=5e-5)


def test_the_golden_files_tell_a_wrong_drafter_from_a_right_one(tmp_path: Path) -> None:
    drafter, golden = apple("rnn", tmp_path)
    # Negative control: TensorRT-LLM's variant, without U at the first step, is not what the files say.
    drafter.rnn_u.bias = mx.zeros_like(drafter.rnn_u.bias)
    state = drafter.advance(golden["embedding"][golden["chain_tokens"][:, 0]], None)
    logits = drafter.logits(golden["hidden"], state)
    assert not np.allclose(logits, golden["chain_logits"][:, 0], atol=1e-3)


class Reference:
    """The drafter in float64, written from its formulas with no regard for speed; weights (out, in)."""

    def __init__(self, drafter: Drafter, embedding: mx.array, hidden: mx.array) -> None:
        self.weights = dict(dense(drafter))
        self.embedding, self.hidden = np.array(embedding, np.float64), np.array(hidden, np.float64)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def log_probs(self, fed: list[int]) -> np.ndarray:
        """(V,) after the tokens `fed`, from the first one on."""
        state = np.zeros_like(self.hidden)
        for token in fed:
            if "rnn_w.weight" in self.weights:
                state = silu(self.linear("rnn_w", self.embedding[token]) + self.linear("rnn_u", state))
            else:
                state = state + self.embedding[token]
        y = np.concatenate([self.hidden, state])
        if "input_proj.weight" in self.weights:
            y = self.linear("input_proj", y)
        layer = 0
        while f"lm_head.{layer}.linear.weight" in self.weights:
            y = y + silu(self.linear(f"lm_head.{layer}.linear", y))
            layer += 1
        logits = self.linear(f"lm_head.{layer}", y)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def search(self, token: int, width: int, depth: int) -> list[tuple[list[int], float]]:
        """The best `width` of all continuations of the best `width`, sorted in full, level after level."""
        beams: list[tuple[list[int], float]] = [([], 0.0)]
        for _ in range(depth):
            grown = [
                ([*spelled, following], score + log_prob)
                for spelled, score in beams
                for following, log_prob in enumerate(self.log_probs([token, *spelled]))
            ]
            grown.sort(key=lambda beam: -beam[1])
            gaps = -np.diff([score for _, score in grown[: width + 1]])
            assert gaps.min() > 1e-4, "choose another seed: these hypotheses cannot be told apart in float32"
            beams = grown[:width]
        return beams


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def dense(drafter: Drafter) -> list[tuple[str, np.ndarray]]:
    """Every weight in float64; quantised ones unpacked."""
    found = []
    for name, module in drafter.named_modules():
        if "weight" not in module:
            continue
        weight = module.weight
        if "scales" in module:
            weight = mx.dequantize(
                weight,
                module.scales,
                module.get("biases"),
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
            )
        found.append((f"{name}.weight", np.array(weight.astype(mx.float32), np.float64)))
        if "bias" in module:
            found.append((f"{name}.bias", np.array(module.bias.astype(mx.float32), np.float64)))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafter_and_search_agree_with_a_second_implementation(variant: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, depth, vocab = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(20, 300))
    drafter = small_drafter(vocab=vocab, seed=seed, **VARIANTS[variant])
    embedding, hidden = mx.array(rng.normal(size=(vocab, 32))), mx.array(rng.normal(size=32))
    embedding, hidden = embedding.astype(mx.float32), hidden.astype(mx.float32)
    reference = Reference(drafter, embedding, hidden)
    beams = drafted(drafter, embedding, hidden, mx.array(3), width, depth, None)
    expected = reference.search(3, width, depth)
    assert hypotheses(beams) == [spelled for spelled, _ in expected]
    np.testing.assert_allclose(beams.scores[-1], [score for _, score in expected], atol=1e-4)
    # Negative control: the same search from another root finds something else.
    other = drafted(drafter, embedding, hidden, mx.array(4), width, depth, None)
    assert not np.allclose(other.scores[-1], [score for _, score in expected], atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_a_quantised_drafter_survives_its_checkpoint(variant: str, mode: str, bits: int, tmp_path: Path) -> None:
    quantization = {"group_size": 32, "bits": bits, "mode": mode}
    drafter = small_drafter(**VARIANTS[variant])
    embedding = mx.random.normal((64, 32), key=mx.random.key(1))
    hidden = mx.random.normal((32,), key=mx.random.key(2))

    def logits(of: Drafter) -> mx.array:
        return of.logits(hidden, of.advance(embedding[9], of.advance(embedding[4], None)))

    plain = logits(drafter)
    nn.quantize(drafter, **quantization)
    save_drafter(tmp_path, drafter, extra={"quantization": quantization})
    loaded = load_drafter(tmp_path)
    assert "scales" in loaded.lm_head[-1] and loaded.args == drafter.args
    assert mx.array_equal(logits(loaded), logits(drafter))
    # Held against its own rounded weights, and clearly apart from the weights before rounding.
    log_probs = logits(loaded) - mx.logsumexp(logits(loaded))
    np.testing.assert_allclose(log_probs, Reference(loaded, embedding, hidden).log_probs([4, 9]), atol=1e-4)
    assert not np.allclose(logits(loaded), plain, atol=1e-4)
