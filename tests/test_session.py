"""A conversation over a kept cache says what a fresh run over the same tokens says, whatever happens in between."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import threading
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import make_family
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from test_ctrl_c import interrupted
from test_interruptions import failing_at
from test_threads import workers
from toys import ids, make_tokenizer, run

from mlx_redrafter import RedrafterError, Session, stream_generate
from mlx_redrafter import generate as generation
from mlx_redrafter import session as session_module
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine import decode as loop
from mlx_redrafter.engine.supported_models import model_sizes
from mlx_redrafter.generate import decode_tokens
from mlx_redrafter.options import Options
from mlx_redrafter.session.chat_template import behind, whole
from mlx_redrafter.session.memory import MARGIN, growth_of

CHAT = (
    "{% for m in messages %}{{ 'S' if m.role == 'system' else 'U' if m.role == 'user' else 'A' }}"
    "{{ m.content }}{{ 'z' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
END = 26
"""The id of z, which ends each message of `CHAT`."""

FAMILIES = ["qwen3", "gemma3_text", "mamba", "qwen3_5"]
"""Rows, rings, states, and rows beside states."""

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
SAMPLED = {"temp": 0.8, "seed": 3}
HOWS: list[dict[str, Any]] = [
    {},
    SAMPLED,
    SAMPLED | {"penalty": True},
    {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
]
WORDS = ("hello", "what now", "tell me more", "and then", "why")


@functools.cache
def make_model(family: str) -> nn.Module:
    """A random model, shared between tests."""
    return make_family(family)


def make_drafter(model: nn.Module) -> Drafter:
    """One that knows nothing."""
    return Drafter(DrafterArgs(*model_sizes(model), exit_dim=16, num_draft_layers=1))


def chatty() -> Any:
    """Letters, and a chat template."""
    tokenizer = make_tokenizer([END], vocab=53)
    tokenizer._tokenizer.chat_template = CHAT
    tokenizer.has_chat_template = True
    return tokenizer


def session(family: str = "qwen3", *, drafter: bool = True, **options: Any) -> Session:
    """Over a toy, with a random drafter."""
    model = make_model(family)
    options = {"max_tokens": 9, "beam_width": 1, "draft_depth": 2} | options
    return Session(model, chatty(), make_drafter(model) if drafter else None, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_each_of_ten_turns_is_that_of_a_fresh_run_on_the_same_tokens(family: str, how: dict[str, Any]) -> None:
    how = dict(how)
    if "kv_bits" in how and family != "qwen3":
        pytest.skip("mlx-lm quantises the caches of few families")
    if how.pop("penalty", False):
        how["logits_processors"] = make_logits_processors(repetition_penalty=1.5, repetition_context_size=40)
    talk = session(family, **how)
    for turn in range(10):
        before = talk.tokens
        answer = talk.send(WORDS[turn % len(WORDS)])
        told = talk.tokens
        assert told[: len(before)] == before and told[len(told) - len(answer.tokens) :] == answer.tokens
        read = told[: len(told) - len(answer.tokens)]
        fresh = run(talk.model, read, max_tokens=len(answer.tokens), **how)
        assert ids(fresh) == answer.tokens, turn
        assert answer.last is not None and answer.last.prompt_tokens == len(read) - len(before), "nothing is read twice"
    assert [each["role"] for each in talk.messages] == ["user", "assistant"] * 10


def test_history_is_what_processors_see_and_where_noise_starts() -> None:
    """The control of the test above: without it a continued text is another one."""
    model = make_model("mamba")
    penalty = make_logits_processors(repetition_penalty=3.0, repetition_context_size=40)
    first, second = list(range(3, 23)), [4, 5, 6]
    for more in (SAMPLED, {"logits_processors": penalty}):
        fresh = ids(run(model, [*first, *second], max_tokens=12, **more))
        made = []
        for history in (first, ()):
            cache = make_prompt_cache(model)
            model(mx.array([first]), cache=cache)
            settings = Options(max_tokens=12, prompt_cache=cache, history=history, **more)  # type: ignore[arg-type]
            made.append(ids(list(decode(second, model, None, settings))))
        assert made[0] == fresh != made[1]


def test_a_history_of_another_length_than_the_cache_is_refused() -> None:
    model = make_model("qwen3")
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    with pytest.raises(RedrafterError, match="the prompt cache holds 3 tokens, its history is 2"):
        list(decode_tokens([4], model, None, Options(prompt_cache=cache, history=[1, 2])))


def test_turns_are_rendered_behind_the_answer_and_its_end_is_not_said_twice() -> None:
    tokenizer = chatty()
    before = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    new = [{"role": "user", "content": "v"}]
    assert tokenizer.decode(whole(tokenizer, before)) == "SszUuzA"
    assert tokenizer.decode(behind(tokenizer, before, new, 5)) == "zUvzA", "broken off: its end is read"
    assert tokenizer.decode(behind(tokenizer, before, new, END)) == "UvzA"
    tokenizer._tokenizer.chat_template = "{{ messages[-1].content }}"
    assert behind(tokenizer, before, new, 5) is None


def test_a_template_that_drops_what_was_said_is_read_anew() -> None:
    talk = session()
    talk.tokenizer._tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}U{{ m.content }}{% endfor %}A"
    talk.send("one")
    answer = talk.send("two")
    assert talk.tokenizer.decode(talk.tokens[: -len(answer.tokens)]) == "UoneUtwoA"
    assert len(talk.messages) == 4


THINKING = (
    "{% if tools %}{{ 't' * (tools | length) }}{% endif %}{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}"
    "{{ m.content }}{{ 'z' }}{% endfor %}{% if add_generation_prompt %}A{% if think is defined and think %}h{% endif %}"
    "{% endif %}"
)


def thinker(**settings: Any) -> Session:
    """Over a template that shows tools in front, and an argument at the end."""
    tokenizer = chatty()
    tokenizer._tokenizer.chat_template = THINKING
    return Session(make_model("qwen3"), tokenizer, max_tokens=4, **settings)


def read_by(talk: Session, text: str, **options: Any) -> tuple[str, int]:
    """(all that was read when an answer begins, how many tokens of it in this turn)."""
    answer = talk.send(text, **options)
    assert answer.last is not None
    return talk.tokenizer.decode(talk.tokens[: -len(answer.tokens)]), answer.last.prompt_tokens


def test_arguments_of_the_template_are_the_sessions_or_a_turns() -> None:
    talk = thinker(chat_template_config={"think": True})
    assert read_by(talk, "a") == ("UazAh", 5)
    before = talk.tokens
    text, count = read_by(talk, "b", chat_template_config={"think": False})
    assert text.endswith("UbzA") and talk.tokens[: len(before)] == before and count < 7, "nothing is read twice"
    assert read_by(talk, "c", chat_template_config=None)[0].endswith("UczA")
    assert read_by(talk, "d")[0].endswith("UdzAh")


def test_tools_that_change_are_read_and_the_conversation_behind_them_again() -> None:
    def look(what: str) -> str:
        """Looks.

        Args:
            what: it should be.
        """
        return what

    talk = thinker(tools=[look])
    assert read_by(talk, "a")[0] == "tUazA"
    assert read_by(talk, "b")[1] < 7
    text, count = read_by(talk, "c", tools=[look, look])
    assert text.startswith("ttUazA") and count == len(text), "anew"
    assert read_by(talk, "d", tools=[look, look])[1] < 7, "once"
    assert read_by(talk, "e")[0].startswith("tUazA"), "the session has its own"
    other = talk.fork()
    assert read_by(other, "f")[1] < 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chat_template_config": 5}, "chat_template_config must be a dictionary of arguments, got 5"),
        ({"chat_template_config": {1: 2}}, "chat_template_config must be a dictionary of arguments"),
        ({"chat_template_config": {"tokenize": True}}, "the chat template refuses these messages: .*tokenize"),
        ({"tools": "look"}, "tools must be a list of functions or JSON schemas, got 'look'"),
        ({"tools": [5]}, "the chat template refuses these messages: "),
    ],
)
def test_what_no_template_takes_is_refused_in_a_line(options: dict[str, Any], said: str) -> None:
    talk = thinker()
    with pytest.raises(RedrafterError, match=said) as raised:
        talk.send("a", **options)
    assert "\n" not in str(raised.value) and talk.send("a").tokens
    with pytest.raises(RedrafterError, match="tools need a chat template, and the tokenizer has none"):
        Session(make_model("qwen3"), make_tokenizer(vocab=53), tools=[{}])


def test_without_a_template_texts_follow_each_other() -> None:
    model = make_model("qwen3")
    talk = Session(model, make_tokenizer(vocab=53), make_drafter(model), max_tokens=4, draft_depth=2)
    first = talk.send("abc")
    talk.send("de")
    assert talk.tokenizer.decode(talk.tokens[: 3 + 4 + 2]) == "abc" + first.text + "de"


def test_text_comes_to_callbacks_and_to_the_iterator_alike() -> None:
    talk, other = session(), session()
    texts: list[str] = []
    responses: list[Any] = []
    answer = talk.send("hello", on_text=texts.append, on_token=responses.append)
    streamed = list(other.stream("hello"))
    assert "".join(texts) == answer.text == "".join(each.text for each in streamed)
    assert [each.token for each in responses] == answer.tokens == [each.token for each in streamed]
    assert answer.finish_reason == streamed[-1].finish_reason and talk.messages == other.messages


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_cancelled_stays_as_far_as_it_came(family: str) -> None:
    talk = session(family, max_tokens=40)
    answer = talk.send("hello", on_token=lambda response: response.generation_tokens == 5 and talk.cancel())
    assert answer.finish_reason == "cancelled" and len(answer.tokens) == 5
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    before = talk.tokens
    again = talk.send("more")
    assert again.tokens == ids(run(talk.model, talk.tokens[: -len(again.tokens)], max_tokens=len(again.tokens)))
    assert talk.tokens[: len(before)] == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turns", [0, 1])
def test_cancelled_while_the_prompt_is_read_nothing_has_happened(family: str, turns: int) -> None:
    talk = session(family, prefill_step_size=4)
    for _ in range(turns):
        talk.send("hello")
    before, said = talk.tokens, talk.messages
    answer = talk.send(
        "a long message to be read", prompt_progress_callback=lambda done, total: 0 < done < total and talk.cancel()
    )
    assert answer.finish_reason == "cancelled" and answer.tokens == [] and answer.last is None
    assert talk.tokens == before and talk.messages == said
    again = talk.send("other")
    assert again.tokens == ids(run(talk.model, talk.tokens[: -len(again.tokens)], max_tokens=len(again.tokens)))


@pytest.mark.parametrize("text", ["x", "xy", "xyz", "xyzabcd"])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_cancelled_behind_the_last_token_of_the_prompt_nothing_has_happened(family: str, step: int, text: str) -> None:
    """A forward of one row writes over the oldest row of a full ring."""
    model = make_model(family)
    talk = Session(model, make_tokenizer(vocab=53), max_tokens=9, prefill_step_size=step)
    for word in WORDS[:3]:
        talk.send(word.replace(" ", ""))
    before = talk.tokens

    def late(history: mx.array, logits: mx.array) -> mx.array:
        talk.cancel()
        return logits

    answer = talk.send(text, logits_processors=[late])
    assert answer.finish_reason == "cancelled" and answer.tokens == [] and talk.tokens == before
    again = talk.send("other")
    assert again.tokens == ids(run(model, talk.tokens[: -len(again.tokens)], max_tokens=len(again.tokens)))


@pytest.mark.parametrize("place", [1, 2, 6, 11])
@pytest.mark.parametrize("text", ["x", "xyzabcd"])
@pytest.mark.parametrize("family", [*FAMILIES, "recurrent_gemma"])
def test_behind_a_turn_that_failed_the_next_may_come_from_another_thread(family: str, text: str, place: int) -> None:
    """Nothing unevaluated stays in the cache: a stream belongs to its thread."""
    model = make_model(family)
    talk = Session(model, make_tokenizer(vocab=53), max_tokens=20)
    talk.send("hello", max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        talk.send(text, logits_processors=[failing_at(place, lambda history, logits: logits)])
    with workers(1) as (pool,):
        again = pool.submit(talk.send, "other").result()
    assert again.tokens == ids(run(model, talk.tokens[: -len(again.tokens)], max_tokens=len(again.tokens)))


def test_a_cancel_before_a_turn_does_not_end_it() -> None:
    talk = session()
    assert not talk.cancel()
    assert talk.send("hello").finish_reason != "cancelled"


def test_a_cancel_at_any_line_behind_which_the_session_is_taken_ends_the_turn() -> None:
    """Each line that the turn goes through in session.py, up to its first token, is stopped at and cancelled at."""
    sources, ended, place = (session_module.__file__, contextlib.__file__), list[int](), 0
    while True:
        talk, lines = session(), 0

        def at_each_line(frame: Any, event: str, arg: object, talk: Session = talk, place: int = place) -> Any:
            nonlocal lines
            if frame.f_code.co_filename not in sources:
                return None
            if event == "line" and talk._uses:  # another thread would be told that it is in use
                lines += 1
                if lines == place + 1:
                    talk.cancel()
            return at_each_line

        stream = talk.stream("hello")
        sys.settrace(at_each_line)
        try:
            first = next(stream, None)
        finally:
            sys.settrace(None)
        if lines <= place:
            stream.close()
            break
        rest = list(stream)
        assert rest == [], f"line {place}"
        ended.append(0 if first is None else 1)
        assert len(talk.tokens) == (len("UhellozA") + 1 if first else 0)
        place += 1
    assert place > 30 and ended == sorted(ended), "until the prompt is read, nothing has happened"


def test_a_timer_cancels_from_another_thread() -> None:
    talk = session(max_tokens=-1)
    timer = threading.Timer(0.3, talk.cancel)
    timer.start()
    answer = talk.send("hello", logits_processors=[never(END)])
    timer.join()
    assert answer.finish_reason == "cancelled" and answer.tokens


def never(token: int) -> Callable[[mx.array, mx.array], mx.array]:
    """A processor that forbids a token."""

    def forbid(history: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == token, -mx.inf, logits)

    return forbid


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_part_and_do_not_disturb_each_other(family: str) -> None:
    talk = session(family)
    talk.send("hello")
    other = talk.fork()
    common = talk.tokens
    for one, text in ((talk, "left"), (other, "right"), (talk, "again"), (other, "again")):
        answer = one.send(text)
        fresh = run(one.model, one.tokens[: -len(answer.tokens)], max_tokens=len(answer.tokens))
        assert answer.tokens == ids(fresh)
    assert talk.tokens != other.tokens and talk.tokens[: len(common)] == other.tokens[: len(common)] == common


def test_reset_forgets() -> None:
    talk = session()
    first = talk.send("hello")
    talk.reset()
    assert talk.tokens == [] and talk.messages == [] and talk.send("hello").tokens == first.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_session_goes_on_as_it_would_have(family: str, tmp_path: Path) -> None:
    talk = session(family, **SAMPLED)
    talk.send("hello")
    talk.save(tmp_path / "talk.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["talk.safetensors"]
    loaded = Session.load(
        tmp_path / "talk.safetensors", talk.model, talk.tokenizer, talk.drafter,
        max_tokens=9, beam_width=1, draft_depth=2, **SAMPLED,
    )  # fmt: skip
    assert loaded.tokens == talk.tokens and loaded.messages == talk.messages
    assert loaded.send("more").tokens == talk.send("more").tokens
    assert load_prompt_cache(str(tmp_path / "talk.safetensors")), "mlx-lm reads it, too"


def test_a_saved_session_knows_what_its_turns_were_read_with(tmp_path: Path) -> None:
    def look(what: str) -> str:
        """Looks.

        Args:
            what: it should be.
        """
        return what

    talk = thinker()
    assert read_by(talk, "a", tools=[look], chat_template_config={"think": True})[0] == "tUazAh"
    talk.save(tmp_path / "talk.safetensors")
    loaded = Session.load(tmp_path / "talk.safetensors", talk.model, talk.tokenizer, max_tokens=4)
    for other in (talk, loaded):
        assert read_by(other, "b")[0].startswith("Uaz"), "without the tools, and so anew"
    assert loaded.tokens == talk.tokens


@pytest.mark.parametrize("config", [{"tokenize": True}, {"think": {1, 2}}])
def test_a_saved_session_whose_arguments_cannot_be_used_again_goes_on(config: dict[str, Any], tmp_path: Path) -> None:
    talk = thinker()
    talk.send("a", **({} if "tokenize" in config else {"chat_template_config": config}))
    if "tokenize" in config:
        talk._read_with = config
    talk.save(tmp_path / "talk.safetensors")
    loaded = Session.load(tmp_path / "talk.safetensors", talk.model, talk.tokenizer, max_tokens=4)
    assert read_by(loaded, "b")[0].endswith("UbzA")


def test_a_reset_that_is_broken_off_anywhere_leaves_a_session_that_goes_on() -> None:
    for place in itertools.count():
        talk = session()
        talk.send("hello")
        if (came := interrupted(talk.reset, place, (session_module.__file__,), instructions=False)) is None:
            break
        del came
        answer = talk.send("more")
        read = talk.tokens[: -len(answer.tokens)]
        assert answer.tokens == ids(run(talk.model, read, max_tokens=len(answer.tokens))), place
    assert place > 20


def test_what_cannot_be_saved_or_loaded_is_said_in_a_line(tmp_path: Path) -> None:
    talk = session()
    with pytest.raises(RedrafterError, match="nothing was said yet"):
        talk.save(tmp_path / "talk.safetensors")
    talk.send("hello")
    with pytest.raises(RedrafterError, match=r"saved as \.safetensors, got talk\.bin"):
        talk.save(tmp_path / "talk.bin")
    (tmp_path / "file").write_text("")
    for folder in ("file", "new", "new/deeper"):
        with pytest.raises(RedrafterError, match=rf"cannot save the session .* there is no directory .*/{folder}$"):
            talk.save(tmp_path / folder / "talk.safetensors")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"], "nothing is made"
    place = tmp_path / "talk.safetensors"
    other = talk.fork()
    other.send([{"role": "user", "content": "hello", "seen": {1}}])
    with pytest.raises(RedrafterError, match=r"cannot save the session .* set is not JSON serializable"):
        other.save(place)
    assert not place.exists()
    talk.save(place)
    whole_file = place.read_bytes()
    damaged = {
        "none.safetensors": None,
        "empty.safetensors": b"",
        "cut.safetensors": whole_file[: len(whole_file) // 2],
        "other.safetensors": whole_file.replace(b"session", b"sesion_"),
    }
    for name, content in damaged.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RedrafterError, match="cannot read the session"):
            Session.load(tmp_path / name, talk.model, talk.tokenizer)
    with pytest.raises(RedrafterError, match=r"cannot read the session .* was saved with another model"):
        Session.load(place, make_model("gemma3_text"), talk.tokenizer)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), talk._cache)
    with pytest.raises(RedrafterError, match="expected a prompt cache with a conversation beside it, got one without"):
        Session.load(tmp_path / "cache.safetensors", talk.model, talk.tokenizer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [64]}, "token ids must be from 0 to 63, got 64"),
        ({"tokens": [-1]}, "token ids must be from 0 to 63, got -1"),
        ({"tokens": [2**40]}, "token ids, got 1099511627776"),
        ({"tokens": []}, "the prompt is empty"),
        ({"tokens": [1, "2"]}, "expected a list of token ids"),
        ({"tokens": "12"}, "expected a list of token ids"),
        ({"tokens": [1, 2]}, "its cache holds .* tokens, and it names 2"),
        ({"messages": []}, "expected a text or messages"),
        ({"format": "9"}, "expected format 1, got '9'"),
        ({"layers": 1}, "the prompt cache must have . layers as the model has, got 1"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused_in_a_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    talk, place = session(), tmp_path / "talk.safetensors"
    talk.send("hello")
    talk.save(place)
    cache, metadata = load_prompt_cache(str(place), return_metadata=True)
    told = json.loads(metadata["session"]) | change
    save_prompt_cache(str(place), cache[: told.pop("layers", None)], {"session": json.dumps(told)})
    with pytest.raises(RedrafterError, match=f"cannot read the session .*: .*{said}") as raised:
        Session.load(place, talk.model, talk.tokenizer)
    assert "\n" not in str(raised.value)


def test_two_threads_at_once_are_told_apart() -> None:
    talk = session()
    stream = talk.stream("hello")
    next(stream)
    for refused in (lambda: talk.send("me too"), talk.reset, talk.fork, lambda: next(talk.stream("me too"))):
        with pytest.raises(RedrafterError, match="the session is in use by thread MainThread: one thread at a time"):
            refused()  # type: ignore[no-untyped-call]
    stream.close()
    assert talk.send("me too").tokens


def test_an_exception_in_a_callback_gives_the_session_back_before_it_is_handled() -> None:
    talk = session()

    def fail(response: object) -> None:
        raise KeyError("mine")

    try:
        talk.send("hello", on_token=fail)
    except KeyError:
        assert [each["role"] for each in talk.messages] == ["user", "assistant"]
        assert talk.send("more").tokens
    else:
        pytest.fail("it is passed on")


def test_sessions_over_one_model_do_not_mix() -> None:
    talk = session()
    other = Session(talk.model, talk.tokenizer, talk.drafter, max_tokens=9, draft_depth=2)
    list(zip_longest(talk.stream("hello"), other.stream("why")))
    for one in (talk, other):
        answer = one.send("more")
        assert answer.tokens == ids(run(one.model, one.tokens[: -len(answer.tokens)], max_tokens=len(answer.tokens)))


@pytest.mark.parametrize(("family", "limit"), [("qwen3", {}), ("qwen3", {"max_kv_size": 300}), ("gemma3_text", {})])
def test_memory_is_known_before_it_is_taken(family: str, limit: dict[str, int]) -> None:
    model = make_model(family)
    growth = growth_of(model, **limit)
    for tokens in (10, 256, 257, 700):
        cache = make_prompt_cache(model, limit.get("max_kv_size"))
        for start in range(0, tokens, 50):
            model(mx.ones((1, min(50, tokens - start)), mx.int32), cache=cache)
        real = sum(c.nbytes for c in cache)
        assert 0.5 * real <= growth.bytes_at(tokens) <= 2 * real + growth.bytes_at(1)
        assert growth.bytes_at(growth.tokens_in(growth.bytes_at(tokens), 10**6)) <= growth.bytes_at(tokens)
    assert growth.tokens_in(0, 10**6) == 0


def test_a_turn_for_which_there_is_no_room_is_refused_before_anything_is_read() -> None:
    model = make_model("qwen3")
    budget = growth_of(model).bytes_at(256)
    talk = session(memory_budget=budget)
    talk.send("hello")
    before = talk.tokens
    with pytest.raises(RedrafterError, match=f"more than its budget of {budget}"):
        talk.send("x" * 300)
    assert talk.tokens == before
    long = talk.send("more", max_tokens=-1, logits_processors=[never(END)])
    assert long.finish_reason == "length" and len(talk.tokens) == 256 - MARGIN


def test_the_oldest_messages_but_the_systems_are_forgotten_to_make_room() -> None:
    talk = session(memory_budget=growth_of(make_model("qwen3")).bytes_at(256), when_full="trim")
    talk.send([{"role": "system", "content": "be brief"}, {"role": "user", "content": "a" * 40}])
    for letter in "bcdefgh":
        answer = talk.send(letter * 40)
        assert answer.finish_reason in ("stop", "length") and len(talk.tokens) <= 256 - MARGIN
        assert answer.tokens == ids(run(talk.model, talk.tokens[: -len(answer.tokens)], max_tokens=len(answer.tokens)))
    assert talk.messages[0] == {"role": "system", "content": "be brief"}
    assert talk.messages[1]["content"] not in ("a" * 40, "b" * 40) and talk.messages[-2]["content"] == "h" * 40
    with pytest.raises(RedrafterError, match="more than its budget"):
        talk.send("x" * 300)


def full(max_tokens: int = 9) -> Session:
    """Without a template, so that a token is a letter: 192 of them have room; three turns of 40 letters were read."""
    model = make_model("qwen3")
    talk = Session(
        model, make_tokenizer(vocab=53), max_tokens=9, memory_budget=growth_of(model).bytes_at(256), when_full="trim"
    )
    for letter in "abc":
        talk.send(letter * 40)
    assert len(talk.tokens) == 3 * 49
    return talk


def test_as_much_is_forgotten_as_the_answer_needs_and_no_more() -> None:
    for max_tokens, turns in ((5, 3), (6, 2), (54, 2), (55, 1), (96, 1), (150, 1), (-1, 1)):
        talk = full()
        answer = talk.send("d" * 40, max_tokens=max_tokens)
        kept = [each["content"][0] for each in talk.messages if each["role"] == "user"]
        assert kept == list("abcd"[3 - turns :]), max_tokens
        assert len(answer.tokens) == (max_tokens if 0 < max_tokens < 150 else 256 - MARGIN - 49 - 40)
    talk = full()
    assert len(talk.send("d" * 150, max_tokens=60).tokens) == 42 and len(talk.messages) == 2, "as much as can be"


def test_what_is_read_anew_takes_the_room_of_what_was_read_before() -> None:
    talk = full()
    held: list[list[int]] = []
    cancelled = talk.send(
        "d" * 40,
        prefill_step_size=8,
        prompt_progress_callback=lambda done, total: (held.append(talk.tokens), done > 20 and talk.cancel()),
    )
    assert cancelled.finish_reason == "cancelled" and held[0] == [], "the old cache was given up"
    assert len(talk.messages) == 6, "the conversation was not"
    with pytest.raises(RedrafterError, match="there is no cache to save"):
        talk.save("nowhere.safetensors")
    answer = talk.send("d", max_tokens=2)
    assert answer.tokens == ids(run(talk.model, talk.tokens[:-2], max_tokens=2))
    assert talk.tokenizer.decode(talk.tokens[:-2]) == "".join(each["content"] for each in talk.messages[:-1])
    assert len(talk.messages) == 8


@pytest.mark.parametrize("name", ["max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"])
def test_how_the_cache_is_made_is_no_option_of_a_turn(name: str) -> None:
    talk = session()
    with pytest.raises(RedrafterError, match=f"{name} is the session's, not a turn's"):
        talk.send("hello", **{name: 64})
    assert talk.send("hello").tokens


def test_the_options_of_a_turn_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, calls = session(), list[str]()
    for module in (generation, session_module):
        name = module.__name__
        monkeypatch.setattr(
            module, "make_settings", lambda *of, name=name, **more: (calls.append(name), Options(*of, **more))[1]
        )
    talk.send("hello")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "the message is empty|expected"),
        ([], "expected a text or messages"),
        ([{"role": "user"}], "a message needs a role and a content"),
        ([1], "expected a text or messages"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_what_is_no_message_is_refused_and_the_session_goes_on(given: Any, said: str) -> None:
    model = make_model("qwen3")
    talk = Session(model, make_tokenizer(vocab=53), max_tokens=3)
    with pytest.raises(RedrafterError, match=said):
        talk.send(given)
    assert talk.send("abc").tokens


def test_options_that_a_session_has_no_use_for_are_refused() -> None:
    for name in ("prompt_cache", "history"):
        with pytest.raises(RedrafterError, match=f"a session has a {name} of its own"):
            session(**{name: []})
    with pytest.raises(RedrafterError, match="when_full must be"):
        session(when_full="explode")
    with pytest.raises(RedrafterError, match="memory_budget must be"):
        session(memory_budget=0)
    with pytest.raises(RedrafterError, match="temp must be"):
        session(temp=-1.0)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_tokens": "5"}, "max_tokens must be an integer, got '5'"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"max_tokens": 0}, "max_tokens must not be 0"),
        ({"prompt_progress_callback": 5}, "prompt_progress_callback must be a function, got 5"),
        ({"stop": 5}, "stop must be a string or several, got 5"),
    ],
)
def test_an_option_of_one_turn_that_cannot_be_is_refused_and_the_session_goes_on(
    option: dict[str, Any], said: str
) -> None:
    talk = session()
    with pytest.raises(RedrafterError, match=said):
        talk.send("hello", **option)
    assert talk.tokens == [] and talk.send("hello").tokens


def test_a_session_says_what_stream_generate_says() -> None:
    talk = session(**SAMPLED)
    answer = talk.send("hello")
    made = list(stream_generate(talk.model, talk.tokenizer, "UhellozA", max_tokens=9, **SAMPLED))
    assert answer.text == "".join(each.text for each in made) and answer.last is not None
    assert json.dumps(talk.messages) and answer.last.seed == 3


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("place", [1, 4, 9, 14])
def test_a_turn_that_is_broken_off_anywhere_leaves_a_session_that_goes_on_right(
    place: int, drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = session(drafter=drafter)
    talk.send("hello")
    kept = talk.tokens
    kind = type(talk._cache[0])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "update_and_fetch", failing_at(place, kind.update_and_fetch))
        with contextlib.suppress(KeyboardInterrupt):
            talk.send("what now")
    assert talk.tokens[: len(kept)] == kept
    said = talk.tokens
    answer = talk.send("why")
    assert talk.tokens[: len(said)] == said
    read = talk.tokens[: len(talk.tokens) - len(answer.tokens)]
    assert answer.tokens == [r.token for r in stream_generate(talk.model, talk.tokenizer, read, max_tokens=9)]
    assert talk.send("more").tokens, "and on"


@pytest.mark.parametrize("family", ["qwen3", "mamba"])
def test_a_second_ctrl_c_while_a_turn_is_put_down_leaves_a_session_that_goes_on_right(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = session(family, drafter=False)
    talk.send("hello")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "read", failing_at(4, loop.read))
        patch.setattr(Session, "_fresh", failing_at(1, Session._fresh))
        with contextlib.suppress(KeyboardInterrupt):
            talk.send("what now")
    for text in ("why", "more"):
        answer = talk.send(text)
        read = talk.tokens[: len(talk.tokens) - len(answer.tokens)]
        assert answer.tokens == [r.token for r in stream_generate(talk.model, talk.tokenizer, read, max_tokens=9)]


def test_an_error_behind_a_step_does_not_end_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = session()
    talk.send("hello")
    with monkeypatch.context() as patch:
        patch.setattr(generation, "GenerationResponse", failing_at(3, generation.GenerationResponse))
        with contextlib.suppress(KeyboardInterrupt):
            talk.send("what now")
    answer = talk.send("why")
    read = talk.tokens[: len(talk.tokens) - len(answer.tokens)]
    assert answer.tokens == [r.token for r in stream_generate(talk.model, talk.tokenizer, read, max_tokens=9)]


def test_what_the_template_moves_to_the_front_is_read() -> None:
    talk = session()
    talk.tokenizer._tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}S{{ m.content }}z{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ 'U' if m.role == 'user' else 'A' }}"
        "{{ m.content }}z{% endfor %}A"
    )
    talk.send("hello")
    talk.send([{"role": "system", "content": "secret"}, {"role": "user", "content": "why"}])
    assert talk.tokenizer.decode(talk.tokens).startswith("SsecretzUhelloz")


def test_a_path_with_a_null_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk = session()
    talk.send("hello")
    with pytest.raises(RedrafterError, match="null character"):
        talk.save("a\0.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_cache_that_mlx_lm_cannot_read_again_is_not_saved(tmp_path: Path) -> None:
    talk = session("deepseek_v41")
    talk.send("hello")
    with pytest.raises(RedrafterError, match="mlx-lm cannot read a LayerCache again: the cache of deepseek_v41 cannot"):
        talk.save(tmp_path / "talk.safetensors")
    assert not list(tmp_path.iterdir()) and talk.send("more").tokens


def test_a_path_with_a_null_or_none_at_all_is_said_in_a_line() -> None:
    for path, said in (("a\0.safetensors", "null character"), (5, "no such path: '5'")):
        with pytest.raises(RedrafterError, match=said):
            Session.load(path, make_model("qwen3"), chatty())  # type: ignore[arg-type]
        talk = session()
        talk.send("hello")
        with pytest.raises(RedrafterError, match=said):
            talk.save(path)  # type: ignore[arg-type]


def test_sessions_saved_to_one_path_at_once_leave_one_of_them_whole(tmp_path: Path) -> None:
    place, talks = tmp_path / "talk.safetensors", []
    with workers(2) as pools:
        for pool, text in zip(pools, ("hello", "what now"), strict=True):
            talk = pool.submit(session).result()
            pool.submit(talk.send, text).result()
            talks.append(talk)
        for _ in range(10):
            for saved in [pool.submit(talk.save, place) for pool, talk in zip(pools, talks, strict=True)]:
                saved.result()
            assert Session.load(place, make_model("qwen3"), chatty()).tokens in [talk.tokens for talk in talks]
    assert list(tmp_path.iterdir()) == [place]


def test_an_option_that_nobody_knows_is_refused_in_a_line() -> None:
    talk = session()
    for ask in (lambda: talk.send("hello", foo=1), lambda: session(foo=1)):
        with pytest.raises(RedrafterError, match=r"^'foo' is no option, only beam_width, draft_depth, "):
            ask()  # type: ignore[no-untyped-call]
    for name in ("seed", "max_tokens"):
        with pytest.raises(RedrafterError, match=f"{name} must be an integer, got True"):
            talk.send("hello", **{name: True})
    assert talk.tokens == [] and talk.send("hello").tokens
