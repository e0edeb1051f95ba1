"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..decoding.options import Options
from ..loading.named_models import ModelArgs


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The settings of a server; the fields are flags, see `cli.server.make_parser`.

    Attributes:
        models: which to load.
        options: defaults of requests, and everything that requests cannot set.
    """

    models: ModelArgs
    options: Options
    host: str
    port: int
    served_model_name: list[str] | None = None
    chat_template: str | None = None
    chat_template_config: dict[str, Any] | None = None
    allowed_origins: list[str]
    api_key: str | None = None
    decode_concurrency: int
    prompt_cache_bytes: int | None = None
    prompt_cache_dir: str | None = None
    context_length: int | None = None
    drain_timeout: int
    log_level: str
