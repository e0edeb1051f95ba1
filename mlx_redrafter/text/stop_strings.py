"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RedrafterError


class StopStrings:
    """Cuts a stream of text before the first complete stop string.

    Text that may turn out to be part of one is delayed.

    Args:
        stop: one string, several, or None.

    Attributes:
        found: the stop string that ended the text; None until then.
    """

    def __init__(self, stop: str | Sequence[str] | None) -> None:
        if stop is not None and not isinstance(stop, Sequence):
            raise RedrafterError(f"stop must be a string or a list of strings, got {stop!r}")
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(isinstance(each, str) and each for each in self._stops):
            raise RedrafterError(f"stop must be non-empty strings, got {self._stops!r}")
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string ended it)."""
        self._held += text
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            _, start, self.found = min(found)
            return self._held[:start], True

        begun = (stop[:count] for stop in self._stops for count in range(len(stop)))
        delayed = max(filter(self._held.endswith, begun), key=len, default="")
        shown = self._held.removesuffix(delayed)
        self._held = delayed
        return shown, False

    def flush(self) -> str:
        """The delayed text; called when the stream has ended."""
        rest = self._held
        self._held = ""
        return rest
