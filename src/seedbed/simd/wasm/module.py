"""Compiles programs to a WebAssembly module, which imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from seedbed import cache
from seedbed.llvm import Target, compile_foreign
from seedbed.simd.ir.program import Program
from seedbed.simd.wasm.kernel import module_ir
from seedbed.simd.wasm.linking import link
from seedbed.simd.wasm.pieces import MOST, in_pieces

PROCESSOR = Target(
    "wasm32-unknown-unknown", cpu="generic", features="+bulk-memory,+nontrapping-fptoint,+sign-ext"
)
"""WebAssembly as browsers have had it since 2021, without vectors: a page runs one example."""
_SPARE = 4096  # bytes of stack
_EDITION = 1  # to be raised with each change of what `pieces` and `linking` make of the same text


def compile_module(programs: Mapping[str, Program]) -> bytes:
    """Compiles programs, by the names of their functions, to a module, or finds it on disk.

    The functions are as `module_ir` says; the module also exports its memory and where that is free. Any
    thread may call this. Raises Unsupported as `module_ir` does.
    """
    text, stack = module_ir(programs)
    key = (
        f"wasm module {_EDITION}, {MOST}, {_SPARE}\n"
        f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}, {PROCESSOR}\n{text}"
    )
    code = cache.load(key)
    if code is None:
        passed = 0

        def cut(module: Any) -> str:
            nonlocal passed
            whole, passed = in_pieces(module, programs)
            return whole

        code = link(compile_foreign(text, PROCESSOR, cut), [*programs], stack + passed + _SPARE)
        cache.save(key, code)
    return code
