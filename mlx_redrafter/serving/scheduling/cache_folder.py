"""Prompt caches on disk, to reuse after a restart.

The files have mlx-lm's format; only the owner can read them. A file's name identifies the model,
options and versions that made it, and its tokens. Metadata is read at startup, arrays when a prompt
matches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from filelock import FileLock, Timeout
from mlx_lm.models import cache as prompt_caches
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ...decoding.options import CACHE_OPTIONS, Options
from ...errors import RedrafterError, join_lines
from ...files import expand_path, get_final_name, replace_file
from ...measuring.store import digest_tensors, sample_tensors
from ...target import kv_cache
from ...target.model_parts import get_module_name

FILE_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}\.safetensors")
FOLDER_MODE = 0o700
FILE_MODE = 0o600

MAX_FILES = 500
"""Files that are kept and read: arrays that are not loaded yet keep theirs open, and mlx-lm allows
2,048.
"""


class CacheFolder:
    """A folder of prompt caches, used by one process at a time.

    Files of other models and versions are ignored.

    Args:
        name: the folder. It is created if it does not exist, for the owner only; an existing one
            keeps its mode.
        model, options: what the caches are for.
    """

    def __init__(self, name: str | Path, model: nn.Module, options: Options) -> None:
        self._path = path = expand_path(name)
        self._lock = FileLock(path / ".lock", timeout=0, mode=FILE_MODE, thread_local=False)
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._lock.acquire()
            for each in path.iterdir():
                final = get_final_name(each.name)
                if each.name != final and FILE_NAME.fullmatch(final):
                    each.unlink()  # left by a process that was killed while writing
        except Timeout:
            raise RedrafterError(f"another process keeps its prompt caches in {path}") from None
        except OSError as error:
            raise RedrafterError(
                f"expected a folder for prompt caches, got {path}: {join_lines(error)}"
            ) from error
        own = [get_module_name(model), digest_tensors(model), repr(getattr(model, "args", None))]
        own += [repr(getattr(options, each)) for each in CACHE_OPTIONS]
        own += [version(each) for each in ("mlx-redrafter", "mlx-lm", "mlx")]
        if options.exact:
            own.append(f"pieces of {options.prefill_step_size}")
        self._key = _digest(json.dumps(own).encode() + sample_tensors(model))

    def read(self) -> Iterator[tuple[Path, np.ndarray[Any, Any], kv_cache.Cache]]:
        """Yields (file, tokens (T,) int32, cache) for this model, least recently used first.

        Arrays are loaded lazily. Damaged files are removed.
        """
        for file in [each for each in self._list_files() if each.name.startswith(self._key)]:
            try:
                cache, metadata = load_prompt_cache(str(file), return_metadata=True)
                tokens = np.array(json.loads(metadata["tokens"]), np.int32)
                length = kv_cache.length(cache)
                if length not in (0, len(tokens)):
                    raise RedrafterError(f"expected {len(tokens)} tokens, got {length}")
            except Exception as error:  # damaged files raise many types
                self.remove_damaged(file, error)
            else:
                yield file, tokens, cache

    def write(
        self, tokens: np.ndarray[Any, Any], cache: kv_cache.Cache, used: float, max_bytes: int
    ) -> Path:
        """Writes a cache atomically, then deletes the least recently used files.

        Args:
            tokens: (T,) int32, the tokens that the cache holds.
            used: when it was last used, in seconds since the epoch; the file gets this time.
            max_bytes: limit of all files together. The most recently used one is kept in any case.

        Returns:
            The file, which is deleted again if those used after it leave no room.
        """
        for c in cache:
            if not hasattr(prompt_caches, type(c).__name__):
                raise RedrafterError(f"mlx-lm cannot load a {type(c).__name__}")
        file = self._path / f"{self._key}-{_digest(tokens.tobytes())}.safetensors"
        with replace_file(file) as partial:
            partial.touch(FILE_MODE)
            save_prompt_cache(str(partial), cache, {"tokens": json.dumps(tokens.tolist())})
            with partial.open("rb") as written:
                os.fsync(written.fileno())  # otherwise a power failure may leave a file of zeros
            os.utime(partial, (used, used))
        files = self._list_files()
        sizes = [each.stat().st_size for each in files]
        while len(files) > 1 and (len(files) > MAX_FILES or sum(sizes) > max_bytes):
            files.pop(0).unlink()
            del sizes[0]
        return file

    def remove_damaged(self, file: Path, error: Exception) -> None:
        """Removes a file that cannot be read, and logs why."""
        logging.warning("Removing the damaged prompt cache %s: %s", file, join_lines(error))
        file.unlink(missing_ok=True)

    def close(self) -> None:
        """Releases the folder to other processes."""
        self._lock.release()

    def _list_files(self) -> list[Path]:
        """The files of all models, least recently used first; none if the folder is gone."""
        if not self._path.is_dir():
            return []
        files = [each for each in self._path.iterdir() if FILE_NAME.fullmatch(each.name)]
        return sorted(files, key=os.path.getmtime)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
