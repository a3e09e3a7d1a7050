"""Reads an exported policy. No class is imported by a name from its JSON, and onnxruntime is not needed."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.config import resolve
from seedbed.exporting.extra import require
from seedbed.files import load_json
from seedbed.printable import printable
from seedbed.run import trust
from seedbed.run.encoding import construct
from seedbed.run.forms import PlainForms, SpaceCodec
from seedbed.run.leaves import like, named_leaves, shape_and_dtype
from seedbed.run.stacking import stacked_spec
from seedbed.spaces import PRIVILEGED, Mirror, Reflection, policy_spec
from seedbed.strict_json import revived
from seedbed.types import (
    ActionSpec,
    Agent,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    SeedbedError,
    Tree,
    bind,
)

CONTRACT, PARAMETERS = "contract.json", "parameters.safetensors"
FORMAT, VERSION = "seedbed-policy", 1


class ExportedAgent(NamedTuple):
    """A trained agent from an exported folder."""

    agent: Agent  # bound
    forms: PlainForms  # of single frames, and of actions as the environment takes them
    frame_stack: int
    params: Tree
    spec: EnvSpec  # of single frames, with the part that only critics have seen


def is_exported(folder: Path) -> bool:
    """Returns whether a folder looks like an exported policy."""
    return (folder / CONTRACT).is_file()


def read(folder: Path) -> ExportedAgent:
    """Reads an exported policy of one of Seedbed's own agents; raises SeedbedError if that fails."""
    contract = _contract(folder)
    try:
        described, frame_stack = contract["agent"], int(contract["frame_stack"])
        name, options, files = described["name"], described["options"], contract["files"]
        size, digest = files[PARAMETERS]["bytes"], files[PARAMETERS]["sha256"]
        torso = str(options.get("torso", ""))
        if name is None or ":" in torso:
            what = f"the agent {described['class']}" if name is None else f"the torso {torso}"
            raise SeedbedError(
                f"{printable(folder)} is of {what}, which is not Seedbed's own: play its policy.onnx with "
                "onnxruntime, or the run with that code"
            )
        shown = _observation(contract["observation"])
        # Contracts of earlier versions have none.
        unseen = _observation(contract.get("privileged"))
        shown = shown if unseen is None else {**shown, PRIVILEGED: unseen}
        action, first = _action(contract["action"])
        spec = EnvSpec(shown, action, _mirror(contract.get("mirror")))
        if name not in trust.AGENTS:
            raise SeedbedError(
                f"{printable(folder)} is of the agent {name!r}, which this Seedbed does not have"
            )
        values = {field: _plain(revived(value)) for field, value in options.items()}
        agent = construct(resolve.load_agent_class(name), values)
        agent = bind(agent, stacked_spec(spec, frame_stack))
        template = jax.eval_shape(agent.init, jax.random.key(0)).params
    except SeedbedError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise _damaged(folder, CONTRACT, f"{type(error).__name__}: {text}") from error
    arrays = _parameters(folder, size, digest)
    forms = PlainForms(policy_spec(spec), first)
    return ExportedAgent(agent, forms, frame_stack, _filled(folder, template, arrays), spec)


def _contract(folder: Path) -> dict[str, Any]:
    try:
        contract = load_json(folder / CONTRACT)
    except (OSError, ValueError) as error:
        raise _damaged(folder, CONTRACT, str(error)) from error
    if not isinstance(contract, dict) or contract.get("format") != FORMAT:
        raise SeedbedError(
            f"{printable(folder)} is no exported policy: its {CONTRACT} is not Seedbed's"
        )
    if contract.get("version") != VERSION:
        raise SeedbedError(
            f"{printable(folder)} was exported by another version of Seedbed: its format is "
            f"{contract.get('version')!r}, this one reads {VERSION}"
        )
    return contract


def _parameters(folder: Path, size: int, digest: str) -> dict[str, np.ndarray]:
    require("safetensors")
    import safetensors.numpy

    try:
        content = (folder / PARAMETERS).read_bytes()
    except OSError as error:
        raise _damaged(folder, PARAMETERS, error.strerror or str(error)) from error
    if len(content) != size:
        raise _damaged(folder, PARAMETERS, f"it has {len(content)} bytes instead of {size}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(folder, PARAMETERS, "its content has changed")
    try:
        return safetensors.numpy.load(content)
    except Exception as error:
        raise _damaged(folder, PARAMETERS, str(error)) from error


def _filled(folder: Path, template: Tree, arrays: dict[str, np.ndarray]) -> Tree:
    """Returns the parameters with the structure of `template`, from arrays by name."""
    named = named_leaves(template)
    if odd := {name for name, _ in named} ^ arrays.keys():
        raise _damaged(folder, PARAMETERS, f"{min(odd)} is only in it, or only in the agent")
    for name, leaf in named:
        have = (arrays[name].shape, str(arrays[name].dtype))
        if have != shape_and_dtype(leaf):
            raise _damaged(folder, PARAMETERS, f"{name} is {have[1]}{list(have[0])}")
    leaves = [like(arrays[name], leaf) for name, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _damaged(folder: Path, name: str, reason: str) -> SeedbedError:
    return SeedbedError(f"{folder / name} is missing or damaged ({reason}): export the run again")


def _plain(value: Any) -> Any:
    """Returns an option: a number, a text, None, or a tuple of these."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"an option is {value!r}")


def observation_json(spec: Tree) -> Any:
    """Returns the shapes of observations, or reflections, as JSON; other nodes cannot be read again."""
    if spec is None:
        return None
    if isinstance(spec, dict):
        return {"dict": {key: observation_json(spec[key]) for key in sorted(spec)}}
    if type(spec) is tuple:
        return {"tuple": [observation_json(child) for child in spec]}
    if isinstance(spec, ArraySpec):
        return {"shape": list(spec.shape), "dtype": spec.dtype}
    if isinstance(spec, Reflection):
        return {"order": list(spec.order), "signs": list(spec.signs)}
    return {"other": type(spec).__name__}


def _observation(data: Any) -> Tree:
    if data is None:
        return None
    if "dict" in data:
        return {str(key): _observation(child) for key, child in data["dict"].items()}
    if "tuple" in data:
        return tuple(map(_observation, data["tuple"]))
    if "other" in data:
        raise SeedbedError(
            f"observations of the type {data['other']} cannot be read: play policy.onnx with onnxruntime"
        )
    if "order" in data:
        return Reflection(tuple(map(int, data["order"])), tuple(map(int, data["signs"])))
    return ArraySpec(tuple(int(size) for size in data["shape"]), str(np.dtype(data["dtype"])))


def mirror_json(mirror: Mirror | None) -> Any:
    """Returns a symmetry of observations and actions as JSON."""
    if mirror is None:
        return None
    return {
        "observation": observation_json(mirror.observation),
        "action": observation_json(mirror.action),
    }


def _mirror(data: Any) -> Mirror | None:
    # Contracts of earlier versions have none.
    if data is None:
        return None
    return Mirror(_observation(data["observation"]), _observation(data["action"]))


def action_json(forms: SpaceCodec) -> dict[str, Any]:
    """Returns the form of actions as JSON, in which an infinite bound is null.

    The environment takes the policy's action in `shape`, plus `start`, as `dtype`.
    """
    action = forms.spec.action
    if isinstance(action, Box):
        low, high = (
            [bound if math.isfinite(bound) else None for bound in bounds]
            for bounds in (action.low, action.high)
        )
        bounds = {"kind": "box", "low": low, "high": high}
        return {**bounds, "shape": list(action.shape), "start": 0, "dtype": "float32"}
    if isinstance(action, Discrete):
        choices, none = {"kind": "discrete", "n": action.n}, np.zeros((), np.int32)
    else:
        nvec = list(action.nvec)
        choices, none = {"kind": "multi_discrete", "nvec": nvec}, np.zeros(len(nvec), np.int32)
    first = np.asarray(forms.decode(none))
    start, dtype = first.astype(np.int64).tolist(), first.dtype.name
    return {**choices, "shape": list(first.shape), "start": start, "dtype": dtype}


def _action(data: Any) -> tuple[ActionSpec, np.ndarray | None]:
    """Returns the form of actions, and the environment's action for choices that are all 0."""
    # Contracts of earlier versions have no `start`.
    first = None
    if data["kind"] != "box" and "start" in data:
        first = np.array(data["start"], np.int64).astype(data["dtype"]).reshape(data["shape"])
    if data["kind"] == "discrete":
        return Discrete(int(data["n"])), first
    if data["kind"] == "multi_discrete":
        return MultiDiscrete(tuple(int(n) for n in data["nvec"])), first
    low = tuple(-math.inf if bound is None else float(bound) for bound in data["low"])
    high = tuple(math.inf if bound is None else float(bound) for bound in data["high"])
    return Box(tuple(int(size) for size in data["shape"]), low, high), None
