"""Evaluates a program of JAX with every float32 number of it in another dtype.

The program is the one that runs in training, but with XLA's convolutions in place of our kernels for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from seedbed.jaxprs import called, scan_parts


def recast(function: Callable[..., Any], dtype: Any, *arguments: Any) -> Any:
    """Returns `function(*arguments)` in numpy, computed in `dtype` wherever the program has float32."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    with jax.enable_x64(True):
        run = jax.jit(lambda given: _Reader(jnp.dtype(dtype)).read(closed, given))
        results = jax.device_get(run(jax.tree.leaves(arguments)))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


class _Reader:
    """Traces a program anew, equation by equation, in another dtype than float32."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def read(self, closed: Any, given: Sequence[Any]) -> list[Any]:
        """Returns the results of a program for operands."""
        closed = closed if isinstance(closed, ClosedJaxpr) else ClosedJaxpr(closed, ())
        jaxpr = closed.jaxpr
        held = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        held.update(zip(jaxpr.invars, given, strict=True))

        def operand(atom: Any) -> Any:
            value = (
                np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else held[atom]
            )
            return self._cast(value)

        for equation in jaxpr.eqns:
            results = self._equation(equation, [operand(atom) for atom in equation.invars])
            held.update(zip(equation.outvars, results, strict=True))
        return [operand(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if (inner := called(equation)) is not None:
            return self.read(inner, given)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(equation, given)
        if name == "platform_index":
            # The `cond` that reads it is told the platforms, too.
            return [np.array(0, np.int32)]
        if name == "bitcast_convert_type":
            # The bits are those of float32: random numbers are made so.
            (x,) = given
            x = x.astype(jnp.float32) if equation.invars[0].aval.dtype == jnp.float32 else x
            return [self._cast(equation.primitive.bind(x, **params))]
        params = {key: self._of(value) for key, value in params.items()}
        results = equation.primitive.bind(*given, **params)
        return results if equation.primitive.multiple_results else [results]

    def _scan(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        params, (constants, carried) = equation.params, scan_parts(equation)
        fixed, start, rows = (
            given[:constants],
            given[constants : constants + carried],
            given[constants + carried :],
        )

        def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.read(params["jaxpr"], [*fixed, *carry, *row])
            return results[:carried], results[carried:]

        last, ys = lax.scan(body, start, rows, params["length"], params["reverse"])
        return [*last, *ys]

    def _while(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        params = equation.params
        test, rest = given[: params["cond_nconsts"]], given[params["cond_nconsts"] :]
        fixed, start = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
        return lax.while_loop(
            lambda carry: self.read(params["cond_jaxpr"], [*test, *carry])[0],
            lambda carry: self.read(params["body_jaxpr"], [*fixed, *carry]),
            start,
        )

    def _cond(self, equation: Any, given: list[Any]) -> Sequence[Any]:
        branches, platforms = (equation.params.get(k) for k in ("branches", "branches_platforms"))
        if platforms is not None:
            (other,) = (
                branch for branch, named in zip(branches, platforms, strict=True) if not named
            )
            return self.read(other, given[1:])
        runs = [lambda *x, branch=branch: self.read(branch, x) for branch in branches]
        return lax.switch(given[0], runs, *given[1:])

    def _cast(self, value: Any) -> Any:
        return lax.convert_element_type(value, self._dtype) if value.dtype == jnp.float32 else value

    def _of(self, parameter: Any) -> Any:
        if isinstance(parameter, Jaxpr | ClosedJaxpr):
            # It says how two numbers become one, in a reduction or a scatter.
            inputs = (
                parameter.jaxpr.invars if isinstance(parameter, ClosedJaxpr) else parameter.invars
            )
            scalars = [jax.ShapeDtypeStruct((), self._of(x.aval.dtype)) for x in inputs]
            closed = jax.make_jaxpr(lambda *x: self.read(parameter, x))(*scalars)
            return closed if isinstance(parameter, ClosedJaxpr) else closed.jaxpr
        return (
            self._dtype
            if isinstance(parameter, np.dtype) and parameter == np.float32
            else parameter
        )
