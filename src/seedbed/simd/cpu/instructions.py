"""Writes one or a few LLVM instructions for each operation of a graph, on a scalar or on `W` lanes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from seedbed.simd.ir.graph import COMPARISONS, Node
from seedbed.simd.schedule.plan import FusedMultiplyAdd

SCALARS = {"float32": "float", "int32": "i32", "uint32": "i32", "bool": "i1"}
_FLOAT_COMPARE = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_UNSIGNED = {"eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}
_SIMPLE = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_INTRINSICS = {
    "sqrt": "sqrt",
    "abs": "fabs",
    "floor": "floor",
    "ceil": "ceil",
    "round": "roundeven",
}
_SHIFTS = {"shift_left": "shl", "shift_right_logical": "lshr", "shift_right_arithmetic": "ashr"}


def literal(value: Any, dtype: str) -> str:
    """Returns a number as an LLVM literal; uint32 as the int32 with the same bits."""
    if dtype == "float32":
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(np.float32(value))))[0]:016X}"
    if dtype == "bool":
        return "true" if value else "false"
    return str(int(np.asarray(value).astype(np.int32)))


class Writer:
    """A writer of LLVM instructions on vectors of `width` lanes; on scalars, if that is one."""

    def __init__(
        self, width: int, *, fma: bool, functions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Takes the names of functions that take the place of instructions on floats, such as "rem"."""
        self.width, self._fma, self._functions = width, fma, functions
        self.lines: list[str] = []
        self.block = "work"  # the block that is being written
        self.declared: dict[str, str] = {}
        self._count = 0

    def kind(self, dtype: str, *, uniform: bool = False) -> str:
        """Returns the LLVM type of a node: a scalar if `uniform`, else a vector."""
        scalar = SCALARS[dtype]
        return scalar if uniform or self.width == 1 else f"<{self.width} x {scalar}>"

    def fresh(self, prefix: str = "t") -> str:
        """Returns a name that is not in use yet, without its `%`."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Writes an instruction without a result, or a label."""
        self.lines.append(text)

    def label(self, name: str) -> None:
        """Begins the block `name`."""
        self.lines.append(f"{name}:")
        self.block = name

    def jump(self, name: str) -> None:
        """Ends the block with a jump to the block `name`."""
        self.lines.append(f"br label %{name}")

    def op(self, text: str) -> str:
        """Writes an instruction and returns the name of its result."""
        name = f"%{self.fresh()}"
        self.lines.append(f"{name} = {text}")
        return name

    def declarations(self) -> list[str]:
        """Returns the declarations of the intrinsics that were called."""
        return [self.declared[name] for name in sorted(self.declared)]

    def constant(self, value: Any, dtype: str, *, uniform: bool) -> str:
        """Returns a literal operand: a scalar if `uniform`, else a vector."""
        text = literal(value, dtype)
        if uniform or self.width == 1:
            return text
        return "<" + ", ".join([f"{SCALARS[dtype]} {text}"] * self.width) + ">"

    def splat(self, name: str, dtype: str) -> str:
        """Returns a vector with the scalar `name` in every lane."""
        if self.width == 1:
            return name
        kind, scalar, width = self.kind(dtype), SCALARS[dtype], self.width
        one = self.op(f"insertelement {kind} poison, {scalar} {name}, i64 0")
        return self.op(
            f"shufflevector {kind} {one}, {kind} poison, <{width} x i32> zeroinitializer"
        )

    def call(self, name: str, kind: str, *args: str) -> str:
        """Calls the intrinsic `llvm.NAME`, whose arguments and result all have the type `kind`."""
        suffix = {"float": "f32", "i32": "i32", "i1": "i1"}
        full = f"llvm.{name}." + (
            suffix[kind] if kind in suffix else f"v{self.width}{suffix[kind.split()[-1][:-1]]}"
        )
        self.declared[full] = f"declare {kind} @{full}({', '.join([kind] * len(args))})"
        return self.op(f"call {kind} @{full}({', '.join(f'{kind} {a}' for a in args)})")

    def any_lane(self, mask: str) -> str:
        """Returns an i1 operand: whether a mask, a vector, holds in some lane."""
        if self.width == 1:
            return mask
        bits = self.op(f"bitcast <{self.width} x i1> {mask} to i{self.width}")
        return self.op(f"icmp ne i{self.width} {bits}, 0")

    def select(self, condition: str, kind: str, true: str, false: str, *, uniform: bool) -> str:
        """Returns one of two operands, chosen in each lane, or once if the condition is `uniform`."""
        mask = self.kind("bool", uniform=uniform)
        return self.op(f"select {mask} {condition}, {kind} {true}, {kind} {false}")

    def fused(self, fused: FusedMultiplyAdd, a: str, b: str, c: str, kind: str) -> str:
        """Returns `±a * b ± c`, rounded once if the CPU has fused multiply-add, else twice."""
        if not self._fma:
            product = self.op(f"fmul {kind} {a}, {b}")
            if fused.minus_product:
                return self.op(f"fsub {kind} {c}, {product}")
            return self.op(f"f{'sub' if fused.minus_c else 'add'} {kind} {product}, {c}")
        if fused.minus_product:
            a = self.op(f"fneg {kind} {a}")
        if fused.minus_c:
            c = self.op(f"fneg {kind} {c}")
        if (name := self._functions.get("fma")) is not None:
            return self.op(f"call {kind} @{name}({kind} {a}, {kind} {b}, {kind} {c})")
        return self.call("fma", kind, a, b, c)

    def compute(self, node: Node, args: list[str], kind: str, mask: str) -> str:
        """Returns the result of an arithmetic node. `kind` is the type of its arguments, `mask` of a bool."""
        op, dtype = node.op, node.args[0].dtype
        if op in COMPARISONS:
            if dtype == "float32":
                return self.op(f"fcmp {_FLOAT_COMPARE[op]} {kind} {args[0]}, {args[1]}")
            table = _SIGNED if dtype == "int32" else _UNSIGNED
            return self.op(f"icmp {table[op]} {kind} {args[0]}, {args[1]}")
        if op in ("and", "or", "xor") or (op in _SIMPLE and dtype != "float32"):
            return self.op(f"{_SIMPLE[op]} {kind} {args[0]}, {args[1]}")
        if op == "not":
            ones = self.constant(-1 if dtype != "bool" else True, dtype, uniform=node.uniform)
            return self.op(f"xor {kind} {args[0]}, {ones}")
        if op in _SHIFTS:
            return self._shift(op, args, kind, node)
        if dtype == "float32":
            return self._float(node, args, kind, mask)
        return self._integer(node, args, kind, mask)

    def _float(self, node: Node, args: list[str], kind: str, mask: str) -> str:
        op = node.op
        if (name := self._functions.get(op)) is not None:
            return self.op(f"call {kind} @{name}({kind} {args[0]}, {kind} {args[1]})")
        if op in ("add", "sub", "mul", "div", "rem"):
            return self.op(f"f{op} {kind} {args[0]}, {args[1]}")
        if op == "neg":
            return self.op(f"fneg {kind} {args[0]}")
        if op in _INTRINSICS:
            return self.call(_INTRINSICS[op], kind, args[0])
        if op in ("max", "min"):
            return self._extreme(node, args, kind, mask)
        raise NotImplementedError(f"no instruction for {op}")

    def _extreme(self, node: Node, args: list[str], kind: str, mask: str) -> str:
        """Computes max or min; NaN in, NaN out.

        If an operand is a constant, it comes first, and one machine instruction is enough: a comparison with
        NaN fails, so the select takes the second operand.
        """
        pairs = sorted(zip(node.args, args, strict=True), key=lambda p: p[0].op != "constant")
        (first, a), (_, b) = pairs
        ahead = self.op(f"fcmp {'ogt' if node.op == 'max' else 'olt'} {kind} {a}, {b}")
        result = self.op(f"select {mask} {ahead}, {kind} {a}, {kind} {b}")
        if first.op == "constant" and first.value == first.value:
            return result
        missing = self.op(f"fcmp uno {kind} {a}, {a}")
        return self.op(f"select {mask} {missing}, {kind} {a}, {kind} {result}")

    def _integer(self, node: Node, args: list[str], kind: str, mask: str) -> str:
        op, dtype = node.op, node.args[0].dtype
        sign = "s" if dtype == "int32" else "u"
        if op in ("max", "min"):
            return self.call(f"{sign}{op}", kind, *args)
        if op == "neg":
            return (
                self.op(f"sub {kind} zeroinitializer, {args[0]}")
                if "<" in kind
                else self.op(f"sub {kind} 0, {args[0]}")
            )
        if op == "abs":
            zero = self.constant(0, dtype, uniform=node.uniform)
            minus = self.op(f"sub {kind} {zero}, {args[0]}")
            return self.call("smax", kind, args[0], minus)
        if op in ("div", "rem"):
            return self._divide(node, args, kind, mask, sign)
        raise NotImplementedError(f"no instruction for {op} of {dtype}")

    def _divide(self, node: Node, args: list[str], kind: str, mask: str, sign: str) -> str:
        """Divides, or takes the remainder, without the traps of the hardware.

        x / 0 is -1 (all bits set), x rem 0 is x, the least int32 / -1 is itself, and that remainder is 0.
        """
        dtype = node.args[0].dtype

        def number(value: int) -> str:
            return self.constant(value, dtype, uniform=node.uniform)

        zero = self.op(f"icmp eq {kind} {args[1]}, {number(0)}")
        unsafe = zero
        if sign == "s":
            least = self.op(f"icmp eq {kind} {args[0]}, {number(-(2**31))}")
            minus = self.op(f"icmp eq {kind} {args[1]}, {number(-1)}")
            overflow = self.op(f"and {mask} {least}, {minus}")
            unsafe = self.op(f"or {mask} {zero}, {overflow}")
        divisor = self.op(f"select {mask} {unsafe}, {kind} {number(1)}, {kind} {args[1]}")
        result = self.op(f"{sign}{node.op} {kind} {args[0]}, {divisor}")
        other = number(-1) if node.op == "div" else args[0]
        return self.op(f"select {mask} {zero}, {kind} {other}, {kind} {result}")

    def _shift(self, op: str, args: list[str], kind: str, node: Node) -> str:
        def number(value: int) -> str:
            return self.constant(value, "int32", uniform=node.uniform)

        mask = self.kind("bool", uniform=node.uniform)
        inside = self.op(f"icmp ult {kind} {args[1]}, {number(32)}")
        beyond = number(31 if op == "shift_right_arithmetic" else 0)
        places = self.op(f"select {mask} {inside}, {kind} {args[1]}, {kind} {beyond}")
        shifted = self.op(f"{_SHIFTS[op]} {kind} {args[0]}, {places}")
        if op == "shift_right_arithmetic":
            return shifted
        return self.op(f"select {mask} {inside}, {kind} {shifted}, {kind} {number(0)}")

    def convert(self, node: Node, arg: str) -> str:
        """Converts between integers and floats; the graph converts bools by selects and comparisons."""
        source = node.args[0].dtype
        before = self.kind(source, uniform=node.uniform)
        after = self.kind(node.dtype, uniform=node.uniform)
        if before == after:
            return arg
        if source == "float32":
            return self._truncate(node, arg, before, after)
        return self.op(f"{'s' if source == 'int32' else 'u'}itofp {before} {arg} to {after}")

    def _truncate(self, node: Node, arg: str, before: str, after: str) -> str:
        """Converts floats to integers: rounds towards zero and saturates; NaN becomes 0."""
        limits, sign = np.iinfo(node.dtype), "s" if node.dtype == "int32" else "u"
        mask = self.kind("bool", uniform=node.uniform)

        def number(value: Any, dtype: str) -> str:
            return self.constant(value, dtype, uniform=node.uniform)

        low, beyond = number(limits.min, "float32"), number(float(limits.max) + 1, "float32")
        above = self.op(f"fcmp ogt {before} {arg}, {low}")  # false for NaN
        inside = self.op(f"select {mask} {above}, {before} {arg}, {before} {low}")
        high = self.op(f"fcmp oge {before} {arg}, {beyond}")
        inside = self.op(f"select {mask} {high}, {before} {low}, {before} {inside}")
        result = self.op(f"fpto{sign}i {before} {inside} to {after}")
        most = number(limits.max, node.dtype)
        result = self.op(f"select {mask} {high}, {after} {most}, {after} {result}")
        missing = self.op(f"fcmp uno {before} {arg}, {arg}")
        return self.op(
            f"select {mask} {missing}, {after} {number(0, node.dtype)}, {after} {result}"
        )
