"""JSON as its standard has it, for every file, message and page of Seedbed. No other module writes JSON.

The standard has no NaN and no infinities. They are the texts in `NON_FINITE`, as in ProtoJSON.
"""

from __future__ import annotations

import json
import math
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The numbers that JSON lacks, by the text that stands for each."""
_MOST_DEPTH = 64
_MOST_DIGITS = 60  # random generators keep integers of 39 digits


def dumps(
    value: Any, *, indent: int | None = None, compact: bool = False, sort: bool = False
) -> str:
    """Returns a value of JSON types, tuples and floats as JSON; raises TypeError for other types."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(
            value, allow_nan=False, indent=indent, separators=separators, sort_keys=sort
        )
    except ValueError:  # a number that is not finite: rare, so the others are not slowed down
        spelled = _spelled(value)
        return json.dumps(
            spelled, allow_nan=False, indent=indent, separators=separators, sort_keys=sort
        )


def loads(text: str | bytes) -> Any:
    """Returns the value of a JSON text that anybody may have written; NaN and infinities stay texts.

    Raises ValueError if it is no JSON, if it is nested more than 64 levels deep, or if an integer has more
    than 60 digits. Accepts the words NaN and Infinity, which earlier versions wrote.
    """
    try:
        value = json.loads(text, parse_int=_integer)
        _require_depth(value, 0)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep") from None
    return value


def revived(value: Any) -> Any:
    """Returns a value that was read, with numbers for the texts in `NON_FINITE`."""
    if isinstance(value, list):
        return [revived(child) for child in value]
    if isinstance(value, dict):
        return {name: revived(child) for name, child in value.items()}
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def spells_number(value: Any) -> bool:
    """Returns whether a value holds a text that `revived` would take for a number."""
    if isinstance(value, list | tuple):
        return any(map(spells_number, value))
    if isinstance(value, dict):
        return any(map(spells_number, value.values()))
    return isinstance(value, str) and value in NON_FINITE


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple):
        return [_spelled(child) for child in value]
    if isinstance(value, dict):
        return {name: _spelled(child) for name, child in value.items()}
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _require_depth(value: Any, depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise RecursionError
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:
            if isinstance(child, dict | list):
                _require_depth(child, depth + 1)
