"""Saves and loads conversations: a prompt cache in mlx-lm's format, with token ids and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as prompt_caches
from mlx_lm.models.cache import save_prompt_cache
from transformers.utils import get_json_schema

from ..errors import RedrafterError, join_lines
from ..files import expand_path, replace_file
from ..measuring.store import digest_tensors
from ..target import kv_cache
from ..target.model_parts import get_module_name, get_vocab_size
from ..target.request_checks import check_cache, check_prompt, check_tokens
from ..target.target import KVQuantization
from ..text.chat_template import Message, parse_messages

FORMAT = "1"
"""The format version of saved conversations."""


class Conversation(NamedTuple):
    """What a file holds.

    Attributes:
        cache: of all `tokens`.
        tokens: the prompts' and answers'.
        messages: the same as messages.
        template: the chat template arguments that the messages were rendered with.
        decoded: the lengths of `tokens` before and after each token that was decoded.
    """

    cache: kv_cache.Cache
    tokens: list[int]
    messages: list[Message]
    template: dict[str, Any]
    decoded: list[int]


def write_conversation(path: str | Path, model: nn.Module, conversation: Conversation) -> None:
    """Writes a conversation, completely or not at all.

    Args:
        path: a file name that ends in .safetensors.

    Raises:
        RedrafterError: the file cannot be written, or mlx-lm cannot load a cache of this type.
    """
    file = expand_path(path)
    if file.suffix != ".safetensors":
        raise RedrafterError(f"expected a session file that ends in .safetensors, got {file.name}")
    if not file.parent.is_dir():
        raise RedrafterError(f"cannot save the session as {file}: there is no folder {file.parent}")
    for layer in conversation.cache:
        kind = type(layer).__name__
        if not hasattr(prompt_caches, kind):
            name = get_module_name(model)
            raise RedrafterError(
                f"mlx-lm cannot load a {kind}: the cache of {name} cannot be saved"
            )

    content = conversation._asdict() | {"format": FORMAT, "model": digest_tensors(model)}
    cache = content.pop("cache")
    try:
        text = json.dumps(content, default=get_json_schema)
        with replace_file(file) as partial:
            save_prompt_cache(str(partial), cache, {"session": text})
    except Exception as error:  # JSON and file errors of many types
        raise RedrafterError(f"cannot save the session as {file}: {join_lines(error)}") from error


def read_conversation(path: str | Path, model: nn.Module) -> Conversation:
    """Reads a conversation; its cache is evaluated.

    Raises:
        RedrafterError: the file cannot be read, or was saved with another model.
    """
    file = expand_path(path)
    try:
        cache, metadata = kv_cache.read_file(file)
        if "session" not in metadata:
            raise RedrafterError("expected a prompt cache with a conversation, got one without")
        content = json.loads(metadata["session"])
        if content["format"] != FORMAT:
            raise RedrafterError(f"expected format {FORMAT}, got {content['format']!r:.60}")
        if content["model"] != digest_tensors(model):
            raise RedrafterError("it was saved with another model")
        tokens = content["tokens"]
        messages = parse_messages(content["messages"])
        template = content["template"]
        decoded = [int(length) for length in content.get("decoded", [])]  # older files have none
        check_tokens(check_prompt(tokens), get_vocab_size(model))
        check_cache(model, cache, KVQuantization())
        length = kv_cache.length(cache)
        if length not in (0, len(tokens)):
            raise RedrafterError(f"expected a cache of {len(tokens)} tokens, got {length}")
        mx.eval([layer.state for layer in cache])
    except Exception as error:  # damaged files raise errors of many types
        raise RedrafterError(f"cannot read the session {file}: {join_lines(error)}") from error
    return Conversation(cache, tokens, messages, template, decoded)
