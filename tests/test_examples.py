"""The demo's recipe on models too small to learn anything: its stages fit together, and go on where they stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import small_llama

from examples.demo import drafter, report
from mlx_redrafter import load_demo, load_drafter
from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training.settings import TrainingArgs

VOCAB = 32


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 4), ("BATCHES", 2), ("LENGTH", 24), ("PROMPT", 8)):
        monkeypatch.setattr(drafter, name, value)


@pytest.mark.usefixtures("few")
def test_texts_are_the_targets_own_and_are_written_once(tmp_path: Path) -> None:
    model, tokens = small_llama(vocab=VOCAB), np.random.default_rng(0).integers(VOCAB, size=400, dtype=np.uint16)
    texts = drafter.write_texts(model, tokens, tmp_path / "texts", 0.0, batches=2)
    assert texts.shape == (8, 24)
    pieces = {tuple(tokens[start : start + 8].tolist()) for start in range(0, 400, 8)}
    assert all(tuple(row[:8].tolist()) in pieces for row in texts)
    (tmp_path / "texts" / "001.npy").unlink()
    marked = np.zeros((4, 24), np.uint16)
    np.save(tmp_path / "texts" / "000.npy", marked)
    again = drafter.write_texts(model, tokens, tmp_path / "texts", 0.0, batches=2)
    assert (again[:4] == marked).all() and (again[4:] == texts[4:]).all()


@pytest.mark.usefixtures("few")
def test_a_drafter_is_trained_and_described(tmp_path: Path) -> None:
    model, tokens = small_llama(vocab=VOCAB), np.random.default_rng(0).integers(VOCAB, size=400, dtype=np.uint16)
    args = DrafterArgs(model.args.hidden_size, VOCAB, exit_dim=8, num_draft_layers=1, draft_vocab_size=12)
    drafter.train(
        model, drafter.given_texts(tokens), args, TrainingArgs(iters=2, draft_depth=3, batch_size=2), tmp_path
    )
    drafter.describe(model, tokens, [[1, 2, 3]], set(), tmp_path, depth=3)
    found: Any = load_drafter(tmp_path, model).args
    assert found.draft_depth in (1, 2, 3) and len(found.acceptance) == 3 and found.draft_vocab_size == 12


def test_prompts_are_as_many_held_out_functions_as_are_asked_for() -> None:
    tokenizer = load_demo()[1]
    found = report.prompts(tokenizer, 5)
    assert len(found) == 5 and all("def " in text.splitlines()[0] for text in found.values())
