"""Drops the keywords of a JSON schema that a grammar rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

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
            if names and refuses(own):
                dropped.append(", ".join(f"{name} {part[name]!r:.80}" for name in names))
                if "patternProperties" in names:  # this would forbid what the patterns allow
                    part.pop("additionalProperties", None)
                for name in names:
                    del part[name]
    return schema, dropped


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
