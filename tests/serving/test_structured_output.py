"""Grammars of JSON schemas: allowed and forced tokens, and unsupported schemas."""

import logging
import random
import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.engine.grammar import mask_root
from mlx_redrafter.serving.api_errors import ApiError, log_once
from mlx_redrafter.serving.scheduling.structured_output import GrammarCompiler, SchemaGrammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "works": {"type": "boolean"}},
    "required": ["name", "works"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(chat_tokenizer) -> GrammarCompiler:
    """For a model with more rows than the tokenizer has tokens."""
    return GrammarCompiler(chat_tokenizer, len(chat_tokenizer) + 3)


def find_allowed(grammar: SchemaGrammar) -> list[int] | None:
    """Allowed next tokens; None if all are."""
    mask = grammar.compute_mask()
    return None if mask is None else mask.nonzero()[0].tolist()


def take(grammar: SchemaGrammar, tokens: Sequence[int]) -> SchemaGrammar:
    """Advances the grammar over tokens that it must allow."""
    assert all(grammar.take(token) for token in tokens)
    return grammar


@pytest.fixture
def encode(chat_tokenizer):
    """Encodes text to token ids."""
    return lambda text: list(chat_tokenizer.encode(text, add_special_tokens=False))


def test_a_schema_holds_after_the_reasoning(chat_tokenizer, compiler, encode):
    grammar = compiler.compile({"type": "boolean"}, "reasoning")()
    end, *_ = chat_tokenizer.eos_token_ids
    (begin,) = encode("</think>")
    size = len(chat_tokenizer) + 3
    for token in encode("Hm. true? </think>"):
        assert set(range(size)) - set(find_allowed(grammar) or []) == {end}
        assert grammar.compute_forced() == []
        logits = mx.zeros((1, size))
        logits[:, end] = 2.0
        logits[:, token] = 1.0
        assert mask_root(grammar, logits).argmax().item() == begin  # instead of the end
        logits[:, token] = 3.0
        assert mask_root(grammar, logits).argmax().item() == token
        take(grammar, [token])
    starts = [chat_tokenizer.decode([token]) for token in find_allowed(grammar) or []]
    assert starts
    assert all("true".startswith(each) or "false".startswith(each) for each in starts)
    take(grammar, encode("true"))
    assert find_allowed(grammar) == list(chat_tokenizer.eos_token_ids)
    assert not grammar.fork().take(encode("x")[0])
    take(grammar, [*chat_tokenizer.eos_token_ids, *encode("anything")])  # not part of the answer
    assert grammar.length == len(encode("Hm. true? </think>true")) + 1 + len(encode("anything"))


def test_forks_do_not_change_a_grammar(compiler, encode):
    """Allowed tokens do not depend on earlier forks, nor on rejected tokens in them."""
    answer = encode('{"name": "Ada Lo", "works":\n true}')
    chance = random.Random(3)
    tried = compiler.compile(PERSON)()
    untouched = compiler.compile(PERSON)()
    for token in answer:
        for _ in range(3):
            fork = tried.fork()
            while fork.compute_mask() is not None and fork.take(chance.choice(answer)):
                fork.compute_forced()
        assert find_allowed(tried) == find_allowed(untouched)
        assert tried.compute_forced() == untouched.compute_forced()
        assert token in (find_allowed(tried) or [])
        take(tried, [token])
        take(untouched, [token])


def test_forced_tokens_are_the_only_allowed_ones(chat_tokenizer, compiler, encode):
    grammar = take(compiler.compile(PERSON)(), encode('{"'))
    forced = grammar.compute_forced()
    assert chat_tokenizer.decode(forced) == "name"
    for token in forced:
        assert find_allowed(grammar) == [token]
        take(grammar, [token])
    assert len(find_allowed(grammar) or []) > 1
    assert grammar.compute_forced() == []


def test_an_answer_may_begin_with_a_tool_marker_instead(compiler, encode):
    mark = encode("<tool>")
    make = compiler.compile(PERSON, unless=tuple(mark))
    start = find_allowed(make()) or []
    without = find_allowed(compiler.compile(PERSON)()) or []
    assert len(mark) > 2
    assert set(start) == {*without, mark[0]}
    assert mark[0] not in without
    assert make().compute_forced() == []
    marked = make()
    for at, token in enumerate(mark[:-1]):
        take(marked, [token])
        assert find_allowed(marked) == [mark[at + 1]]
        assert marked.compute_forced() == mark[at + 1 :]
        assert not marked.fork().take(encode("{")[0])
    take(marked, [mark[-1], *encode("anything")])
    assert find_allowed(marked) is None
    assert marked.compute_forced() == []
    plain = take(make(), encode("{"))
    assert mark[0] not in (find_allowed(plain) or [])
    assert not plain.fork().take(mark[0])
    reasoned = compiler.compile(PERSON, "reasoning", tuple(mark))()
    assert set(find_allowed(take(reasoned, encode("so</think>"))) or []) == set(start)


def test_a_call_is_one_of_the_functions(compiler, encode):
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "$defs": {"b": {"type": "integer"}},
    }
    functions = [
        {"name": name, "parameters": {"type": "object", **parameters}} for name in ("list", 'l"é')
    ]
    make = compiler.compile([*functions, {"name": "none"}])
    for call in (
        '{"name": "list", "arguments": {"a": 1}}',
        r'{"name": "l\"é", "arguments": {"a": -20, "x": null}}',
        '{"name": "none", "arguments": {}}',
    ):
        following = find_allowed(take(make(), encode(call)))
        take(make(), [*encode(call), following[0]])
    begun = take(make(), encode('{"name": "list", "arguments": {"a": '))
    assert not begun.fork().take(encode("x")[0])
    assert not make().take(encode("[")[0])


def refer(count: int, levels: int = 1) -> dict[str, Any]:
    """A schema of `count` references, each `levels` arrays away from the next."""

    def wrap(schema, count):
        return {"type": "array", "items": wrap(schema, count - 1)} if count else schema

    names = [f"#/$defs/{at}" for at in range(count + 1)]
    schemas = {str(at): wrap({"$ref": name}, levels) for at, name in enumerate(names[1:])}
    return {"$ref": names[0], "$defs": schemas | {str(count): {"type": "string"}}}


REFUSED = {
    "itself": ({"$ref": "#"}, "no text satisfies it"),
    "a circle": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "no text satisfies it",
    ),
    "missing": ({"$ref": "#/$defs/x"}, "Pointer '/$defs/x' does not exist"),
    "elsewhere": ({"$ref": "http://example.com/x"}, "Resource 'http://example.com/x'"),
    "unknown type": ({"type": "objekt"}, "Invalid type: objekt"),
    "wrong type": ({"type": 5}, "type must be"),
    "no choice": ({"enum": []}, "Unsatisfiable schema"),
    "impossible": ({"allOf": [{"type": "string"}, {"type": "number"}]}, "Unsatisfiable schema"),
    "not a number": ({"const": float("inf")}, "expected value"),
    "half a character": ({"const": "\ud800"}, "unexpected end of hex escape"),
    "deep": (refer(1, 200), "recursion limit exceeded"),
    "names it cannot match": (
        {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}},
        "",
    ),
    "long": (refer(5000), "at most 500 references"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemas_are_refused(name, compiler):
    schema, wrong = REFUSED[name]
    with pytest.raises(
        ApiError, match=re.escape("the JSON schema cannot be followed: ") + ".*" + re.escape(wrong)
    ):
        compiler.compile(schema)


OBJECT = {"type": "object"}
IGNORED = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "propertyNames": OBJECT
    | {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"const": 1}, "minContains": 1},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "binary": {"type": "string", "format": "binary"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "(?=a)": {"type": "string", "pattern": "^(?=a).b$"},
    "(?!^[-+.]*$)": {
        "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*\.?\d*$"}]
    },
    "-9223372036854775808": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "http://json-schema.org/schema": {"$schema": "http://json-schema.org/schema", "type": "string"},
}
"""Text in the log -> a schema that causes it."""


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("place", ["format", "call", "within"])
def test_unenforceable_keywords_are_ignored(name, place, compiler, encode, caplog):
    caplog.set_level(logging.INFO)
    log_once.cache_clear()
    inner = OBJECT | {
        "properties": {"a": IGNORED[name], "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    asked = {
        "format": IGNORED[name],
        "call": [{"name": "f", "parameters": inner}],
        "within": inner,
    }[place]
    compiler.compile(asked)
    (line,) = [each for each in caplog.messages if "ignored" in each]
    assert name in line.replace("\\\\", "\\")
    compiler.compile(asked)
    assert len([each for each in caplog.messages if "ignored" in each]) == 1


def test_the_rest_of_such_a_schema_is_enforced(compiler, encode):
    """Includes properties named like keywords, and constants that look like schemas."""
    look = {"pattern": "(?=a)"}
    properties = {
        "pattern": {"type": "boolean"},
        "a": {"type": "string", **look},
        "b": {"const": look},
    }
    schema = {"type": "object", "properties": properties, "required": ["pattern", "a", "b"]}
    grammar = take(compiler.compile(schema)(), encode('{"pattern": '))
    assert not grammar.fork().take(encode('"')[0])
    take(grammar, encode('true, "a": "xyz", "b": {"pattern": "(?=a)"}}'))


def test_long_chains_of_references_work(compiler, encode):
    """Too deep for the stack of an ordinary thread, which would end the process."""
    grammar = take(compiler.compile(refer(200, 30))(), encode("[[[["))
    assert grammar.fork().take(encode("[")[0])
    assert (
        take(
            compiler.compile({"anyOf": [{"$ref": "#"}, {"type": "null"}]})(), encode("null")
        ).length
        == 1
    )
