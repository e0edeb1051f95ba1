"""Stop strings in a stream of text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.stop_strings import StopStrings


def whole(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """What should be shown of `text`: all before the stop string that is complete first, the longest if several are."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def streamed(watch: Any, chunks: Sequence[str]) -> tuple[str, bool]:
    """The same, fed to `watch` piece by piece."""
    shown = ""
    for chunk in chunks:
        more, found = watch.feed(chunk)
        shown += more
        if found:
            return shown, True
    return shown + watch.rest(), False


def chunkings(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    for cuts in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        at = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(at)]


class PieceByPiece:
    """The mistake to be caught: looks for stop strings inside each piece only."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops

    def feed(self, text: str) -> tuple[str, bool]:
        return whole(text, self.stops)

    def rest(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("hello world", "lo w"),
        ("aaabaaab", "aab"),
        ("abababac", "abac"),
        ("no such", "xyz"),
        ("ends in en", "end"),
        ("", "x"),
    ],
)
def test_any_chunking_of_a_text_stops_where_find_does(text: str, stop: str) -> None:
    at = text.find(stop)
    assert whole(text, [stop]) == ((text, False) if at < 0 else (text[:at], True))
    for chunks in chunkings(text):
        assert streamed(StopStrings([stop]), chunks) == whole(text, [stop])


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_stop_alike_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=40))
    stop = "".join(rng.choices("ab", k=rng.randint(1, 7)))
    chunks = []
    rest = text
    while rest:
        size = rng.randint(0, 4)
        chunks.append(rest[:size])
        rest = rest[size:]
    assert streamed(StopStrings([stop]), chunks) == whole(text, [stop])


def test_looking_at_each_piece_alone_would_be_caught() -> None:
    # Negative control.
    wrong = [chunks for chunks in chunkings("hello world") if streamed(PieceByPiece(["lo w"]), chunks)[1] is False]
    assert wrong


@pytest.mark.parametrize("stops", [["sat", "dog"], ["\n\n", "."], ["cat", "cats"]])
def test_the_first_of_several_stop_strings_ends_the_text(stops: list[str]) -> None:
    for text in ("the cats sat. the dog", "the dog\n\nsat", "the cat", "the end"):
        for size in range(1, len(text) + 1):
            chunks = [text[i : i + size] for i in range(0, len(text), size)]
            assert streamed(StopStrings(stops), chunks) == whole(text, stops)


def test_a_stop_string_inside_another_ends_the_text_alike_however_it_is_cut() -> None:
    for chunks in chunkings("xabcdy"):
        assert streamed(StopStrings(["abcd", "c"]), chunks) == whole("xabcdy", ["abcd", "c"])


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    watch = StopStrings(["cat"])
    assert [watch.feed(piece) for piece in ("the ", "c", "a", "r ", "ca", "t!")] == [
        ("the ", False),
        ("", False),
        ("", False),
        ("car ", False),
        ("", False),
        ("", True),
    ]


def test_what_was_held_back_is_given_once_at_the_end() -> None:
    watch = StopStrings(["cat"])
    assert watch.feed("the ca") == ("the ", False)
    assert (watch.rest(), watch.rest()) == ("ca", "")


def test_without_stop_strings_everything_passes() -> None:
    assert streamed(StopStrings([]), ["the ", "", "cat"]) == ("the cat", False)


@pytest.mark.parametrize("stops", [[""], ["cat", ""], [3]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(RedrafterError, match=r"^a stop string must be a text that is not empty, got \[.*\]$"):
        StopStrings(stops)
