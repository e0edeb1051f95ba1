"""Published heads of every kind load, convert, and compute what their authors' code computed."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from helpers.cached import feed_states, make_target
from helpers.checkpoints import load_golden, refused, same, tensors
from helpers.heads import draft_logits
from helpers.published import GOLDEN, Arrays, list_golden, publish, read_golden
from helpers.small import save_target, small_llama
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.loading.checkpoints import load_drafter

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

STATELESS = list_golden("heads/*")
PAIRS = list_golden("cached/eagle*", "cached/*_mtp*")
BLOCKS = list_golden("cached/d[fs]*")
QUANTIZED = ("eagle3_mlx", "dflash_mlx", "qwen3_5_mtp_mlxvlm_4bit")
IN_MODELS = list_golden("cached/*_mtp_mlx_*")
"""Layers in the folder of a whole quantized model."""


@pytest.fixture(scope="module")
def medusa_target(tmp_path_factory) -> Path:
    """A target with the output matrix of the golden Medusa v2 heads."""
    model = small_llama(hidden=48, vocab=97, tie_word_embeddings=False)
    model.lm_head.weight = read_golden("medusa_v2")[1]["target.lm_head.weight"]
    directory = tmp_path_factory.mktemp("target")
    save_target(directory, model)
    return directory


@pytest.mark.parametrize(
    "name", sorted({*GOLDEN} - {*QUANTIZED, *IN_MODELS, "medusa_v2", "glm4_moe_lite_mtp_mlxvlm"})
)
def test_a_converted_head_equals_the_published_one(name, tmp_path):
    drafter = load_golden(name, tmp_path)
    published = load_drafter(tmp_path / "in")
    assert published.args == drafter.args
    assert same(tensors(published), tensors(drafter))


@pytest.mark.parametrize("name", ["eagle3_mlx", "dflash_mlx"])
def test_a_quantized_head_stays_quantized(name, tmp_path):
    source = publish(name, tmp_path / "in")
    drafter = load_drafter(source)
    said = read_golden(name)[2]["quantization"]
    layers = {key: layer.bits for key, layer in drafter.named_modules() if hasattr(layer, "bits")}
    own = [entry["bits"] for entry in said.values() if isinstance(entry, dict)]
    assert "fc" in layers
    assert sorted(bits for bits in layers.values() if bits != said["bits"]) == sorted(own)
    refused(source, tmp_path / "result")
    plain = load_drafter(convert(source, tmp_path / "plain", dequantize=True).path)
    assert not [layer for _, layer in plain.named_modules() if hasattr(layer, "bits")]
    assert mx.allclose(plain.sample_logits(), drafter.sample_logits(), atol=1e-3)


def compute_logits(drafter: Drafter, golden: Arrays) -> np.ndarray:
    """(N, 2, P, V) the logits of a head without a cache, arranged as in the golden file."""
    hidden = golden["hidden_states"]
    expected = golden["logits"]
    heads, texts, places = expected.shape[:3]
    read = mx.zeros((texts * places, heads), mx.int32)
    return np.array(
        draft_logits(drafter, hidden.reshape(texts * places, -1), read).reshape(expected.shape)
    )


@pytest.mark.parametrize("name", STATELESS)
def test_logits_match_the_original(name, medusa_target, tmp_path):
    base_model = str(medusa_target) if name == "medusa_v2" else None
    done = convert(publish(name, tmp_path / "in"), tmp_path / "out", base_model=base_model)
    drafter = load_drafter(done.path)
    golden = read_golden(name)[1]
    assert done.args.hidden_state == "after_norm"
    assert done.difference[0] == 0
    np.testing.assert_allclose(compute_logits(drafter, golden), golden["logits"], atol=1e-4, rtol=0)
    # Negative control: states of another text.
    other = golden | {"hidden_states": golden["hidden_states"][::-1]}
    assert not np.allclose(compute_logits(drafter, other), golden["logits"], atol=1e-2)


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_of_pairs_match_the_original(name, tmp_path):
    drafter = load_golden(name, tmp_path)
    golden = read_golden(name)[1]
    source = drafter.open(make_target(name, drafter))
    guessed = drafter.draft_ids if "draft_ids" in drafter else mx.arange(drafter.args.vocab_size)
    n = len(golden["context_hidden"])
    tokens = golden["context_tokens"]

    def expect(logits, name, row):
        np.testing.assert_allclose(logits[0, guessed], golden[name][row], atol=1e-4, rtol=0)

    feed_states(source, golden["context_hidden"], tokens[:n], 0)
    advance = source.begin(tokens[n])
    logits, state = advance(tokens[n:], None)
    expect(logits, "context_logits", -1)
    for step, token in enumerate(golden["step_tokens"]):
        assert guessed[mx.argmax(logits[0, guessed])].item() == token.item()
        logits, state = advance(token.reshape(1), state)
        expect(logits, "step_logits", step)
    second = golden["second_tokens"]
    feed_states(source, golden["second_hidden"], mx.concatenate([tokens[n:], second[:1]]), n)
    logits, _ = source.begin(second[1])(second[1:], None)
    expect(logits, "second_logits", -1)
    # Negative control: without the first two positions the guesses differ.
    source = drafter.open(make_target(name, drafter))
    feed_states(source, golden["context_hidden"][2:], tokens[2:n], 2)
    logits, _ = source.begin(tokens[n])(tokens[n:], None)
    assert not np.allclose(logits[0, guessed], golden["context_logits"][-1], atol=1e-2)


def feed_block_states(source, states: mx.array, position: int):
    """Passes states at `position` to a source; block drafters ignore the tokens."""
    feed_states(source, states, mx.zeros(len(states), mx.int32), position)


def draft(source, golden: Arrays, part: str, path: mx.array) -> mx.array:
    """(D, V) logits of a block's guesses along a path."""
    root = golden[f"{part}block_tokens"][0].astype(mx.int32)
    found = []
    state = None
    advance = source.begin(root, len(path))
    for tokens in [root.reshape(1), *path.astype(mx.int32).reshape(-1, 1)][:-1]:
        logits, state = advance(tokens, state)
        found.append(logits)
    return mx.concatenate(found)


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_of_blocks_match_the_original(name, tmp_path):
    drafter = load_golden(name, tmp_path)
    golden = read_golden(name)[1]
    source = drafter.open(make_target(name, drafter))
    kind = next(kind for kind in ("scores", "corrected_logits", "logits") if kind in golden)

    def expect(logits, part, what):
        """Compares the logits of draftable tokens; all others must be infinite."""
        every = drafter.draft_ids if "draft_ids" in drafter else mx.arange(drafter.args.vocab_size)
        ids = golden.get(f"{part}candidates", mx.broadcast_to(every, (len(logits), len(every))))
        np.testing.assert_allclose(
            mx.take_along_axis(logits, ids, axis=1), golden[what], atol=1e-4, rtol=0
        )
        assert mx.isfinite(logits).sum().item() == ids.size

    def check(part):
        logits = draft(source, golden, part, golden[f"{part}draft_tokens"])
        assert mx.argmax(logits, axis=1).tolist() == golden[f"{part}draft_tokens"].tolist()
        expect(logits, part, f"{part}{kind}")

    feed_block_states(source, golden["context_hidden"], 0)
    check("")
    if "context_keys" in golden:
        n = len(golden["context_hidden"])
        for what, cached in zip(
            ("keys", "values"), zip(*source.arrays[0], strict=True), strict=True
        ):
            wanted = golden[f"context_{what}"]
            got = [array[0, :, n - wanted.shape[1] : n].swapaxes(0, 1) for array in cached]
            np.testing.assert_allclose(mx.stack(got), wanted, atol=1e-4, rtol=0)
    if "forced_tokens" in golden:
        forced = "forced_scores" if kind == "scores" else "forced_logits"
        expect(draft(source, golden, "", golden["forced_tokens"]), "", forced)
    position = len(golden["context_hidden"])
    for part in ("second_", "third_"):
        feed_block_states(source, golden[f"{part}hidden"], position)
        position += len(golden[f"{part}hidden"])
        check(part)
    source = drafter.open(make_target(name, drafter))
    feed_block_states(source, golden["context_hidden"], 0)
    check("short_")


@pytest.mark.parametrize("name", BLOCKS)
def test_wrong_states_change_the_guesses(name, tmp_path):
    """Negative controls: shifted positions, reversed layers, and a missing last position."""
    drafter = load_golden(name, tmp_path)
    golden = read_golden(name)[1]
    states = golden["context_hidden"]
    path = golden["draft_tokens"]
    count = len(drafter.args.capture_layers or [])
    swapped = mx.concatenate(mx.split(states, count, axis=1)[::-1], axis=1)
    rolled = mx.concatenate([states[1:], states[:1]])
    target = make_target(name, drafter)
    found = []
    for told in (states, rolled, swapped, states[:-1]):
        source = drafter.open(target)
        feed_block_states(source, told, 0)
        found.append(draft(source, golden, "", path))
    for other in found[1:]:
        assert not np.allclose(found[0], other, atol=1e-2)
