"""Conversations in files: a prompt cache of mlx-lm, with the token ids and the messages beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as prompt_caches
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from transformers.utils import get_json_schema

from ..atomic_files import expand_path, replace_file
from ..engine import kv_cache
from ..engine.prompts import check_prompt
from ..engine.target import KVQuantization, check_request, model_name
from ..errors import RedrafterError, one_line
from ..planning.costs import digest_tensors
from .chat_template import Message, as_messages

FORMAT = "1"
"""Of saved conversations."""


class Saved(NamedTuple):
    """A conversation.

    Attributes:
        cache: what was read and said.
        tokens: the ids that it holds.
        messages: the same as messages.
        template: arguments of the chat template that they were read with; None where a file does not say.
    """

    cache: kv_cache.Cache
    tokens: list[int]
    messages: list[Message]
    template: dict[str, Any] | None


def write_saved(path: str | Path, model: nn.Module, saved: Saved) -> None:
    """Writes a conversation, whole or not at all.

    Args:
        path: a name that ends in .safetensors, in a directory that is there.
        model: that it was held with.

    Raises:
        RedrafterError: it cannot be written, or nothing was read yet.
    """
    place = expand_path(path)
    if place.suffix != ".safetensors":
        raise RedrafterError(f"a session is saved as .safetensors, got {place.name}")
    if not os.path.isdir(place.parent):
        raise RedrafterError(f"cannot save the session as {place}: there is no directory {place.parent}")
    if not saved.tokens:
        raise RedrafterError("nothing was said yet, or it has to be read anew: there is no cache to save")
    if odd := [type(c).__name__ for c in saved.cache if not hasattr(prompt_caches, type(c).__name__)]:
        raise RedrafterError(f"mlx-lm cannot read a {odd[0]} again: the cache of {model_name(model)} cannot be saved")
    told = saved._asdict() | {"format": FORMAT, "model": digest_tensors(model)}
    del told["cache"]
    try:
        told["template"] = written(saved.template)
        text = json.dumps(told)
        with replace_file(place) as partly:
            save_prompt_cache(str(partly), saved.cache, {"session": text})
    except (OSError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise RedrafterError(f"cannot save the session as {place}: {one_line(error)}") from error


def written(template: dict[str, Any] | None) -> Any:
    """Arguments of a chat template as JSON has them, functions as templates see them; None where it has not."""
    try:
        return json.loads(json.dumps(template, default=get_json_schema))
    except Exception:  # a value may be refused in as many ways
        return None


def read_saved(path: str | Path, model: nn.Module) -> Saved:
    """A conversation that was written, its cache evaluated.

    Raises:
        RedrafterError: there is none, it is damaged, or was held with another model.
    """
    place = expand_path(path)
    try:
        cache, metadata = load_prompt_cache(str(place), return_metadata=True)
        told = json.loads(metadata.get("session", "null"))
        if not isinstance(told, dict):
            raise RedrafterError("expected a prompt cache with a conversation beside it, got one without")
        if told.get("format") != FORMAT:
            raise RedrafterError(f"expected format {FORMAT}, got {told.get('format')!r:.60}")
        if told["model"] != digest_tensors(model):
            raise RedrafterError("it was saved with another model")
        tokens, messages = told["tokens"], as_messages(told["messages"])
        template = told.get("template")
        if not isinstance(template, dict | None):
            raise RedrafterError("expected arguments of a chat template")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RedrafterError("expected a list of token ids")
        check_request(model, check_prompt(tokens), cache, KVQuantization())
        if (held := kv_cache.length(cache)) not in (0, len(tokens)):
            raise RedrafterError(f"its cache holds {held} tokens, and it names {len(tokens)}")
        mx.eval([c.state for c in cache])
    except Exception as error:  # a damaged file fails in as many ways
        raise RedrafterError(f"cannot read the session {place}: {one_line(error)}") from error
    return Saved(cache, tokens, messages, template)
