"""Texts of strangers, such as names of folders and values in files, as a terminal or a page may show them."""

from __future__ import annotations


def printable(value: object, keep: str = "") -> str:
    r"""Returns a value as text in which what cannot be seen is written out, such as `\x1b` for an escape.

    That is: control characters, invisible ones, those that turn the direction of writing, and halves of
    surrogate pairs, which are how Python names bytes that are no text. Characters of `keep` stay.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
