"""Drives a robot with an exported policy, of which it reads only the file: no Seedbed, no JAX.

`python examples/drive_robot.py exported/go1/policy.onnx scene.xml`. The class stands for a robot: give a real
one these four methods. It knows the parts of the observation that Go1 and `seedbed train robot.xml` have.
"""

import json
import sys
import time

import mujoco
import numpy as np
import onnxruntime


class Robot:
    """A robot in MuJoCo's C code; `told` is what the policy's file says."""

    def __init__(self, scene, told):
        self.model = mujoco.MjModel.from_xml_path(scene)
        self.data = mujoco.MjData(self.model)
        joints = [self.model.joint(name) for name in told["joint_names"].split(",")]
        self.places = [joint.qposadr[0] for joint in joints]
        self.dofs = [joint.dofadr[0] for joint in joints]
        kp, kd = np.array(json.loads(told["kp"])), np.array(json.loads(told["kd"]))
        servos = np.array(told["servo_damping"].split(","), float)  # their part of kd
        self.model.actuator_gainprm[:, 0], self.model.actuator_biasprm[:, 1] = kp, -kp
        self.model.actuator_biasprm[:, 2], self.model.dof_damping[self.dofs] = -servos, kd - servos
        torques = bounds(told["torque_ranges"])
        self.model.actuator_forcelimited[:] = np.isfinite(torques[0])
        self.model.actuator_forcerange[:] = np.nan_to_num(np.transpose(torques))
        self.data.qpos[:] = np.array(told["opening_qpos"].split(","), float)

    def joints(self):
        return self.data.qpos[self.places], self.data.qvel[self.dofs]

    def imu(self):
        """Velocity, turning and the direction of gravity, in the trunk's frame."""
        axes = np.empty(9)
        mujoco.mju_quat2Mat(axes, self.data.qpos[3:7])
        axes = axes.reshape(3, 3)
        return self.data.qvel[:3] @ axes, self.data.qvel[3:6], -axes[2]

    def send(self, targets, seconds):
        self.data.ctrl[:] = targets
        mujoco.mj_step(self.model, self.data, round(seconds / self.model.opt.timestep))


def bounds(text):
    """The least and the largest numbers; null is none."""
    return np.array([each or (-np.inf, np.inf) for each in json.loads(text)]).T


def main(policy, scene, command=(0.5, 0.0, 0.0), seconds=10.0):
    session = onnxruntime.InferenceSession(policy)
    told = session.get_modelmeta().custom_metadata_map
    rest, scale = (
        np.array(told[key].split(","), float) for key in ("default_joint_pos", "action_scale")
    )
    robot, period = Robot(scene, told), 1 / float(told["rate_hz"])
    terms, (low, high) = json.loads(told["observation_terms"]), bounds(told["target_ranges"])
    actions = [np.zeros(len(rest))] * 3  # the newest first
    due = time.perf_counter()
    for _ in range(round(seconds / period)):
        angles, speeds = robot.joints()
        velocity, turning, gravity = robot.imu()
        late = next(term["delay"] for term in terms if term["name"] == "actions")
        parts = {"base_lin_vel": velocity, "base_ang_vel": turning, "projected_gravity": gravity}
        parts |= {"joint_pos": angles - rest, "joint_vel": speeds}
        parts |= {"actions": actions[late], "command": command}
        seen = np.concatenate([parts[term["name"]] for term in terms])[None].astype(np.float32)
        (action,) = session.run(["action"], {session.get_inputs()[0].name: seen})
        actions = [action[0], *actions[:2]]
        targets = rest + scale * actions[int(told["action_delay"])]
        robot.send(np.clip(targets, low, high), period)
        due += period
        time.sleep(max(0.0, due - time.perf_counter()))
    told = f"told to walk {command[0] * seconds:.1f} m forward"
    print(f"{told}: is at {robot.data.qpos[:2].round(2)} m, {robot.data.qpos[2]:.2f} m high")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python drive_robot.py policy.onnx scene.xml")
    main(*sys.argv[1:])
