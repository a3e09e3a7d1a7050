"""`seedbed export`: writes a run's policy into a folder in which nothing is executable."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
import safetensors.numpy

from seedbed import strict_json
from seedbed.arguments import checked
from seedbed.config import flags
from seedbed.config.saved import saved_config
from seedbed.envs.device.robots.deployment import deployment, metadata
from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.envs.device.robots.sensed import SensedRobot
from seedbed.envs.device.wrappers import changing, innermost
from seedbed.envs.host.gym import GymEnv
from seedbed.envs.host.pickled import without_code
from seedbed.exporting import card, driving
from seedbed.exporting.check import require_equal
from seedbed.exporting.graph import IR_VERSION, OPSET
from seedbed.exporting.loading import (
    CONTRACT,
    FORMAT,
    PARAMETERS,
    VERSION,
    action_json,
    mirror_json,
    observation_json,
)
from seedbed.exporting.policy import (
    ACTION,
    FIRST,
    NEXT,
    OBSERVATION,
    REWARD,
    MemoryEntry,
    PolicyGraph,
    build,
)
from seedbed.files import sync
from seedbed.policy import TrainedAgent, restore
from seedbed.printable import printable
from seedbed.run import trust
from seedbed.run.deployed import Policy
from seedbed.run.encoding import BOUND, encode
from seedbed.run.folder import METRICS, RunFolder
from seedbed.run.leaves import array_of, named_leaves
from seedbed.run.lines import read_lines
from seedbed.spaces import PRIVILEGED, entry
from seedbed.types import Agent, ArraySpec, SeedbedError
from seedbed.version import __version__

GRAPH = "policy.onnx"
_MEANINGS = {
    OBSERVATION: "the observation as the environment gives it: a single frame, not normalised",
    REWARD: "the reward of the last action; 0 if `first`",
    FIRST: "whether the observation opens an episode",
    ACTION: "the action, every random number at its median: the mode of the policy",
    "logits": "logarithms of the actions' probabilities, up to a constant",
    "mean": "mean of the normal distribution, before it is squashed into an action",
    "scale": "standard deviation of that distribution",
    "q_values": "values of the actions",
}


@checked
def export(
    run: str | Path,
    folder: str | Path,
    newest: bool = False,
    warn: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> dict[str, Any]:
    """Exports a run's best policy, or its newest, into a new folder; returns the contract.

    `trust` is that of `restore`. Calls `warn` like it, and if the graph takes only one environment at a
    time. Raises SeedbedError if the folder is not empty, if a part of the agent's `act` has no form in ONNX,
    if onnxruntime does not agree with JAX, or if the folder cannot be written; then it is as it was before.
    """
    run, folder = Path(run), Path(folder)
    _require_room(folder)
    trained = restore(run, warn, newest, trust)
    policy = trained.deployed(warn)
    robot = _robot(trained.env, warn)
    # On a GPU, JAX would round the factors of products to TF32, by more than the check allows.
    with jax.default_matmul_precision("highest"):
        graph = build(policy, metadata(robot) if robot else {})
        if graph.single:
            warn(
                f"the graph takes one environment at a time: with more, act fails ({graph.single})"
            )
        errors = require_equal(policy, graph)
    lines = read_lines(run / METRICS)
    arrays = {name: np.array(array_of(leaf)) for name, leaf in named_leaves(policy.params)}
    files = {
        GRAPH: graph.model.SerializeToString(),
        PARAMETERS: safetensors.numpy.save(arrays),
        card.CURVE: card.curve(lines).encode(),
    }
    contract = {
        "format": FORMAT,
        "version": VERSION,
        "seedbed": __version__,
        **_arrays(policy, graph),
        "observation": observation_json(policy.spec.observation),
        # Only to make the agent again: no input, as critics alone have seen it.
        "privileged": observation_json(entry(trained.forms.spec.observation, PRIVILEGED)),
        "action": action_json(trained.forms),
        "mirror": mirror_json(trained.forms.spec.mirror),
        "frame_stack": policy.frame_stack,
        "agent": _agent(policy.agent),
        "environment": _environment(run, trained),
        "robot": robot,
        "training": _training(trained, card.evaluation_of(lines, trained.step)),
        "checked": {"onnxruntime": onnxruntime.__version__, "relative_errors": errors},
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    files["README.md"] = card.readme(contract).encode()
    files[CONTRACT] = (strict_json.dumps(contract, indent=2) + "\n").encode()
    _write(folder, files)
    return contract


def _robot(env: Any, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Returns how a policy drives its robot; None, and calls `warn`, if a wrapper hides that."""
    task = innermost(env)
    if not isinstance(task, SensedRobot) or not task.sights or task.action_moves == "motion":
        return None
    if hiding := changing(env):
        warn(
            f"the file does not say how it drives a robot: {', '.join(hiding)} may change what the policy "
            "sees, or its actions"
        )
        return None
    return deployment(task)


def _arrays(policy: Policy, graph: PolicyGraph) -> dict[str, Any]:
    """Returns the contract's description of the graph and its arrays."""
    statistics = [name for name, _ in named_leaves(policy.params) if name.startswith("seen.")]
    return {
        "graph": {
            "file": GRAPH,
            "opset": OPSET,
            "ir_version": IR_VERSION,
            "batch": 1 if graph.single else "any",
        },
        "inputs": [_described(name, spec) for name, spec in graph.inputs.items()],
        "memory": [_remembered(entry) for entry in graph.memory],
        "outputs": [_described(name, spec) for name, spec in graph.outputs.items()],
        "normalisation": {"in_graph": True, "statistics": statistics},
        "evaluation_draws": graph.draws,
    }


def _described(name: str, spec: ArraySpec) -> dict[str, Any]:
    head = name.partition(".")[0]
    meaning = _MEANINGS.get(name) or _MEANINGS.get(head) or "a value that the agent's act names"
    return {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "meaning": meaning}


def _remembered(entry: MemoryEntry) -> dict[str, Any]:
    same = entry.initial.size > 0 and bool((entry.initial == entry.initial.reshape(-1)[0]).all())
    initial = entry.initial.reshape(-1)[0] if same else entry.initial
    follows = (
        "the action that was taken" if entry.is_action else f"the output `{NEXT}.{entry.name}`"
    )
    return {
        "input": entry.name,
        "output": f"{NEXT}.{entry.name}",
        "shape": list(entry.initial.shape),
        "dtype": str(entry.initial.dtype),
        "initial": initial.tolist(),
        "is_action": entry.is_action,
        "meaning": f"memory, from {'its first value' if not same else initial.tolist()}; next: {follows}",
    }


def _agent(agent: Agent) -> dict[str, Any]:
    encoded = encode(agent, BOUND)
    kind = encoded.pop("class")
    own = [name for name, path in trust.AGENTS.items() if path == kind]
    return {"name": own[0] if own else None, "class": kind, "options": encoded}


def _environment(run: Path, trained: TrainedAgent) -> dict[str, Any]:
    """Returns the environment's saved options, and the Gymnasium task that shows the same observations."""
    env: Any = trained.env
    task: dict[str, Any] | None = None
    if hasattr(env, "gymnasium_id"):
        task = {"id": env.gymnasium_id, "kwargs": env.gymnasium_options()}
    elif isinstance(env, GymEnv):
        task = {"id": env.id, "kwargs": dict(env.kwargs)}
    return {"gymnasium": task, "options": without_code(RunFolder.read(run).read_config()["env"])}


def _training(trained: TrainedAgent, evaluation: dict[str, Any] | None) -> dict[str, Any]:
    config = trained.config
    return {
        "name": config.name,
        "command": flags.command(config),
        "seed": config.runtime.seed,
        "member": trained.member,
        "env_steps": trained.step,
        "evaluation": evaluation,
    }


def _require_room(folder: Path) -> None:
    """Raises SeedbedError if there is something in the folder already, or if it is none."""
    try:
        if folder.exists() and next(folder.iterdir(), None) is not None:
            raise SeedbedError(f"{printable(folder)} is not empty: name a new folder with -o")
    except OSError as error:
        raise _unusable(folder, error) from error


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Writes all files beside a new folder, and gives them its name when they are on the disk.

    An empty folder stays and gets the files, the contract last: a shell may be in it, or it may be a mount.
    """
    whole = folder.resolve()
    is_new = not whole.exists()
    place = whole.with_name(f".{whole.name}.new") if is_new else whole
    try:
        if is_new:
            whole.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        for name, content in files.items():
            (place / name).write_bytes(content)
            sync(place / name)
        sync(place)
        if is_new:
            place.rename(whole)
            sync(whole.parent)
    except OSError as error:
        for name in files:
            with contextlib.suppress(OSError):
                (place / name).unlink()
        raise _unusable(folder, error) from error
    finally:
        if is_new:
            shutil.rmtree(place, ignore_errors=True)


def _unusable(folder: Path, error: OSError) -> SeedbedError:
    return SeedbedError(
        f"the folder {printable(folder)} cannot be written ({error.strerror or error}): name another with -o"
    )


def scene_of(run: Path, scene: str, trust: bool) -> Path:
    """Returns the scene in which a run's policy is to drive a robot: `scene`, or the run's own for "".

    Raises SeedbedError if the run drives no robot, or the scene lacks what its policy needs.
    """
    wrapped: Any = saved_config(RunFolder.read(run), trust).env
    env: Any = innermost(wrapped)
    if not isinstance(env, JoystickTask) or not env.sights:
        raise SeedbedError(
            f"{printable(run)} drives no robot: --robot is for tasks with a joystick"
        )
    if hiding := changing(wrapped):
        raise SeedbedError(
            f"{printable(run)} drives no robot: {', '.join(hiding)} may change what its policy sees, or its "
            "actions; export it without --robot"
        )
    path = Path(scene) if scene else env.model_path
    driving.Robot(path, metadata(deployment(env)))
    return path


def drive(folder: Path, scene: Path, tell: Callable[[str], None]) -> str:
    """Drives a robot with what was exported, in a scene; returns what came of it.

    Calls `tell` with what is done. Raises SeedbedError if the robot falls.
    """
    tell(f"driving in {printable(scene)} in real time, for {driving.SECONDS:.0f} s")
    came = driving.drive(folder / GRAPH, scene, tell)
    median, most = came.latency_ms
    text = (
        f"{came.seconds:.0f} s in MuJoCo's C code by {GRAPH} alone: off by {came.velocity_error:.2f} m/s "
        f"and {came.turning_error:.2f} rad/s, {median:.2f} ms a step (99 of 100 within {most:.2f}), "
        f"{came.late} steps late"
    )
    if came.fell:
        raise SeedbedError(f"the policy was exported, but the robot fell after {text}")
    return text


def told(contract: dict[str, Any], folder: Path) -> str:
    """Returns the line that tells of an exported policy."""
    worst = max(contract["checked"]["relative_errors"].values())
    return (
        f"{printable(folder)} has the policy of step {contract['training']['env_steps']:,}; onnxruntime "
        "and JAX differ "
        f"by at most {worst:.0e} of an output's largest number"
    )
