"""Sparse symmetric positive definite systems over the degrees of freedom, H = L' D L."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.physics.math import mul, sub, unstack

Entry = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The entries of L, in H = L' D L, that may be non-zero.

    `rows[k]` holds the columns left of k, nearest first.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def nv(self) -> int:
        """Returns the size of the system."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True)
class Factor:
    """The factors of H: unit lower L by entry, and the reciprocals of D [nv]; all are scalars."""

    pattern: Pattern
    lower: Mapping[Entry, Any]
    reciprocal: Sequence[Any]


def pattern(nv: int, pairs: set[Entry]) -> Pattern:
    """Returns the pattern of L: the non-zeros (i, j), i >= j, of H [nv, nv], and the fill.

    The elimination goes from the leaves to the root. It makes no fill if every column is an ancestor of its
    row. Source: Featherstone (2005), L' D L.
    """
    rows: list[set[int]] = [set() for _ in range(nv)]
    for i, j in pairs:
        if i != j:
            rows[i].add(j)
    for k in range(nv - 1, -1, -1):
        for i in rows[k]:
            rows[i] |= {j for j in rows[k] if j < i}
    return Pattern(tuple(tuple(sorted(row, reverse=True)) for row in rows))


def factor(pattern: Pattern, matrix: Mapping[Entry, Any]) -> Factor:
    """Factorises H, given as scalars by entry (i, j), i >= j. An absent off-diagonal entry is zero."""
    work = dict(matrix)
    lower: dict[Entry, Any] = {}
    reciprocal: list[Any] = [None] * pattern.nv
    for k in range(pattern.nv - 1, -1, -1):
        reciprocal[k] = 1 / work[k, k]
        columns = [i for i in pattern.rows[k] if (k, i) in work]
        for place, i in enumerate(columns):
            ratio = lower[k, i] = mul(work[k, i], reciprocal[k])
            for j in columns[place:]:
                product = mul(ratio, work[k, j])
                work[i, j] = sub(work[i, j], product) if (i, j) in work else -product
    return Factor(pattern, lower, reciprocal)


def quadratic(factor: Factor, vector: Sequence[Any]) -> Any:
    """Returns v' H^-1 v of v = vector [nv]. If the elements are arrays, so is the result."""
    x = list(vector)
    total: Any = 0
    for k in reversed(range(len(x))):
        for i in factor.pattern.rows[k]:
            if (k, i) in factor.lower:
                x[i] = x[i] - factor.lower[k, i] * x[k]
        total = total + x[k] * x[k] * factor.reciprocal[k]
    return total


def solve(factor: Factor, vector: jax.Array | Sequence[Any]) -> jax.Array:
    """Solves H x = vector [nv] for x [nv]."""
    x = list(vector) if isinstance(vector, Sequence) else unstack(vector)
    rows = [[i for i in row if (k, i) in factor.lower] for k, row in enumerate(factor.pattern.rows)]
    for k in reversed(range(len(x))):
        for i in rows[k]:
            x[i] = sub(x[i], mul(factor.lower[k, i], x[k]))
    x = [mul(value, reciprocal) for value, reciprocal in zip(x, factor.reciprocal, strict=True)]
    for k in range(len(x)):
        # The most recent x[i] is used last, so that the wait for it is short.
        for i in reversed(rows[k]):
            x[k] = sub(x[k], mul(factor.lower[k, i], x[i]))
    return jnp.stack(x)


def eliminate(matrix: Sequence[Sequence[Any]], vector: Sequence[Any]) -> list[Any]:
    """Solves A x = vector for a small matrix A of scalars that need not be symmetric.

    It does not pivot: A must be near a positive definite matrix.
    """
    rows = [[*row, right] for row, right in zip(matrix, vector, strict=True)]
    for k, pivot in enumerate(rows):
        for i in range(k + 1, len(rows)):
            ratio = rows[i][k] / pivot[k]
            rows[i] = [x - ratio * y for x, y in zip(rows[i], pivot, strict=True)]
    x: list[Any] = []
    for row in reversed(rows):
        known = row[len(row) - 1 - len(x) : -1]
        left = row[-1]
        for factor, value in zip(known, x, strict=True):
            left = left - factor * value
        x.insert(0, left / row[len(row) - 2 - len(x)])
    return x
