"""Stop strings in a stream of text. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import RedrafterError


class StopStrings:
    """Passes text on up to the stop string that is complete first, and holds back what might become one.

    Args:
        stops: the strings; may be empty.

    Attributes:
        found: the stop string that ended the text; None before.

    Raises:
        RedrafterError: one of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise RedrafterError(f"a stop string must be a text that is not empty, got {list(stops)!r}")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string ended it)."""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            return self._held[:at], True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def rest(self) -> str:
        """The text that was held back, once there is no more."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, stop: str) -> int:
        """How many characters at the end begin `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
