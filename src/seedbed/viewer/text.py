"""Numbers as people read them, in the live view, in lists and in reports. What is not known is a dash."""

from __future__ import annotations

import math
from typing import Any


def _known(value: Any) -> bool:
    return value is not None and value == value


def as_number(value: Any, digits: int = 2) -> str:
    """Writes a number with so many decimals."""
    return f"{float(value):.{digits}f}" if _known(value) else "-"


def as_score(value: Any) -> str:
    """Writes a return: with decimals if it is small, and with thousands separated."""
    if not _known(value):
        return "-"
    return f"{float(value):,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def as_percent(value: Any) -> str:
    """Writes a share as whole percents."""
    return f"{float(value):.0%}" if _known(value) else "-"


def as_count(value: Any) -> str:
    """Writes a count: whole, or in millions or billions."""
    if not _known(value):
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:,.0f}"


def as_duration(seconds: Any) -> str:
    """Writes a duration in its two largest units."""
    if not _known(seconds) or math.isinf(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def as_age(seconds: Any) -> str:
    """Writes how long ago something was, in its largest unit."""
    if not _known(seconds):
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds / size)}{unit}"
    return f"{int(seconds)}s"
