"""JAX's primitives as nodes of ONNX: all that do not act on each element alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seedbed.exporting.graph import Graph, Tensor, is_static, product
from seedbed.run.operations import Operation
from seedbed.types import SeedbedError

Rule = Callable[[Graph, Operation, Sequence[Tensor]], list[str]]
"""Adds nodes to a graph for any other primitive; returns the names of the results."""


def refused(name: str, what: str, place: str) -> SeedbedError:
    """Returns the error for a primitive that cannot be exported; `place` is a file and a line."""
    return SeedbedError(f"the agent's act cannot be exported: {name} at {place} is {what}")


LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
"""Primitives of bools; of integers, they are exported only where they are known."""


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
