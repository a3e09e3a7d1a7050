"""Writes the LLVM IR that moves numbers between vectors."""

from __future__ import annotations

from seedbed.llvm import Function


def transpose(f: Function, rows: list[str], kind: str) -> list[str]:
    """Emits the transpose of 16 vectors of as many numbers of an LLVM type. Returns the columns' names."""
    width, step = 16, 1
    while step < width:
        new = list(rows)
        for i in range(width):
            if i & step:
                continue
            pair = rows[i], rows[i + step]
            new[i] = shuffle(
                f, pair, [j + width - step if j & step else j for j in range(width)], kind
            )
            new[i + step] = shuffle(
                f, pair, [j + width if j & step else j + step for j in range(width)], kind
            )
        rows, step = new, 2 * step
    return rows


def interleave(f: Function, first: str, second: str) -> str:
    """Emits <32 x i16> of the numbers of two vectors <16 x i16> in turn."""
    return shuffle(f, (first, second), [i // 2 + i % 2 * 16 for i in range(32)], "i16")


def shuffle(f: Function, pair: tuple[str, str], order: list[int], kind: str) -> str:
    """Emits a vector of numbers of two vectors of 16 numbers, by their places in both together."""
    width = 16
    lanes = ", ".join(f"i32 {i}" for i in order)
    return f.op(
        f"shufflevector <{width} x {kind}> {pair[0]}, <{width} x {kind}> {pair[1]}, "
        f"<{len(order)} x i32> <{lanes}>"
    )
