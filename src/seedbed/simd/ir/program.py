"""A function of one example as a scalar graph: its operands, and what is raised if it cannot be one."""

from __future__ import annotations

import dataclasses

import numpy as np

from seedbed.simd.ir.graph import Graph
from seedbed.types import SeedbedError

DTYPES = ("float32", "int32", "uint32", "bool")
"""The types that the numbers of a kernel may have."""


class Unsupported(SeedbedError):
    """Raised when a function cannot become a kernel, e.g. because an operation has no scalar form."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An argument or result of a program: `shape` is that of one example, `nodes` are its elements."""

    shape: tuple[int, ...]
    dtype: str
    shared: bool  # all examples use the same value
    nodes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of one example as a scalar graph, with its arguments and results."""

    graph: Graph
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def slots(operands: tuple[Operand, ...]) -> list[int]:
    """Returns the first slot of each operand; for a shared operand, its index among the shared operands."""
    places, at, shared = [], 0, 0
    for operand in operands:
        places.append(shared if operand.shared else at)
        shared += operand.shared
        at += 0 if operand.shared else operand.nodes.size
    return places
