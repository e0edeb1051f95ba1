"""Stop strings in streamed text."""

import itertools
from collections.abc import Iterator, Sequence

import pytest

from helpers.refusals import refusal
from mlx_redrafter.text.stop_strings import StopStrings


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Expected text: everything before the stop string that completes first, or the longest."""
    places = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return (text[: min(places)[1]], True) if places else (text, False)


def feed(stops: StopStrings, chunks: Sequence[str]) -> tuple[str, bool]:
    """Feeds the text in pieces."""
    shown = ""
    for chunk in chunks:
        more, found = stops.feed(chunk)
        shown += more
        if found:
            return shown, True
    return shown + stops.flush(), False


def all_chunks(text: str) -> Iterator[list[str]]:
    """Every way to split a text."""
    for cuts in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        at = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("aaabaaab", ["aab"]),
        ("ends in en", ["end"]),
        ("the cat", []),
        ("xabcdy", ["abcd", "c"]),
        ("the cats!", ["cat", "cats"]),
        ("the.\n\ncat", ["\n\n", "."]),
    ],
)
def test_any_chunking_stops_at_the_same_place(text, stops):
    for chunks in all_chunks(text):
        assert feed(StopStrings(stops), chunks) == cut_at_stop(text, stops)


def test_a_partial_stop_string_is_buffered():
    stops = StopStrings(["cat"])
    fed = [stops.feed(piece)[0] for piece in ("the ", "c", "a", "r ", "ca")]
    assert (fed, stops.flush(), stops.flush()) == (["the ", "", "", "car ", ""], "ca", "")


def test_an_empty_stop_string_is_refused():
    for stops in ([""], ["cat", ""], [3]):
        with refusal(r"^stop must be non-empty strings, got \[.*\]$"):
            StopStrings(stops)
