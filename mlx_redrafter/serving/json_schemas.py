"""Drops the keywords of a JSON schema that a grammar rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

Schema = dict[str, Any]
Constraint = Schema | list[dict[str, Any]]
"""What an answer must follow: a JSON schema, or functions of which it calls one."""

MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value maps names to schemas."""

DATA_KEYWORDS = ("const", "enum", "default", "examples", "example")
"""Keywords whose value is data, not a schema."""

KEYWORDS = (
    "$schema", "pattern", "patternProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
"""Keywords that a grammar may reject for their values."""


def drop_refused(constraint: Constraint, refuses: Callable[[Schema], bool]) -> tuple[Constraint, list[str]]:
    """Returns (a copy of a constraint without the keywords that a grammar rejects, what was dropped).

    Args:
        refuses: whether a grammar rejects a schema.
    """
    constraint, dropped = deepcopy(constraint), list[str]()
    for part in list(find_parts(constraint)):
        for name in [name for name in KEYWORDS if name in part]:
            own = {key: part[key] for key in ("type", name) if key in part}
            if name == "patternProperties" and isinstance(part[name], dict):
                own = {name: dict.fromkeys(part[name], True)}
            if refuses(own):
                dropped.append(f"{name} {part.pop(name)!r:.80}")
                if name == "patternProperties":  # this would forbid what the patterns allow
                    part.pop("additionalProperties", None)
    return constraint, dropped


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
