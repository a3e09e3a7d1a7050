"""What a program needs to know to let an exported policy drive a robot, in the words of mjlab and LeRobot."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from seedbed.envs.device.robots.edits import limits, torque_ranges
from seedbed.envs.device.robots.sensed import SensedRobot
from seedbed.types import SeedbedError

TERMS = "observation_terms"
"""The key of the parts of the observation in order: JSON, with the fields of `Sight`."""


def deployment(task: SensedRobot) -> dict[str, Any]:
    """Returns how a task's actions become targets of servos, and what its policy sees, as JSON values.

    The order of the joints is that of the actions. A servo's torque in N m is `joint_stiffness` times (target
    - position) - `joint_damping` times velocity; its target is `default_joint_pos` + `action_scale` times the
    action, `action_delay` steps late, held within `target_ranges`, and its torque within `torque_ranges`
    (null: no bounds). If `action_moves` is `target` and not `posture`, actions are added to the target of the
    step before, which is `initial_target` at first, and `last_target` says whether to what was `wanted` then,
    or to what was `held` within the ranges; if it is `joints`, to the positions. `servo_damping` is
    the part of the damping that counts towards the largest force of a servo; the joint has the rest. `gait`
    has the fields of `Rhythm`. What has no sensor is measured in the frame of `base_body`. Episodes open
    about `opening_qpos`. Raises SeedbedError, which names the joint, for a name that a list cannot hold.
    """
    model = task.compiled()
    joints = model.actuator_trnid[:, 0]
    names = [model.joint(int(joint)).name for joint in joints]
    for joint, name in zip(joints, names, strict=True):
        if not name or "," in name:
            raise SeedbedError(
                f"{task.xml_file}: the name of joint {joint} is {name!r}, by which a program that drives the "
                "robot cannot find it in a list separated by commas: rename the joint in the file"
            )
    within = -model.actuator_biasprm[:, 2]
    dofs = model.jnt_dofadr[joints]
    damping = within + model.dof_damping[dofs]
    moved = task.action_moves == "target"
    first = {
        "initial_target": [float(x) for x in task.first_targets],
        "last_target": "held" if task.bounded_targets else "wanted",
    }
    rhythm = {"gait": task.rhythm._asdict()} if task.rhythm else {}
    return {
        "joint_names": names,
        "joint_stiffness": model.actuator_gainprm[:, 0].tolist(),
        "joint_damping": damping.tolist(),
        "servo_damping": within.tolist(),
        "joint_frictionloss": model.dof_frictionloss[dofs].tolist(),
        "joint_armature": model.dof_armature[dofs].tolist(),
        "target_ranges": _bounds(limits(model.actuator_ctrllimited, model.actuator_ctrlrange)),
        "torque_ranges": _bounds(torque_ranges(model)),
        "default_joint_pos": [float(x) for x in task.rest],
        "keyframe": task.home,
        "opening_qpos": [float(x) for x in task.opening],
        "base_body": model.body(task.trunk).name,
        "action_scale": [float(task.action_scale)] * model.nu,
        "action_delay": task.delay,
        "action_moves": task.action_moves,
        "rate_hz": 1.0 / task.dt,
        "command_names": [command.name for command in task.commands],
        "command_ranges": [[command.low, command.high] for command in task.commands],
        "observation_names": [sight.name for sight in task.sights],
        "observation_history_lengths": [sight.history for sight in task.sights],
        "observation_history_order": "newest_first",
        TERMS: [{**sight._asdict(), "scale": 1.0} for sight in task.sights],
        **(first if moved else {}),
        **rhythm,
    }


def _bounds(ranges: np.ndarray) -> list[list[float] | None]:
    """Returns ranges [n, 2], with None for those that are infinite."""
    return [each.tolist() if np.isfinite(each).all() else None for each in ranges]


def metadata(described: dict[str, Any]) -> dict[str, str]:
    """Returns the texts that an ONNX model carries, of what `deployment` has described.

    Lists of numbers or names are separated by commas, as mjlab writes them; `kp` and `kd` are JSON, as
    LeRobot reads them, and so is what has lists in it.
    """
    texts = {key: _text(value) for key, value in described.items()}
    gains = {"kp": "joint_stiffness", "kd": "joint_damping"}
    return texts | {short: json.dumps(described[name]) for short, name in gains.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(each, list | dict | None) for each in value):
        return json.dumps(value)
    return ",".join(f"{each:.7g}" if isinstance(each, float) else str(each) for each in value)
