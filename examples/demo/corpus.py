"""The demo's text: the standard library and the packages of packages.txt.

Its tokenizer; the text as token ids.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

PACKAGES = Path(__file__).with_name("packages.txt")
# Of one package, so that the large ones do not outweigh the others.
PACKAGE_BYTES = 500_000
FILE_BYTES = range(500, 150_000)
# A file that shares more than this part of its longer lines with the held-out files is a copy of
# one.
SHARED_LINES = 0.15
END = "<|endoftext|>"
# A newline keeps its indentation, a word its leading space; digits stay apart.
PIECES = r"\r?\n *| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\s+"


def download_packages(directory: Path) -> list[Path]:
    """The wheels of packages.txt, downloaded by pip unless they are there.

    Nothing in them is run.
    """
    pinned = [line.split("#")[0].strip() for line in PACKAGES.read_text().splitlines()]
    directory.mkdir(exist_ok=True)
    if len(list(directory.glob("*.whl"))) < len(pinned):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        for requirement in tqdm(pinned, desc="packages"):
            subprocess.run([*pip, "--dest", str(directory), requirement], check=True)
    return sorted(directory.glob("*.whl"))


def package_texts(wheels: list[Path], held_out: list[str], seed: int = 0) -> Iterator[str]:
    """Python sources of each wheel, chosen at random up to PACKAGE_BYTES.

    Copies of held-out files are left out.
    """
    known = {line for text in held_out for line in _long_lines(text)}
    rng = np.random.default_rng(seed)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            entries = [
                e
                for e in archive.infolist()
                if e.filename.endswith(".py") and e.file_size in FILE_BYTES
            ]
            left = PACKAGE_BYTES
            for i in rng.permutation(len(entries)):
                if entries[i].file_size > left:
                    continue
                try:
                    text = archive.read(entries[i]).decode("utf-8")
                except UnicodeDecodeError:
                    continue
                lines = _long_lines(text)
                if not lines or sum(line in known for line in lines) / len(lines) <= SHARED_LINES:
                    left -= entries[i].file_size
                    yield text


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) > 30]


def train_tokenizer(texts: list[str], vocab_size: int, directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` entries, saved to `directory` in the Hugging Face
    layout.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(directory)
    return wrapped


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> np.ndarray:
    """One uint16 stream of token ids: the texts in a shuffled order, each ended by the end-of-text
    token.
    """
    order = np.random.default_rng(seed).permutation(len(texts))
    parts = []
    for i in tqdm(order, desc="tokens"):
        ids = tokenizer.encode(texts[i], add_special_tokens=False)
        parts.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(parts)
