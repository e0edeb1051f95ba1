"""A turn adds exactly what the chat template puts after the last answer, without extra spaces."""

import string

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.refusals import refusal
from helpers.sessions import chat_tokenizer, make_model, plain_session
from mlx_redrafter import Session
from mlx_redrafter.text.chat_template import (
    encode_continuation,
    encode_conversation,
    encode_turn,
    render,
)

SPACE = "\u2581"
LETTERS = ["<unk>", SPACE, *string.ascii_letters, "(", ")", ":", "\n", "."]
JOINED = [SPACE + "t", "ab", "E" + SPACE, ")" + ":"]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ m.content }}{{ ' E ' if m.role == 'assistant' else ' A ' }}"
    "{% endfor %}"
)
TIGHT = (
    "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'assistant' else '.' }}{% endfor %}"
)


def sentencepiece(kind: str, template: str | None = None):
    """A tokenizer of letters and pairs that adds a space before every text, as Llama 2's does."""
    vocab = {piece: number for number, piece in enumerate([*LETTERS, *JOINED])}
    pairs = [(piece[0], piece[1]) for piece in JOINED]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>"))
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        parts = [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="always", split=False
        )
        tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="always", split=False)
    inner = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped = TokenizerWrapper(inner, eos_token_ids=[999])
    if template is not None:
        wrapped._tokenizer.chat_template = template
        wrapped.has_chat_template = True
    return wrapped


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize("template", [None, TEMPLATE, TIGHT])
def test_sentencepiece_adds_no_space_before_a_turn(kind, template):
    tokenizer = sentencepiece(kind, template)
    before = [{"role": "user", "content": "def ma"}]
    answer = "in"
    for text in ("cd", " cd", "():", "\nab", ".", "  two"):
        new = [{"role": "user", "content": text}]
        read = [
            *encode_conversation(tokenizer, before, {}),
            *encode_continuation(tokenizer, answer),
        ]
        ids = encode_turn(tokenizer, before, new, read[-1], {}, {})
        messages = [*before, {"role": "assistant", "content": answer}, *new]
        if template is None:
            rendered = "".join(message["content"] for message in messages)
        else:
            rendered = render(tokenizer, messages, {})
        assert tokenizer.decode([*read, *ids]) == rendered
        assert [*read, *ids] == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize(
    ("between", "twice"), [("", False), (" ", False), (" \n", False), (" b ", True)]
)
def test_generated_end_token_is_not_repeated(kind, between, twice):
    end = f"'{between}</s>' if m.role == 'assistant' else ':'".replace("\n", "\\n")
    tokenizer = sentencepiece(
        kind, "{% for m in messages %}{{ m.content }}{{ " + end + " }}{% endfor %}"
    )
    tokenizer._tokenizer.add_special_tokens({"eos_token": "</s>"})
    last = tokenizer._tokenizer.eos_token_id
    tokenizer.eos_token_ids = [last]
    before = [{"role": "user", "content": "ab"}]
    new = [{"role": "user", "content": "cd"}]
    read = [*encode_conversation(tokenizer, before, {}), *encode_continuation(tokenizer, "in")]
    cut = encode_turn(tokenizer, before, new, read[-1], {}, {})
    ended = encode_turn(tokenizer, before, new, last, {}, {})
    assert [*read, *cut] == tokenizer.encode(f"ab:in{between}</s>cd:", add_special_tokens=False)
    assert ended == (cut if twice else cut[cut.index(last) + 1 :])


THINKING = (
    "{% if tools %}{{ 't' * (tools | length) }}{% endif %}"
    "{% for m in messages %}"
    "{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{{ 'z' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A{% if think is defined and think %}h{% endif %}{% endif %}"
)


def make_thinker(**settings) -> Session:
    """A session whose template shows tools first and an argument last."""
    return Session(make_model("qwen3"), chat_tokenizer(THINKING), max_tokens=4, **settings)


def send(session: Session, text: str, **options) -> tuple[str, int]:
    """Returns (the conversation up to the new answer as text, the number of tokens prefilled)."""
    answer = session.send(text, **options)
    before = session.tokens[: -len(answer.tokens)]
    return session.tokenizer.decode(before), answer.last.prompt_tokens


def look():
    """Looks."""


def test_a_turns_template_arguments_override_the_sessions():
    session = make_thinker(chat_template_config={"think": True})
    assert send(session, "a") == ("UazAh", 5)
    before = session.tokens
    text, count = send(session, "b", chat_template_config={"think": False})
    assert text.endswith("UbzA")
    assert session.tokens[: len(before)] == before
    assert count < 7, "nothing is prefilled twice"
    assert send(session, "c", chat_template_config=None)[0].endswith("UczA")
    assert send(session, "d")[0].endswith("UdzAh")


def test_changed_tools_are_prefilled_again(tmp_path):
    session = make_thinker(tools=[look])
    assert send(session, "a")[0] == "tUazA"
    assert send(session, "b")[1] < 7
    text, count = send(session, "c", tools=[look, look])
    assert text.startswith("ttUazA")
    assert count == len(text)
    assert send(session, "d", tools=[look, look])[1] < 7, "only the first time"
    session.save(tmp_path / "talk.safetensors")
    loaded = Session.load(
        tmp_path / "talk.safetensors", session.model, session.tokenizer, max_tokens=4
    )
    assert send(loaded, "e")[0].startswith("Uaz"), "without tools, so prefilled again"
    assert send(session, "e")[0].startswith("tUazA")
    assert send(session.fork(), "f")[1] < 7


def test_unusable_template_arguments_are_refused():
    session = make_thinker()
    for options in ({"chat_template_config": 5}, {"tools": "look"}, {"tools": [5]}):
        with refusal(r"^(chat_template_config must|tools must|the chat template rejects)"):
            session.send("a", **options)
    for name in ("tokenize", "add_generation_prompt", "conversation"):
        with refusal(f"the chat template rejects .* argument '{name}'"):
            session.send("a", chat_template_config={name: True})
    assert session.send("a").tokens
    with refusal("tools need a chat template, and the tokenizer has none"):
        plain_session(tools=[{}])
