"""JSON objects in files, flags and requests."""

from __future__ import annotations

import json
import math
from typing import Any

from .errors import RedrafterError, join_lines


def parse_object(text: str | bytes, name: str = "the value") -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        name: what the text is, for errors.

    Raises:
        RedrafterError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RedrafterError(f"{name} is not JSON: {join_lines(error)}") from error
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise RedrafterError(f"{name} must be a JSON object, got {kind}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)
