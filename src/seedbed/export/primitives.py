"""JAX's primitives as nodes of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seedbed.export.graph import Graph, Known, Tensor, compact, is_static, product
from seedbed.export.program import Operation, refused

Pointwise = Callable[..., str]
"""Adds nodes to a graph for a primitive that acts on elements: (graph, params, *names) -> name."""
Rule = Callable[[Graph, Operation, Sequence[Tensor]], list[str]]
"""Adds nodes to a graph for any other primitive; returns the names of the results."""


def _plain(kind: str) -> Pointwise:
    return lambda g, _, *names: g.node(kind, *names)


def _number(g: Graph, value: float) -> str:
    return g.constant(np.array(value, np.float32))


def _log1p(g: Graph, _: Any, x: str) -> str:
    """Adds log(1 + x) without its rounding error, after Kahan: log(u) x / (u - 1) for u = 1 + x."""
    one = _number(g, 1.0)
    u = g.node("Add", x, one)
    step, log = g.node("Sub", u, one), g.node("Log", u)
    close = g.node("Mul", log, g.node("Div", x, step))
    near = g.node("Where", g.node("Equal", step, _number(g, 0.0)), x, close)
    return g.node("Where", g.node("Equal", u, x), log, near)


def _expm1(g: Graph, _: Any, x: str) -> str:
    """Adds exp(x) - 1 without its rounding error, after Kahan: (y - 1) x / log(y) for y = exp(x)."""
    one = _number(g, 1.0)
    y = g.node("Exp", x)
    step = g.node("Sub", y, one)
    close = g.node("Mul", step, g.node("Div", x, g.node("Log", y)))
    near = g.node("Where", g.node("Equal", step, _number(g, 0.0)), x, close)
    far = g.node("Or", g.node("Equal", step, _number(g, -1.0)), g.node("Equal", step, y))
    return g.node("Where", far, step, near)


def _integer_pow(g: Graph, params: Any, x: str) -> str:
    return g.node("Pow", x, _number(g, params["y"]))


def _is_finite(g: Graph, _: Any, x: str) -> str:
    return g.node("Not", g.node("Or", g.node("IsInf", x), g.node("IsNaN", x)))


def _not_equal(g: Graph, _: Any, x: str, y: str) -> str:
    return g.node("Not", g.node("Equal", x, y))


def _clamp(g: Graph, _: Any, low: str, x: str, high: str) -> str:
    return g.node("Min", g.node("Max", x, low), high)


POINTWISE: dict[str, Pointwise] = {
    "abs": _plain("Abs"),
    "acos": _plain("Acos"),
    "acosh": _plain("Acosh"),
    "add": _plain("Add"),
    "add_any": _plain("Add"),
    "asin": _plain("Asin"),
    "asinh": _plain("Asinh"),
    "atan": _plain("Atan"),
    "atanh": _plain("Atanh"),
    "ceil": _plain("Ceil"),
    "clamp": _clamp,
    "convert_element_type": lambda g, params, x: g.cast(x, params["new_dtype"]),
    "copy": lambda g, _, x: x,
    "copy_p": lambda g, _, x: x,
    "cos": _plain("Cos"),
    "cosh": _plain("Cosh"),
    "div": _plain("Div"),
    "eq": _plain("Equal"),
    "erf": _plain("Erf"),
    "exp": _plain("Exp"),
    "expm1": _expm1,
    "floor": _plain("Floor"),
    "ge": _plain("GreaterOrEqual"),
    "gt": _plain("Greater"),
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "le": _plain("LessOrEqual"),
    "log": _plain("Log"),
    "log1p": _log1p,
    "logistic": _plain("Sigmoid"),
    "lt": _plain("Less"),
    "max": _plain("Max"),
    "min": _plain("Min"),
    "mul": _plain("Mul"),
    "ne": _not_equal,
    "neg": _plain("Neg"),
    "pow": _plain("Pow"),
    "rem": lambda g, _, x, y: g.node("Mod", x, y, fmod=1),
    "rsqrt": lambda g, _, x: g.node("Reciprocal", g.node("Sqrt", x)),
    "sign": _plain("Sign"),
    "sin": _plain("Sin"),
    "sinh": _plain("Sinh"),
    "sqrt": _plain("Sqrt"),
    "square": lambda g, _, x: g.node("Mul", x, x),
    "stop_gradient": lambda g, _, x: x,
    "sub": _plain("Sub"),
    "tan": _plain("Tan"),
    "tanh": _plain("Tanh"),
}
LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
"""Primitives of bools; of integers, they are exported only where they are known."""
FOLDED = {
    *POINTWISE,
    *LOGICAL,
    "bitcast_convert_type",
    "erf_inv",
    "round",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
}
"""Primitives that act on elements, so that JAX can apply them to arrays in which the batch has size 1."""


_MOVES = ("expand_dims", "reshape", "rev", "slice", "split", "squeeze", "transpose")
"""Primitives that only move elements."""


def _logical(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    name = operation.primitive.name
    if operation.results[0].dtype != bool:
        raise refused(name, f"of {operation.results[0].dtype}, not of bools", operation.place)
    return [g.node(LOGICAL[name], *(x.name for x in given))]


def _round(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    if int(operation.params["rounding_method"]) != 1:
        raise refused("round", "away from zero; round to even, as jnp.round does", operation.place)
    return [g.node("Round", given[0].name)]


def _select_n(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    which, *cases = (x.name for x in given)
    if given[0].dtype != bool or len(cases) != 2:
        raise refused("select_n", f"a choice among {len(cases)} by a number", operation.place)
    if given[1].dtype != bool:
        return [g.node("Where", which, cases[1], cases[0])]
    yes = g.node("And", which, cases[1])
    return [g.node("Or", yes, g.node("And", g.node("Not", which), cases[0]))]


def _reshape(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    return [g.reshape(given[0].name, operation.results[0].shape)]


def _broadcast(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    x, shape = given[0], operation.results[0].shape
    axes = operation.params["broadcast_dimensions"]
    sizes = dict(zip(axes, x.shape, strict=True))
    aligned = tuple(sizes.get(axis, 1) for axis in range(len(shape)))
    name = x.name if aligned == x.shape else g.reshape(x.name, aligned)
    return [name if aligned == shape else g.node("Expand", name, g.sizes(shape))]


def _transpose(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    return [g.transpose(given[0].name, operation.params["permutation"])]


def _slice(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    params, shape = operation.params, given[0].shape
    strides = params["strides"] or (1,) * len(shape)
    windows = []
    for axis, (start, limit, step, size) in enumerate(
        zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
    ):
        if not is_static((start, step)) or not (is_static((limit,)) or limit == size):
            raise refused("slice", "a window of the batch", operation.place)
        if (start, step) != (0, 1) or limit != size:
            windows.append((start, None if limit == size else limit, step, axis))
    return [g.slice(given[0].name, windows) if windows else given[0].name]


def _reverse(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    least = np.iinfo(np.int64).min
    windows = [(-1, least, -1, axis) for axis in operation.params["dimensions"]]
    return [g.slice(given[0].name, windows) if windows else given[0].name]


def _gather(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    """Adds nodes for one window at a known place, as `x[:, 0]` asks for it."""
    x, place = given[0], g.known(given[1].name)
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    if place is None or numbers.operand_batching_dims:
        raise refused("gather", "at indices that are found while it runs", operation.place)
    if place.ndim != 1:
        return [_gather_rows(g, operation, x, place)]
    windows = []
    for axis, start in zip(numbers.start_index_map, place.tolist(), strict=True):
        if not is_static((sizes[axis], x.shape[axis])):
            raise refused("gather", "a window of the batch", operation.place)
        start = min(max(start, 0), x.shape[axis] - sizes[axis])
        if sizes[axis] != x.shape[axis]:
            windows.append((start, start + sizes[axis], 1, axis))
    name = g.slice(x.name, windows) if windows else x.name
    return [g.reshape(name, operation.results[0].shape)]


def _gather_rows(g: Graph, operation: Operation, x: Tensor, places: np.ndarray) -> str:
    """Adds a node for known rows of one axis, as `x[:, ::-1]` asks for them."""
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    axes, rank = numbers.start_index_map, len(operation.results[0].shape)
    others = [i for i in range(len(x.shape)) if i not in axes]
    whole = all(sizes[i] == x.shape[i] for i in others)
    if len(axes) != 1 or numbers.collapsed_slice_dims != axes or not whole:
        raise refused("gather", "of more than whole rows of one axis", operation.place)
    (axis,) = axes
    rows = places[..., 0].astype(np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < x.shape[axis]):
        raise refused("gather", "of rows that are not there", operation.place)
    name = g.node("Gather", x.name, g.constant(rows), axis=axis)
    # ONNX puts the rows in place of the axis, JAX where no other axis goes.
    sources = [i if i < axis else i + rows.ndim - 1 for i in others]
    order = [-1] * rank
    for place, source in zip(numbers.offset_dims, sources, strict=True):
        order[place] = source
    free = iter(range(axis, axis + rows.ndim))
    return g.transpose(name, [next(free) if source < 0 else source for source in order])


def _dynamic_slice(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    x, starts = given[0], [g.known(place.name) for place in given[1:]]
    windows = []
    for axis, (start, size) in enumerate(zip(starts, operation.params["slice_sizes"], strict=True)):
        if size == x.shape[axis]:
            continue
        if start is None or not is_static((size, x.shape[axis])):
            what = "at a place that is found while it runs"
            raise refused("dynamic_slice", what, operation.place)
        begin = min(max(int(start), 0), x.shape[axis] - size)
        windows.append((begin, begin + size, 1, axis))
    return [g.slice(x.name, windows) if windows else x.name]


def _pad(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    config = operation.params["padding_config"]
    if any(inner or min(low, high) < 0 for low, high, inner in config):
        raise refused("pad", "between elements, or negative", operation.place)
    pads = [low for low, _, _ in config] + [high for _, high, _ in config]
    return [g.node("Pad", given[0].name, g.integers(pads), given[1].name)]


def _concatenate(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    return [g.node("Concat", *(x.name for x in given), axis=operation.params["dimension"])]


def _stack(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    axis = operation.params["axis"]
    parts = [g.node("Unsqueeze", x.name, g.integers([axis])) for x in given]
    return [g.node("Concat", *parts, axis=axis)]


def _split(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    params = operation.params
    if not is_static(params["sizes"]):
        raise refused("split", "a division of the batch", operation.place)
    return g.split(given[0].name, params["sizes"], params["axis"])


def _iota(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    """Adds the numbers of the environments, 0 to B - 1, along an axis: other axes' numbers are known."""
    del given
    result, axis = operation.results[0], operation.params["dimension"]
    zero, one = (g.constant(np.array(i, np.int64)) for i in (0, 1))
    limit = g.node("Squeeze", g.size(result.shape[axis]))
    numbers = g.cast(g.node("Range", zero, limit, one), result.dtype)
    aligned = tuple(size if i == axis else 1 for i, size in enumerate(result.shape))
    numbers = g.reshape(numbers, aligned)
    return [
        numbers if aligned == result.shape else g.node("Expand", numbers, g.sizes(result.shape))
    ]


def _size(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    """Adds the size of an axis, as a number."""
    del given
    size = g.node("Squeeze", g.size(operation.params["dim"]))
    return [g.cast(size, operation.results[0].dtype)]


def _argument(kind: str) -> Rule:
    def rule(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
        (axis,) = operation.params["axes"]
        place = g.node(kind, given[0].name, axis=int(axis), keepdims=0)
        return [g.cast(place, operation.results[0].dtype)]

    return rule


def _reduce(kind: str) -> Rule:
    def rule(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
        axes = g.integers(operation.params["axes"])
        x, truth = given[0].name, given[0].dtype == bool
        if truth:
            x = g.cast(x, "int32")
        y = g.node(kind, x, axes, keepdims=0, noop_with_empty_axes=1)
        return [g.cast(y, "bool") if truth else y]

    return rule


def _cumsum(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    axis = g.constant(np.array(operation.params["axis"], np.int64))
    return [g.node("CumSum", given[0].name, axis, reverse=int(operation.params["reverse"]))]


def _dot_general(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    """Adds a product of matrices; axes that stay, and those that are summed over, are joined to one each."""
    (summed_x, summed_y), (shared_x, shared_y) = operation.params["dimension_numbers"]
    x, y = given
    free_x = [i for i in range(len(x.shape)) if i not in (*summed_x, *shared_x)]
    free_y = [i for i in range(len(y.shape)) if i not in (*summed_y, *shared_y)]
    left = g.transpose(x.name, [*shared_x, *free_x, *summed_x])
    right = g.transpose(y.name, [*shared_y, *summed_y, *free_y])
    shared = tuple(x.shape[i] for i in shared_x)
    length = product(tuple(x.shape[i] for i in summed_x))
    kept_x, kept_y = tuple(x.shape[i] for i in free_x), tuple(y.shape[i] for i in free_y)
    # MatMul takes any number of first axes from an operand, but only if the other is a plain matrix.
    plain = not shared and len(summed_x) == len(kept_y) == 1 and kept_x
    if not plain:
        left = g.reshape(left, (*shared, product(kept_x), length))
        right = g.reshape(right, (*shared, length, product(kept_y)))
    made = g.node("MatMul", left, right)
    return [made if plain else g.reshape(made, operation.results[0].shape)]


def _convolution(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    params = operation.params
    numbers, padding = params["dimension_numbers"], params["padding"]
    odd = params["batch_group_count"] != 1 or any(step != 1 for step in params["lhs_dilation"])
    if odd or any(min(pair) < 0 for pair in padding):
        raise refused("conv_general_dilated", "a transposed or a grouped one", operation.place)
    y = g.node(
        "Conv",
        g.transpose(given[0].name, numbers.lhs_spec),
        g.transpose(given[1].name, numbers.rhs_spec),
        strides=list(params["window_strides"]),
        pads=[low for low, _ in padding] + [high for _, high in padding],
        dilations=list(params["rhs_dilation"]),
        group=params["feature_group_count"],
    )
    return [g.transpose(y, np.argsort(numbers.out_spec).tolist())]


def _max_pool(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    """Adds a pooling over the inner axes of [N, ..., C]."""
    params = operation.params
    window, steps, padding = (params[k] for k in ("window_dimensions", "window_strides", "padding"))
    rank = len(window)
    outer = [(window[i], steps[i], tuple(padding[i])) for i in (0, rank - 1)]
    dilated = any(x != 1 for k in ("base_dilation", "window_dilation") for x in params[k])
    if rank < 3 or dilated or outer != [(1, 1, (0, 0))] * 2:
        raise refused("reduce_window_max", "of other axes than the inner ones", operation.place)
    inner = range(1, rank - 1)
    y = g.node(
        "MaxPool",
        g.transpose(given[0].name, [0, rank - 1, *inner]),
        kernel_shape=[window[i] for i in inner],
        strides=[steps[i] for i in inner],
        pads=[padding[i][0] for i in inner] + [padding[i][1] for i in inner],
    )
    return [g.transpose(y, [0, *range(2, rank), 1])]


def _same(g: Graph, operation: Operation, given: Sequence[Tensor]) -> list[str]:
    del g, operation
    return [x.name for x in given]


RULES: dict[str, Rule] = {
    **dict.fromkeys(LOGICAL, _logical),
    "argmax": _argument("ArgMax"),
    "argmin": _argument("ArgMin"),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "cumsum": _cumsum,
    "dim_as_value": _size,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _reshape,
    "gather": _gather,
    "iota": _iota,
    "optimization_barrier": _same,
    "pad": _pad,
    "reduce_and": _reduce("ReduceMin"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_or": _reduce("ReduceMax"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_window_max": _max_pool,
    "reshape": _reshape,
    "rev": _reverse,
    "round": _round,
    "select_n": _select_n,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}


def fold(operation: Operation, given: Sequence[Known]) -> list[Known] | None:
    """Returns the results of an operation on what is known, computed by JAX; None if its graph must.

    Where the batch's size enters, only elements can be computed.
    """
    name, results = operation.primitive.name, operation.results
    shapes = [result.shape for result in results]
    arrays = [x.array for x in given]
    if name == "broadcast_in_dim":
        wide, axes = [1] * len(shapes[0]), operation.params["broadcast_dimensions"]
        for axis, size in zip(axes, arrays[0].shape, strict=True):
            wide[axis] = size
        array = np.broadcast_to(arrays[0].reshape(wide), compact(shapes[0]))
        return [Known(np.array(array), shapes[0])]
    if name == "iota" and is_static((shapes[0][operation.params["dimension"]],)):
        numbers = np.arange(shapes[0][operation.params["dimension"]], dtype=results[0].dtype)
        aligned = [-1 if i == operation.params["dimension"] else 1 for i in range(len(shapes[0]))]
        array = np.broadcast_to(numbers.reshape(aligned), compact(shapes[0]))
        return [Known(np.array(array), shapes[0])]
    if name in ("dim_as_value", "iota"):
        return None
    known = all(map(is_static, [*shapes, *(x.shape for x in given)]))
    moved = name in _MOVES or (name == "gather" and "IN_BOUNDS" in str(operation.params["mode"]))
    if not known and moved and _is_splat(arrays[0]):
        value = arrays[0].reshape(-1)[0]
        return [Known(np.full(compact(shape), value), shape) for shape in shapes]
    if not known and name not in FOLDED:
        return None
    made = operation.primitive.bind(*arrays, **operation.params)
    made = made if operation.primitive.multiple_results else [made]
    return [Known(np.asarray(x), shape) for x, shape in zip(made, shapes, strict=True)]


def _is_splat(array: np.ndarray) -> bool:
    return array.size > 0 and bool((array == array.reshape(-1)[0]).all())


def chosen(operation: Operation, given: Sequence[Any]) -> Any:
    """Returns the case that `select_n` takes everywhere, if that is known and has the result's shape."""
    if operation.primitive.name != "select_n":
        return None
    which = given[0]
    if not isinstance(which, Known) or not _is_splat(which.array):
        return None
    case = given[1 + int(which.array.reshape(-1)[0])]
    return case if case.shape == operation.results[0].shape else None
