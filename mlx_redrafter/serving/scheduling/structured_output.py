"""Answers that follow a JSON schema: llguidance masks the tokens that a grammar refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from functools import cached_property
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ...errors import join_lines
from ..api_errors import ApiError, SchemaNotFollowed, log_once

Constraint = dict[str, Any] | list[dict[str, Any]]
"""What an answer must follow: a JSON schema, or functions of which it calls one."""

KEYWORDS = (
    "$schema",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
"""Keywords of a schema that a grammar may reject for their values."""

WHITESPACE = r"[ \n]{1,24}"
"""Whitespace between the parts of an object. Without the limit some models never stop."""

CANNOT_FOLLOW = "the JSON schema cannot be followed"

MAX_REFERENCES = 500
STACK_BYTES = 1 << 29
"""Maximum `$ref`s in a schema, and the stack for them: llguidance recurses into each, up to 128
levels deep, and a stack overflow would end the process."""


class GrammarCompiler:
    """Compiles JSON schemas to grammars.

    Args:
        tokenizer: mlx-lm's wrapper of a fast tokenizer.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def compile(
        self, constraint: Constraint, initial_state: str | None = None, unless: tuple[int, ...] = ()
    ) -> SchemaGrammar:
        """A grammar; calling it makes a copy for one answer.

        Keywords that llguidance cannot enforce are ignored and logged.

        Args:
            initial_state: see `EncodedPrompt`; with "reasoning" the grammar begins after the end of
                the reasoning.
            unless: token ids with which the answer may begin instead; the rest of it is then free.
        """
        matcher = self._match(constraint, unless)
        ignored = list[str]()
        if matcher.is_error():
            followed, ignored = self._drop_refused(constraint)
            matcher = self._match(followed, unless) if ignored else matcher
        if matcher.is_error():
            raise ApiError(describe_error(matcher))
        ignored += matcher.get_grammar_warnings()
        if ignored:
            names = join_lines("; ".join(ignored))
            log_once(f"JSON schema keywords that a grammar cannot enforce are ignored: {names}")
        end = tuple(self._tokenizer.think_end_tokens) if initial_state == "reasoning" else ()
        return SchemaGrammar(matcher, self._compiled, (constraint, initial_state, unless), end)

    @cached_property
    def _compiled(self) -> LLTokenizer:
        """The tokenizer for llguidance, made in up to a second for the first request."""
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(
            backend.to_str(),
            n_vocab=self._vocab_size,
            eos_token=list(self._tokenizer.eos_token_ids),
        )

    def _match(self, constraint: Constraint, unless: tuple[int, ...]) -> LLMatcher:
        grammar = describe_grammar(constraint, unless)
        if grammar.count('"$ref"') > MAX_REFERENCES:
            raise ApiError(f"{CANNOT_FOLLOW}: it must have at most {MAX_REFERENCES} references")
        previous = threading.stack_size(STACK_BYTES)
        try:
            with ThreadPoolExecutor(1) as thread:
                matcher = thread.submit(LLMatcher, self._compiled, grammar).result()
        finally:
            threading.stack_size(previous)
        matcher.compute_bitmask()
        return matcher

    def _drop_refused(self, constraint: Constraint) -> tuple[Constraint, list[str]]:
        """(a copy of a constraint without the keywords that llguidance rejects, those keywords)."""
        constraint = deepcopy(constraint)
        dropped = list[str]()
        for part in list(list_objects(constraint)):
            for name in KEYWORDS:
                if isinstance(part.get(name), str | int | float):  # not a property of this name
                    own = {key: part[key] for key in ("type", name) if key in part}
                    error = LLMatcher.validate_grammar(describe_grammar(own, ()), self._compiled)
                    if error and not error.startswith("Unsatisfiable"):
                        dropped.append(f"{name} {part.pop(name)!r:.80}")
        return constraint, dropped


def describe_grammar(constraint: Constraint, unless: tuple[int, ...]) -> str:
    """The grammar in llguidance's format, in which each schema is a document of its own."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": True}
    if isinstance(constraint, dict):
        mark = " ".join(f"<[{token}]>" for token in unless)
        choice = [{"lark_grammar": f"start: @answer | {mark}"}] if mark else []
        answer = {"name": "answer", "json_schema": constraint | {"x-guidance": options}}
        return json.dumps({"grammars": [*choice, answer]})
    calls = []
    schemas = []
    for at, function in enumerate(constraint):
        begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        calls.append(f'{json.dumps(begin, ensure_ascii=False)} @arguments{at} "}}"')
        schema = function.get("parameters") or {"type": "object"}
        schemas.append({"name": f"arguments{at}", "json_schema": schema | {"x-guidance": options}})
    return json.dumps({"grammars": [{"lark_grammar": f"start: {' | '.join(calls)}"}, *schemas]})


def list_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects in a schema, except those in values that an answer may have."""
    if isinstance(schema, dict):
        yield schema
        schema = [value for name, value in schema.items() if name not in ("const", "enum")]
    if isinstance(schema, list):
        for each in schema:
            yield from list_objects(each)


def describe_error(matcher: LLMatcher) -> str:
    """llguidance's error on one line."""
    wrong = join_lines(matcher.get_error())
    if wrong.startswith("NoExtensionBias"):
        wrong = "no text satisfies it"
    return f"{CANNOT_FOLLOW}: {wrong:.300}"


class SchemaGrammar:
    """The grammar of one answer; see `Grammar`.

    Args:
        matcher: llguidance's matcher at the start of the grammar.
        arguments: the arguments of `GrammarCompiler.compile`, for another rank to compile the same
            grammar.
        begins_after: token ids after which the grammar begins; empty if it begins with the answer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        arguments: tuple[Any, ...],
        begins_after: tuple[int, ...],
    ) -> None:
        self.matcher = matcher
        self._tokenizer = tokenizer
        self.arguments = arguments
        self._begins_after = begins_after
        self._unless: tuple[int, ...] = arguments[-1]
        self._tail: tuple[int, ...] = ()  # the latest tokens before the grammar begins
        # The first tokens of the grammar, at most one more than `unless`.
        self._start: tuple[int, ...] = ()
        self._is_free = False  # whether any token is allowed from here on
        # The mask before the grammar begins: the answer must not end inside its reasoning.
        self._reasoning = np.ones(tokenizer.vocab_size, bool)
        self._reasoning[list(tokenizer.eos_tokens)] = False
        self.length = 0

    def fork(self) -> Self:
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    __call__ = fork

    @property
    def fallback(self) -> int | None:
        """In reasoning, the next token of what ends it, in place of an end-of-text token."""
        end = self._begins_after
        counts = range(len(end) - 1, -1, -1)
        begun = (n for n in counts if self._tail[len(self._tail) - n :] == end[:n])
        return next((end[n] for n in begun), None)

    def take(self, token: int) -> bool:
        self.length += 1
        if self._begins_after:
            self._tail = (*self._tail, token)[-len(self._begins_after) :]
            if self._tail == self._begins_after:
                self._begins_after = ()
            return True
        if self._is_free:
            return True
        if token in self._tokenizer.eos_tokens:
            self._is_free = self.matcher.is_accepting()
            return self._is_free
        self._start = (*self._start, token)[: len(self._unless) + 1]
        self._is_free = self._start == self._unless
        return not self.matcher.is_stopped() and self.matcher.try_consume_tokens([token]) == 1

    def compute_mask(self) -> NDArray[np.bool_] | None:
        """(V,) the mask of allowed tokens; None if all are allowed."""
        if self._begins_after:
            return self._reasoning
        if self._is_free:
            return None
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise SchemaNotFollowed(describe_error(self.matcher))
        return np.unpackbits(bits, count=self._tokenizer.vocab_size, bitorder="little").view(bool)

    def compute_forced(self) -> list[int]:
        if self._is_free or self._begins_after or self.matcher.is_stopped():
            return []
        return self.matcher.compute_ff_tokens()
