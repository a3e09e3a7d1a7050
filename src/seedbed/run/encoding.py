"""Options as JSON and back: dataclasses with their classes, tuples, dicts and plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from seedbed.named import is_local
from seedbed.nearest import require_options
from seedbed.printable import printable
from seedbed.run.trust import Trust
from seedbed.strict_json import NON_FINITE, spells_number
from seedbed.types import SeedbedError, Tree

BOUND = ("spec",)
"""Agent fields that `types.bind` fills. They are not options and are not saved with a configuration."""


def encode(value: Any, left_out: tuple[str, ...] = ()) -> Any:
    """Returns a value as JSON types, without the fields `left_out`; raises SeedbedError for another type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in left_out and field.init
        }
        return {"class": f"{kind.__module__}:{kind.__qualname__}", **fields}
    if isinstance(value, tuple | list):
        return [encode(child) for child in value]
    if isinstance(value, dict):
        return {name: encode(child) for name, child in value.items()}
    if spells_number(value):
        raise SeedbedError(
            f"option {value!r} is a text that stands for a number in JSON ({', '.join(NON_FINITE)}): give "
            "the number, or another text"
        )
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise SeedbedError(
        f"option {value!r} of type {type(value).__name__} cannot be saved with the run: use "
        "numbers, strings, tuples and dataclasses"
    )


def unimportable(value: Any) -> str:
    """Returns the name of a class in a value of `encode` that no other process can import; "" without one."""
    children: Any = value.values() if isinstance(value, dict) else ()
    if isinstance(value, tuple | list):
        children = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        if is_local(kind.__module__, kind.__qualname__):
            return kind.__qualname__
        children = (getattr(value, field.name) for field in dataclasses.fields(value))
    return next(filter(None, map(unimportable, children)), "")


def decode(value: Any, trust: Trust) -> Any:
    """Returns the value that was encoded; `trust` tells of the file that it is from.

    Raises SeedbedError if the class is not there, may not be imported, or is no dataclass.
    """
    if isinstance(value, list):
        return tuple(decode(child, trust) for child in value)
    if not isinstance(value, dict):
        return value
    fields = {name: decode(child, trust) for name, child in value.items() if name != "class"}
    if "class" not in value:
        return fields
    kind = trust.load(value["class"])
    if not dataclasses.is_dataclass(kind):
        raise SeedbedError(
            f"{printable(trust.file)} names {value['class']}, which is no dataclass: restore the file"
        )
    return construct(kind, fields)


def construct(kind: type, fields: dict[str, Any]) -> Any:
    """Makes a dataclass of its fields; raises SeedbedError, with the nearest name, for an unknown one."""
    require_options(kind.__name__, fields, [field.name for field in dataclasses.fields(kind)])
    return kind(**fields)


def plain_tuple(value: Any) -> Any:
    """Returns a list, and the lists in it, as tuples, and anything else as it is."""
    return tuple(map(plain_tuple, value)) if isinstance(value, list) else value


def encode_shapes(tree: Tree) -> Any:
    """Returns a tree of arrays, or of their shapes, as JSON types that say its structure, shapes and dtypes.

    Raises SeedbedError if it has nodes other than tuples, NamedTuples, lists, dicts with names, and None.
    """
    if tree is None:
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = type(tree)
        return {
            "named": f"{kind.__module__}:{kind.__qualname__}",
            "of": [encode_shapes(child) for child in tree],
        }
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [encode_shapes(child) for child in tree]}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: encode_shapes(child) for key, child in tree.items()}}
    leaf: Any = tree
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return [list(leaf.shape), str(leaf.dtype)]
    raise SeedbedError(
        f"a gradient has a node of type {type(tree).__name__}: learners can only share trees of tuples, "
        "NamedTuples, lists and dicts with names"
    )


def decode_shapes(data: Any, trust: Trust) -> Tree:
    """Returns the tree of `encode_shapes`, whose leaves are `jax.ShapeDtypeStruct`.

    `trust` tells of the file that it is from. Raises SeedbedError if it names what is no NamedTuple, or may
    not be imported.
    """
    import jax

    if data is None:
        return None
    if isinstance(data, list):
        return jax.ShapeDtypeStruct(tuple(data[0]), data[1])
    if "named" in data:
        kind: Any = trust.load(data["named"])
        if not (issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(data["of"])):
            raise SeedbedError(
                f"{printable(trust.file)} names {data['named']}, which is no such NamedTuple: restore "
                "the file"
            )
        return kind(*(decode_shapes(child, trust) for child in data["of"]))
    if "dict" in data:
        return {key: decode_shapes(child, trust) for key, child in data["dict"].items()}
    ((name, children),) = data.items()
    return (tuple if name == "tuple" else list)(decode_shapes(child, trust) for child in children)
