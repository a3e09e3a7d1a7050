"""States of robots as a mirror shows them, to compare a step there with the image of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.robots.mirror import sides_of
from seedbed.envs.device.robots.sensed import Sight
from seedbed.types import Timestep

Turned = Callable[[str, Any], np.ndarray]
"""Returns the image of rows [B, n] of what a `Sight` of this name has."""


def shown(
    task: Any, before: TaskState, actions: np.ndarray, memory: Callable[[Turned, list[int]], Any]
) -> tuple[TaskState, np.ndarray]:
    """Returns the images of states, leaves [B, ...], and of actions [B, nu] of a task with a joystick.

    `memory` makes that of what the task remembers, of the function that turns parts, and the feet's images.
    """
    sides = sides_of(task.compiled(), task.at_home, task.feet)

    def turned(name: str, x: Any) -> np.ndarray:
        of = sides.of(Sight(name, np.shape(x)[-1]))
        return np.asarray(x)[:, list(of.order)] * np.array(of.signs, np.float32)

    def joined(rows: Any, ends: list[int], *names: str) -> np.ndarray:
        parts = zip(names, np.split(rows, ends, axis=1), strict=True)
        return np.concatenate([turned(*each) for each in parts], axis=1)

    speeds = [3, 6], "base_lin_vel", "base_ang_vel", "joint_vel"
    ride, feet = before.kept, list(sides.feet.order)
    kept = ride._replace(
        command=turned("command", ride.command),
        action=turned("actions", ride.action),
        earlier=turned("actions", ride.earlier),
        feet=jax.tree.map(lambda x: x[:, feet], ride.feet),
        memory=memory(turned, feet),
        seen=ride.seen._replace(command=turned("command", ride.seen.command)),
    )
    states = before._replace(
        qpos=joined(before.qpos, [3, 7], "position", "orientation", "joint_pos"),
        qvel=joined(before.qvel, *speeds),
        qacc_warmstart=joined(before.qacc_warmstart, *speeds),
        kept=kept,
    )
    return states, turned("actions", actions)


def require_image(task: Any, ours: Timestep, image: Timestep) -> None:
    """Asserts that steps are images of each other: what is seen is reflected, rewards are the same."""
    for name, of in task.spec.mirror.observation.items():
        wanted = np.asarray(ours.observation[name])[:, list(of.order)] * np.array(of.signs)
        scale = np.maximum(1.0, np.abs(wanted).max(axis=0))
        np.testing.assert_array_less(np.abs(image.observation[name] - wanted) / scale, 1e-3)
    np.testing.assert_allclose(image.reward, ours.reward, rtol=1e-3, atol=1e-4)
