"""The demo's text: the Python standard library's sources, split by file, and a tokenizer for them.

The standard library may be redistributed (PSF licence) and is on every machine that runs the recipe.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
SKIPPED = ("site-packages", "encodings", "pydoc_data", "lib2to3")
HELD_OUT_PERCENT = 4
# A newline keeps its indentation, a word its leading space; digits stay apart.
PIECES = r"\r?\n *| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\s+"


def source_files() -> list[Path]:
    """Every UTF-8 source of the running interpreter's standard library, sorted by path."""
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(library.rglob("*.py")):
        if path.relative_to(library).parts[0] in SKIPPED:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 500 and "\x00" not in text:
            files.append(path)
    return files


def library_name(path: Path) -> str:
    """A source's path within the standard library."""
    return path.relative_to(sysconfig.get_path("stdlib")).as_posix()


def is_held_out(path: Path) -> bool:
    """Whether a file is kept out of training: a hash of its library path decides, on any machine."""
    return int(hashlib.sha256(library_name(path).encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def split_files() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files)."""
    files = source_files()
    return [f for f in files if not is_held_out(f)], [f for f in files if is_held_out(f)]


def train_tokenizer(files: list[Path], vocab_size: int, directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` entries, saved to `directory` in the Hugging Face layout."""
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
    tokenizer.train_from_iterator((f.read_text(encoding="utf-8") for f in files), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(directory)
    return wrapped


def encode_files(files: list[Path], tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> np.ndarray:
    """One uint16 stream of token ids: the files in a shuffled order, each ended by the end-of-text token."""
    order = np.random.default_rng(seed).permutation(len(files))
    parts: list[int] = []
    for i in order:
        parts += tokenizer.encode(files[i].read_text(encoding="utf-8"), add_special_tokens=False)
        parts.append(tokenizer.eos_token_id)
    return np.array(parts, dtype=np.uint16)
