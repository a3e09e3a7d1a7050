"""Runs exported policies by their contracts, and compares them with JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed.exporting.check import Arrays, Reference, compare, open_session
from seedbed.exporting.policy import NEXT, OBSERVATION
from seedbed.run.deployed import Policy


class Exported:
    """An exported policy, which knows no more than its folder says. Its memory is that of B environments."""

    def __init__(self, folder: Path, batch: int = 1) -> None:
        self.contract = json.loads((folder / "contract.json").read_text())
        self.session = open_session((folder / "policy.onnx").read_bytes())
        self._names = [output.name for output in self.session.get_outputs()]
        self._memory = self.contract["memory"]
        self.memory = {
            entry["input"]: np.broadcast_to(
                np.array(entry["initial"], entry["dtype"]), (batch, *entry["shape"])
            )
            for entry in self._memory
        }

    def step(self, given: Arrays) -> dict[str, Any]:
        """Returns the outputs for the inputs that there are, of which the policy takes what it needs."""
        inputs = {entry["name"]: given[entry["name"]] for entry in self.contract["inputs"]}
        made = self.session.run(self._names, {**inputs, **self.memory})
        outputs = dict(zip(self._names, made, strict=True))
        self.memory = {entry["input"]: outputs[entry["output"]] for entry in self._memory}
        return outputs


class Recording(NamedTuple):
    """What a policy saw and did in JAX."""

    initial: Arrays  # memory before the first step
    inputs: list[Arrays]
    outputs: list[Arrays]


def record(policy: Policy, env: Any, batch: int, steps: int) -> Recording:
    """Plays with JAX in `batch` host environments."""
    reference = Reference(policy, batch)
    host = env.make(batch, 0)
    memory, timestep = reference.initial(), host.reset()
    recording = Recording(memory, [], [])
    for _ in range(steps):
        reward = np.where(timestep.first, np.float32(0), timestep.reward)
        given = {OBSERVATION: np.array(timestep.observation), "reward": reward}
        given["first"] = np.array(timestep.first)
        outputs = reference(memory, given)
        recording.inputs.append(given)
        recording.outputs.append(outputs)
        memory = {name: outputs[f"{NEXT}.{name}"] for name in memory}
        timestep = host.step(outputs["action"])
    host.close()
    return recording


def teacher_forced(folder: Path, recording: Recording) -> dict[str, float]:
    """Returns relative errors of an exported policy, each step from the memory that JAX had reached."""
    outputs = iter(recording.outputs)
    session = Exported(folder).session
    inputs = iter(recording.inputs)
    found = compare(session, lambda memory, given: next(outputs), recording.initial, inputs)
    return found.relative()


def free_running(folder: Path, recording: Recording) -> dict[str, float]:
    """Returns relative errors of an exported policy that goes on from its own memory."""
    exported = Exported(folder, len(recording.inputs[0]["first"]))
    largest: dict[str, float] = {}
    scale: dict[str, float] = {}
    for given, expected in zip(recording.inputs, recording.outputs, strict=True):
        for name, made in exported.step(given).items():
            error = np.abs(np.float64(made) - expected[name]).max()
            largest[name] = max(largest.get(name, 0.0), error)
            scale[name] = max(scale.get(name, 1e-30), np.abs(np.float64(expected[name])).max())
    return {name: largest[name] / scale[name] for name in largest}
