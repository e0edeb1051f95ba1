"""What a grammar cannot enforce of a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

Schema = dict[str, Any]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value has schemas by name."""

VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords whose value is data, not a schema."""

GROUPS = [
    ("$schema",),
    ("pattern",),
    ("patternProperties",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
]
"""Keywords that a grammar may refuse for their values; each group is dropped together."""


def drop_refused(schema: Schema, refuses: Callable[[Schema], bool]) -> tuple[Schema, list[str]]:
    """Returns (a copy of a schema without the keywords that a grammar refuses, what was dropped).

    Keywords that are wrong by JSON Schema's own rules are kept, so that the whole schema is refused.

    Args:
        refuses: whether a grammar refuses a schema.
    """
    schema, dropped = deepcopy(schema), list[str]()
    for part in list(find_parts(schema)):
        for group in GROUPS:
            names = [name for name in group if name in part]
            own = {name: part[name] for name in ("type", *names) if name in part}
            if isinstance(own.get("patternProperties"), dict):
                own = {"patternProperties": dict.fromkeys(own["patternProperties"], True)}
            if names and refuses(own) and is_schema(own):
                dropped.append(", ".join(f"{name} {part[name]!r:.80}" for name in names))
                drop(part, names)
    return schema, dropped


def drop(part: Schema, names: Sequence[str]) -> None:
    """Removes keywords; `additionalProperties` with `patternProperties`, as it would refuse what those allow."""
    if "patternProperties" in part and "patternProperties" in names:
        part.pop("additionalProperties", None)
    for name in names:
        part.pop(name, None)


def find_parts(schema: Any) -> Iterator[Schema]:
    """Yields all schemas within a schema, itself included."""
    if isinstance(schema, list):
        for each in schema:
            yield from find_parts(each)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name not in VALUES:
                is_map = name in MAPS and isinstance(value, dict)
                yield from find_parts(list(value.values()) if is_map else value)


def is_schema(schema: Schema) -> bool:
    """Whether a schema follows JSON Schema's own rules."""
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError:
        return False
    return True
