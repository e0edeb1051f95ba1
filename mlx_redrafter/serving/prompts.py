"""The prompt caches that answers leave behind for the next ones."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import LRUPromptCache


class Prompts(LRUPromptCache):
    """mlx-lm's, which never leaves nothing to read: the first token is chosen behind a prompt's last one.

    mlx-lm's own gives an empty rest for a prompt that is a conversation it has seen to its end.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """(a copy of the cache that holds most of the prompt, or None; the tokens still to read, one at least)."""
        if len(tokens) < 2:
            return None, tokens
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if not rest:
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = rest + tokens[-1:]
        return cache, rest
