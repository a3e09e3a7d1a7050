"""The known names that are closest to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from seedbed.errors import SeedbedError


def nearest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.0) -> list[str]:
    """Returns at most `most` known names, the closest first; those below `cutoff` (0 to 1) are left out."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(
    name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.0, otherwise: str = ""
) -> str:
    """Returns `; did you mean A, B?` for the end of an error, or `; ` and `otherwise` if no name is close."""
    near = nearest(name, known, most, cutoff)
    hint = f"did you mean {', '.join(near)}?" if near else otherwise
    return hint and f"; {hint}"


def require_options(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises SeedbedError, with a near name or all, for a name that is not an option of `owner`."""
    known = list(known)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, 1, 0.5, f"it has {', '.join(known)}")
            raise SeedbedError(f"{owner} has no option {name!r}{hint}")
