"""What a run starts from: the target, and the texts or prompts of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..atomic_files import expand_path
from ..demo.sources import training_prompts
from ..generate import encode_chat
from .data import Text, load_prompts, load_texts
from .settings import Settings

DEMO_PROMPTS = 1024
"""How many pieces of the standard library the demo's target writes on from."""


def read_prompts(settings: Settings, tokenizer: Any) -> list[list[int]]:
    """The prompts that the target answers, as token ids; the demo's when the settings name none."""
    if settings.prompts:
        return load_prompts(Path(settings.prompts), tokenizer)
    return [encode_chat(tokenizer, text) for text in training_prompts(DEMO_PROMPTS, settings.seed)]


def read_texts(settings: Settings, tokenizer: Any) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts of `--data`."""
    assert settings.data is not None
    return load_texts(settings.data, tokenizer, mask_prompt=settings.mask_prompt)


def base_name(settings: Settings) -> str | None:
    """The target's name as a drafter's config records it; None for the demo."""
    if settings.model is None:
        return None
    path = expand_path(settings.model)
    return str(path.resolve()) if path.exists() else settings.model
