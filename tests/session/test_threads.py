"""A model is loaded in one thread, and each turn of a session over it may come from another."""

from __future__ import annotations

from pathlib import Path

import mlx_lm
import pytest
from families import make_family
from sessions import assert_fresh, chat_tokenizer, make_drafter
from small import save_target
from threads import workers
from toys import make_model

from mlx_redrafter import RedrafterError, Session, load

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",  # ropes whose frequencies are not parameters, as those of Llama 3
        "bailing_hybrid",  # slopes of its linear attention
        "gemma3n",  # its forward puts other weights into the model
        "qwen3_5",
        "mamba",
    ],
)
def test_every_turn_may_come_from_another_thread(family: str) -> None:
    def make() -> Session:
        model = make_family(family)
        return Session(model, chat_tokenizer(), make_drafter(model), max_tokens=6, beam_width=1, draft_depth=2)

    with workers(3) as (first, second, third):
        session = first.submit(make).result()
        for pool in (second, third, first):
            answer = pool.submit(session.send, "hello").result()
            first.submit(assert_fresh, session, answer).result()


def test_model_must_be_evaluated_where_it_is_loaded(tmp_path: Path) -> None:
    """A rope of this kind keeps its frequencies, which are not parameters."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    save_target(
        tmp_path, make_model("llama-yarn", vocab=53), chat_tokenizer()._tokenizer, rope_scaling=rope, head_dim=32
    )
    with workers(2) as (one, other):
        model, tokenizer = one.submit(load, tmp_path).result()
        assert other.submit(lambda: Session(model, tokenizer, max_tokens=4).send("hello")).result().tokens
        unevaluated = one.submit(lambda: mlx_lm.load(str(tmp_path))[0]).result()
        with pytest.raises(RedrafterError, match=r"was loaded in another thread, .*: load it with mlx_redrafter\.load"):
            other.submit(Session, unevaluated, tokenizer).result()
        session = one.submit(Session, unevaluated, tokenizer, max_tokens=4).result()
        assert other.submit(session.send, "hello").result().tokens
