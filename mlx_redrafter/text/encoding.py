"""Encodes prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RedrafterError
from ..target.request_checks import check_prompt

Prompt = str | Sequence[int] | mx.array
"""A text, or its token ids."""


def wrap_tokenizer(tokenizer: Any) -> TokenizerWrapper:
    """A tokenizer of transformers or of mlx-lm as mlx-lm's."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    try:
        return TokenizerWrapper(tokenizer)
    except AttributeError as error:
        got = type(tokenizer).__name__
        raise RedrafterError(f"tokenizer must be what load returns, got {got}") from error


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Special tokens are added to a text unless it begins with the beginning-of-text token.
    """
    if not isinstance(prompt, str):
        return cast(list[int], check_prompt(prompt).tolist())
    if not is_text(prompt):
        raise RedrafterError("the prompt is not UTF-8")
    needs_special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=needs_special))


def encode_chat(tokenizer: Any, messages: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a user message, or of messages, with the chat template if there is one."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not tokenizer.has_chat_template:
        contents = (str(message.get("content", "")) for message in messages)
        return encode(tokenizer, "\n".join(contents))
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def is_text(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a shell may pass other bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
