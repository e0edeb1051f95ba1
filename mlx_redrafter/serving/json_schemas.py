"""What a grammar cannot enforce of a JSON schema, and where an answer breaks one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

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
    except Exception:  # besides a SchemaError: what Python raises for a schema of wrong types or a huge pattern
        return False
    return True


def find_violation(schema: Schema, text: str) -> str | None:
    """Returns where a text breaks a schema, and which keyword; None if it does not.

    Patterns are not checked: with some of them Python's `re` takes forever, and stops all other threads meanwhile.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return "it is not JSON"
    schema = deepcopy(schema)
    for part in list(find_parts(schema)):
        drop(part, ("pattern", "patternProperties"))
    validator: Any = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    error = best_match(validator.iter_errors(value))
    return None if error is None else f"{error.json_path} breaks {error.validator}"
