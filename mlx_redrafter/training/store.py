"""The texts of a run with what the target computed at their tokens: one file each, so that a killed
run keeps them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from ..atomic_files import replace_file
from ..errors import RedrafterError
from .data import Text
from .hidden_states import make_row_dtype
from .settings import TrainingArgs

TEXT_SETTINGS = (
    "model",
    "adapter_path",
    "data",
    "mask_prompt",
    "max_seq_length",
    "max_tokens",
    "temp",
)
"""The settings that texts depend on."""


class TextStore:
    """A folder of texts. Its name depends on `TEXT_SETTINGS`, so that runs with other settings
    ignore it.

    Args:
        work: the folder above it.
        width: of the target's hidden states.

    Attributes:
        texts: with states that are memory-mapped.
    """

    def __init__(self, work: Path, args: TrainingArgs, width: int) -> None:
        settings = json.dumps([getattr(args, name) for name in TEXT_SETTINGS])
        self.folder = work / f"texts-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
        self.kind = make_row_dtype(width)
        self.texts = [self._read(path) for path in sorted(self.folder.glob("[0-9]*"))]

    def _read(self, path: Path) -> Text:
        """The text in a file: int32 tokens, then a row for each but the last."""
        _, offset, is_held_out, kind = path.name.split("-", 3)
        count, rest = divmod(path.stat().st_size + self.kind.itemsize, 4 + self.kind.itemsize)
        if rest:
            raise RedrafterError(f"{path} is damaged: delete it")
        states = np.memmap(path, self.kind, "r", offset=4 * count, shape=(count - 1,))
        return Text(
            np.fromfile(path, "<i4", count), int(offset), states, kind, bool(int(is_held_out))
        )

    def add(self, text: Text) -> None:
        """Stores a text that the target has read."""
        assert text.states is not None
        path = self.folder / f"{len(self.texts):05}-{text.offset}-{text.is_held_out:d}-{text.kind}"
        with replace_file(path) as partial_file:
            partial_file.write_bytes(text.ids.astype("<i4").tobytes() + text.states.tobytes())
        self.texts.append(self._read(path))

    @property
    def nbytes(self) -> int:
        """The size of all texts on disk."""
        return sum(len(text.ids) * self.kind.itemsize for text in self.texts)
