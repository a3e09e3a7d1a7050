"""Hashes a jaxpr by what it computes: the same in every process, and whatever names it has."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import core

# Parameters that do not change the result: names, and how to differentiate.
_IGNORED = frozenset(
    {
        "name",
        "jvp",
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "fwd_jaxpr_thunk",
        "bwd",
        "symbolic_zeros",
        "num_consts_jvp",
        "debug_info",
        "out_trees",
        "in_tree",
        "out_tree",
    }
)


# Parameters that decide what a derivative is.
_RULES = frozenset({"jvp", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"})


class Indescribable(Exception):
    """Raised when a jaxpr contains something that has no lasting description."""


def digest(closed: core.ClosedJaxpr, *, rules: bool = False) -> str:
    """Returns the SHA-256, in hex, of a jaxpr's text and of the bytes of its constants.

    With `rules`, also of the rules by which its `jax.custom_jvp` functions are differentiated once.

    Raises:
        Indescribable: a parameter has no description that another process would share; or, with `rules`, the
            jaxpr has a rule of another kind.
    """
    scribe = _Scribe({}, rules)
    scribe.closed(closed)
    return _hash(scribe.lines)


class _Scribe:
    """A writer of jaxprs as lines of text. Variables are numbered in the order in which they appear."""

    def __init__(self, known: dict[int, str], rules: bool) -> None:
        self.lines: list[str] = []
        self._numbers: dict[Any, int] = {}
        self._known = known  # hashes of inner jaxprs by id: calls of one function share one
        self._rules = rules

    def closed(self, closed: core.ClosedJaxpr) -> None:
        self.jaxpr(closed.jaxpr)
        self.lines += [self.value(constant) for constant in closed.consts]

    def jaxpr(self, jaxpr: Any) -> None:
        self.lines.append(f"{self._atoms(jaxpr.constvars)};{self._atoms(jaxpr.invars)}")
        for equation in jaxpr.eqns:
            params = [
                f"{name}={self.value(param)}"
                for name, param in sorted(equation.params.items())
                if name not in _IGNORED or (self._rules and equation.primitive.name == "name")
            ]
            results, given = self._atoms(equation.outvars), self._atoms(equation.invars)
            self.lines.append(f"{results}={equation.primitive.name} {given} {' '.join(params)}")
            if self._rules and _RULES & equation.params.keys():
                self.lines.append(self._rule(equation))
        self.lines.append(f"in {self._atoms(jaxpr.outvars)}")

    def _rule(self, equation: Any) -> str:
        """Returns the hash of what a function's own rule computes, for tangents of all operands."""
        params = equation.params
        if "jvp_jaxpr_fun" not in params or params["symbolic_zeros"]:
            raise Indescribable(f"the rule of {equation.primitive.name}")
        zeros = [False] * (len(equation.invars) - params["num_consts"])
        jaxpr, consts, without_tangent = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
        if any(isinstance(constant, jax.core.Tracer) for constant in consts):
            raise Indescribable("a rule that closes over traced values")
        inner = _Scribe({}, rules=False)
        inner.closed(core.ClosedJaxpr(jaxpr, consts))
        return _hash([*inner.lines, str(without_tangent)])

    def _atoms(self, atoms: Iterable[Any]) -> str:
        return " ".join(map(self._atom, atoms))

    def _atom(self, atom: Any) -> str:
        if isinstance(atom, core.Literal):
            array = np.asarray(atom.val)
            return f"{_name(array.dtype)}{array.shape}{array.tobytes().hex()}"
        number = self._numbers.get(atom)
        if number is not None:
            return str(number)
        self._numbers[atom] = number = len(self._numbers)
        return f"{number}:{_name(atom.aval.dtype)}{atom.aval.shape}"

    def value(self, value: Any) -> str:
        """Returns a description of a parameter or a constant; raises Indescribable if there is none."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if type(value) is tuple and all(type(item) is int for item in value):
            return repr(value)
        value = getattr(value, "closed", value)  # a Function, of a kernel inside
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return self._inner(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, np.dtype | type):
            return str(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array) or hasattr(value, "__array__"):
            array = np.ascontiguousarray(value)
            content = hashlib.sha256(array.tobytes()).hexdigest()
            return f"{array.dtype}{array.shape}{content}"
        if isinstance(value, dict):
            return self.value(tuple(sorted(value.items())))
        if isinstance(value, Sequence | frozenset):
            items = (
                sorted(map(self.value, value))
                if isinstance(value, frozenset)
                else map(self.value, value)
            )
            return f"{type(value).__name__}({', '.join(items)})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return f"{type(value).__name__}{self.value(vars(value))}"
        text = f"{type(value).__name__} {value!r}"
        return _function(value) if " at 0x" in text else text

    def _inner(self, jaxpr: core.Jaxpr | core.ClosedJaxpr) -> str:
        """Returns the hash of an inner jaxpr, which is written separately."""
        if id(jaxpr) in self._known:
            return self._known[id(jaxpr)]
        inner = _Scribe(self._known, self._rules)
        if isinstance(jaxpr, core.ClosedJaxpr):
            inner.closed(jaxpr)
        else:
            inner.jaxpr(jaxpr)
        self._known[id(jaxpr)] = _hash(inner.lines)
        return self._known[id(jaxpr)]


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype)


def _function(value: Any) -> str:
    """Returns the qualified name of a function.

    Raises Indescribable for a lambda or a function made inside another: its name does not identify it.
    """
    name = getattr(value, "__qualname__", "<none>")
    if "<" in name:
        raise Indescribable(f"{value!r}")
    return f"{value.__module__}.{name}"


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
