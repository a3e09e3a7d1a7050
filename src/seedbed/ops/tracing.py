"""What a method of the user's did wrong while JAX traced it, in a line that names method and place."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from seedbed.types import SeedbedError

_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_OURS = (f"{Path(__file__).parents[1]}/", f"{Path(jax.__file__).parent}/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{Path(traceback.__file__).parent}/")


@contextlib.contextmanager
def naming(method: str, guide: str) -> Iterator[None]:
    """Raises an exception of the block as a SeedbedError that names the method and the line that failed.

    `guide` is the page that tells how such a method is written. A SeedbedError passes as it is.
    """
    try:
        yield
    except SeedbedError:
        raise
    except Exception as error:
        text = (str(error).strip() or "no text").splitlines()[0].rstrip(":. ")
        hint = ""
        if isinstance(error, _TRACED):
            hint = (
                "; arrays have no values while JAX traces: use jnp.where, not `if`, and jnp, not np"
            )
        elif isinstance(error, jax.errors.UnexpectedTracerError):
            hint = (
                "; an array that was made while JAX traced was kept, by functools.cache or "
                "cached_property perhaps: keep numpy arrays"
            )
        raise SeedbedError(
            f"{method} failed{_place(error)}: {type(error).__name__}: {text}{hint} (see {guide}; --debug "
            "shows the traceback)"
        ) from error


def _place(error: Exception) -> str:
    """Returns, as text, the last line of a traceback that is the user's, else of a library, or ''."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    if not outside:
        return ""
    mine = [frame for frame in outside if not any(part in frame.filename for part in _LIBRARIES)]
    outside = mine or outside
    return f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}"
