"""Compilation of LLVM IR text to machine code, and a writer of such text with loops and temporaries."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

# LLVM's global context is not thread-safe.
_LOCK = threading.Lock()
# Machine code lives as long as its engine, so the engines are kept.
_ENGINES: list[llvm.ExecutionEngine] = []
# Calls out of the machine code go through a table, because its memory manager leaves no room for stubs.
_FAR_CALLS = """
!llvm.module.flags = !{!1000000}
!1000000 = !{i32 7, !"RtLibUseGOT", i32 1}
"""
# Characters of a module from which on LLVM only simplifies it. All of -O1 takes seconds of such a module, and
# steps of Go1 and of the humanoid were no faster by it (0.99 to 1.02); shorter ones were, by 2 to 12 %.
_LONG = 2_600_000
# Lanes -> how the names of the x86 features start that need more lanes.
_WIDER = {
    4: ("avx2", "avx10", "avx512", "amx", "vaes", "vpclmul", "gfni"),
    8: ("avx10", "avx512", "amx"),
    16: (),
}


# AVX-512 with its rounding to bfloat16 and its products of pairs of such numbers.
_FOR_PAIRS = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")
# What code with tiles uses: AMX's tiles of bfloat16, and the above.
_FOR_TILES = ("amx-tile", "amx-bf16", *_FOR_PAIRS)
# Linux's system call arch_prctl, its request for a part of the CPU's state, and that of the tiles.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18


class VectorUnit(NamedTuple):
    """The vector unit of a CPU: float32 lanes per vector register, and the number of such registers."""

    width: int
    registers: int


class Target(NamedTuple):
    """The processor that machine code is for: LLVM triple, CPU, and features such as "+avx2,-avx512f"."""

    triple: str
    cpu: str
    features: str = ""

    @property
    def architecture(self) -> str:
        """The name of the instruction set: "x86_64", "aarch64" or another."""
        name = self.triple.split("-")[0]
        return "aarch64" if name == "arm64" else name

    @property
    def fused_multiply_add(self) -> bool:
        """Whether the CPU multiplies and adds with one rounding in one instruction."""
        return self.architecture == "aarch64" or "+fma" in self.features.split(",")


@functools.cache
def _initialize() -> None:
    # Other targets than this machine's are for tests: to look at what other machines would run.
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@functools.cache
def host_vector_unit() -> VectorUnit:
    """Returns the vector unit of this machine: 16 lanes for AVX-512, 8 for AVX2 with FMA, otherwise 4."""
    _initialize()
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return VectorUnit(16, 32)
    if features.get("avx2") and features.get("fma"):
        return VectorUnit(8, 16)
    return VectorUnit(4, 32 if host_target(4).architecture == "aarch64" else 16)


def host_has_pairs() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 numbers (AVX512-BF16)."""
    _initialize()
    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in _FOR_PAIRS)


@functools.cache
def host_has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX) and Linux lets this process use them.

    The first call asks Linux for the permission, which all threads of the process then have. It warns if the
    CPU has tiles and Linux refuses them.
    """
    _initialize()
    features = llvm.get_host_cpu_features()
    if sys.platform != "linux" or not all(features.get(name) for name in _FOR_TILES):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    warnings.warn(
        f"Linux refuses this CPU's tiles (AMX) to this process: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@functools.cache
def host_target(width: int | None = None) -> Target:
    """Returns this machine, without the features that need more than `width` float32 lanes.

    The default is the width of `host_vector_unit`. Only x86 features are turned off. Fused multiply-add
    stays on: x86 has it for 128-bit registers too.
    """
    _initialize()
    if width is None:
        width = host_vector_unit().width
    here = Target(llvm.get_process_triple(), llvm.get_host_cpu_name())
    wide = _WIDER[width] if here.architecture == "x86_64" else ()
    flags = [
        f"{'+' if on and not name.startswith(wide) else '-'}{name}"
        for name, on in sorted(llvm.get_host_cpu_features().items())
    ]
    return here._replace(features=",".join(flags))


def toolchain(width: int) -> str:
    """Describes everything about LLVM and this CPU on which machine code for `width` lanes depends."""
    versions = f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}, {_LONG}"
    return ", ".join([versions, *host_target(width)])


def compile_ir(text: str, symbol: str) -> int:
    """Compiles the module `text` for this machine and returns the address of its function `symbol`.

    The machine code stays valid until the process ends. Any thread may call this.

    Raises:
        RuntimeError: the text is not valid LLVM IR (LLVM's message is kept), or lacks `symbol`.
    """
    return load_object(compile_object(text, host_target()), symbol)


def compile_object(text: str, target: Target) -> bytes:
    """Compiles the module `text` to an object file for `target`.

    Any thread may call this.

    Raises:
        RuntimeError: the text is not valid LLVM IR; LLVM's message is kept.
    """
    with _LOCK:
        machine = _machine(target)
        module = llvm.parse_assembly(text + _FAR_CALLS)
        module.verify()
        for function in module.functions:
            if function.is_declaration and not function.name.startswith("llvm."):
                function.add_function_attribute("nonlazybind")
        (_optimize if len(text) < _LONG else _simplify)(module, machine)
        return machine.emit_object(module)


def _optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    tuning = llvm.create_pipeline_tuning_options(speed_level=1)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)


def _simplify(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_module_pass_manager()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.add_sroa_pass()
    passes.add_dead_code_elimination_pass()
    passes.run(module, builder)


def compile_assembly(text: str, target: Target) -> str:
    """Compiles the module `text`, which names no target, to the assembly of `target`.

    Any thread may call this.

    Raises:
        RuntimeError: the text is not valid LLVM IR (LLVM's message is kept), or LLVM lacks the processor.
    """
    with _LOCK:
        machine, module = _optimized(text, target)
        # comments with the names of blocks, by which measurements find the loops again
        machine.set_asm_verbosity(True)
        return machine.emit_assembly(module)


def compile_foreign(text: str, target: Target, rewritten: Callable[[Any], str] = str) -> bytes:
    """Compiles the module `text`, which names no target, to an object file for another machine.

    `rewritten` returns the IR to compile, of the optimised module; it compiles nothing. Any thread may call.

    Raises:
        RuntimeError: the text is not valid LLVM IR (LLVM's message is kept), or LLVM lacks the processor.
    """
    with _LOCK:
        machine, module = _optimized(text, target)
        module = llvm.parse_assembly(rewritten(module))
        module.verify()
        return machine.emit_object(module)


def _optimized(text: str, target: Target) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    _initialize()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2
    )
    module = llvm.parse_assembly(
        f'target datalayout = "{machine.target_data}"\ntarget triple = "{target.triple}"\n' + text
    )
    module.verify()
    _optimize(module, machine)
    return machine, llvm.parse_assembly(_frozen(str(module)))


# Strength reduction of straight code asks of pair after pair of integer sums whether a term may be poison,
# and looks for a proof through dozens of instructions for each: with random bits, that was 13 of 14 seconds.
# What is frozen needs no proof, and `freeze` becomes no instruction.
_MIXED = re.compile(r"^ *%([\w.]+) = (xor i32 .*|tail call i32 @llvm\.fshl\.i32.*)$", re.MULTILINE)


def _frozen(text: str) -> str:
    return _MIXED.sub(r"%mixed.\1 = \2\n%\1 = freeze i32 %mixed.\1", text)


def load_object(code: bytes, symbol: str) -> int:
    """Loads an object file and returns the address of its function `symbol`.

    The object stays loaded until the process ends. Any thread may call this.

    Raises:
        RuntimeError: the object lacks `symbol`.
    """
    with _LOCK:
        # LLVM's own memory manager may put code and constants more than 2 GiB apart.
        engine = llvm.create_mcjit_compiler(
            llvm.parse_assembly(""), _machine(host_target()), use_lmm=True
        )
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = engine.get_function_address(symbol)
        if not address:
            raise RuntimeError(f"the module defines no function {symbol!r}; define it in the IR")
        _ENGINES.append(engine)
        return address


def _machine(target: Target) -> llvm.TargetMachine:
    _initialize()
    # The JIT's default code model, "large", needs an extra instruction for the address of each constant.
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.features,
        opt=2,
        reloc="pic",
        codemodel="small",
    )


class LoopValues:
    """The values that a counted loop carries.

    `index` and `values` are the names in the body of the loop. The body sets `next` to the values for
    the next iteration, which stay valid after the loop; by default they do not change.
    """

    def __init__(self, index: str, values: list[str]) -> None:
        """Takes the names of the loop's index and of the phi nodes of its values."""
        self.index, self.values, self.next = index, values, list(values)


class Function:
    """The text of one LLVM function, built instruction by instruction in the block that is open."""

    def __init__(self, signature: str, attributes: str = "") -> None:
        """Starts the text, `define <signature> nounwind <attributes> ... {`, and opens the block `entry`."""
        # For CPUs that LLVM tunes for 256 bits, 512-bit registers must be asked for.
        wide = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
        self._lines = [f"define {signature} nounwind {attributes} {wide} {{", "entry:"]
        self._block = "entry"
        self._count = 0

    def fresh(self, prefix: str = "t") -> str:
        """Returns a name, without `%`, that this function has not used so far."""
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Appends an instruction without a result."""
        self._lines.append(text)

    def op(self, text: str) -> str:
        """Appends an instruction and returns the name of its result."""
        name = f"%{self.fresh()}"
        self._lines.append(f"{name} = {text}")
        return name

    def label(self, name: str) -> None:
        """Ends the current block with a branch to the new block `name`, and opens that."""
        self._lines += [f"br label %{name}", f"{name}:"]
        self._block = name

    def open(self, name: str) -> None:
        """Opens the block `name`. The last instruction must have ended the current block."""
        self._lines.append(f"{name}:")
        self._block = name

    def at(self, base: str, index: str | int, kind: str = "float") -> str:
        """Returns the address of element `index` of the array of type `kind` at `base`."""
        if index in (0, "0"):
            return base
        return self.op(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def scaled(self, base: str, index: str, stride: int, kind: str = "float") -> str:
        """Returns the address of element `index * stride` of the array of type `kind` at `base`."""
        return self.at(base, self.op(f"mul i64 {index}, {stride}"), kind)

    @contextmanager
    def repeat(
        self, count: int | str, carried: Sequence[tuple[str, str]] = ()
    ) -> Iterator[LoopValues]:
        """Emits a loop that runs `count` >= 1 times around the instructions that the `with` block appends.

        `count` is a number or the name of an i64 value. `carried` holds (type, initial value) of each
        carried value.
        """
        body, before = self.fresh("body"), self._block
        names = [f"%{self.fresh()}" for _ in range(len(carried) + 1)]
        carry = LoopValues(names[0], names[1:])
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
        """Emits a loop around what the `with` block appends, and yields the name of its i64 index.

        The index runs from `start` to `stop` - 1. Both are run-time values; the range may be empty.
        """
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

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Emits a branch around what the `with` block appends, which runs if the i1 `condition` is true."""
        inside, after = self.fresh("inside"), self.fresh("after")
        self.line(f"br i1 {condition}, label %{inside}, label %{after}")
        self.open(inside)
        yield
        self.label(after)

    def text(self, returns: str = "void") -> str:
        """Returns the text of the finished function, which returns `returns`, such as "i64 0"."""
        return "\n".join([*self._lines, f"ret {returns}", "}", ""])
