"""The fewest tokens of a text: never more than it has, and enough to refuse prompts that are far too long."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_redrafter.serving.text_length import ShortestEncoding

BYTES = bytes_to_unicode()
SPACES = "  \n\t\u3000"
COMBINING = "e\u0301 a\u0328\u0301\u1100\u1161\u11a8\u1f82"
TEXTS = (
    "the catthe cat ",
    "cat\n\n" + " " * 90,
    "\x04\x06\x00",
    "<end>  \n  <end>",
    COMBINING,
    "\u4e16\u754c\U0001f600\U000f0000",
)


def make_bpe(
    names: Iterable[str], *steps: Any, normalizer: Any = None, added: Sequence[AddedToken] = (), **model: Any
) -> SimpleNamespace:
    """A tokenizer that merges " the", " cat" and spaces, as far as its vocabulary has `names`."""
    names, space = list(names), "\u2581" if model.get("byte_fallback") else BYTES[ord(" ")]
    vocabulary = {name: at for at, name in enumerate(names)}
    merges = []
    for word in (f"{space}the", f"{space}cat", space * 64):
        for size in range(2, len(word) + 1):
            parts = word[: size - 1], word[size - 1]
            if parts not in merges and vocabulary.keys() >= set(parts):
                vocabulary.setdefault("".join(parts), len(vocabulary))
                merges.append(parts)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return SimpleNamespace(backend_tokenizer=tokenizer, get_vocab=tokenizer.get_vocab)


def byte_level(**options: Any) -> SimpleNamespace:
    return make_bpe(BYTES.values(), pre_tokenizers.ByteLevel(add_prefix_space=False), **options)


END = [AddedToken("<end>", lstrip=True, rstrip=True)]
SENTENCEPIECE = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
PIECES = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
FALLBACK: dict[str, Any] = {"normalizer": SENTENCEPIECE, "byte_fallback": True, "fuse_unk": True, "unk_token": "a"}
PRESENT = [name for byte, name in BYTES.items() if byte not in (0, 4, 6, 0xF3)]

KNOWN = {
    "bytes": byte_level(),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "compatible": byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "spaces around": byte_level(added=END),
    "without some bytes": make_bpe(PRESENT, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "words": make_bpe(BYTES.values(), pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel()),
    "fallback": make_bpe([*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))], **FALLBACK),
}
UNKNOWN = {
    "without the byte of a letter": make_bpe(
        [name for name in BYTES.values() if name != "t"], pre_tokenizers.ByteLevel(add_prefix_space=False)
    ),
    "unknown characters in one": make_bpe(PIECES, **FALLBACK | {"byte_fallback": False}),
    "fallback without a byte": make_bpe([*PIECES, *(f"<0x{byte:02X}>" for byte in range(255))], **FALLBACK),
    "removed words": make_bpe(BYTES.values(), pre_tokenizers.Split("cat", "removed"), pre_tokenizers.ByteLevel()),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "replaced": byte_level(normalizer=normalizers.Replace("the", "t")),
    "replaced by a pattern": byte_level(normalizer=normalizers.Replace(Regex("the"), "the")),
    "no backend": SimpleNamespace(get_vocab=lambda: {"a": 0}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer, generator = KNOWN[name], random.Random(name)
    shortest = ShortestEncoding(tokenizer)
    texts = [text * 300 for text in TEXTS]
    texts += ["".join(generator.choices(TEXTS, k=40)) for _ in range(30)]
    texts += ["".join(generator.choices("".join(TEXTS) + SPACES, k=400)) for _ in range(30)]
    for text in texts:
        for form in (text, unicodedata.normalize("NFD", text)):
            assert shortest.count_tokens(form) <= len(tokenizer.backend_tokenizer.encode(form))


@pytest.mark.parametrize("name", KNOWN)
def test_long_texts_have_many_tokens(name: str) -> None:
    count = ShortestEncoding(KNOWN[name]).count_tokens
    assert count("the cat " * 1000) >= 6000 // 3
    assert (count(" " * 6400) >= 100) is (name != "spaces around")
    assert (count("\u4e16" * 6400) >= 100 // 4) is (name != "spaces around")


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_known_of_tokenizers_that_may_drop_text(name: str) -> None:
    assert ShortestEncoding(UNKNOWN[name]).count_tokens("the cat " * 1000) == 0
