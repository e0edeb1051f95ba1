"""What a client that asks for it is told of drafting while its answer is made: `include_drafts` in `stream_options`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..engine.types import Tree
from ..generate import GenerationResponse


@dataclass(frozen=True)
class News:
    """Of an answer so far; nothing of MLX in it, so that a handler may have it.

    Attributes:
        tokens: those since the last news, each with its `text` and whether it is `from_draft`.
        rounds, drafted, accepted: see `GenerationResponse`.
        seconds: since the first token, without the turns of other answers.
        tree: of the last round, if there was one since the last news: the nodes' `tokens` as text, their `parents`
            (node 0 is the root, its own parent), the `path` of nodes that were kept, and the model's own token behind
            it, `next`.
    """

    tokens: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    tree: dict[str, Any] | None = None

    def behind(self, earlier: News) -> News:
        """Both in one."""
        return replace(self, tokens=earlier.tokens + self.tokens, tree=self.tree or earlier.tree)

    def as_json(self) -> dict[str, Any]:
        """The field `redrafter` of a chunk; `tree` only where there is one."""
        told = vars(self) | {"seconds": round(self.seconds, 6)}
        return told if self.tree else {name: value for name, value in told.items() if name != "tree"}


class Watch:
    """Follows one answer, in the thread that generates.

    Args:
        decode: text of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._own = 0.0
        self._since: float | None = None
        self._begun = False
        self._round: tuple[list[int], list[int], list[int], int] | None = None

    def on_round(self, tree: Tree, path: list[int], chosen: list[int]) -> None:
        """Keeps a round as numbers; see `Options`. Both arrays are computed: nothing waits."""
        self._round = cast(list[int], tree.tokens.tolist()), cast(list[int], tree.parents.tolist()), path, chosen[-1]

    def pause(self) -> None:
        """Stops the time: another answer's turn begins."""
        if self._since is not None:
            self._own += time.perf_counter() - self._since
            self._since = None

    def go_on(self) -> None:
        """Lets the time run, once there was a token."""
        if self._begun and self._since is None:
            self._since = time.perf_counter()

    def news(self, response: GenerationResponse) -> News:
        """Of a token, which must be told at once; the first one starts the time."""
        seconds = self._own + (0.0 if self._since is None else time.perf_counter() - self._since)
        self._begun = True
        self.go_on()
        tree, self._round = self._drawn(), None
        return News(
            [{"text": response.text, "from_draft": response.from_draft, "draft_source": response.draft_source}],
            response.rounds, response.drafted, response.accepted, seconds, tree,
        )  # fmt: skip

    def _drawn(self) -> dict[str, Any] | None:
        """The round as text."""
        if self._round is None:
            return None
        tokens, parents, path, last = self._round
        *words, following = [self._decode([token]) for token in (*tokens, last)]
        return {"tokens": words, "parents": parents, "path": path, "next": following}


class Ledger:
    """What has come of an answer and was not sent yet, in the thread of its handler."""

    def __init__(self) -> None:
        self._news = News()

    def noted(self, responses: Iterator[Any]) -> Iterator[Any]:
        """The same responses; their news are kept."""
        for response in responses:
            if (news := getattr(response, "news", None)) is not None:
                self._news = news.behind(self._news)
            yield response

    def take(self) -> dict[str, Any]:
        """What is sent now, and not again."""
        told = self._news.as_json()
        self._news = replace(self._news, tokens=[], tree=None)
        return told
