"""What a caller is told of each round: the tree, what was kept of it, what the target said. No token depends on it."""

from __future__ import annotations

from typing import Any

import pytest
from families import Follower, make_family, overheard, script
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from toys import assert_same_cache, ids, make_model, make_prompt, run, with_plain

from mlx_redrafter import RedrafterError
from mlx_redrafter.engine.types import Tree
from mlx_redrafter.generate import decode_tokens
from mlx_redrafter.options import Options

PROMPT = make_prompt(9)
COUNT = 24
BEAMS = {
    "chain": {"beam_width": 1, "draft_depth": 4},
    "tree": {"beam_width": 3, "draft_depth": 3},
    "pruned": {"beam_width": 3, "draft_depth": 3, "tree_size": 6},
}
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temp": 0.9, "top_p": 0.9, "seed": 4},
    "processors": {"logits_processors": make_logits_processors(repetition_penalty=1.3)},
}


class Told(list[tuple[list[int], list[int], list[int], list[int]]]):
    """(tokens, parents, path, chosen) of each round."""

    def __call__(self, tree: Tree, path: list[int], chosen: list[int]) -> None:
        self.append((tree.tokens.tolist(), tree.parents.tolist(), path, chosen))  # type: ignore[arg-type]

    def check(self, said: list[int]) -> None:
        """That the rounds spell what was said behind the first token, along paths of their trees."""
        spoken = said[:1]
        for tokens, parents, path, chosen in self:
            assert path[0] == 0 and len(path) == len(chosen)
            assert [parents[node] for node in path[1:]] == path[:-1]
            assert [tokens[node] for node in path] == [spoken[-1], *chosen[:-1]]
            # Nobody behind the tip is what the target said there, unless the text had to end.
            follow = [tokens[node] for node in range(1, len(tokens)) if parents[node] == path[-1] and node != path[-1]]
            spoken += chosen
            assert chosen[-1] not in follow or spoken == said
        assert spoken == said


@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("how", HOWS)
def test_the_rounds_that_are_told_spell_the_text(how: str, beam: str) -> None:
    model, options = make_model(), BEAMS[beam] | HOWS[how]
    plain, drafter = with_plain(model, PROMPT, COUNT, "mixed", width=BEAMS[beam]["beam_width"], luck=1, **HOWS[how])
    told = Told()
    steps = run(model, PROMPT, drafter, max_tokens=COUNT, on_round=told, **options)
    assert ids(steps) == ids(plain)
    told.check(ids(steps))
    last = steps[-1].stats
    assert len(told) == last.rounds and sum(len(path) - 1 for _, _, path, _ in told) == last.accepted > 3
    assert sum(len(tokens) - 1 for tokens, _, _, _ in told) == last.drafted
    assert [step.from_draft for step in steps[1:]] == [
        at < len(chosen) - 1 for _, _, _, chosen in told for at in range(len(chosen))
    ]


def test_it_is_told_before_its_first_token_is_yielded() -> None:
    model = make_model()
    drafter = with_plain(model, PROMPT, COUNT, "right", width=1)[1]
    told = Told()
    steps = decode_tokens(PROMPT, model, drafter, Options(max_tokens=COUNT, on_round=told, **BEAMS["chain"]))
    seen = [len(told) for _ in steps]
    assert seen[:7] == [0, 1, 1, 1, 1, 1, 2]


def test_rounds_that_draft_nothing_are_not_told() -> None:
    model = make_family("mamba")  # states: behind much that was read again a round drafts nothing
    with overheard(model) as heard:
        plain = ids(run(model, PROMPT, max_tokens=COUNT + 8))
    text = PROMPT + plain
    drafter = Follower(model, text, heard, script("half", len(text), 1), 1)
    told = Told()
    steps = run(model, PROMPT, drafter, max_tokens=COUNT, on_round=told, **BEAMS["chain"])
    last = steps[-1].stats
    assert ids(steps) == plain[:COUNT] and last.plain_steps > 0 and len(told) == last.rounds - last.plain_steps
    told = Told()
    run(model, PROMPT, max_tokens=COUNT, on_round=told)
    run(model, PROMPT, drafter, max_tokens=COUNT, on_round=told, plan="off")
    assert told == []


@pytest.mark.parametrize("beam", BEAMS)
def test_what_it_raises_comes_through_and_the_cache_holds_what_was_yielded(beam: str) -> None:
    model = make_model()
    drafter = with_plain(model, PROMPT, COUNT, "mixed", width=BEAMS[beam]["beam_width"])[1]
    told, got, cache = Told(), [], make_prompt_cache(model)

    def third(tree: Tree, path: list[int], chosen: list[int]) -> None:
        told(tree, path, chosen)
        if len(told) == 3:
            raise KeyError("enough")

    settings = Options(max_tokens=COUNT, prompt_cache=cache, on_round=third, **BEAMS[beam])
    with pytest.raises(KeyError, match="enough"):
        for step in decode_tokens(PROMPT, model, drafter, settings):
            got.append(step)
    expected = make_prompt_cache(model)
    run(model, PROMPT, max_tokens=len(got), prompt_cache=expected)
    assert len(got) == 1 + sum(len(chosen) for *_, chosen in told[:2])
    assert_same_cache(cache, expected)


def test_it_must_be_a_function() -> None:
    with pytest.raises(RedrafterError, match="on_round must be a function, got 3"):
        Options(on_round=3)  # type: ignore[arg-type]
