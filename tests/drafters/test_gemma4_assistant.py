"""Gemma 4's assistants: the original's drafts, the rows they read, and which targets they fit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from helpers.assistants import load_golden_target
from helpers.checkpoints import load_golden
from helpers.published import Arrays, list_golden, read_golden
from mlx_redrafter import generate_step
from mlx_redrafter.drafters.gemma4_assistant import Drafter, find_read_layers
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.engine.source import Source
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.tree import chain
from mlx_redrafter.engine.types import Kept

GOLDEN = list_golden("shared_cache/*")
PROMPTS = ("short", "long")


class Text:
    """A text that a target reads, with an assistant's source."""

    def __init__(self, model: nn.Module, drafter: Any) -> None:
        self.source: Any = drafter.open(model)
        self.target = Target(model, capture=self.source.capture)
        self.source.read_rows = self.target.read_rows

    def read(self, tokens: mx.array) -> mx.array:
        """Reads tokens that stay; returns their states."""
        position = self.target.length
        hidden = self.target.forward(tokens).hidden
        self.source.keep(Kept(tokens, hidden, None, len(tokens), position))
        return hidden["after_norm"]

    def verify(self, tokens: mx.array, n_accepted: int) -> mx.array:
        """Verifies a chain, of which some tokens after the root stay; returns the last state."""
        position = self.target.length
        path = mx.minimum(mx.arange(len(tokens)), n_accepted)
        hidden = self.target.verify(chain(tokens[0], tokens[1:]), is_tree=False).hidden
        kept = Kept(tokens, hidden, path, mx.array(n_accepted + 1), position)
        self.source.keep(kept)
        self.target.keep_path([*range(n_accepted + 1)], tokens[: n_accepted + 1].tolist())  # type: ignore[arg-type]
        return kept.last_hidden("after_norm")

    def compute_logits(self, root: mx.array, path: mx.array) -> mx.array:
        """(K, V) the logits of a draft along a path of K tokens."""
        advance = self.source.begin(root)
        state = None
        found = []
        for token in [root, *path][:-1]:
            logits, state = advance(token.reshape(1), state)
            found.append(logits)
        return mx.concatenate(found)


def draft(source: Source, root: mx.array, plan: Plan) -> list[int]:
    """The tokens of a draft without its root."""
    tree = source.propose(root, plan, None, in_level_order=False)
    return tree.tokens.tolist()[1:]  # type: ignore[return-value,index]


def assert_near(got: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=GOLDEN)
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Drafter, Arrays]:
    """(the target, the assistant, the original's results)."""
    drafter: Any = load_golden(request.param, tmp_path_factory.mktemp("golden"))
    return load_golden_target(request.param), drafter, read_golden(request.param)[1]


def select(arrays: Arrays, prefix: str) -> Arrays:
    return {
        key.removeprefix(prefix): each for key, each in arrays.items() if key.startswith(prefix)
    }


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_match_the_original(prompt: str, golden: tuple[nn.Module, Drafter, Arrays]) -> None:
    """After a prompt, and after rounds of which two, no and all drafted tokens are accepted."""
    model, drafter, arrays = golden
    expected = select(arrays, f"{prompt}.")
    text = Text(model, drafter)
    assert_near(text.read(expected["tokens"]), expected["target_hidden"])
    root = expected["root"]

    def check(part: str, root: mx.array) -> None:
        drafted = expected[f"{part}last.draft_tokens"]
        assert draft(text.source, root, chain_plan(len(drafted))) == drafted.tolist()
        assert_near(text.compute_logits(root, drafted), expected[f"{part}last.logits"])

    check("", root)
    forced = expected["forced_tokens"]
    assert_near(text.compute_logits(root, forced), expected["last.forced_logits"])
    for part in ("second.", "third.", "fourth."):
        state = text.verify(expected[f"{part}verified_tokens"], expected[f"{part}accepted"].item())  # type: ignore[arg-type]
        assert text.target.length == expected[f"{part}length"].item()
        assert_near(state, expected[f"{part}hidden"])
        check(part, expected[f"{part}root"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_target_keeps_the_rows_that_the_original_reads(
    prompt: str, golden: tuple[nn.Module, Drafter, Arrays]
) -> None:
    model, drafter, arrays = golden
    text = Text(model, drafter)
    text.read(arrays[f"{prompt}.tokens"])
    for kind, layer in find_read_layers(drafter, model, "it").items():
        name = kind.partition("_")[0]
        for got, what in zip(text.target.read_rows(layer), ("keys", "values"), strict=True):
            wanted = arrays[f"{prompt}.{name}_{what}"]
            assert_near(got[0], wanted[:, wanted.shape[1] - got.shape[2] :])
            assert got.shape[2] == wanted.shape[1] or kind == "sliding_attention"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_rounds_match_the_original(prompt: str, golden: tuple[nn.Module, Drafter, Arrays]) -> None:
    model, drafter, arrays = golden
    expected = select(arrays, f"{prompt}.last.rounds.")
    drafts: list[list[int]] = []
    accepted: list[int] = []

    def note(tree: Any, path: list[int], chosen: list[int]) -> None:
        drafts.append(tree.tokens.tolist())
        accepted.append(len(path) - 1)

    steps = generate_step(
        arrays[f"{prompt}.tokens"], model, drafter, plan=(1, 4), context=False, on_round=note,
        max_tokens=len(expected["text"]),
    )  # fmt: skip
    assert [token for token, _, _ in steps] == expected["text"].tolist()
    assert [root for root, *_ in drafts] == expected["roots"].tolist()
    assert [rest for _, *rest in drafts] == expected["drafts"].tolist()
    assert accepted == expected["accepted"].tolist()


def test_other_rows_states_and_positions_change_the_logits(
    golden: tuple[nn.Module, Drafter, Arrays],
) -> None:
    """Negative controls."""
    model, drafter, arrays = golden
    expected = select(arrays, "long.")
    path = expected["last.draft_tokens"]
    text = Text(model, drafter)
    tokens = expected["tokens"]
    states = {"after_norm": text.read(tokens)}
    read = text.target.read_rows
    n = len(tokens)

    def read_fewer(layer: int) -> tuple[mx.array, mx.array]:
        keys, values = read(layer)
        return keys[..., 1:, :], values[..., 1:, :]

    own = Kept(tokens, states, None, n, 0), read
    changes = {
        "rows of the layers below": (own[0], lambda layer: read(layer - 3)),
        "one row fewer": (own[0], read_fewer),
        "the state before": (Kept(tokens, states, mx.arange(n - 1), n, 0), read),
        "the position after": (Kept(tokens, states, None, n, 1), read),
        "none": own,
    }
    for name, (kept, text.source.read_rows) in changes.items():
        text.source.keep(kept)
        found = text.compute_logits(expected["root"], path)
        far = mx.abs(found - expected["last.logits"]).max().item()
        assert far < 1e-4 if name == "none" else far > 1e-2, name  # type: ignore[operator]
