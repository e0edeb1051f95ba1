"""Every turn gives what a fresh run over the same tokens gives, whatever happened before."""

import json
import threading
from itertools import product, zip_longest

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers import toys
from helpers.refusals import refusal
from helpers.sessions import (
    FAMILIES,
    assert_fresh,
    chat_tokenizer,
    make_model,
    make_session,
    plain_session,
)
from helpers.small import save_target, small_drafter, small_llama
from helpers.threads import workers
from helpers.toys import make_tokenizer
from mlx_redrafter import Session, load, load_demo, stream_generate

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

SAMPLED = {"temp": 0.8, "seed": 3}
WORDS = ("hello", "what now", "tell me more", "and then")


@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"penalty": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_equals_a_fresh_run(family, options):
    options = dict(options)
    if options.pop("penalty", False):
        options["logits_processors"] = make_logits_processors(
            repetition_penalty=1.5, repetition_context_size=40
        )
    elif not options and family == "qwen3":
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    session = make_session(family, **options)
    for word in WORDS:
        before = session.tokens
        answer = session.send(word)
        assert session.tokens[: len(before)] == before
        assert_fresh(session, answer, **options)
        n_read = len(session.tokens) - len(answer.tokens) - len(before)
        assert answer.last.prompt_tokens == n_read, "nothing is prefilled twice"
    assert [each["role"] for each in session.messages] == ["user", "assistant"] * 4


def test_send_stream_and_callbacks_agree():
    session = make_session(**SAMPLED)
    other = make_session(**SAMPLED)
    texts = []
    tokens = []
    answer = session.send(
        "hello", on_text=texts.append, on_token=lambda response: tokens.append(response.token)
    )
    streamed = list(other.stream("hello"))
    assert "".join(texts) == answer.text == "".join(each.text for each in streamed)
    assert tokens == answer.tokens == [each.token for each in streamed]
    assert answer.finish_reason == streamed[-1].finish_reason
    assert session.messages == other.messages
    responses = list(
        stream_generate(session.model, session.tokenizer, "UhellozA", max_tokens=9, **SAMPLED)
    )
    assert answer.text == "".join(each.text for each in responses)
    assert json.dumps(session.messages)
    assert answer.last.seed == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cancelled_or_closed_answer_keeps_its_tokens(family):
    session = make_session(family, max_tokens=40)
    assert not session.cancel(), "there is no answer to cancel"
    answer = session.send(
        "hello", on_token=lambda response: response.generation_tokens == 5 and session.cancel()
    )
    assert answer.finish_reason == "cancelled"
    assert len(answer.tokens) == 5
    assert session.messages[-1] == {"role": "assistant", "content": answer.text}
    stream = session.stream("more")
    tokens = [next(stream).token for _ in range(4)]
    before = session.tokens
    stream.close()
    assert session.tokens[-4:] == tokens
    assert session.tokens[: len(before)] == before
    assert_fresh(session, session.send("other"))


@pytest.mark.parametrize(("text", "step"), [("x", 4), ("xyz", 1), ("xyzabcdefghijkl", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_cancel_around_the_prompt_changes_nothing(family, step, text):
    """One more row would overwrite the oldest row of a full ring buffer."""
    session = plain_session(family, max_tokens=9, prefill_step_size=step, context=False)

    def after(history, logits):
        session.cancel()
        return logits

    def within(done, total):
        if 0 < done < total:
            session.cancel()

    ways = [{"logits_processors": [after]}]
    if len(text) > step:
        ways.append({"prompt_progress_callback": within})
    for words in (0, 3):
        for word in ("hello", "whatnow", "why")[:words]:
            session.send(word)
        before = session.tokens, session.messages
        for way in ways:
            answer = session.send(text, **way)
            assert answer.finish_reason == "cancelled"
            assert answer.tokens == []
            assert (session.tokens, session.messages) == before
        assert_fresh(session, session.send("other"))


def test_cancel_from_another_thread_ends_the_answer():
    session = plain_session(max_tokens=-1)  # its tokenizer has no end token
    timer = threading.Timer(0.3, session.cancel)
    timer.start()
    answer = session.send("hello")
    timer.join()
    assert answer.finish_reason == "cancelled"
    assert answer.tokens


OWN_ARRAYS = ("recurrent_gemma", "gemma3n", "gpt_oss", "bailing_hybrid")
"""Their models hold or store arrays that are not parameters: states, replaced weights, RoPE
frequencies, slopes.
"""


@pytest.mark.parametrize(
    ("family", "place"), [*product(FAMILIES, (1, 6, 11)), *product(OWN_ARRAYS, (6,))]
)
def test_a_turn_after_an_interrupt_may_use_another_thread(family, place):
    session = plain_session(family, max_tokens=20)
    calls = []

    def interrupt(history, logits):
        calls.append(1)
        if len(calls) == place:
            raise KeyboardInterrupt
        return logits

    session.send("hello", max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        session.send("xyz", logits_processors=[interrupt])
    with workers(1) as (pool,):
        answer = pool.submit(session.send, "other").result()
    assert_fresh(session, answer)


def test_use_by_two_threads_at_once_is_refused():
    session = make_session()
    stream = session.stream("hello")
    next(stream)
    for use in (
        lambda: session.send("me too"),
        session.reset,
        session.fork,
        lambda: next(session.stream("me too")),
    ):
        with refusal("the session is in use by thread MainThread: one thread at a time"):
            use()
    stream.close()
    assert session.send("me too").tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_are_independent(family):
    session = make_session(family)
    session.send("hello")
    other = session.fork()
    common = session.tokens
    for one, text in ((session, "left"), (other, "right"), (session, "again"), (other, "again")):
        assert_fresh(one, one.send(text))
    assert session.tokens != other.tokens
    assert session.tokens[: len(common)] == other.tokens[: len(common)] == common
    list(zip_longest(session.stream("hello"), other.stream("why")))  # alternating
    for one in (session, other):
        assert_fresh(one, one.send("more"))
    session.reset()
    assert session.tokens == []
    assert session.messages == []
    assert_fresh(session, session.send("hello"))


def test_bad_turns_change_nothing():
    session = plain_session(max_tokens=3)
    session.send("hello")
    before = session.tokens
    messages = (
        "",
        [{"role": "user"}],
        [{"role": "user", "content": [1]}],
        "\ud800",
    )
    wrong = [(message, {}) for message in messages]
    for message, options in [
        *wrong,
        ("abc", {"max_tokens": 0}),
        ("abc", {"stop": 5}),
        ("abc", {"kv_bits": 4}),
        ("abc", {"on_text": 5}),
        ("abc", {"on_token": "print"}),
    ]:
        with refusal("message" if not options else f"^{next(iter(options))} "):
            session.send(message, **options)
        assert session.tokens == before
    assert session.send("abc").last.prompt_tokens == 3, "the cache was kept"


def test_bad_sessions_are_refused():
    for option in (
        {"prompt_cache": []},
        {"when_full": "explode"},
        {"memory_budget": 0},
        {"beam_width": 0},
    ):
        with refusal(f"^{next(iter(option))} "):
            make_session(**option)


def test_a_template_that_drops_answers_is_prefilled_again():
    template = "{% for m in messages if m.role == 'user' %}U{{ m.content }}{% endfor %}A"
    session = Session(make_model("qwen3"), chat_tokenizer(template), max_tokens=4)
    session.send("one")
    answer = session.send("two")
    assert session.tokenizer.decode(session.tokens[: -len(answer.tokens)]) == "UoneUtwoA"
    assert_fresh(session, answer)


def test_a_turns_plan_overrides_the_sessions():
    model, tokenizer, drafter = load_demo()
    session = Session(model, tokenizer, drafter, draft_depth=3, max_tokens=8)
    assert session.send("class Stack:", plan="off").last.drafted == 0
    assert session.send("\n", plan=(2, 2)).last.drafted > 0
    fixed = Session(model, tokenizer, drafter, plan=(1, 3), temp=0.7, max_tokens=8)
    assert fixed.send("class Stack:", draft_depth=2).last.drafted > 0
    assert fixed.send("\n", sampler=lambda logprobs: mx.argmax(logprobs, axis=-1)).last is not None
    copied = plain_session(plan="off").send("abcabcabcabcabc", max_tokens=40, context=True)
    assert copied.last.context_drafted > 0


def test_a_model_must_be_evaluated_in_its_loading_thread(tmp_path):
    """This rope keeps frequencies that are not parameters."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = toys.make_model("llama-yarn", vocab=53)
    save_target(tmp_path, model, chat_tokenizer()._tokenizer, rope_scaling=rope, head_dim=32)
    with workers(2) as (one, other):
        model, tokenizer = one.submit(load, tmp_path).result()
        assert (
            other.submit(lambda: Session(model, tokenizer, max_tokens=4).send("hello"))
            .result()
            .tokens
        )
        unevaluated = one.submit(lambda: mlx_lm.load(str(tmp_path))[0]).result()
        with refusal(r"was loaded in another thread, .*: load it with mlx_redrafter\.load"):
            other.submit(Session, unevaluated, tokenizer).result()
        session = one.submit(Session, unevaluated, tokenizer, max_tokens=4).result()
        assert other.submit(session.send, "hello").result().tokens


@pytest.mark.parametrize("vocab", [257, 101])
@pytest.mark.parametrize("plan", ["off", (1, 4)])
def test_exact_turns_have_the_same_bits_after_a_failure(vocab, plan, tmp_path):
    """A failure drops the cache; earlier answers are then read as they were decoded.

    Also in a session that was saved and loaded.
    """
    model = small_llama(vocab=vocab, layers=2, seed=3)
    drafter = small_drafter(vocab=vocab)

    def fail(done, total):
        raise ValueError("a bug of the caller")

    tokenizer = make_tokenizer(vocab=vocab)
    options = {"plan": plan, "exact": True, "max_tokens": 20}

    def open_session():
        return Session(model, tokenizer, drafter, **options)

    def take_turn(session, text):
        found = list(session.stream(text))
        return [each.token for each in found], [each.logprobs.tolist() for each in found]

    disturbed = open_session()
    undisturbed = open_session()
    for text in ("abcde", "fgh"):
        assert take_turn(disturbed, text) == take_turn(undisturbed, text)
    file = tmp_path / "session.safetensors"
    disturbed.save(file)
    loaded = Session.load(file, model, tokenizer, drafter, **options)
    for session in (disturbed, loaded):
        with pytest.raises(ValueError, match="a bug of the caller"):
            session.send("ij", prompt_progress_callback=fail)
    for text in ("ij", "klm"):
        expected = take_turn(undisturbed, text)
        assert take_turn(disturbed, text) == expected
        assert take_turn(loaded, text) == expected
