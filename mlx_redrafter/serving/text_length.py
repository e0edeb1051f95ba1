"""How few tokens a text can have, found without encoding it: that takes seconds and 80 MB per megabyte."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

COMPOSING, MAX_COMPOSED = ("NFC", "NFKC"), 4
"""Normalizers that may replace several characters by one, though not in ASCII text; and how many at most."""

KEEPING = (*COMPOSING, "NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits")
"""Other steps before a tokenizer's model that do not shorten a text."""

OTHER_THAN_LETTERS = bytes(set(range(256)) - set(string.ascii_letters.encode()))


class ShortestEncoding:
    """Counts the fewest tokens that a tokenizer may need for a text.

    A token stands for at most as many characters, and as many letters, as the longest in the vocabulary. This holds for
    BPE with tokens for all bytes; only control characters may have none, and are not counted. Other tokenizers may drop
    any text, or make one token of it, so for them the count is always 0.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend, vocabulary = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
        described = {} if backend is None else json.loads(backend.to_str())
        model = described.get("model", {})
        steps = [*_list_steps(described.get("normalizer")), *_list_steps(described.get("pre_tokenizer"))]
        kinds = {step["type"] for step in steps}
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        if is_byte_level := "ByteLevel" in kinds:  # the first byte of several can be missing: the others are counted
            names = {byte: name for byte, name in bytes_to_unicode().items() if byte < 0xC0}
        missing = [byte for byte, name in names.items() if name not in vocabulary]
        self._lost = [chr(byte) for byte in missing if byte < ord(" ")]
        has_bytes = (is_byte_level or model.get("byte_fallback")) and len(self._lost) == len(missing)
        is_plain = not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        self._is_known = model.get("type") == "BPE" and has_bytes and is_plain and all(map(_keeps_text, steps))
        self._may_compose = not kinds.isdisjoint(COMPOSING)
        # Such tokens also stand for the spaces around them.
        self._takes_spaces = any(each["lstrip"] or each["rstrip"] for each in described.get("added_tokens", ()))
        self._most_characters = max(map(len, vocabulary))
        self._most_letters = max(1, *map(_count_letters, vocabulary))

    def count_tokens(self, text: str) -> int:
        """Returns the fewest tokens for a text; 0 if that is not known."""
        characters, letters = len(text) - sum(map(text.count, self._lost)), _count_letters(text)
        if self._may_compose and not text.isascii():
            characters, letters = characters // MAX_COMPOSED, 0
        if self._takes_spaces:
            characters = 0
        fewest = max(characters // self._most_characters, letters // self._most_letters)
        return fewest if self._is_known else 0


def _list_steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the normalizers or pre-tokenizers of a description, without sequences."""
    if step is not None and step["type"] == "Sequence":
        for each in step.get("normalizers") or step.get("pretokenizers") or ():
            yield from _list_steps(each)
    elif step is not None:
        yield step


def _keeps_text(step: dict[str, Any]) -> bool:
    kind, pattern = step["type"], step.get("pattern", {})
    if kind == "Replace":
        return "String" in pattern and len(pattern["String"]) <= len(step["content"])
    return kind in KEEPING or (kind == "Split" and step["behavior"] != "Removed")


def _count_letters(text: str) -> int:
    """The number of ASCII letters: few tokens have more than 30 of them, but some have 100 spaces or dashes."""
    return len(text.encode("ascii", "ignore").translate(None, OTHER_THAN_LETTERS))
