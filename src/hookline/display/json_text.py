"""JSON of results: numbers that JSON lacks become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(data: Mapping[str, Any]) -> str:
    """Return data as JSON. NaN and infinities, which JSON lacks, become strings.

    >>> print(json_text({"norm": float("nan"), "sites": ("fc", 3)}))
    {
      "norm": "NaN",
      "sites": [
        "fc",
        3
      ]
    }
    """
    return json.dumps(to_json_value(data), indent=2, allow_nan=False)


def to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON has. NaN and infinities become strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
