"""The examples of a run, with what the target computed at their tokens.

Each is a file, so that a killed run keeps them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from ..errors import RedrafterError
from ..files import replace_file
from .data import Example
from .hidden_states import make_state_dtype
from .settings import TrainingArgs

EXAMPLE_SETTINGS = (
    "model",
    "adapter_path",
    "data",
    "mask_prompt",
    "max_seq_length",
    "max_tokens",
    "temp",
)
"""The settings that examples depend on."""


def get_folder_name(args: TrainingArgs) -> str:
    """A folder's name that depends on `EXAMPLE_SETTINGS`, so that runs with others ignore it."""
    settings = json.dumps([getattr(args, name) for name in EXAMPLE_SETTINGS])
    return f"texts-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


class ExampleStore:
    """A folder of examples.

    Args:
        width: of the target's hidden states.

    Attributes:
        examples: with states that are memory-mapped.
    """

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        self.dtype = make_state_dtype(width)
        self.examples = [self._read(path) for path in sorted(folder.glob("[0-9]*"))]

    def _read(self, path: Path) -> Example:
        """The example in a file: int32 tokens, then the states of all but the last."""
        _, offset, is_held_out, kind = path.name.split("-", 3)
        size = self.dtype.itemsize
        count, rest = divmod(path.stat().st_size + size, 4 + size)
        if rest:
            raise RedrafterError(f"{path} is damaged: delete it")
        tokens = np.fromfile(path, "<i4", count)
        states = np.memmap(path, self.dtype, "r", offset=4 * count, shape=(count - 1,))
        return Example(tokens, int(offset), states, kind, is_held_out == "1")

    def add(self, example: Example) -> None:
        """Stores an example that the target has read."""
        assert example.states is not None
        number = f"{len(self.examples):05}"
        path = self.folder / f"{number}-{example.offset}-{example.is_held_out:d}-{example.kind}"
        with replace_file(path) as partial_file:
            tokens = example.tokens.astype("<i4").tobytes()
            partial_file.write_bytes(tokens + example.states.tobytes())
        self.examples.append(self._read(path))

    @property
    def nbytes(self) -> int:
        """The size of all examples on disk."""
        return sum(len(example.tokens) * self.dtype.itemsize for example in self.examples)
