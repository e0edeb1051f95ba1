"""A drafter tried on a few prompts: what `convert` and `doctor` say of it."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from .drafters.protocol import Drafter
from .engine.stats import Stats
from .generate import decode_prompts, encode_chat
from .options import Options

PROMPTS = (
    "Write a function that reverses a linked list.\n\ndef reverse(",
    "Explain in three sentences why the sky is blue.",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "List the planets of the solar system, with one fact about each.",
)


def try_drafter(model: nn.Module, tokenizer: Any, drafter: Drafter, options: Options) -> Stats:
    """The rounds of decoding `PROMPTS` with a drafter, through the chat template where there is one."""
    prompts = [encode_chat(tokenizer, text) for text in PROMPTS]
    return decode_prompts(model, drafter, prompts, options, set(tokenizer.eos_token_ids)).stats
