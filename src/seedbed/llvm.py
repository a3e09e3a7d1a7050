"""Compile LLVM IR text for the host CPU, and write such text with loops and temporaries."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import llvmlite
import llvmlite.binding as llvm

_LOCK = threading.Lock()  # LLVM's global context is not thread-safe
_ENGINES: list[llvm.ExecutionEngine] = []  # machine code lives as long as its engine
# Calls out of the machine code go through a table: its memory manager leaves no room for stubs.
_FAR_CALLS = """
!llvm.module.flags = !{!1000000}
!1000000 = !{i32 7, !"RtLibUseGOT", i32 1}
"""
_WIDER = {  # beginnings of the names of x86 features that need more lanes
    4: ("avx2", "avx10", "avx512", "amx", "vaes", "vpclmul", "gfni"),
    8: ("avx10", "avx512", "amx"),
    16: (),
}


class VectorUnit(NamedTuple):
    """Float32 lanes per vector register, and how many such registers the CPU has."""

    width: int
    registers: int


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.cache
def host_vector_unit() -> VectorUnit:
    """Vector unit of this machine: 16 lanes for AVX-512, 8 for AVX2, otherwise 4."""
    _initialize()
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return VectorUnit(16, 32)
    if features.get("avx2") and features.get("fma"):
        return VectorUnit(8, 16)
    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    return VectorUnit(4, 32 if arm else 16)


def narrowed(width: int) -> dict[str, bool]:
    """Features of this CPU without those of vectors wider than `width` float32 lanes.

    Fused multiply-add stays, which x86 has with registers of 128 bits too.
    """
    _initialize()
    wide = _WIDER[width] if architecture() == "x86_64" else ()
    features = llvm.get_host_cpu_features()
    return {name: on and not name.startswith(wide) for name, on in features.items()}


def architecture() -> str:
    """Name of this CPU's instruction set: "x86_64", "aarch64" or another."""
    name = llvm.get_process_triple().split("-")[0]
    return "aarch64" if name == "arm64" else name


def fused_multiply_add() -> bool:
    """Whether this CPU multiplies and adds with one rounding in one instruction."""
    _initialize()
    return architecture() == "aarch64" or bool(llvm.get_host_cpu_features().get("fma"))


def toolchain(width: int) -> str:
    """Everything about LLVM and this CPU on which machine code for `width` lanes depends."""
    versions = f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}"
    return f"{versions}, {llvm.get_process_triple()}, {llvm.get_host_cpu_name()}, {_flags(width)}"


def compile_ir(text: str, symbol: str) -> int:
    """Address of function `symbol` of the module `text`, compiled for this machine.

    The machine code stays valid until the process ends.

    Raises:
        RuntimeError: the text is not valid LLVM IR (LLVM's message is kept), or lacks `symbol`.
    """
    return load_object(compile_object(text, host_vector_unit().width), symbol)


def compile_object(text: str, width: int) -> bytes:
    """Object file of the module `text`, for vectors of at most `width` float32 lanes.

    Raises:
        RuntimeError: the text is not valid LLVM IR; LLVM's message is kept.
    """
    with _LOCK:
        machine = _target_machine(width)
        module = llvm.parse_assembly(text + _FAR_CALLS)
        module.verify()
        for function in module.functions:
            if function.is_declaration and not function.name.startswith("llvm."):
                function.add_function_attribute("nonlazybind")
        tuning = llvm.create_pipeline_tuning_options(speed_level=1)
        tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
        builder = llvm.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        return machine.emit_object(module)


def load_object(code: bytes, symbol: str) -> int:
    """Address of function `symbol` of an object file, which stays loaded until the process ends.

    Raises:
        RuntimeError: the object lacks `symbol`.
    """
    with _LOCK:
        # LLVM's own memory manager may put code and constants more than 2 GiB apart.
        engine = llvm.create_mcjit_compiler(
            llvm.parse_assembly(""), _target_machine(host_vector_unit().width), use_lmm=True
        )
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = engine.get_function_address(symbol)
        if not address:
            raise RuntimeError(f"the module defines no function {symbol!r}; define it in the IR")
        _ENGINES.append(engine)
        return address


def _flags(width: int) -> str:
    return ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(narrowed(width).items()))


def _target_machine(width: int) -> llvm.TargetMachine:
    _initialize()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    # The JIT's default code model is "large": it spends an instruction on each constant's address.
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=_flags(width),
        opt=2,
        reloc="pic",
        codemodel="small",
    )


class Carry:
    """Values carried round a counted loop: `values` inside it, `next` to be set in it."""

    def __init__(self, index: str, values: list[str]) -> None:
        """Carry of a loop whose index is `index` and whose phi nodes are `values`."""
        self.index, self.values, self.next = index, values, list(values)


class Function:
    """Text of one LLVM function, grown instruction by instruction."""

    def __init__(self, signature: str, attributes: str = "") -> None:
        """Start `define <signature> <attributes> {` with one open basic block."""
        # 512-bit registers are opt-in for CPUs that LLVM tunes for 256 bits.
        wide = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
        self._lines = [f"define {signature} nounwind {attributes} {wide} {{", "entry:"]
        self._block = "entry"
        self._count = 0

    def fresh(self, prefix: str = "t") -> str:
        """Name not used in this function so far."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(text)

    def op(self, text: str) -> str:
        """Append an instruction and return the name of its result."""
        name = f"%{self.fresh()}"
        self._lines.append(f"{name} = {text}")
        return name

    def label(self, name: str) -> None:
        """Close the current block by falling into the new block `name`."""
        self._lines += [f"br label %{name}", f"{name}:"]
        self._block = name

    def open(self, name: str) -> None:
        """Open block `name` after an instruction that ended the current one."""
        self._lines.append(f"{name}:")
        self._block = name

    def at(self, base: str, index: str | int, kind: str = "float") -> str:
        """Address of element `index` of the `kind` array at `base`."""
        if index in (0, "0"):
            return base
        return self.op(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def scaled(self, base: str, index: str, stride: int, kind: str = "float") -> str:
        """Address of element `index * stride` of the `kind` array at `base`."""
        return self.at(base, self.op(f"mul i64 {index}, {stride}"), kind)

    @contextmanager
    def repeat(self, count: int | str, carried: Sequence[tuple[str, str]] = ()) -> Iterator[Carry]:
        """Loop `count` >= 1 times, perhaps a value; `carried` gives (type, initial value) of each carry."""
        body, before = self.fresh("body"), self._block
        names = [f"%{self.fresh()}" for _ in range(len(carried) + 1)]
        carry = Carry(names[0], names[1:])
        self.label(body)
        hole = len(self._lines)
        yield carry
        after = self.op(f"add i64 {carry.index}, 1")
        entries = [
            ("i64", "0", after),
            *((*c, n) for c, n in zip(carried, carry.next, strict=True)),
        ]
        self._lines[hole:hole] = [
            f"{name} = phi {kind} [{start}, %{before}], [{following}, %{self._block}]"
            for name, (kind, start, following) in zip(names, entries, strict=True)
        ]
        more = self.op(f"icmp slt i64 {after}, {count}")
        done = self.fresh("done")
        self.line(f"br i1 {more}, label %{body}, label %{done}")
        self.open(done)

    @contextmanager
    def between(self, start: str, stop: str) -> Iterator[str]:
        """Loop over an index from `start` to `stop` (both run-time values, perhaps empty)."""
        head, body, done = self.fresh("head"), self.fresh("body"), self.fresh("done")
        before = self._block
        self.label(head)
        hole, index = len(self._lines), f"%{self.fresh()}"
        more = self.op(f"icmp slt i64 {index}, {stop}")
        self.line(f"br i1 {more}, label %{body}, label %{done}")
        self.open(body)
        yield index
        after = self.op(f"add i64 {index}, 1")
        self._lines.insert(
            hole, f"{index} = phi i64 [{start}, %{before}], [{after}, %{self._block}]"
        )
        self.line(f"br label %{head}")
        self.open(done)

    def text(self, returns: str = "void") -> str:
        """The finished function, which returns `returns`."""
        return "\n".join([*self._lines, f"ret {returns}", "}", ""])
