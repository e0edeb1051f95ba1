"""A drafter that can guess some tokens only: the text is the same, its file is checked, and `convert` keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, WEIGHTS, apple, command, ranks, refused, same, save, tensors
from small import small_drafter, small_llama
from toys import ids, make_prompt, run

from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training.lessons import make_vocabulary, vocabulary_of

VOCAB = 64
GUESSED = np.array([0, 3, 5, 8, 13, 21, 34, 55, 61, 60, 1, 2])


def partial(whole: Drafter, guessed: np.ndarray = GUESSED) -> Drafter:
    """`whole`, without the rows of its head for other tokens."""
    args = whole.args
    drafter = Drafter(
        DrafterArgs(
            args.hidden_size, args.vocab_size, args.exit_dim, args.num_draft_layers, draft_vocab_size=len(guessed)
        )
    )
    arrays = tensors(whole)
    head = f"lm_head.{args.num_draft_layers}.weight"
    kept = {name: array for name, array in arrays.items() if name != head}
    rows = {head: arrays[head][mx.array(guessed)], "draft_ids": mx.array(guessed.astype(np.int32))}
    drafter.load_weights(list((kept | rows).items()))
    return drafter


def test_its_logits_are_those_of_the_whole_head_and_minus_infinity() -> None:
    whole = small_drafter()
    drafter = partial(whole)
    rng = np.random.default_rng(0)
    hidden, state = (mx.array(rng.normal(size=(2, 3, 32)).astype(np.float32)) for _ in range(2))
    logits, expected = drafter.logits(hidden, state), whole.logits(hidden, state)
    assert logits.shape == expected.shape == (2, 3, VOCAB) and logits.dtype == mx.float32
    others = np.setdiff1d(np.arange(VOCAB), GUESSED)
    assert mx.allclose(logits[..., mx.array(GUESSED)], expected[..., mx.array(GUESSED)], atol=1e-5)
    assert (np.array(logits)[..., others] == -np.inf).all()
    assert drafter.logits(hidden[0, 0], state[0]).shape == (3, VOCAB), "the hidden state is broadcast"


SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temp": 0.9},
    {"temp": 0.9, "top_k": 20},
    {"temp": 1.0, "top_p": 0.8, "min_p": 0.05},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "xtc_special_tokens": [7]},
)


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("shape", [(1, 4, None), (2, 3, None), (4, 5, 9), (20, 2, None)])
@pytest.mark.parametrize("size", [2, 12, VOCAB])
def test_the_text_is_that_of_plain_decoding(size: int, shape: tuple[int, int, int | None], options: Any) -> None:
    model, prompt = small_llama(), make_prompt(9, vocab=VOCAB)
    drafter = partial(small_drafter(), np.random.default_rng(1).permutation(VOCAB)[:size])
    width, depth, nodes = shape
    plain = run(model, prompt, max_tokens=20, seed=3, **options)
    beam = {"beam_width": width, "draft_depth": depth, "tree_size": nodes}
    assert ids(run(model, prompt, drafter, max_tokens=20, seed=3, **beam, **options)) == ids(plain)


def test_it_guesses_what_it_can_guess_and_nothing_else() -> None:
    """A drafter of all tokens guesses the same tokens and others; on the way to the target, both are right at times."""
    model, prompt = small_llama(seed=4), make_prompt(9, vocab=VOCAB)
    text = ids(run(model, prompt, max_tokens=30))
    known = np.unique(text)[:3]
    drafter = partial(small_drafter(), known)
    steps = run(model, prompt, drafter, max_tokens=30, beam_width=3, draft_depth=1)
    guessed = {step.token for step in steps if step.from_draft}
    assert guessed and guessed <= set(known.tolist())


def test_it_is_written_and_read_again(tmp_path: Path) -> None:
    drafter = partial(small_drafter())
    save_drafter(tmp_path, drafter, dtype=mx.float16)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(GUESSED))
    found = load_drafter(tmp_path, small_llama())
    assert found.draft_ids.dtype == mx.int32 and np.array_equal(np.array(found.draft_ids), GUESSED)
    assert found.lm_head[-1].weight.dtype == mx.float16 and found.args == drafter.args
    found.set_dtype(mx.float32)
    assert found.draft_ids.dtype == mx.int32 and "draft_ids" not in found.trainable_parameters()
    vocabulary = vocabulary_of(found)
    assert vocabulary is not None and mx.array_equal(vocabulary.rows, make_vocabulary(GUESSED, VOCAB).rows)
    assert vocabulary_of(small_drafter()) is None
    with pytest.raises(CheckpointError, match="vocabulary size 64, the target has 70"):
        load_drafter(tmp_path, small_llama(vocab=70))


def damaged(change: Callable[[dict[str, mx.array], dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        arrays = tensors(partial(small_drafter()))
        config = {"vocab_size": VOCAB}
        change(arrays, config)
        apple(directory, arrays, **config)

    return write


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no vocabulary size": (
        damaged(lambda arrays, config: config.clear()),
        r".*with draft_ids, config.json must say vocab_size, at least 12, got None",
    ),
    "a smaller vocabulary": (
        damaged(lambda arrays, config: config.update(vocab_size=11)),
        r".*must say vocab_size, at least 12, got 11",
    ),
    "a huge vocabulary": (damaged(lambda arrays, config: config.update(vocab_size=10**30)), ".*must say vocab_size.*"),
    "a vocabulary of text": (damaged(lambda arrays, config: config.update(vocab_size="64")), ".*got '64'"),
    "a token beyond it": (
        damaged(lambda arrays, config: config.update(vocab_size=60)),
        ".*expected draft_ids from 0 to 59, got 0 to 61",
    ),
    "a negative token": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(-1, 11, dtype=mx.int32))),
        ".*expected draft_ids from 0 to 63, got -1 to 10",
    ),
    "a token twice": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.zeros((12,), mx.int32))),
        ".*draft_ids names a token twice",
    ),
    "too few tokens": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(11, dtype=mx.int32))),
        ".*draft_ids.*",
    ),
    "a table of tokens": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(12, dtype=mx.int32)[None])),
        ".*draft_ids.*",
    ),
    "tokens as fractions": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(12).astype(mx.float32))),
        ".*draft_ids.*",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_draft_vocabulary_that_is_none_is_refused(case: str, tmp_path: Path) -> None:
    write, reason = DAMAGED[case]
    write(tmp_path / "in")
    refused(tmp_path / "in", reason, tmp_path / "result")
    with pytest.raises(CheckpointError, match=reason):
        load_drafter(tmp_path / "in")
    # Negative control: undamaged it is read.
    damaged(lambda arrays, config: None)(tmp_path / "sound")
    load_drafter(tmp_path / "sound")


@pytest.mark.parametrize("flags", [(), ("-q", "--q-group-size", "32"), ("--dtype", "bfloat16")], ids=str)
def test_convert_keeps_it_and_quantises_around_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    shares = [[0.5, 0.25], [0.5, 0.125]]
    source = apple(tmp_path / "in", tensors(partial(small_drafter())), vocab_size=VOCAB, acceptance=shares)
    status, _, said = command("--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    assert (status, said) == (0, "")
    found = load_drafter(tmp_path / "out")
    assert found.args.draft_vocab_size == 12 and found.args.acceptance == shares
    assert found.draft_ids.dtype == mx.int32 and np.array_equal(np.array(found.draft_ids), GUESSED)
    if not flags:
        assert same(tensors(found), tensors(partial(small_drafter())))


def test_the_config_beside_a_single_file_is_read(tmp_path: Path) -> None:
    arrays = tensors(partial(small_drafter()))
    save(tmp_path / "in" / "drafter.safetensors", arrays)
    (tmp_path / "in" / CONFIG).write_text(json.dumps({"vocab_size": VOCAB}))
    done = convert(tmp_path / "in" / "drafter.safetensors", tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), arrays)
    save(tmp_path / "in" / "other.safetensors", arrays)
    refused(tmp_path / "in" / "drafter.safetensors", ".*config.json must say vocab_size.*", tmp_path / "result")


def test_convert_reads_it_from_ranks_and_from_long_integers(tmp_path: Path) -> None:
    drafter = partial(small_drafter())
    directory = ranks(tmp_path / "ranks", tensors(drafter), 2)
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"vocab_size": VOCAB}))
    done = convert(directory, tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), tensors(drafter))
    arrays = tensors(drafter)
    save(tmp_path / "long" / WEIGHTS, arrays | {"draft_ids": arrays["draft_ids"].astype(mx.int64)})
    (tmp_path / "long" / CONFIG).write_text(json.dumps({"vocab_size": VOCAB}))
    assert same(tensors(load_drafter(convert(tmp_path / "long", tmp_path / "out2").path)), tensors(drafter))


def test_long_integers_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    """32 bits would make those of a sound drafter of the first two."""
    arrays = tensors(partial(small_drafter()))
    for at, (token, pattern) in enumerate(
        (
            (2**32 + 8, "{0}: expected integers of 32 bits, got 0 to 4294967304"),
            (-(2**32) + 8, "{0}: expected integers of 32 bits, got -4294967288 to 61"),
            (64, "{1}: expected draft_ids from 0 to 63, got 0 to 64"),
        )
    ):
        source = tmp_path / f"in{at}"
        wrong = np.where(np.arange(12) == 3, token, GUESSED)
        apple(source, arrays | {"draft_ids": mx.array(wrong)}, vocab_size=VOCAB)
        assert mx.load(str(source / WEIGHTS))["draft_ids"].dtype == mx.int64
        refused(source, pattern.format(source / WEIGHTS, source), tmp_path / "result")


@pytest.mark.torch
def test_pickled_integers_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = tensors(partial(small_drafter()))
    values = {name: torch.tensor(np.array(array)) for name, array in arrays.items()}
    source = tmp_path / "in" / "pytorch_model.bin"
    apple(source.parent, {}, vocab_size=VOCAB)
    (source.parent / WEIGHTS).unlink()
    torch.save(values | {"draft_ids": torch.tensor(GUESSED + 2**32)}, source)
    refused(source.parent, f"{source}: expected integers of 32 bits, got 4294967296 to 4294967357", tmp_path / "result")
    torch.save(values | {"draft_ids": values["draft_ids"].long()}, source)
    done = convert(source.parent, tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), arrays), "negative control"


@pytest.mark.parametrize(
    "shares",
    [[], [[]], [[0.5], [0.5, 0.1]], [[1.5]], [["x"]], [[True]], [[0.5, float("nan")]], 3, [[-0.1]], "0.5"],
    ids=repr,
)
def test_an_acceptance_that_is_none_is_refused(shares: Any, tmp_path: Path) -> None:
    apple(tmp_path / "in", tensors(small_drafter()), acceptance=shares)
    with pytest.raises(CheckpointError, match="acceptance must be a row of shares from 0 to 1 for each depth, got"):
        load_drafter(tmp_path / "in")
