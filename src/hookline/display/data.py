"""Convert results to data: dicts of plain values, JSON, and tables of pandas."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any


class Tabular(ABC):
    """Give a result that is a table as data: its facts, and rows that have the same keys."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict of plain values."""

    @abstractmethod
    def _table_rows(self) -> list[dict[str, Any]]:
        """Return the rows, each as a dict of plain values."""

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; the columns are the keys of `to_dict()`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            message = "to_pandas() needs pandas.\nRun pip install pandas."
            raise ModuleNotFoundError(message, name="pandas") from error
        return pandas.DataFrame(self._table_rows())


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
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
