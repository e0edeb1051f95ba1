"""Answers that follow a JSON schema, by llguidance: the tokens that the grammar does not allow get no probability."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from typing import Any, cast

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import one_line
from .schemas import ApiError
from .types import GenerationFailed

BLANKS = r"[ \n]{1,24}"
"""What may be between the parts of an object: without a limit some models go on with it forever."""

Processor = Callable[[mx.array, mx.array], mx.array]


class GrammarCompiler:
    """Makes the logits processors of answers that follow a schema.

    Args:
        tokenizer: mlx-lm's wrapper of a fast tokenizer.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: LLTokenizer | None = None  # which takes up to a second, at the first request that needs it

    def compile(
        self, schema: dict[str, Any], state: str | None = None, unless: tuple[int, ...] = ()
    ) -> Callable[[], list[Processor]]:
        """A factory of processors for one answer.

        Args:
            state: where the answer begins; after reasoning the grammar holds from the mark that ends it.
            unless: tokens with which the answer may begin instead; nothing is masked after them.

        Raises:
            ApiError: the schema is wrong, or uses what llguidance does not know.
        """
        if self._compiled is None:
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            ends = list(self._tokenizer.eos_token_ids)
            self._compiled = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=ends)
        compiled = self._compiled
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": BLANKS})
            wrong = LLMatcher.validate_grammar(grammar, compiled)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ApiError(f"the JSON schema cannot be followed: {one_line(wrong)}")
        end = tuple(self._tokenizer.think_end_tokens) if state == "reasoning" else ()
        return lambda: [GrammarProcessor(LLMatcher(compiled, grammar), end)]


class GrammarProcessor:
    """A logits processor of mlx-lm's kind for one answer, which decodes one token at a time.

    Args:
        matcher: at the start of the grammar.
        begins_after: token ids after which the grammar holds; none for all of the answer.
    """

    def __init__(self, matcher: LLMatcher, begins_after: tuple[int, ...] = ()) -> None:
        self._matcher, self._begins_after, self._holds = matcher, begins_after, not begins_after
        self._last: tuple[int, ...] = ()  # tokens, as many as `begins_after` has
        self._read: int | None = None  # length of the history before; the first call sees the prompt alone

    def __call__(self, history: mx.array, logits: mx.array) -> mx.array:
        """The logits (1, V) with minus infinity for each token that the grammar does not allow next.

        Args:
            history: (T,) the prompt, and every token of the answer so far.

        Raises:
            GenerationFailed: llguidance gives up on the grammar, which may be too complex.
        """
        new = history[len(history) if self._read is None else self._read :]
        self._read = len(history)
        for token in cast(list[int], new.tolist()):
            if self._holds:
                self._matcher.consume_token(token)
            else:
                self._last = (*self._last, token)[-len(self._begins_after) :]
                self._holds = self._last == self._begins_after
        if not self._holds:
            return logits
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GenerationFailed(f"the schema cannot be followed: {self._matcher.get_error().splitlines()[0]}")
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool)
        return mx.where(mx.array(allowed), logits, -mx.inf)
