"""The demo's tokenizer, and its text as token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
# A newline keeps its indentation, a word its leading space; digits stay apart.
PIECES = r"\r?\n *| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\s+"


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
