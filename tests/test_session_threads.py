"""A model is loaded in one thread, a session made over it in the same, and each turn may come from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from families import make_family
from mlx.utils import tree_flatten
from small import save_target
from test_session import chatty, make_drafter
from test_threads import workers
from toys import ids, make_model, run

from mlx_redrafter import RedrafterError, Session, load

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@pytest.mark.parametrize(
    "family",
    [
        "afmoe",  # ropes whose frequencies are no parameters, as those of Llama 3 and of gpt-oss
        "gpt_oss",
        "exaone4",
        "gemma4_text",
        "bailing_hybrid",  # slopes of its linear attention
        "gemma3n",  # its forward puts other weights into the model
        "qwen3_5",
        "mamba",
    ],
)
def test_every_turn_may_come_from_a_thread_of_its_own(family: str) -> None:
    def made() -> Session:
        model = make_family(family)
        drafter = make_drafter(model)  # never evaluated
        return Session(model, chatty(), drafter, max_tokens=6, beam_width=1, draft_depth=2)

    with workers(3) as (first, second, third):
        talk = first.submit(made).result()
        turns = []
        for pool in (second, third, first):
            answer = pool.submit(talk.send, "hello").result()
            turns.append((talk.tokens[: -len(answer.tokens)], answer.tokens))
        for read, said in turns:
            fresh = first.submit(run, talk.model, read, max_tokens=len(said)).result()
            assert said and ids(fresh) == said


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model with a rope that keeps its frequencies."""
    place = tmp_path_factory.mktemp("yarn")
    model: Any = make_model("llama-yarn", vocab=53)
    save_target(place, model, chatty()._tokenizer, rope_scaling=ROPE, head_dim=32)
    return place


def test_a_model_is_loaded_in_one_thread_and_used_in_another(stored: Path) -> None:
    with workers(2) as (one, other):
        model, tokenizer = one.submit(load, stored).result()
        answer = other.submit(lambda: Session(model, tokenizer, max_tokens=4).send("hello")).result()
    assert answer.tokens


def test_a_model_that_another_thread_has_left_unevaluated_is_refused_in_a_line(stored: Path) -> None:
    def loaded() -> tuple[Any, Any]:
        return mlx_lm.load(str(stored))[:2]

    with workers(2) as (one, other):
        model, tokenizer = one.submit(loaded).result()
        with pytest.raises(RedrafterError, match=r"was loaded in another thread, .*: load it with mlx_redrafter\.load"):
            other.submit(Session, model, tokenizer).result()
        talk = one.submit(Session, model, tokenizer, max_tokens=4).result()
        assert other.submit(talk.send, "hello").result().tokens
    assert all(isinstance(array, mx.array) for _, array in tree_flatten(model.parameters()))
