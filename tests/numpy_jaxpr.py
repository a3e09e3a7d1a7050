"""Evaluates JAX functions with numpy, one equation at a time: no compilation, so physics tests stay short."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from jax.extend import core

from seedbed.jaxprs import scan_parts

NAMED: list[tuple[str, Any]] = []
"""What `checkpoint_name` has named in the functions evaluated so far, in order: (name, value)."""

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else (a // b).astype(a.dtype),
    "rem": np.fmod,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "round": np.round,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "square": np.square,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "pow": np.power,
    "atan2": np.arctan2,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "stop_gradient": lambda x: x,
}


def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Any) -> Any:
    return x[_window(x, starts, slice_sizes)]


def _dynamic_update_slice(x: Any, update: Any, *starts: Any) -> Any:
    out = x.copy()
    out[_window(x, starts, update.shape)] = update
    return out


def _window(x: Any, starts: Any, sizes: Any) -> tuple[slice, ...]:
    clipped = [
        min(max(int(start), 0), whole - size)
        for start, size, whole in zip(starts, sizes, x.shape, strict=True)
    ]
    return tuple(slice(start, start + size) for start, size in zip(clipped, sizes, strict=True))


def _select_n(which: Any, *cases: Any) -> Any:
    if which.dtype != bool:
        return np.choose(which, cases)
    return np.where(which, cases[1], cases[0])


STRUCTURAL: dict[str, Callable[..., Any]] = {
    "integer_pow": lambda x, y: x**y,
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "transpose": lambda x, permutation: np.transpose(x, permutation),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "select_n": _select_n,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "reduce_sum": lambda x, axes, **_: x.sum(tuple(axes), dtype=x.dtype),
    "reduce_max": lambda x, axes, **_: x.max(tuple(axes)),
    "reduce_min": lambda x, axes, **_: x.min(tuple(axes)),
    "reduce_and": lambda x, axes, **_: x.all(tuple(axes)),
    "reduce_or": lambda x, axes, **_: x.any(tuple(axes)),
    "pad": lambda x, value, padding_config: _pad(x, value, padding_config),
    "optimization_barrier": lambda *xs: list(xs),
    "name": lambda x, name: _named(x, name),
}


def _pad(x: Any, value: Any, config: Any) -> Any:
    shape = [
        low + size + max(size - 1, 0) * inner + high
        for size, (low, high, inner) in zip(x.shape, config, strict=True)
    ]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return np.asarray(jax.lax.pad(x, value, config))
    out = np.full(shape, value, x.dtype)
    window = tuple(
        slice(low, low + size + max(size - 1, 0) * inner, inner + 1)
        for size, (low, _, inner) in zip(x.shape, config, strict=True)
    )
    out[window] = x
    return out


def _named(x: Any, name: str) -> Any:
    NAMED.append((name, x))
    return x


def _reshape(eqn: Any) -> Callable[..., Any]:
    shape = eqn.outvars[0].aval.shape
    return lambda x, *_: x.reshape(shape)


def _broadcast(eqn: Any) -> Callable[..., Any]:
    shape, axes = tuple(eqn.params["shape"]), eqn.params["broadcast_dimensions"]
    sizes = dict(zip(axes, eqn.invars[0].aval.shape, strict=True))
    expanded = tuple(sizes.get(axis, 1) for axis in range(len(shape)))
    if expanded == shape:
        return lambda x: x.reshape(shape)
    return lambda x: np.broadcast_to(x.reshape(expanded), shape)


def _slice(eqn: Any) -> Callable[..., Any]:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    window = tuple(map(slice, start, limit, eqn.params["strides"] or [1] * len(start)))
    return lambda x: x[window]


def _gather(eqn: Any) -> Callable[..., Any]:
    """Reads one window, which is what an indexed read becomes under vmap; otherwise as JAX does."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]

    def gather(x: Any, indices: Any) -> Any:
        if indices.ndim > 1 or numbers.operand_batching_dims:
            return eqn.primitive.bind(x, indices, **eqn.params)
        starts = _starts(x, indices, numbers.start_index_map)
        return np.squeeze(x[_window(x, starts, sizes)], tuple(numbers.collapsed_slice_dims))

    return gather


def _scatter(eqn: Any) -> Callable[..., Any]:
    """Writes one window, which is what an indexed write becomes under vmap; otherwise as JAX does."""
    numbers = eqn.params["dimension_numbers"]

    def scatter(x: Any, indices: Any, updates: Any) -> Any:
        if indices.ndim > 1 or numbers.operand_batching_dims:
            return eqn.primitive.bind(x, indices, updates, **eqn.params)
        window = np.expand_dims(updates, tuple(numbers.inserted_window_dims))
        starts = _starts(x, indices, numbers.scatter_dims_to_operand_dims)
        return _dynamic_update_slice(x, window, *starts)

    return scatter


def _starts(x: Any, indices: Any, axes: Any) -> list[int]:
    starts = [0] * x.ndim
    for axis, index in zip(axes, indices, strict=True):
        starts[axis] = index
    return starts


class Program:
    """A jaxpr as a list of numpy calls on numbered values."""

    known: ClassVar[dict[int, Program]] = {}

    def __init__(self, closed: Any) -> None:
        self.source = closed  # keeps its id taken
        self.values: list[Any] = []
        self.slots: dict[Any, int] = {}
        jaxpr = closed.jaxpr
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            self.slots[var] = self._new(np.asarray(const))
        self.inputs = [self._define(var) for var in jaxpr.invars]
        self.calls = [
            (
                _call(eqn),
                [self._slot(atom) for atom in eqn.invars],
                list(map(self._define, eqn.outvars)),
            )
            for eqn in jaxpr.eqns
        ]
        self.outputs = [self._slot(atom) for atom in jaxpr.outvars]
        # What no later call reads is let go, or large batches would fill the memory.
        last = {slot: k for k, (_, given, made) in enumerate(self.calls) for slot in given + made}
        kept = {*self.outputs, *(i for i, value in enumerate(self.values) if value is not None)}
        self.dead: list[list[int]] = [[] for _ in self.calls]
        for slot, k in last.items():
            if slot not in kept:
                self.dead[k].append(slot)

    @classmethod
    def of(cls, jaxpr: Any) -> Program:
        """The program of a jaxpr, closed or with no constants."""
        if id(jaxpr) not in cls.known:
            is_closed = isinstance(jaxpr, core.ClosedJaxpr)
            cls.known[id(jaxpr)] = cls(jaxpr if is_closed else core.ClosedJaxpr(jaxpr, ()))
        return cls.known[id(jaxpr)]

    def __call__(self, *args: Any) -> list[Any]:
        values = self.values.copy()
        for slot, arg in zip(self.inputs, args, strict=True):
            values[slot] = arg
        for (fn, given, made), dead in zip(self.calls, self.dead, strict=True):
            out = fn(*[values[i] for i in given])
            if isinstance(out, list):
                for slot, value in zip(made, out, strict=True):
                    values[slot] = value
            else:
                values[made[0]] = out
            for slot in dead:
                values[slot] = None
        return [values[i] for i in self.outputs]

    def _new(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _define(self, var: Any) -> int:
        self.slots[var] = self._new(None)
        return self.slots[var]

    def _slot(self, atom: Any) -> int:
        if hasattr(atom, "val"):
            return self._new(np.asarray(atom.val, atom.aval.dtype))
        return self.slots[atom]


def evaluate(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a JAX function on arrays with numpy arithmetic of the arrays' own precision."""
    return prepare(fn, *args)(*args)


def prepare(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Traces a JAX function for arguments like these; returns it for arrays, with numpy arithmetic."""
    with jax.enable_x64(True):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        program = Program(closed)

    def run(*args: Any) -> Any:
        flat = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
        with jax.enable_x64(True), np.errstate(all="ignore"):
            out = map(np.asarray, program(*flat))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def _call(eqn: Any) -> Callable[..., Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE:
        return ELEMENTWISE[name]
    if name in STRUCTURAL:
        return functools.partial(STRUCTURAL[name], **params)
    if name in ("jit", "pjit", "closed_call", "eval_jaxpr", "remat2", "custom_jvp_call"):
        return Program.of(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"])
    if name == "cond":
        branches = [Program.of(branch) for branch in params["branches"]]
        return lambda which, *values: branches[int(which)](*values)
    if name in PREPARED:
        return PREPARED[name](eqn)
    return functools.partial(_bind, eqn)


def _bind(eqn: Any, *values: Any) -> Any:
    results = eqn.primitive.bind(*values, **eqn.params)
    return list(map(np.asarray, results)) if eqn.primitive.multiple_results else np.asarray(results)


def _while(eqn: Any) -> Callable[..., Any]:
    params = eqn.params
    n, k = params["cond_nconsts"], params["body_nconsts"]
    cond, body = Program.of(params["cond_jaxpr"]), Program.of(params["body_jaxpr"])

    def loop(*values: Any) -> list[Any]:
        test, consts, carry = values[:n], values[n : n + k], list(values[n + k :])
        while True:
            going = np.asarray(cond(*test, *carry)[0])
            if not going.any():
                return carry
            # Under vmap each example leaves the loop by itself and then keeps what it has.
            carry = [
                np.where(going.reshape(going.shape + (1,) * (np.ndim(new) - going.ndim)), new, old)
                for new, old in zip(body(*consts, *carry), carry, strict=True)
            ]

    return loop


def _scan(eqn: Any) -> Callable[..., Any]:
    params = eqn.params
    n, k = scan_parts(eqn)
    body = Program.of(params.get("jaxpr") or params["call_jaxpr"])
    avals = params["jaxpr"].out_avals[k:]
    order = range(params["length"])

    def loop(*values: Any) -> list[Any]:
        consts, carry, xs = values[:n], values[n : n + k], values[n + k :]
        outputs: list[Any] = [None] * len(order)
        for i in reversed(order) if params["reverse"] else order:
            out = body(*consts, *carry, *[x[i] for x in xs])
            carry, outputs[i] = out[:k], out[k:]
        columns = zip(*outputs, strict=True) if outputs else ((),) * len(avals)
        stacked = [
            np.stack(column) if column else np.zeros((0, *aval.shape), aval.dtype)
            for column, aval in zip(columns, avals, strict=True)
        ]
        return [*carry, *stacked]

    return loop


PREPARED: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "stack": lambda eqn: lambda *xs: np.stack(xs, eqn.params["axis"]),
    "unstack": lambda eqn: lambda x: list(np.moveaxis(x, eqn.params["axis"], 0)),
    "gather": _gather,
    "scatter": _scatter,
    "while": _while,
    "scan": _scan,
}
