"""Places for the arrays of a thread: arrays that are in use at different times share memory.

An array that is copied where its use ends, into one whose use begins there, is that one: nothing is copied.

What a thread keeps in memory costs a GPU most, in its caches and in bandwidth. The program's text has no
jumps but those of loops and guards, so an array is in use from its first to its last mention, or, if a loop
lies across one of these ends, to that loop's end.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seedbed.simd.gpu.memory import ALIGN

_LABEL = re.compile(r"(\w+):$")
_TARGET = re.compile(r"label %(\w+)")
_ADDRESS = re.compile(r"(%\w+) = getelementptr .*ptr (%\w+), i64")
_NAME = re.compile(r"%[a-z]+\d+")
_COPY = re.compile(r"call void @llvm\.memcpy\S+\(ptr (%m\d+), ptr (%m\d+), i64 (\d+)")


class Span(NamedTuple):
    """A stretch of lines, both ends included."""

    first: int
    last: int


class _Block(NamedTuple):
    offset: int
    end: int
    span: Span


def spans(made: Iterable[tuple[str, str, int]], lines: Sequence[str]) -> dict[str, Span]:
    """Returns the lines between which each array is in use, by its address; unused arrays are left out.

    `made` holds the address of each array, the block in which it begins and its bytes. The first block is
    `work`, and has no label.
    """
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    begins = {address: labels.get(block, 0) for address, block, _ in made}
    uses: dict[str, list[int]] = {address: [] for address in begins}
    root = {address: address for address in uses}
    for i, line in enumerate(lines):
        for name in _NAME.findall(line):
            if name in root:
                uses[root[name]].append(i)
        found = _ADDRESS.match(line)
        if found is not None and found[2] in root:
            root[found[1]] = root[found[2]]
    loops = _loops(labels, lines)
    return {a: _lengthened(begins[a], at, loops) for a, at in uses.items() if at}


def _loops(labels: dict[str, int], lines: Sequence[str]) -> list[Span]:
    """Returns the stretches of the loops, each from first label to last jump back; inner ones first."""
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        for label in _TARGET.findall(line):
            if labels.get(label, i) < i:
                ends[labels[label]] = i
    return sorted((Span(*loop) for loop in ends.items()), key=lambda s: s.last - s.first)


def _lengthened(begin: int, uses: list[int], loops: Sequence[Span]) -> Span:
    """Returns the stretch of an array that begins in the block at line `begin` and is used in lines `uses`.

    A loop in which it is used, but outside which it begins or is used too, belongs to it as a whole.
    """
    first, last = uses[0], uses[-1]
    for loop in loops:
        inside = bisect.bisect_right(uses, loop.last) - bisect.bisect_left(uses, loop.first)
        own = loop.first <= begin <= loop.last and inside == len(uses)
        if inside and not own:
            first, last = min(first, loop.first), max(last, loop.last)
    return Span(first, last)


class Places(NamedTuple):
    """Instructions that give each array its address in the block `%local`, and the code that follows."""

    addresses: list[str]
    lines: list[str]


def shared_places(made: Sequence[tuple[str, str, int]], lines: Sequence[str]) -> Places:
    """Returns the places of arrays, and the lines without copies of an array to its own place.

    The arguments are those of `spans`.
    """
    live, sizes = spans(made, lines), {address: size for address, _, size in made}
    same, copies = _moved(live, sizes, lines)
    placed: list[_Block] = []
    offsets: dict[str, int] = {}
    aligned = {address: -(-size // ALIGN) * ALIGN for address, size in sizes.items()}
    for address in sorted(live, key=lambda a: (-sizes[a], a)):
        if same[address] != address:
            continue
        size, span = aligned[address], live[address]
        others = [b for b in placed if b.span.first <= span.last and span.first <= b.span.last]
        offsets[address] = offset = _lowest(size, others)
        placed.append(_Block(offset, offset + size, span))
    total = max((block.end for block in placed), default=0)
    addresses = [
        f"{a} = getelementptr i8, ptr %local, i64 {offsets[same[a]]}" for a in sizes if a in live
    ]
    block = [f"%local = alloca [{total} x i8], align {ALIGN}"] if total else []
    return Places([*block, *addresses], [x for i, x in enumerate(lines) if i not in copies])


def _moved(
    live: dict[str, Span], sizes: dict[str, int], lines: Sequence[str]
) -> tuple[dict[str, str], set[int]]:
    """Returns the array whose place each array takes, perhaps its own, and the lines of needless copies.

    Lengthens the spans in `live` of arrays whose places others take.
    """
    same, copies = {address: address for address in live}, set[int]()
    for i, line in enumerate(lines):
        found = _COPY.match(line)
        if found is None or found[1] not in same or found[2] not in same:
            continue
        target, source, size = found[1], same[found[2]], int(found[3])
        whole = size == sizes[target] == sizes[source]
        if whole and live[source].last == i == live[target].first:
            live[source] = Span(live[source].first, live[target].last)
            same[target] = source
            copies.add(i)
    return same, copies


def _lowest(size: int, others: list[_Block]) -> int:
    """Returns the lowest offset at which `size` bytes touch none of the other blocks."""
    at = 0
    for block in sorted(others):
        if at + size <= block.offset:
            break
        at = max(at, block.end)
    return at
