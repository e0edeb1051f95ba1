"""Images in messages: where they may come from, and how an answer to them passes on its way from mlx-lm's decoding."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any

from mlx_lm.server import _image_parts, _image_url

from .bodies import Refusal

DATA = ("data:",)
WEB = ("http://", "https://")


def check_urls(messages: list[dict[str, Any]], *, fetch: bool) -> None:
    """Looks at where each image is said to be, before anything is fetched.

    Args:
        fetch: whether the server may ask others for images.

    Raises:
        Refusal: somewhere else than it may be.
    """
    allowed = DATA + WEB if fetch else DATA
    for part in _image_parts(messages):
        url = _image_url(part)
        if not isinstance(url, str) or not url.startswith(allowed):
            raise Refusal(f"an image must be a URL that begins with {' or '.join(allowed)}, got {url!r:.40}")


class Relay(Queue[Any]):
    """What mlx-lm's own decoding takes for the handler's queue: each thing is looked at before the handler has it.

    Args:
        answers: the handler's queue.
        look: called with each thing; what it raises ends the decoding.
        pause: called once the handler has it.

    Attributes:
        error: what has ended the decoding, if it has failed; it does not pass, nor does the None at the end.
    """

    def __init__(self, answers: Queue[Any], look: Callable[[Any], None], pause: Callable[[], None]) -> None:
        super().__init__()
        self._answers, self._look, self._pause = answers, look, pause
        self.error: Exception | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Passes an item on.

        Raises:
            Exception: what `look` raises.
        """
        if isinstance(item, Exception):
            self.error = item
        elif item is not None:
            self._look(item)
            self._answers.put(item)
            self._pause()
