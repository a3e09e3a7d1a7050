"""Moves long stretches of a function of LLVM IR, without a branch in them, to functions of their own.

LLVM takes every instruction of WebAssembly to write one and the same register. When it moves an instruction
to where the result is used, it goes through all writes of that register in the function: the time of a
function grows with the square of its length, and a humanoid's took minutes. Browsers optimise shorter
functions sooner, too.

What a stretch needs from elsewhere, and what is needed of it, goes through memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MOST = 20_000
"""Most lines of a new function, and of what stays in the function that calls it, if it can be.

With a tenth of this, Go1's page stepped less than three quarters as fast in Chromium.
"""
_WORTH = 10  # a stretch moves if it has at least a tenth of so many lines
_SLOT = 8  # bytes, which hold a value of any type
_NAME = re.compile(r"%([\w.$-]+)")
_DEFINED = re.compile(r"  %([\w.$-]+) = ")
_HEAD = re.compile(r"define .*?@([\w.$-]+)\((.*)\)")
_MERGED = " = phi "
_STAYS = re.compile(r"\S|  (br |ret |switch |unreachable|\]| )|.* = (phi|alloca) ")
"""Lines that stay: labels, what ends a block, what merges values, and places of arrays."""


class _Part(NamedTuple):
    """Lines that stay in a function, or that move to one of their own."""

    lines: list[str]
    moves: bool


def in_pieces(module: Any, functions: Iterable[str], most: int = MOST) -> tuple[str, int]:
    """Returns the IR of a module of LLVM's, and the bytes of stack that its new functions pass each other.

    `functions` take pointers and return nothing. Of one that has more than `most` lines, the longest
    stretches move to functions of at most that many. What has no name in `module` gets one.
    """
    types = {name: _named(module.get_function(name)) for name in functions}
    lines: list[str] = []
    stack = 0
    # Each function ends with a line of its own.
    for text in str(module).split("\n}\n"):
        before, define, after = text.rpartition("\ndefine ")
        head, _, body = after.partition("\n")
        found = _HEAD.match("define " + head) if define else None
        if found and found[1] in types:
            cut, size = _cut("define " + head, body, types[found[1]], most)
            stack = max(stack, size)
            lines += [before, *cut]
        else:
            lines.append(text + "\n}" * bool(define))
    return "\n".join([*lines, ""]), stack


def _named(function: Any) -> dict[str, str]:
    """Names all values and blocks of a function; returns the types of values by their names."""
    types: dict[str, str] = {}
    for number, block in enumerate(function.blocks):
        block.name = block.name or f"block.{number}"
        for value in block.instructions:
            kind = str(value.type)
            if kind != "void":
                value.name = value.name or f"value.{len(types)}"
                types[value.name] = kind
    return types


def _cut(head: str, body: str, types: dict[str, str], most: int) -> tuple[list[str], int]:
    """Returns the lines of a function and of those that it calls, and the bytes that they pass."""
    parts = _parts(
        [kept for line in body.splitlines() if (kept := line.split(";")[0].rstrip())], most
    )
    passed = _passed(parts)
    size = _SLOT * len(passed)
    found = _HEAD.match(head)
    assert found is not None
    name, given = found[1], [f"%{each}" for each in _NAME.findall(found[2])]
    taken = ", ".join(f"ptr noalias {each}" for each in [*given, "%passed"])
    arguments = ", ".join(f"ptr {each}" for each in [*given, "%passed"])
    stays: list[str] = []
    moved: list[str] = []
    staying = [line for part in parts if not part.moves for line in part.lines]
    needed = _used(staying)
    for i, part in enumerate(parts):
        if not part.moves:
            stays += part.lines
            continue
        own = {_defined(line) for line in part.lines}
        stays.append(f"  call void @{name}.{i}({arguments})")
        made = [each for line in part.lines if (each := _defined(line)) in needed]
        stays += _read(made, types, passed)
        moved += [
            f"define internal void @{name}.{i}({taken}) nounwind {{",
            *_read([each for each in _used(part.lines) if each not in own], types, passed),
            *_with_stores(part.lines, own, types, passed),
            "  ret void",
            "}",
        ]
    stays = _with_stores(stays, {_defined(line) for line in staying}, types, passed)
    room = [f"  %passed = alloca [{size} x i8], align {_SLOT}"] if moved else []
    # Behind the label of the first block.
    return [head, *stays[:1], *room, *stays[1:], "}", *moved], size


def _parts(body: Sequence[str], most: int) -> list[_Part]:
    """Divides the lines of a function, so that at most `most` stay if stretches that are worth it move."""
    stretches = [
        (stays, list(lines))
        for stays, lines in itertools.groupby(body, lambda x: bool(_STAYS.match(x)))
    ]
    lengths = sorted((len(lines) for stays, lines in stretches if not stays), reverse=True)
    left, least = len(body), math.inf
    for length in lengths:
        if left <= most or length < most / _WORTH:
            break
        left, least = left - length, length
    parts: list[_Part] = []
    for stays, lines in stretches:
        moves = not stays and len(lines) >= least
        count = -(-len(lines) // most) if moves else 1
        ends = [len(lines) * i // count for i in range(count + 1)]
        parts += [_Part(lines[a:b], moves) for a, b in itertools.pairwise(ends)]
    return parts


def _defined(line: str) -> str:
    """Returns the name of the value that a line defines, or nothing."""
    found = _DEFINED.match(line)
    return found[1] if found else ""


def _used(lines: Iterable[str]) -> dict[str, None]:
    """Returns the names in lines, in order, of values and of labels."""
    return dict.fromkeys(name for line in lines for name in _NAME.findall(line))


def _passed(parts: Sequence[_Part]) -> dict[str, int]:
    """Returns the numbers, by names, of the values that are needed in another function than their own."""
    # All that stays is of one function.
    own = {
        _defined(line): i if part.moves else -1
        for i, part in enumerate(parts)
        for line in part.lines
    }
    passed: dict[str, int] = {}
    for i, part in enumerate(parts):
        here = i if part.moves else -1
        for name in _used(part.lines):
            if own.get(name, here) != here:
                passed.setdefault(name, len(passed))
    return passed


def _with_stores(
    body: Sequence[str], own: set[str], types: dict[str, str], passed: dict[str, int]
) -> list[str]:
    """Returns lines with instructions that pass on what is `own` and needed elsewhere."""
    lines: list[str] = []
    merged: list[str] = []  # what passes on the values that a block's first lines merge
    for line in body:
        name = _defined(line)
        stored: list[str] = []
        if name in own and name in passed:
            at = f"{name}.to"
            stored = [_at(at, passed[name]), f"  store {types[name]} %{name}, ptr %{at}"]
        if _MERGED in line:
            lines.append(line)
            merged += stored
        else:
            lines += [*merged, line, *stored]
            merged = []
    return lines


def _read(names: Iterable[str], types: dict[str, str], passed: dict[str, int]) -> list[str]:
    """Returns the instructions that read those values that other functions pass."""
    lines: list[str] = []
    for name in names:
        if name not in passed:
            continue
        at = f"{name}.at"
        lines += [_at(at, passed[name]), f"  %{name} = load {types[name]}, ptr %{at}"]
    return lines


def _at(name: str, number: int) -> str:
    return f"  %{name} = getelementptr inbounds nuw i8, ptr %passed, i32 {_SLOT * number}"
