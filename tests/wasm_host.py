"""simd.vectorize by a WebAssembly module, one example after another, in wasmtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import wasmtime

from gpu_host import key_data
from seedbed.play.programs import words
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Program
from seedbed.simd.vectorize import trace_example
from seedbed.simd.wasm.linking import HEAP
from seedbed.simd.wasm.module import compile_module


class Module:
    """A module of programs, whose functions take and return words."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.code = compile_module(programs)
        self.store = wasmtime.Store()
        module = wasmtime.Module(self.store.engine, self.code)
        assert not module.imports
        exports = wasmtime.Instance(self.store, module, []).exports(self.store)
        self.functions: dict[str, Any] = {name: exports[name] for name in programs}
        self.memory: Any = exports["memory"]
        self.free: int = exports[HEAP].value(self.store)  # type: ignore[union-attr]
        self.sizes = {
            name: sum(operand.nodes.size for operand in program.outputs)
            for name, program in programs.items()
        }

    def call(self, name: str, given: np.ndarray, shared: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Calls a function; `given` are the words of its operands, and `shared` the arrays of the others."""
        size = self.sizes[name]
        parts = [given.tobytes(), bytes(4 * size), *(array.tobytes() for array in shared)]
        places = []
        end = self.free
        for part in parts:
            places.append(end)
            end += -(-len(part) // 16) * 16
        table, end = end, end + 4 * len(shared) + 4
        missing = end - self.memory.data_len(self.store)
        if missing > 0:
            self.memory.grow(self.store, -(-missing // 65536))
        for part, place in zip(parts, places, strict=True):
            self.memory.write(self.store, part, place)
        self.memory.write(self.store, np.array(places[2:], np.uint32).tobytes(), table)
        self.functions[name](self.store, places[0], places[1], table)
        return np.frombuffer(
            self.memory.read(self.store, places[1], places[1] + 4 * size), np.uint32
        )


def wasm_vectorize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `simd.vectorize(fn)` by a module; arguments are arrays, not traced."""

    def batched(*args: Any) -> Any:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
        example = trace_example(fn, "fn", (one, {}))
        given = len(example.closed.in_avals) - len(example.shared)
        program = trace(example.closed, [False] * given + [True] * len(example.shared))
        module = Module({"fn": program})
        shared = [np.ascontiguousarray(key_data(x)) for x in example.shared]
        results = []
        for row in range(jax.tree.leaves(args)[0].shape[0]):
            got = module.call("fn", words(jax.tree.map(lambda x, row=row: x[row], args)), shared)
            results.append(unpack(got, program))
        return example.rebuild([np.stack(column) for column in zip(*results, strict=True)])

    return batched


def unpack(got: np.ndarray, program: Program) -> list[np.ndarray]:
    """Returns the results of a program, of the words that its function has written."""
    arrays, at = [], 0
    for operand in program.outputs:
        part = got[at : at + operand.nodes.size].reshape(operand.shape)
        at += operand.nodes.size
        is_bool = operand.dtype == "bool"
        arrays.append(part.astype(bool) if is_bool else part.view(operand.dtype))
    return arrays
