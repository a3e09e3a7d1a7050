"""An ONNX graph in the making: tensors, constants, and sizes that depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from seedbed.types import SeedbedError

OPSET, IR_VERSION = 18, 8
"""The version of ONNX's operators, and of its format; onnxruntime reads both since version 1.14."""
BATCH = "batch"
"""The name of the axis of environments in the graph's inputs and outputs."""
DTYPES = {
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "uint16": TensorProto.UINT16,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "float32": TensorProto.FLOAT,
}
"""The types that a graph may have; int64 is for sizes and indices only."""
Shape: TypeAlias = tuple[Any, ...]
"""Sizes of axes: integers, and symbolic dimensions that are multiples of the batch."""


class Tensor(NamedTuple):
    """A value that the graph computes, or one of its inputs."""

    name: str
    shape: Shape
    dtype: Any


class Known(NamedTuple):
    """A value that is known at export. Where its shape has a symbolic size, its array has size 1."""

    array: np.ndarray
    shape: Shape

    @property
    def dtype(self) -> Any:
        """The dtype of its numbers."""
        return self.array.dtype


def is_static(shape: Shape) -> bool:
    """Returns whether all sizes are integers."""
    return all(isinstance(size, int | np.integer) for size in shape)


def compact(shape: Shape) -> tuple[int, ...]:
    """Returns a shape with 1 in place of each symbolic size."""
    return tuple(int(size) if isinstance(size, int | np.integer) else 1 for size in shape)


class Graph:
    """An ONNX graph to which nodes are added in order. For one thread at a time."""

    def __init__(self, batch: Any) -> None:
        """`batch` is the symbolic dimension of the batch, or 1."""
        self._batch = batch
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[str, np.ndarray] = {}
        self._named: dict[tuple[Any, ...], str] = {}  # small constants, by their content
        self._sizes: dict[int, str] = {}  # multiples of the batch
        self._count = 0

    def input(self, name: str, shape: Shape, dtype: Any) -> Tensor:
        """Adds an input; the first one must have the batch as its first axis."""
        self._inputs.append(self._info(name, shape, dtype))
        return Tensor(name, shape, np.dtype(dtype))

    def output(self, name: str, value: Tensor | Known) -> None:
        """Adds an output, with the value of a tensor."""
        self.node("Identity", self.tensor(value), names=[name])
        self._outputs.append(self._info(name, value.shape, value.dtype))

    def node(self, kind: str, *inputs: str, names: Sequence[str] = (), **attributes: Any) -> str:
        """Adds a node; returns the name of its only result, or of the first of `names`."""
        made = list(names) or [self._fresh()]
        self._nodes.append(helper.make_node(kind, list(inputs), made, **attributes))
        return made[0]

    def split(self, name: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Adds a node that cuts a tensor into parts; returns their names."""
        names = [self._fresh() for _ in sizes]
        self.node("Split", name, self.integers(sizes), names=names, axis=axis)
        return names

    def constant(self, array: np.ndarray, name: str = "") -> str:
        """Adds a constant; returns its name, which is `name` if it is given and free."""
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size <= 64 else (id(array),)
        if key not in self._named:
            if not name or name in self._constants:
                name = self._fresh()
            self._constants[name] = array
            self._named[key] = name
        return self._named[key]

    def integers(self, values: Sequence[Any]) -> str:
        """Adds a constant vector of int64."""
        return self.constant(np.array([int(value) for value in values], np.int64))

    def known(self, name: str) -> np.ndarray | None:
        """Returns the array of a constant, or None for another tensor."""
        return self._constants.get(name)

    def sizes(self, shape: Shape) -> str:
        """Returns the name of an int64 vector with a shape, of which sizes may depend on the batch."""
        if is_static(shape):
            return self.integers(shape)
        parts = [self.integers([size]) if is_static((size,)) else self.size(size) for size in shape]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def size(self, size: Any) -> str:
        """Returns the name of an int64 `[1]` with a symbolic size, or raises SeedbedError."""
        factor = size // self._batch
        if not isinstance(factor, int) or factor * self._batch != size:
            raise SeedbedError(
                f"the agent's act cannot be exported: it makes an axis of size {size}"
            )
        if factor not in self._sizes:
            if factor == 1:
                first = self._inputs[0].name
                self._sizes[1] = self.node("Shape", first, start=0, end=1)
            else:
                one = self.size(self._batch)
                self._sizes[factor] = self.node("Mul", one, self.integers([factor]))
        return self._sizes[factor]

    def reshape(self, name: str, shape: Shape) -> str:
        """Adds a node that gives a tensor another shape."""
        known = self.known(name)
        if known is not None and is_static(shape):
            return self.constant(known.reshape(shape))
        symbolic = [not is_static((size,)) for size in shape]
        if sum(symbolic) == 1 and 0 not in compact(shape):
            whole = [-1 if open_ else size for open_, size in zip(symbolic, shape, strict=True)]
            return self.node("Reshape", name, self.integers(whole))
        return self.node("Reshape", name, self.sizes(shape), allowzero=1)

    def transpose(self, name: str, axes: Sequence[int]) -> str:
        """Adds a node that reorders a tensor's axes, if that changes anything."""
        if list(axes) == sorted(axes):
            return name
        known = self.known(name)
        if known is not None:
            return self.constant(np.array(known.transpose(axes), order="C"))
        return self.node("Transpose", name, perm=list(axes))

    def slice(self, name: str, windows: Sequence[tuple[int, Any, int, int]]) -> str:
        """Adds a node that takes windows (start, limit, step, axis); a limit of None is the end."""
        start, limit, step, axis = zip(*windows, strict=True)
        ends = [np.iinfo(np.int64).max if end is None else end for end in limit]
        return self.node("Slice", name, *map(self.integers, (start, ends, axis, step)))

    def cast(self, name: str, dtype: Any) -> str:
        """Adds a node that converts a tensor to a numpy dtype."""
        return self.node("Cast", name, to=_type(dtype))

    def tensor(self, value: Tensor | Known, expand: bool = True) -> str:
        """Returns the name of a value as a tensor. Without `expand`, sizes of the batch may be 1 instead."""
        if isinstance(value, Tensor):
            return value.name
        _type(value.dtype)
        name = self.constant(value.array)
        if not expand or is_static(value.shape):
            return name
        return self.node("Expand", name, self.sizes(value.shape))

    def model(self, properties: dict[str, str]) -> onnx.ModelProto:
        """Returns the model, without what no output depends on; raises SeedbedError if it is not valid."""
        read = {output.name for output in self._outputs}
        nodes: list[onnx.NodeProto] = []
        for node in reversed(self._nodes):
            if not read.isdisjoint(node.output):
                nodes.append(node)
                read.update(node.input)
        held = [
            numpy_helper.from_array(np.array(array, order="C"), name)
            for name, array in self._constants.items()
            if name in read
        ]
        graph = helper.make_graph(nodes[::-1], "policy", self._inputs, self._outputs, held)
        model = helper.make_model(
            graph,
            producer_name="seedbed",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )
        helper.set_model_props(model, properties)
        try:
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            text = " ".join(str(error).split())[:300]
            raise SeedbedError(f"the exported graph is not valid: {text}") from error
        return model

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _info(self, name: str, shape: Shape, dtype: Any) -> Any:
        sizes = [int(size) if is_static((size,)) else self._axis(size) for size in shape]
        return helper.make_tensor_value_info(name, _type(dtype), sizes)

    def _axis(self, size: Any) -> str:
        return BATCH if size is self._batch or size == self._batch else str(size)


def product(shape: Shape) -> Any:
    """Returns the number of elements, which may be symbolic."""
    return math.prod(shape)


def _type(dtype: Any) -> int:
    """Returns ONNX's number of a type; raises SeedbedError for one that a graph may not have."""
    if str(dtype) not in DTYPES:
        raise SeedbedError(
            f"the agent's act cannot be exported: it computes in {dtype}; a graph has only "
            f"{', '.join(DTYPES)}"
        )
    return DTYPES[str(dtype)]
