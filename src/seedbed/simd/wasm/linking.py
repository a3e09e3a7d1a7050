"""Makes a WebAssembly module of one object file of LLVM's.

The object file imports its memory and the global of its stack pointer; all else is in it, at the addresses
and under the numbers that it has in the module, if its data begin at 0 and it calls nothing from outside. So
it is enough to define what is imported, to export the functions, and to leave out what only a linker reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_HEADER = b"\0asm\1\0\0\0"
# Kinds of sections, of imports and exports, and of symbols with their flags.
_CUSTOM, _IMPORT, _MEMORY, _GLOBAL, _EXPORT, _CODE, _DATA, _DATA_COUNT = 0, 2, 5, 6, 7, 10, 11, 12
_OF_FUNCTION, _OF_MEMORY, _OF_GLOBAL = 0, 2, 3
_SYMBOL_TABLE = 8
_FUNCTION_SYMBOL, _DATA_SYMBOL, _SECTION_SYMBOL = 0, 1, 3
_UNDEFINED, _NAMED = 0x10, 0x40
_I32, _I32_CONST, _END_OF_EXPRESSION = 0x7F, 0x41, 0x0B
_CONSTANT, _MUTABLE = 0, 1
_NO_MOST = 0  # a memory may grow without limit
_PAGE, _ALIGN = 65536, 16  # bytes
HEAP = "heap"
"""The exported global from which on the memory is free."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        """Reads an unsigned LEB128 number."""
        value, shift = 0, 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        """Reads a signed LEB128 number of 32 bits."""
        begin = self.at
        value = self.number()
        bits = 7 * (self.at - begin)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def text(self) -> str:
        return self.take(self.number()).decode()


def link(code: bytes, functions: Sequence[str], stack: int) -> bytes:
    """Returns the module that exports `functions`, `memory` and HEAP, and has `stack` bytes of stack.

    `code` is an object file that defines the functions. Raises ValueError if it imports another one.
    """
    assert code[: len(_HEADER)] == _HEADER
    sections: dict[int, bytes] = {}
    numbers: dict[str, int] = {}
    for kind, body in _sections(_Reader(code[len(_HEADER) :])):
        if kind == _CUSTOM:
            numbers |= _symbols(_Reader(body))
        else:
            sections[kind] = body
    _check_imports(_Reader(sections.pop(_IMPORT)))
    data_end = _data_end(_Reader(sections[_DATA])) if _DATA in sections else 0
    top = _rounded(_rounded(data_end, _ALIGN) + stack, _ALIGN)
    sections[_MEMORY] = _vector([bytes([_NO_MOST]) + _leb(_rounded(top, _PAGE) // _PAGE)])
    sections[_GLOBAL] = _vector([_global(top, _MUTABLE), _global(top, _CONSTANT)])
    exports = [_export(name, _OF_FUNCTION, numbers[name]) for name in functions]
    exports += [_export("memory", _OF_MEMORY, 0), _export(HEAP, _OF_GLOBAL, 1)]
    sections[_EXPORT] = _vector(exports)
    order = sorted(sections, key=lambda kind: _CODE - 0.5 if kind == _DATA_COUNT else kind)
    parts = [bytes([kind]) + _leb(len(sections[kind])) + sections[kind] for kind in order]
    return _HEADER + b"".join(parts)


def _sections(reader: _Reader) -> Iterator[tuple[int, bytes]]:
    while reader.at < len(reader.data):
        kind = reader.take(1)[0]
        yield kind, reader.take(reader.number())


def _symbols(reader: _Reader) -> dict[str, int]:
    """Returns the numbers of functions by their names, if a custom section is the one that has them."""
    found: dict[str, int] = {}
    if reader.text() != "linking":
        return found
    reader.number()  # version
    while reader.at < len(reader.data):
        kind, end = reader.take(1)[0], reader.number() + reader.at
        if kind == _SYMBOL_TABLE:
            for _ in range(reader.number()):
                _read_symbol(reader, found)
        reader.at = end
    return found


def _read_symbol(reader: _Reader, found: dict[str, int]) -> None:
    kind, flags = reader.take(1)[0], reader.number()
    is_defined = not flags & _UNDEFINED
    if kind == _DATA_SYMBOL:
        reader.text()
        for _ in range(3 * is_defined):
            reader.number()
        return
    number = reader.number()
    if kind != _SECTION_SYMBOL and (is_defined or flags & _NAMED):
        name = reader.text()
        if kind == _FUNCTION_SYMBOL:
            found[name] = number


def _check_imports(reader: _Reader) -> None:
    """Checks that nothing is imported but a memory and the global of the stack pointer."""
    for _ in range(reader.number()):
        module, name, kind = reader.text(), reader.text(), reader.take(1)[0]
        if kind == _OF_MEMORY:
            has_most = reader.take(1)[0] & 1
            for _ in range(1 + has_most):
                reader.number()
        elif kind == _OF_GLOBAL and name == "__stack_pointer":
            reader.take(2)
        else:
            raise ValueError(f"the object file imports {module}.{name}, which nothing defines")


def _data_end(reader: _Reader) -> int:
    """Returns where in the memory the last of the data ends."""
    end = 0
    for _ in range(reader.number()):
        flags, opcode = reader.number(), reader.take(1)[0]
        assert flags == 0 and opcode == _I32_CONST, "data of another form than LLVM's"
        begin = reader.signed()
        assert reader.take(1)[0] == _END_OF_EXPRESSION
        size = reader.number()
        reader.take(size)
        end = max(end, begin + size)
    return end


def _global(value: int, is_mutable: int) -> bytes:
    return bytes([_I32, is_mutable, _I32_CONST]) + _signed_leb(value) + bytes([_END_OF_EXPRESSION])


def _export(name: str, kind: int, number: int) -> bytes:
    return _leb(len(name.encode())) + name.encode() + bytes([kind]) + _leb(number)


def _vector(items: Sequence[bytes]) -> bytes:
    return _leb(len(items)) + b"".join(items)


def _leb(value: int) -> bytes:
    """Returns an unsigned number in LEB128."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _signed_leb(value: int) -> bytes:
    """Returns a number of at least 0 in signed LEB128, whose last byte has its bit 6 clear."""
    code = _leb(value)
    return code if code[-1] < 64 else code[:-1] + bytes([code[-1] | 128, 0])


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
