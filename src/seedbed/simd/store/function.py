"""Functions of one example, some of which are known before they are made.

A function is a jaxpr, or is derived from another function by a recipe. What is derived has a jaxpr only when
somebody asks for it: in a later process its types are on disk, and so is its machine code. Functions are
hashed by identity. For any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.core
from jax.extend import core

from seedbed import cache, strict_json
from seedbed.jaxprs import without_collector
from seedbed.simd.store.digest import Indescribable, digest


class Function:
    """A function of one example, with flat operands and results."""

    def __init__(
        self,
        in_avals: Sequence[Any],
        out_avals: Sequence[Any],
        make: Callable[[], core.ClosedJaxpr],
        recipe: str | None,
    ) -> None:
        """Takes types, what makes the jaxpr, and the recipe if other processes can derive it, too.

        A recipe says all that the jaxpr depends on.
        """
        self.in_avals, self.out_avals = list(in_avals), list(out_avals)
        self._make, self.derived = make, recipe

    @staticmethod
    def of(closed: core.ClosedJaxpr) -> Function:
        """Returns the function that a jaxpr computes."""
        return Function(closed.in_avals, closed.out_avals, lambda: closed, None)

    def __repr__(self) -> str:
        return str(self.closed)

    @functools.cached_property
    def closed(self) -> core.ClosedJaxpr:
        """Returns the jaxpr; that of a derived function is made by the first call."""
        return self._make()

    @functools.cached_property
    def name(self) -> str | None:
        """Returns what tells, in every process, what the function computes; None if nothing does."""
        return self.derived or self._digest(rules=False)

    @functools.cached_property
    def rules(self) -> str | None:
        """Returns what also tells how it is differentiated once; None if nothing does or it is derived."""
        return None if self.derived else self._digest(rules=True)

    @without_collector
    def _digest(self, *, rules: bool) -> str | None:
        # The types of code inside shard_map name a mesh, which is not on disk.
        if rules and any(aval.manual_axis_type.varying for aval in self.in_avals):
            return None
        try:
            found = digest(self.closed, rules=rules)
            # The jaxpr draws random numbers in one operation, which this setting splits up.
            return f"{found}{int(jax.config.jax_threefry_partitionable)}"  # type: ignore[attr-defined]
        except Indescribable:
            return None


def recall(recipe: str) -> dict[str, Any] | None:
    """Returns what is known on disk of a derivation, or None."""
    found = cache.load(_key(recipe))
    return strict_json.loads(found) if found else None


def remember(recipe: str, known: dict[str, Any]) -> None:
    """Keeps on disk what is known of a derivation: JSON."""
    cache.save(_key(recipe), strict_json.dumps(known).encode())


def describe(avals: Sequence[Any]) -> list[Any]:
    """Returns types as JSON."""
    return [[list(a.shape), str(a.dtype), a.weak_type] for a in avals]


def types_of(described: Sequence[Any]) -> list[Any]:
    """Returns the types that `describe` has described."""
    return [jax.core.ShapedArray(tuple(s), d, weak_type=w) for s, d, w in described]


def _key(recipe: str) -> str:
    return f"derivation\n{recipe}"
