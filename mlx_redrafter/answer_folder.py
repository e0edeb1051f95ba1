"""A folder of past prompts and answers, stored as token ids, from which later texts are drafted.

Each tokenizer has one file, a sequence of records. A record is a mark, the number of tokens, the number of prompt
tokens, a hash of the whole prompt, a checksum of everything else after the mark, and the tokens. Records are appended
under a lock. After a damaged record, reading continues at the next mark.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import ranks
from .atomic_files import expand_path, find_final_name, lock_file, replace_file
from .drafters.matches import BITS
from .drafters.past import Array, PastIndex
from .errors import RedrafterError, join_lines, warn

MAX_TOKENS = 200_000
"""The most tokens kept per tokenizer; the oldest texts are dropped first."""

ANSWERS_HELP = "keep token ids of prompts and answers in this folder, and draft from them"

REWRITE_FACTOR = 1.25
"""A file is rewritten without its oldest texts when it is longer than this times `MAX_TOKENS`."""

MIN_TEXT, MAX_TEXT = 16, 1 << 16
"""Length limits in tokens: shorter texts are not kept, as they repeat little; of longer texts only the end is kept."""

REINDEX_SHARE = 1 / 64
"""The index is rebuilt when the new tokens exceed this share of the indexed ones."""

LOCK_TIMEOUT = 1.0
"""Seconds to wait for another process's lock; after that the text is not written."""

RECORD_MARK = b"\xf5past"
COUNTS = struct.Struct("<III")  # tokens, prompt tokens, hash of the request
CHECKSUM = struct.Struct("<I")
LOCK = ".lock"
FILE_NAME = re.compile(r"answers-[0-9a-f]{16}\.tokens")
FOLDER_MODE, FILE_MODE = 0o700, 0o600


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: the number of prompt tokens at its start, which are not learned.
        request: a hash of the request, see `number_request`; None if not stored.
        hidden: (L - 1, D) float16, the target's hidden states at all tokens except the last; None before the target
            has read the text.
        likeliest: (L - 1, M) int32 and (L - 1, M) float16, the target's M likeliest next tokens after each learned
            token, the likeliest first, and their probabilities; None if not stored.
    """

    ids: Array
    offset: int
    request: int | None = None
    hidden: Array | None = None
    likeliest: tuple[Array, Array] | None = None

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned; at least 1, as the first guess follows the second token."""
        return max(self.offset - 1, 1)


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        texts: prompts and their answers in int32, the oldest first.
        damaged: the number of bytes outside valid records.
    """

    texts: list[Text]
    damaged: int


def number_request(prompt: Array) -> int:
    """A 32-bit hash of a whole prompt (T,), including its cached tokens."""
    return zlib.crc32(prompt.astype("<i4").tobytes())


def encode_text(text: Text) -> bytes:
    """The record of a text."""
    counts = COUNTS.pack(len(text.ids), text.offset, text.request or 0)
    data = text.ids.astype("<i4").tobytes()
    return RECORD_MARK + counts + CHECKSUM.pack(zlib.crc32(data, zlib.crc32(counts))) + data


def decode_texts(data: bytes) -> Contents:
    """The texts of all valid records."""
    texts, damaged, at, head = list[Text](), 0, 0, len(RECORD_MARK) + COUNTS.size + CHECKSUM.size
    while at < len(data):
        if data.startswith(RECORD_MARK, at) and at + head <= len(data):
            counts = data[at + len(RECORD_MARK) : at + len(RECORD_MARK) + COUNTS.size]
            count, offset, request = COUNTS.unpack(counts)
            (checksum,) = CHECKSUM.unpack(data[at + head - 4 : at + head])
            end = at + head + 4 * count
            if end <= len(data) and checksum == zlib.crc32(memoryview(data)[at + head : end], zlib.crc32(counts)):
                texts.append(Text(np.frombuffer(data, "<i4", count, at + head).astype(np.int32), offset, request))
                at = end
                continue
        following = data.find(RECORD_MARK, at + 1)
        following = len(data) if following < 0 else following
        damaged, at = damaged + following - at, following
    return Contents(texts, damaged)


def keep_latest(texts: Sequence[Text]) -> list[Text]:
    """The last texts, with at most `MAX_TOKENS` in total."""
    sizes = np.cumsum([len(text.ids) for text in reversed(texts)])
    return list(texts[len(texts) - int(np.searchsorted(sizes, MAX_TOKENS, "right")) :])


def open_folder(name: str | Path) -> Path:
    """A folder for answers, created if it does not exist, readable only by its owner.

    Raises:
        RedrafterError: it cannot be created or read, or holds other files.
    """
    path = expand_folder_name(name)
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        names = (name for name in os.listdir(path) if not name.startswith("."))
        other = next((name for name in names if not FILE_NAME.fullmatch(name)), None)
        if other is not None:
            raise RedrafterError(f"expected a folder that holds only answers, got {path}, which holds {other}")
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise RedrafterError(f"expected a folder for answers, got {path}: {join_lines(error)}") from error
    return path


def expand_folder_name(name: str | Path) -> Path:
    """The path of a folder.

    Raises:
        RedrafterError: the name is empty, for example from an unset variable.
    """
    if not str(name).strip():
        raise RedrafterError("expected the name of a folder for answers, got an empty one")
    return expand_path(name)


def list_files(folder: Path) -> list[Path]:
    """The files of a folder, one for each tokenizer."""
    return sorted(path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))


def clear_folder(folder: Path) -> bool:
    """Removes all answers in a folder; returns whether there were any.

    Raises:
        RedrafterError: another process holds the lock for longer than `LOCK_TIMEOUT`.
        OSError: a file cannot be removed.
    """

    def list_kept() -> list[Path]:
        """The files, including those of a killed process."""
        return [path for path in folder.iterdir() if FILE_NAME.fullmatch(find_final_name(path.name))]

    if not list_kept():  # the folder may belong to something else: create no lock in it
        return False
    with lock_file(folder / LOCK, LOCK_TIMEOUT):
        for path in list_kept():
            path.unlink(missing_ok=True)
    return True


class AnswerFolder:
    """Past texts of one tokenizer.

    Threads and processes may share a folder. Texts of other processes are read only when it is opened.

    Args:
        name: the folder, created if it does not exist.
        tokenizer: the texts' tokenizer; each tokenizer has its own file.

    Raises:
        RedrafterError: see `open_folder`; or there are several ranks, which would draft from different answers.
    """

    def __init__(self, name: str | Path, tokenizer: Any) -> None:
        if (size := ranks.count_ranks()) > 1:
            raise RedrafterError(f"past answers need a single process, got {size} ranks")
        self._folder = open_folder(name)
        vocab = tokenizer.get_vocab()
        self._n_tokens = min(1 + max(vocab.values(), default=-1), 1 << BITS)  # no model has larger ids
        names = "\n".join(sorted(vocab, key=vocab.__getitem__))
        digest = hashlib.sha256(f"{self._n_tokens}\n{names}".encode(errors="surrogatepass"))
        self.path = self._folder / f"answers-{digest.hexdigest()[:16]}.tokens"
        self._lock = threading.Lock()  # guards the attributes below
        self._texts = keep_latest(self._read())
        self._index: PastIndex | None = None
        self._n_new = 0  # tokens that are not in the index
        self._has_warned = False

    def _read(self) -> list[Text]:
        try:
            texts = decode_texts(self.path.read_bytes()).texts
        except FileNotFoundError:
            return []
        except OSError as error:
            warn(f"past answers cannot be read: {join_lines(error)}")
            return []
        return [text for text in texts if self._fits(text.ids)]

    def _fits(self, ids: Array) -> bool:
        return len(ids) >= MIN_TEXT and ids.min() >= 0 and ids.max() < self._n_tokens

    @property
    def texts(self) -> list[Text]:
        """All texts, the oldest first."""
        with self._lock:
            return list(self._texts)

    def index(self) -> PastIndex:
        """An index of the texts; the newest ones may be missing."""
        with self._lock:
            if self._index is None or self._n_new > REINDEX_SHARE * len(self._index):
                self._texts, self._n_new = keep_latest(self._texts), 0
                self._index = PastIndex([text.ids for text in self._texts])
            return self._index

    def add(self, prompt: Sequence[int], made: Sequence[int], known: int = 0) -> None:
        """Adds a text. If it cannot be written, warns once and keeps it for this process only.

        Args:
            prompt: everything before the answer.
            made: the answer; if it is empty, nothing is added.
            known: how many prompt tokens came from a prompt cache; they are part of an earlier text and left out.
        """
        ids = np.array([*prompt[known:], *made][-MAX_TEXT:], np.int32)
        if not made or not self._fits(ids):
            return
        text = Text(ids, max(0, len(ids) - len(made)), number_request(np.array(prompt, np.int32)))
        with self._lock:
            self._texts.append(text)
            self._n_new += len(ids)
            try:
                self._append(encode_text(text))
            except (OSError, RedrafterError) as error:
                if not self._has_warned:
                    self._has_warned = True
                    warn(f"cannot write an answer to {self._folder}: {join_lines(error)}")

    def _append(self, record: bytes) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        with lock_file(self._folder / LOCK, LOCK_TIMEOUT):
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
            try:
                size = os.fstat(file).st_size
                try:
                    if os.write(file, record) < len(record):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except BaseException:
                    os.ftruncate(file, size)
                    raise
            finally:
                os.close(file)
            if size + len(record) > 4 * REWRITE_FACTOR * MAX_TOKENS:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        texts = keep_latest(decode_texts(self.path.read_bytes()).texts)
        with replace_file(self.path) as partial:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            with os.fdopen(file, "wb") as opened:
                opened.writelines(map(encode_text, texts))


def find_folder(name: str | Path) -> Path:
    """The path of an existing folder for answers.

    Raises:
        RedrafterError: it does not exist.
    """
    path = expand_folder_name(name)
    if not path.is_dir():
        raise RedrafterError(f"expected a folder created by --answers, got {name}")
    return path


def read_texts(name: str | Path, tokenizer: Any) -> list[Text]:
    """The texts of one tokenizer in a folder, the oldest first.

    Raises:
        RedrafterError: there is no such folder, or it has no texts of this tokenizer.
    """
    folder = find_folder(name)
    if not (texts := AnswerFolder(name, tokenizer).texts):
        held = "only those of other tokenizers" if list_files(folder) else "an empty folder"
        raise RedrafterError(f"expected answers of this model's tokenizer in {name}, got {held}")
    return texts


def open_answers(answers: str | Path | AnswerFolder | None, tokenizer: Any) -> AnswerFolder | None:
    """Opens the folder of this name; an `AnswerFolder` or None is returned unchanged.

    Raises:
        RedrafterError: see `AnswerFolder`.
    """
    return AnswerFolder(answers, tokenizer) if isinstance(answers, (str, Path)) else answers
