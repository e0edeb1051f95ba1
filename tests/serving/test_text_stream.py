"""Splitting tokens into text, reasoning and tool calls, wherever token boundaries are."""

import json
from pathlib import Path

import pytest
from mlx_lm import tokenizer_utils
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mlx_redrafter.serving.formats.text_stream import TextStream, decode_inside

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def read(tokenizer, pieces: list[str], state: str | None = "normal", stops: tuple[str, ...] = ()):
    """Streams the pieces. Returns (text, reasoning, calls, raw text, stream)."""
    stream = TextStream(tokenizer, state, stops, TOOLS)
    segments = []
    raw = ""
    for token in [
        *(token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)),
        None,
    ]:
        if stream.stopped_by is None:
            shown, more = stream.add(token, is_last=token is None)
            segments = segments + more
            raw = raw + shown
    text, reasoning = (
        "".join(each.text for each in segments if each.kind == kind)
        for kind in ("text", "reasoning")
    )
    calls = [(each.name, json.loads(each.text)) for each in segments if each.kind == "tool_call"]
    return text, reasoning, calls, raw, stream


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_token_boundaries_do_not_matter(chat_tokenizer, size):
    whole = f"Hi <think>hm, <5</think>→ so: {CALL}{CALL} and <tool"
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    text, reasoning, calls, raw, stream = read(chat_tokenizer, pieces)
    assert text == "Hi → so:  and <tool"
    assert reasoning == "hm, <5"
    assert calls == [("f", {"x": 1})] * 2
    assert raw == whole
    assert stream.has_tool_calls
    assert read(chat_tokenizer, pieces, None)[:3] == (whole, "", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("whole", "stops", "expected", "found"),
    [
        ("one, two", (", t", "zzz"), "one", ", t"),
        ("one, two", ("two!",), "one, two", None),
        ("aab", ("ab", "b"), "a", "ab"),
        ("x<think>abc", ("bc",), "x", "bc"),
    ],
)
def test_stop_strings_are_found_and_named(chat_tokenizer, size, whole, stops, expected, found):
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    text, _, _, _, stream = read(chat_tokenizer, pieces, "normal", stops)
    assert text == expected
    assert stream.stopped_by == found


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"x": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments": {"x": 1}',
        '<tool_call>{"name": "f", "arguments": {"x": 1}}, "id": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "a"b"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ,}}</tool_call>',
        '<tool_call>"a": {"name": "f",}</tool_call>',
        '<tool_call>{"name": null, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    ],
)
def test_an_invalid_call_is_text(chat_tokenizer, call, caplog):
    text, _, calls, _, stream = read(chat_tokenizer, [call])
    assert text == call
    assert not calls
    assert not stream.has_tool_calls
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("arguments", ['""', "null", "{}", '"null"', '" "', '"{}"'])
def test_a_call_may_have_no_arguments(chat_tokenizer, arguments):
    assert read(chat_tokenizer, [CALL.replace('{"x": 1}', arguments)])[2] == [("f", {})]
    assert read(chat_tokenizer, ['<tool_call>{"name": "f"}</tool_call>'])[2] == [("f", {})]


@pytest.mark.parametrize(
    ("call", "x"),
    [
        ('{"name": "f", "arguments": {"x": "a\n\tb"}}', "a\n\tb"),
        ('{"name": "f", "arguments": {"x": "\\"a\nb\\\\"}}', '"a\nb\\'),
        ('{"name": "f", "arguments": {"x": "a \\\n  b"}}', "a \\\n  b"),
        ('{"name": "f", "arguments": {"x": "a\\\\\n\\n"}}', "a\\\n\n"),
        ('{"name": "f", "arguments": {"x": 1,},}', 1),
        ('{"name": "f", "arguments": {"x": [1, 2, ]\n, }}', [1, 2]),
        ('{"name": "f", "arguments": {"x": 1}}}', 1),
        ('{"name": "f", "arguments": {"x": 1}}\n}]', 1),
        ('{{"name": "f", "arguments": {"x": 1}}}', 1),
        ('{{"name": "f", "arguments": {"x": 1}}', 1),
        ('[{"name": "f", "arguments": {"x": 1}},]', 1),
        ('{"name": "f", "arguments": {"x": "{,}\n,]}}",}}}', "{,}\n,]}}"),
    ],
)
def test_common_mistakes_are_repaired(chat_tokenizer, call, x):
    assert read(chat_tokenizer, [f"<tool_call>{call}</tool_call>"])[:3] == (
        "",
        "",
        [("f", {"x": x})],
    )


@pytest.mark.parametrize("between", ["", "\n", " \n\n"])
def test_whitespace_between_calls_is_dropped(chat_tokenizer, between):
    assert read(chat_tokenizer, [f"{CALL}{between}{CALL}{between}"])[:2] == ("", "")
    assert read(chat_tokenizer, [f"a\n{CALL}{between}b{between}c"])[0] == f"a\n{between}b{between}c"


def test_a_truncated_call_may_be_complete(chat_tokenizer):
    assert read(chat_tokenizer, [CALL.removesuffix("</tool_call>")])[2] == [("f", {"x": 1})]


def test_without_tools_a_call_marker_is_text(chat_tokenizer):
    stream = TextStream(chat_tokenizer, "reasoning", [], [])
    tokens = chat_tokenizer.encode("A <tool_call> is</think>42", add_special_tokens=False)
    segments = [each for token in tokens for each in stream.add(token)[1]] + stream.add(
        None, is_last=True
    )[1]
    texts = {
        kind: "".join(each.text for each in segments if each.kind == kind)
        for kind in ("reasoning", "text")
    }
    assert texts == {"reasoning": "A <tool_call> is", "text": "42"}


PIECES = [
    "<unk>",
    "</s>",
    "a",
    "▁a",
    "▁",
    "▁▁▁",
    "▁so",
    "re",
    "turn",
    *(f"<0x{n:02X}>" for n in range(256)),
]
STRIP = decoders.Strip(" ", 1, 0)
REPLACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "SentencePiece": decoders.Sequence([*REPLACE, STRIP]),
    "SentencePiece without a prefix": decoders.Sequence(REPLACE),
    "Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
"""mlx-lm has a detokenizer for the first two, and decodes the last line by line."""


def make_spaced(name: str, folder: Path):
    """mlx-lm's wrapper of a tokenizer with one of the decoders."""
    vocab = {piece: at for at, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = DECODERS[name]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.save_pretrained(folder)
    return tokenizer_utils.load(folder)


@pytest.mark.parametrize("name", [*DECODERS, "bytes"])
def test_a_text_that_continues_another_keeps_its_spaces(name, tmp_path, chat_tokenizer):
    if name == "bytes":
        tokenizer = chat_tokenizer
        ids = tokenizer.encode(" so\n   return é", add_special_tokens=False)
    else:
        tokenizer = make_spaced(name, tmp_path)
        pieces = ["▁so", "<0x0A>", "▁▁▁", "re", "turn", "▁", "<0xC3>", "<0xA9>"]
        ids = [PIECES.index(piece) for piece in pieces]
    texts = []
    for continues in (True, False):
        stream = TextStream(tokenizer, None, (), (), continues=continues)
        texts.append("".join(stream.add(token)[0] for token in ids))
        texts[-1] += stream.add(None, is_last=True)[0]
    plain = tokenizer.detokenizer
    for token in ids:
        plain.add_token(token)
        assert plain.last_segment is not None
    plain.finalize()
    assert texts == [" so\n   return é", plain.text]
    assert decode_inside(tokenizer, ids[:1])[0] == " "
