"""Past prompts and answers in a folder, as token ids, from which later texts are drafted.

There is a file for each tokenizer, a sequence of records: a mark, the number of tokens and how many of them are the
prompt, a hash of the whole prompt, a checksum of everything else after the mark, and the tokens. Records are appended
under a lock; after a damaged one the next is found by its mark.
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
from .atomic_files import expand_path, final_name, lock_file, replace_file
from .drafters.matches import BITS
from .drafters.past import Array, PastIndex
from .errors import RedrafterError, one_line, warn

MAX_TOKENS = 200_000
"""The most tokens kept for a tokenizer; the oldest texts are dropped."""

ANSWERS_HELP = "keep token ids of prompts and answers in this folder, and draft from them"

SLACK = 1.25
"""A file is rewritten when it is this many times longer than `MAX_TOKENS`."""

MIN_TEXT, MAX_TEXT = 16, 1 << 16
"""Shorter texts are not kept, as they repeat little; of longer ones only the end is."""

INDEX_AGAIN = 1 / 64
"""The index is rebuilt when new tokens exceed this share of those in it."""

PATIENCE = 1.0
"""Seconds to wait for another process that writes; after that a text is not written."""

MARK = b"\xf5past"
COUNTS = struct.Struct("<III")  # tokens, how many of them are the prompt, and the request's hash
CHECKSUM = struct.Struct("<I")
LOCK = ".lock"
NAME = re.compile(r"answers-[0-9a-f]{16}\.tokens")
FOLDER_MODE, FILE_MODE = 0o700, 0o600


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: the length of the prompt at its start, which is not learned.
        request: a number that identifies the request, see `number_request`; None if it was not kept.
        hidden: (L - 1, D) float16, the target's hidden states at all tokens except the last; None before it was read.
        likeliest: (L - 1, M) int32 and (L - 1, M) float16, the target's likeliest next tokens after each learned one,
            the likeliest first, and their probabilities; None if they were not kept.
    """

    ids: Array
    offset: int
    request: int | None = None
    hidden: Array | None = None
    likeliest: tuple[Array, Array] | None = None

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned: the first guess follows the second token."""
        return max(self.offset - 1, 1)


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        texts: prompts and their answers in int32, the oldest first.
        damaged: bytes outside whole records.
    """

    texts: list[Text]
    damaged: int


def number_request(prompt: Array) -> int:
    """A 32-bit hash of a whole prompt (T,), its cached tokens included."""
    return zlib.crc32(prompt.astype("<i4").tobytes())


def encode_text(text: Text) -> bytes:
    """The record of a text."""
    counts = COUNTS.pack(len(text.ids), text.offset, text.request or 0)
    data = text.ids.astype("<i4").tobytes()
    return MARK + counts + CHECKSUM.pack(zlib.crc32(data, zlib.crc32(counts))) + data


def decode_texts(data: bytes) -> Contents:
    """The texts of all undamaged records."""
    texts, damaged, at, head = list[Text](), 0, 0, len(MARK) + COUNTS.size + CHECKSUM.size
    while at < len(data):
        if data.startswith(MARK, at) and at + head <= len(data):
            counts = data[at + len(MARK) : at + len(MARK) + COUNTS.size]
            count, offset, request = COUNTS.unpack(counts)
            (checksum,) = CHECKSUM.unpack(data[at + head - 4 : at + head])
            end = at + head + 4 * count
            if end <= len(data) and checksum == zlib.crc32(memoryview(data)[at + head : end], zlib.crc32(counts)):
                texts.append(Text(np.frombuffer(data, "<i4", count, at + head).astype(np.int32), offset, request))
                at = end
                continue
        following = data.find(MARK, at + 1)
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
        RedrafterError: it cannot be created or read, or holds something else.
    """
    path = name_folder(name)
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        other = next((each for each in os.listdir(path) if not (each.startswith(".") or NAME.fullmatch(each))), None)
        if other is not None:
            raise RedrafterError(f"expected a folder that holds only answers, got {path}, which holds {other}")
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise RedrafterError(f"expected a folder for answers, got {path}: {one_line(error)}") from error
    return path


def name_folder(name: str | Path) -> Path:
    """The path of a folder.

    Raises:
        RedrafterError: the name is empty, as of a variable that is not set.
    """
    if not str(name).strip():
        raise RedrafterError("expected the name of a folder for answers, got an empty one")
    return expand_path(name)


def list_files(folder: Path) -> list[Path]:
    """The files of a folder, one for each tokenizer."""
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def clear_folder(folder: Path) -> bool:
    """Removes all answers in a folder; returns whether there were any.

    Raises:
        RedrafterError: another process writes for longer than `PATIENCE`.
        OSError: it cannot be removed.
    """

    def list_kept() -> list[Path]:
        """The files, including those of a killed process."""
        return [path for path in folder.iterdir() if NAME.fullmatch(final_name(path.name))]

    if not list_kept():  # the folder may be used for something else
        return False
    with lock_file(folder / LOCK, PATIENCE):
        for path in list_kept():
            path.unlink(missing_ok=True)
    return True


class AnswerFolder:
    """Past texts of one tokenizer. Threads and processes may share a folder; others' texts are read when it is opened.

    Args:
        name: of the folder, which is created if it does not exist.
        tokenizer: of the texts; those of others are kept separately.

    Raises:
        RedrafterError: see `open_folder`; or there are several ranks, which would draft from different answers.
    """

    def __init__(self, name: str | Path, tokenizer: Any) -> None:
        if (size := ranks.count()) > 1:
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
            warn(f"past answers cannot be read: {one_line(error)}")
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
        """An index of the texts; it may lack the last few."""
        with self._lock:
            if self._index is None or self._n_new > INDEX_AGAIN * len(self._index):
                self._texts, self._n_new = keep_latest(self._texts), 0
                self._index = PastIndex([text.ids for text in self._texts])
            return self._index

    def add(self, prompt: Sequence[int], made: Sequence[int], known: int = 0) -> None:
        """Keeps a text. If it cannot be written, it is kept for this process only, with one warning.

        Args:
            prompt: everything before the answer.
            made: the answer; if it is empty, nothing is kept.
            known: how many tokens of the prompt were in a cache; they are in an earlier text, and not kept again.
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
                    warn(f"an answer could not be kept in {self._folder}: {one_line(error)}")

    def _append(self, record: bytes) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        with lock_file(self._folder / LOCK, PATIENCE):
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
            if size + len(record) > 4 * SLACK * MAX_TOKENS:
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
    path = name_folder(name)
    if not path.is_dir():
        raise RedrafterError(f"expected a folder that --answers has made, got {name}")
    return path


def read_texts(name: str | Path, tokenizer: Any) -> list[Text]:
    """A folder's texts of a tokenizer, the oldest first.

    Raises:
        RedrafterError: there is no such folder, or it has no texts of this tokenizer.
    """
    folder = find_folder(name)
    if not (texts := AnswerFolder(name, tokenizer).texts):
        held = "those of other tokenizers alone" if list_files(folder) else "an empty folder"
        raise RedrafterError(f"expected answers of this model's tokenizer in {name}, got {held}")
    return texts


def open_answers(answers: str | Path | AnswerFolder | None, tokenizer: Any) -> AnswerFolder | None:
    """The folder of this name, or the given folder or None.

    Raises:
        RedrafterError: see `AnswerFolder`.
    """
    return AnswerFolder(answers, tokenizer) if isinstance(answers, (str, Path)) else answers
