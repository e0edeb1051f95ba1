"""JSON schemas: dropping keywords that a grammar rejects, and finding where an answer violates a schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

Schema = dict[str, Any]

MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value maps names to schemas."""

DATA_KEYWORDS = ("const", "enum", "default", "examples", "example")
"""Keywords whose value is data, not a schema."""

KEYWORD_GROUPS = [
    ("$schema",),
    ("pattern",),
    ("patternProperties",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
]
"""Keywords that a grammar may reject for their values; those of a group are dropped together."""


def drop_refused(schema: Schema, refuses: Callable[[Schema], bool]) -> tuple[Schema, list[str]]:
    """Returns (a copy of a schema without the keywords that a grammar rejects, what was dropped).

    Keywords that are invalid in JSON Schema itself are kept, so that the whole schema is refused.

    Args:
        refuses: whether a grammar rejects a schema.
    """
    schema, dropped = deepcopy(schema), list[str]()
    for part in list(find_parts(schema)):
        for group in KEYWORD_GROUPS:
            names = [name for name in group if name in part]
            own = {name: part[name] for name in ("type", *names) if name in part}
            if isinstance(own.get("patternProperties"), dict):
                own = {"patternProperties": dict.fromkeys(own["patternProperties"], True)}
            if names and refuses(own) and is_schema(own):
                dropped.append(", ".join(f"{name} {part[name]!r:.80}" for name in names))
                drop_keywords(part, names)
    return schema, dropped


def drop_keywords(part: Schema, names: Sequence[str]) -> None:
    """Removes keywords in place.

    `additionalProperties` goes with `patternProperties`, as it would forbid what the patterns allow.
    """
    if "patternProperties" in part and "patternProperties" in names:
        part.pop("additionalProperties", None)
    for name in names:
        part.pop(name, None)


def find_parts(schema: Any) -> Iterator[Schema]:
    """Yields a schema and all schemas within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from find_parts(each)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name not in DATA_KEYWORDS:
                is_map = name in MAP_KEYWORDS and isinstance(value, dict)
                yield from find_parts(list(value.values()) if is_map else value)


def is_schema(schema: Schema) -> bool:
    """Whether a schema is valid JSON Schema."""
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except Exception:  # not only SchemaError: wrong types and huge patterns raise other types
        return False
    return True


def find_violation(schema: Schema, text: str) -> str | None:
    """Returns where a text violates a schema, and which keyword; None if it does not.

    Patterns are not checked: with some of them Python's `re` runs forever and blocks all other threads.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return "it is not JSON"
    schema = deepcopy(schema)
    for part in list(find_parts(schema)):
        drop_keywords(part, ("pattern", "patternProperties"))
    validator: Any = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    error = best_match(validator.iter_errors(value))
    return None if error is None else f"{error.json_path} breaks {error.validator}"
