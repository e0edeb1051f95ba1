"""Saved sessions continue as if never saved; errors are one line."""

import json
from pathlib import Path

import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from helpers.refusals import refusal
from helpers.sessions import FAMILIES, make_model, make_session
from mlx_redrafter import Session

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "talk.safetensors"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_session_continues_like_the_saved_one(family, file):
    options = {
        "temp": 0.8,
        "seed": 3,
        "max_tokens": 9,
        "beam_width": 1,
        "draft_depth": 2,
    }
    session = make_session(family, **options)
    session.send("hello")
    session.save(file)
    assert [*file.parent.iterdir()] == [file]
    loaded = Session.load(file, session.model, session.tokenizer, session.drafter, **options)
    assert loaded.tokens == session.tokens
    assert loaded.messages == session.messages
    assert loaded.send("more").tokens == session.send("more").tokens
    assert load_prompt_cache(str(file)), "mlx-lm can read it"


def test_unsavable_sessions_are_refused(file):
    session = make_session()
    with refusal("nothing to save"):
        session.save(file)
    session.send("hello")
    for path in (
        file.with_suffix(".bin"),
        Path("/dev/null") / file.name,
        file.parent / "new" / file.name,
    ):
        with refusal(r"safetensors, got talk\.bin|cannot save the session as"):
            session.save(path)
    foreign = make_session("deepseek_v41")
    foreign.send("hello")
    with refusal("mlx-lm cannot load a LayerCache: the cache of deepseek_v41 cannot"):
        foreign.save(file)
    assert not [*file.parent.iterdir()], "nothing was created"


def test_damaged_or_inconsistent_file_is_refused(file):
    session = make_session()
    session.send("hello")
    session.save(file)
    content = file.read_bytes()
    other = file.with_name("other.safetensors")
    with refusal(r"cannot read the session .* was saved with another model"):
        Session.load(file, make_model("gemma3_text"), session.tokenizer)
    for damaged in (
        None,
        b"",
        content[: len(content) // 2],
        content.replace(b"session", b"sesion_"),
    ):
        if damaged is not None:
            other.write_bytes(damaged)
        with refusal("cannot read the session"):
            Session.load(other, session.model, session.tokenizer)
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    for change in ({"tokens": [64]}, {"tokens": [1, 2]}, {"messages": []}, {"format": "9"}):
        saved = json.loads(metadata["session"]) | change
        save_prompt_cache(str(other), cache, {"session": json.dumps(saved)})
        with refusal(f"cannot read the session .*: .*{next(iter(change))[:5]}"):
            Session.load(other, session.model, session.tokenizer)
