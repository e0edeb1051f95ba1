"""The recurrent drafter against Apple's PyTorch code, and its draft vocabulary."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from helpers.small import hypotheses, partial_drafter, small_drafter, small_llama
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.beam_search import run_alone, search
from mlx_redrafter.engine.types import Beams
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.loading.checkpoints import load_drafter, save_drafter

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("no-blocks", "rnn", "rnn-input-proj", "sum")


def keep_top(logits: mx.array, count: int) -> mx.array:
    """Subtracts each row's maximum and sets all but the top `count` to -50,000 (ties are kept).

    Source: Apple's ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py, which ranks
    hypotheses this way.
    """
    logits = logits - logits.max(axis=-1, keepdims=True)
    threshold = mx.sort(logits, axis=-1)[:, -min(count, logits.shape[-1])][:, None]
    return mx.where(logits < threshold, -50000.0, logits)


def load_golden(name: str, directory: Path) -> tuple[Drafter, dict[str, mx.array]]:
    """Returns (the golden file's drafter, loaded from a checkpoint directory.

    All arrays of the file).
    """
    arrays, metadata = mx.load(str(GOLDEN / f"{name}.safetensors"), return_metadata=True)
    weights = {k.removeprefix("drafter."): w for k, w in arrays.items() if k.startswith("drafter.")}
    config = {"model_type": "recurrent_drafting_drafter", **json.loads(metadata["config"])}
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return load_drafter(directory), arrays


def draft(
    drafter: Drafter,
    embedding: mx.array,
    hidden: mx.array,
    token: mx.array,
    width: int,
    depth: int,
    top: int | None,
) -> Beams:
    """Runs our beam search on an embedding table."""

    def advance(tokens, state):
        state = drafter.read_token(tokens, embedding.__getitem__, hidden, state, 0)
        return drafter.logits(hidden, state), state

    adjust = None if top is None else lambda logits, level, paths: keep_top(logits, top)
    return run_alone(search(token, width, depth, adjust=adjust), advance)


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_logits_match_apples(name, tmp_path):
    drafter, golden = load_golden(name, tmp_path)
    state = None
    for t in range(4):
        tokens = golden["chain_tokens"][:, t]
        embed = golden["embedding"].__getitem__
        state = drafter.read_token(tokens, embed, golden["hidden"], state, 0)
        logits = drafter.logits(golden["hidden"], state)
        np.testing.assert_allclose(logits, golden["chain_logits"][:, t], atol=2e-5, rtol=1e-5)
        kept = keep_top(logits, 50)
        log_probs = kept - mx.logsumexp(kept, axis=-1, keepdims=True)
        np.testing.assert_allclose(
            log_probs, golden["chain_log_probs_top50"][:, t], atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize(("width", "length"), [(1, 5), (3, 4), (5, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_beams_and_scores_match_apples(name, width, length, tmp_path):
    drafter, golden = load_golden(name, tmp_path)
    for row in range(3):
        token = golden["token"][row]
        beams = draft(
            drafter, golden["embedding"], golden["hidden"][row], token, width, length - 1, 50
        )
        # Apple's length includes the target's own token.
        expected = golden[f"beams_{width}_{length}"][row].tolist()
        assert [[token.item(), *tokens] for tokens in hypotheses(beams)] == expected
        np.testing.assert_allclose(
            beams.scores[-1], golden[f"beam_scores_{width}_{length}"][row], atol=5e-5
        )


def test_golden_files_detect_a_wrong_drafter(tmp_path):
    drafter, golden = load_golden("rnn", tmp_path)
    # Negative control: TensorRT-LLM's variant, which skips U in the first step.
    drafter.rnn_u.bias = mx.zeros_like(drafter.rnn_u.bias)
    state = drafter.read_token(
        golden["chain_tokens"][:, 0], golden["embedding"].__getitem__, golden["hidden"], None, 0
    )
    assert not np.allclose(
        drafter.logits(golden["hidden"], state), golden["chain_logits"][:, 0], atol=1e-3
    )


VOCAB = 64
GUESSED = np.array([0, 3, 5, 8, 13, 21, 34, 55, 61, 60, 1, 2])


def test_other_tokens_have_logits_of_minus_infinity():
    whole = small_drafter()
    drafter = partial_drafter(whole, GUESSED)
    rng = np.random.default_rng(0)
    hidden, state = (mx.array(rng.normal(size=(2, 3, 32)).astype(np.float32)) for _ in range(2))
    logits = drafter.logits(hidden, state)
    expected = whole.logits(hidden, state)
    assert logits.shape == expected.shape == (2, 3, VOCAB)
    assert logits.dtype == mx.float32
    others = np.setdiff1d(np.arange(VOCAB), GUESSED)
    assert mx.allclose(logits[..., mx.array(GUESSED)], expected[..., mx.array(GUESSED)], atol=1e-5)
    assert (np.array(logits)[..., others] == -np.inf).all()
    # The hidden state is broadcast.
    assert drafter.logits(hidden[0, 0], state[0]).shape == (3, VOCAB)


def test_a_draft_vocabulary_is_saved_and_loaded(tmp_path):
    drafter = partial_drafter(small_drafter(), GUESSED)
    save_drafter(tmp_path, drafter, dtype=mx.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(GUESSED))
    found = load_drafter(tmp_path, small_llama())
    assert found.draft_ids.dtype == mx.int32
    assert np.array_equal(np.array(found.draft_ids), GUESSED)
    assert found.lm_head[-1].weight.dtype == mx.float16
    assert found.args == drafter.args
    found.set_dtype(mx.float32)
    assert found.draft_ids.dtype == mx.int32
    assert "draft_ids" not in found.trainable_parameters()
    with pytest.raises(CheckpointError, match="64, the target has 70"):
        load_drafter(tmp_path, small_llama(vocab=70))
