"""Torsos of users: flax modules, named as code, such as `my_nets:Wide` or `my_nets:Wide(units=256)`."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from seedbed.named import import_named, is_local
from seedbed.nearest import did_you_mean
from seedbed.spaces import PRIVILEGED, entry, without
from seedbed.types import SeedbedError, Tree

_FORM = "give module:Name, or module:Name(field=value, ...) with numbers, texts and tuples of these"
_FLAX = ("parent", "name")  # fields that every flax module has, and flax fills


def is_own(torso: str) -> bool:
    """Returns whether a torso's name is that of a user's code."""
    return ":" in torso


def name_of(module: nn.Module) -> str:
    """Returns the name with which `own_torso` makes a module like this one again.

    Raises SeedbedError if no other process could make it: its class is in a script or a notebook, or inside a
    function, or a field is neither a number nor a text, nor a tuple of these.
    """
    kind, given = type(module), []
    if is_local(kind.__module__, kind.__qualname__):
        raise SeedbedError(
            f"torso is a {kind.__qualname__} that other processes cannot import: put the class into a "
            "module, such as my_nets.py, and import it from there"
        )
    for field in dataclasses.fields(kind):
        if field.name in _FLAX:
            continue
        value, usual = getattr(module, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if value is usual or (type(value) is type(usual) and value == usual):
            continue
        if not _is_literal(value):
            raise SeedbedError(
                f"torso is a {kind.__qualname__} whose field {field.name} is {value!r}, which cannot be "
                "saved with the run: use numbers, texts and tuples of these, or derive a class with it"
            )
        given.append(f"{field.name}={value!r}")
    path = f"{kind.__module__}:{kind.__qualname__}"
    name = path + (f"({', '.join(given)})" if given else "")
    if type(own_torso(name)) is not kind:
        raise SeedbedError(
            f"torso is a {kind.__qualname__} that is not, or no longer, {path}: import it anew"
        )
    return name


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def require_form(torso: str) -> None:
    """Raises SeedbedError if a name is not of the form of `own_torso`; imports nothing."""
    _parts(torso)


def own_torso(torso: str) -> nn.Module:
    """Imports a user's flax module: a class, which is made with the fields in the name, or an instance.

    Raises SeedbedError if there is none of this name, or if it cannot be made.
    """
    module_name, path, fields = _parts(torso)
    try:
        found: Any = import_named(module_name)
    except ModuleNotFoundError as error:
        raise SeedbedError(
            f"torso {torso!r}: no module {error.name!r}; install it or start in its folder"
        ) from error
    except Exception as error:
        raise SeedbedError(
            f"torso {torso!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found), 3, 0.5)
            raise SeedbedError(f"torso {torso!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    if isinstance(found, nn.Module) and fields is None:
        return found.clone(parent=None, name=None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise SeedbedError(
            f"torso {torso!r} is a {type(found).__name__}: give a class derived from flax.linen.Module, or "
            "one of its instances without fields in brackets"
        )
    try:
        return found(**(fields or {}), parent=None)
    except Exception as error:
        raise SeedbedError(f"torso {torso!r}: {type(error).__name__}: {error}") from error


def _parts(torso: str) -> tuple[str, str, dict[str, Any] | None]:
    """Returns the module, the path in it, and the fields in brackets, None without brackets."""
    module, _, rest = torso.partition(":")
    path, bracket, _ = rest.partition("(")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise SeedbedError(f"torso {torso!r}: {_FORM}")
    if not bracket:
        return module, path, None
    try:
        call = ast.parse(rest, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != path:
            raise ValueError("no call by names")
        names = [each.arg or "" for each in call.keywords]
        if {"", *_FLAX} & set(names) or len(set(names)) < len(names):
            raise ValueError("no fields of its own")
        fields = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise SeedbedError(f"torso {torso!r}: {_FORM}") from error
    return module, path, fields


def check_torso(torso: str, shown: Tree, scaled: bool) -> None:
    """Raises SeedbedError unless a user's torso turns observations into features.

    It must return float32 `[B, D]`, and may have parameters only: no running averages.

    Args:
        torso: its name.
        shown: what an agent's networks see, leaves [B, ...]; the policy's sees no entry `privileged` of it.
        scaled: whether observations are normalised, and bytes so become floats.
    """
    floats = jax.tree.map(
        lambda x: x if x.dtype == jnp.uint8 and not scaled else x.astype(jnp.float32), shown
    )
    _check(torso, without(floats, PRIVILEGED))
    if entry(shown, PRIVILEGED) is not None:
        _check(torso, floats)


def _check(torso: str, observation: Tree) -> None:
    module = own_torso(torso)

    def run(seen: Tree) -> Any:
        return module.init_with_output(jax.random.key(0), seen)

    try:
        features, variables = jax.eval_shape(run, observation)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise SeedbedError(
            f"torso {torso!r} fails with this environment's observations: {type(error).__name__}: {said}"
        ) from error
    batch = jax.tree.leaves(observation)[0].shape[0]
    is_array = isinstance(features, jax.ShapeDtypeStruct)
    if not is_array or features.ndim != 2 or features.shape[0] != batch:
        form = list(features.shape) if is_array else f"a {type(features).__name__}"
        raise SeedbedError(
            f"torso {torso!r} returns {form} for {batch} observations: it must return features [{batch}, D]"
        )
    if features.dtype != jnp.float32:
        raise SeedbedError(
            f"torso {torso!r} returns {features.dtype}: it must return float32 features"
        )
    if more := sorted(set(variables) - {"params"}):
        raise SeedbedError(
            f"torso {torso!r} has variables {more[0]!r}, and only parameters are trained: take layers "
            "without running averages, such as flax.linen.LayerNorm"
        )
