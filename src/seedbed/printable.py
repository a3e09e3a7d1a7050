"""Texts of strangers, such as names of folders and values in files, as a terminal or a page may show them."""

from __future__ import annotations

import os
import shlex


def printable(value: object, keep: str = "") -> str:
    r"""Returns a value as text in which what cannot be seen is written out, such as `\x1b` for an escape.

    That is: control characters, invisible ones, those that turn the direction of writing, and halves of
    surrogate pairs, which are how Python names bytes that are no text. Characters of `keep` stay.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _written_out(c) for c in text)


def pasted(path: object) -> str:
    """Returns a path as `quoted` does, so that no program takes it for an option."""
    text = str(path)
    return quoted(f"./{text}" if text.startswith("-") else text)


def quoted(text: str) -> str:
    r"""Returns a text as one word of a command that a person pastes into a shell; it can all be seen.

    What cannot be seen is written as `$'\x0a'`, which bash, zsh and ksh read.
    """
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_shell, text))}'"


def resume_command(run: object) -> str:
    """Returns the command that goes on with the run in a folder."""
    return f"seedbed train --resume --run {pasted(run)}"


def _in_shell(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _written_out(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
