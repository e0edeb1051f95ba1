"""What a turn adds behind what was said is what the whole conversation would have there."""

from __future__ import annotations

import string
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from test_session import make_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from toys import make_tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_redrafter import Session
from mlx_redrafter.session.chat_template import behind, continued, ids_of, rendered, whole

SPACE = "\u2581"
LETTERS = ["<unk>", SPACE, *string.ascii_letters, "(", ")", ":", "\n", "."]
JOINED = [SPACE + "t", "ab", "E" + SPACE, ")" + ":"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ ' E ' if m.role == 'assistant' else ' A ' }}{% endfor %}"
TIGHT = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'assistant' else '.' }}{% endfor %}"


def sentencepiece(kind: str, template: str | None = None) -> Any:
    """Letters and a few pairs, with a space in front of every text, as Llama 2's and Mistral's tokenizers have it."""
    vocab = {piece: number for number, piece in enumerate([*LETTERS, *JOINED])}
    pairs = [(piece[0], piece[1]) for piece in JOINED]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>"))
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        parts = [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="always", split=False)
    wrapped: Any = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False), eos_token_ids=[999]
    )
    if template is not None:
        wrapped._tokenizer.chat_template, wrapped.has_chat_template = template, True
    return wrapped


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize("template", [None, TEMPLATE, TIGHT])
def test_a_sentencepiece_tokenizer_adds_no_space_where_a_turn_begins(kind: str, template: str | None) -> None:
    tokenizer = sentencepiece(kind, template)
    before, said = [{"role": "user", "content": "def ma"}], "in"
    for text in ("cd", " cd", "():", "i am", "\nab", ".", "  two"):
        new = [{"role": "user", "content": text}]
        read = [*whole(tokenizer, before), *continued(tokenizer, said)]
        ids = behind(tokenizer, before, new, read[-1])
        assert ids is not None
        messages = [*before, {"role": "assistant", "content": said}, *new]
        text = "".join(m["content"] for m in messages) if template is None else rendered(tokenizer, messages, {})
        assert tokenizer.decode([*read, *ids]) == text
        assert [*read, *ids] == ids_of(tokenizer, text), "here every piece is one that stands for itself"


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize(
    ("between", "said_twice"), [("", False), (" ", False), ("\n", False), (" \n", False), (".", True), (" b ", True)]
)
def test_an_end_that_was_said_is_not_said_again_behind_the_templates_whitespace(
    kind: str, between: str, said_twice: bool
) -> None:
    end = f"'{between}</s>' if m.role == 'assistant' else ':'".replace("\n", "\\n")
    tokenizer = sentencepiece(kind, "{% for m in messages %}{{ m.content }}{{ " + end + " }}{% endfor %}")
    tokenizer._tokenizer.add_special_tokens({"eos_token": "</s>"})
    last = tokenizer._tokenizer.eos_token_id
    tokenizer.eos_token_ids = [last]
    before, new = ([{"role": "user", "content": each}] for each in ("ab", "cd"))
    read = [*whole(tokenizer, before), *continued(tokenizer, "in")]
    cut, ended = behind(tokenizer, before, new, read[-1]), behind(tokenizer, before, new, last)
    assert cut is not None and [*read, *cut] == ids_of(tokenizer, f"ab:in{between}</s>cd:")
    assert ended == (cut if said_twice else cut[cut.index(last) + 1 :])


def test_a_conversation_of_a_session_has_no_spaces_that_nobody_said() -> None:
    talk = Session(make_model("qwen3"), sentencepiece("prepend"), max_tokens=2)
    talk.send("def ma")
    talk.send("in():")
    said = [each["content"] for each in talk.messages]
    assert talk.tokenizer.decode(talk.tokens[: len("def ma") + 1]) == "def ma"
    assert talk.tokenizer.decode(talk.tokens).startswith("def ma" + said[1] + "in():")


def test_other_tokenizers_are_asked_for_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(vocab=53)
    asked: list[str] = []
    encode = tokenizer._tokenizer.encode
    monkeypatch.setattr(
        tokenizer._tokenizer, "encode", lambda text, **more: (asked.append(text), encode(text, **more))[1]
    )
    assert continued(tokenizer, "hello") == encode("hello", add_special_tokens=False)
    assert asked == ["hello", "a"]
