"""Answers that follow a JSON schema, by llguidance: the tokens that the grammar does not allow get no probability."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ..errors import one_line
from .schemas import ApiError
from .types import SchemaNotFollowed

BLANKS = r"[ \n]{1,24}"
"""What may be between the parts of an object: without a limit some models go on with it forever."""

MAX_ERROR = 300
"""Characters of what llguidance says."""

MAX_REFERENCES, STACK_BYTES = 500, 1 << 29
"""The most `$ref`s of a schema, and a stack for them: llguidance recurses from each into the next, through up to 128
levels, and would end the process where the stack does."""


class GrammarCompiler:
    """Makes the grammars of answers that follow a schema.

    Args:
        tokenizer: mlx-lm's wrapper of a fast tokenizer.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: LLTokenizer | None = None  # which takes up to a second, at the first request that needs it

    def compile(
        self, schema: dict[str, Any], state: str | None = None, unless: tuple[int, ...] = (), lenient: bool = False
    ) -> GrammarFactory:
        """A factory of grammars, each for one answer.

        Args:
            state: where the answer begins; after reasoning the grammar holds from the mark that ends it.
            unless: token ids with which the answer may begin instead, after which it is free; none for no such choice.
            lenient: whether keywords that llguidance does not know are ignored.

        Raises:
            ApiError: the schema is wrong, or uses what llguidance does not know, or no answer follows it.
        """
        if self._compiled is None:
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            ends = list(self._tokenizer.eos_token_ids)
            self._compiled = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=ends)
        end = tuple(self._tokenizer.think_end_tokens) if state == "reasoning" else ()
        start = SchemaGrammar(_make_matcher(schema, self._compiled, lenient), self._compiled, end, unless)
        return GrammarFactory((schema, state, unless, lenient), start)


@dataclass(frozen=True)
class GrammarFactory:
    """Makes grammars of one schema, each for one answer.

    Attributes:
        arguments: of `GrammarCompiler.compile`, with which another process makes the same.
        start: a grammar of which nothing was taken.
    """

    arguments: tuple[Any, ...]
    start: SchemaGrammar

    def __call__(self) -> SchemaGrammar:
        """A grammar for one answer."""
        return self.start.fork()


def _make_matcher(schema: dict[str, Any], tokenizer: LLTokenizer, lenient: bool) -> LLMatcher:
    """A matcher at the start of a schema's grammar.

    Raises:
        ApiError: see `GrammarCompiler.compile`.
    """
    try:
        text = json.dumps(schema)
        if text.count('"$ref"') > MAX_REFERENCES:
            raise ValueError(f"it must have at most {MAX_REFERENCES} references")
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": BLANKS, "lenient": lenient})
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the JSON schema cannot be followed: {one_line(error)}") from error
    previous = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            matcher = thread.submit(LLMatcher, tokenizer, grammar).result()
    finally:
        threading.stack_size(previous)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ApiError(f"the JSON schema cannot be followed: {_describe_error(matcher)}")
    return matcher


def _describe_error(matcher: LLMatcher) -> str:
    wrong = one_line(matcher.get_error())
    return "no text follows it" if wrong.startswith("NoExtensionBias") else wrong[:MAX_ERROR]


class SchemaGrammar:
    """What one answer must follow; see `Grammar`.

    Args:
        matcher: at the start of the grammar.
        begins_after: token ids after which the grammar begins; none for the answer's start.
        unless: token ids with which the answer may begin there instead, after which it is free.

    Attributes:
        matcher: after what was taken.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        begins_after: tuple[int, ...] = (),
        unless: tuple[int, ...] = (),
    ) -> None:
        self.matcher, self._tokenizer, self._begins_after, self._unless = matcher, tokenizer, begins_after, unless
        self._tail: tuple[int, ...] | None = () if begins_after else None  # the last tokens before it begins
        self._is_marked = self._is_free = False  # whether `unless` was begun, and nothing holds any more
        self.length = 0

    def fork(self) -> Self:
        """See `Grammar.fork`."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def take(self, token: int) -> bool:
        """See `Grammar.take`."""
        self.length += 1
        if self._tail is not None:
            tail = (*self._tail, token)[-len(self._begins_after) :]
            self._tail = None if tail == self._begins_after else tail
            return True
        if self._is_free:
            return True
        if self._unless and token == self._unless[0]:
            self._unless, self._is_marked = self._unless[1:], True
            self._is_free = not self._unless
            return True
        if self._is_marked:
            return False
        self._unless = ()
        if token in self._tokenizer.eos_tokens:
            self._is_free = self.matcher.is_accepting()
            return self._is_free
        return not self.matcher.is_stopped() and self.matcher.try_consume_tokens([token]) == 1

    def find_mask(self) -> NDArray[np.bool_] | None:
        """See `Grammar.find_mask`.

        Raises:
            SchemaNotFollowed: llguidance gives up on the grammar, which may be too complex.
        """
        if self._is_free or self._tail is not None:
            return None
        size = self._tokenizer.vocab_size
        if self._is_marked:
            allowed = np.zeros(size, bool)
        else:
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            if self.matcher.is_error():
                raise SchemaNotFollowed(f"the JSON schema cannot be followed: {_describe_error(self.matcher)}")
            allowed = np.unpackbits(bits, count=size, bitorder="little").view(bool)
        if self._unless:
            allowed[self._unless[0]] = True
        return allowed

    def find_forced(self) -> list[int]:
        """See `Grammar.find_forced`."""
        if self._is_marked:
            return list(self._unless)
        if self._is_free or self._unless or self._tail is not None or self.matcher.is_stopped():
            return []
        return self.matcher.compute_ff_tokens()
