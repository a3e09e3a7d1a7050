"""Motions that a robot follows: files, our own, and the task; MuJoCo's C code is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np
import pytest

import biped
from seedbed import simd
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.robots.g1_motion import Following, G1Motion, MotionScales
from seedbed.envs.device.robots.motion import exercises, read_motion, resampled
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("motion")
    (path / "g1.xml").write_text(biped.xml("g1"))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return mujoco.MjModel.from_xml_path(str(folder / "g1.xml"))


def rows_of(model: Any, count: int, rate: float, turns: float = 0.0) -> np.ndarray:
    """Rows of a motion that bends every joint, sways and turns."""
    time = np.arange(count) / rate
    rows = np.tile(model.key_qpos[0], (count, 1))
    rows[:, 7:] += 0.1 * np.sin(time[:, None] * np.linspace(1, 3, model.nq - 7))
    rows[:, 1] += 0.05 * np.sin(time)
    rows[:, 3], rows[:, 6] = np.cos(turns * time / 2), np.sin(turns * time / 2)
    return rows


def written(path: Path, rows: np.ndarray, fps: Any = 30, **other: Any) -> Path:
    bodies = np.stack([rows[:, :7], rows[:, :7]], axis=1)
    arrays = {
        "joint_pos": rows[:, 7:],
        "body_pos_w": bodies[..., :3],
        "body_quat_w": bodies[..., 3:],
    }
    np.savez(path, **{"fps": np.array([fps]), **arrays} | other)
    return path


@pytest.fixture(scope="module")
def task(folder: Path, model: Any) -> G1Motion:
    file = written(folder / "wave.npz", rows_of(model, 46, 30, turns=0.8))
    ones = MotionScales(**dict.fromkeys(MotionScales.__dataclass_fields__, 1.0))
    options = {"noise_level": 0.0, "solver_iterations": 0, "scales": ones}
    return G1Motion(xml_file=str(folder / "g1.xml"), motion=str(file), **options)


def test_a_file_is_resampled_with_the_speeds_between_its_rows(folder, model):
    rows = rows_of(model, 61, 30, turns=2.0)
    motion = read_motion(written(folder / "turn.npz", rows), model, 0.02)
    assert motion.qpos.shape == (101, model.nq) and not motion.closed
    for i, row in enumerate(motion.qpos):
        at = i * 0.02 * 30
        before, after = rows[int(at)], rows[min(int(at + 1e-6) + 1, 60)]
        assert np.abs(row - before).max() <= np.abs(after - before).max() + 1e-5
    np.testing.assert_allclose(motion.qvel[:-1, 5], 2.0, atol=2e-2)
    assert not motion.qvel[-1].any()
    for i in (3, 50):
        place = np.float64(motion.qpos[i])
        mujoco.mj_integratePos(model, place, np.float64(motion.qvel[i]), 0.02)
        np.testing.assert_allclose(place, motion.qpos[i + 1], atol=1e-5)


def test_quaternions_of_the_other_sign_are_no_turn(folder, model):
    rows = rows_of(model, 30, 50)
    rows[::2, 3:7] *= -1
    motion = read_motion(written(folder / "signs.npz", rows, fps=50), model, 0.02)
    assert np.abs(motion.qvel[:, 3:6]).max() < 1e-3


def test_what_is_after_the_end(model):
    time = np.linspace(0, 2 * np.pi, 51)
    rows = np.tile(model.key_qpos[0], (51, 1))
    rows[:, 8] += 0.2 * np.sin(time)
    closed, opened = resampled(model, rows, 50, 0.02), resampled(model, rows[:30], 50, 0.02)
    assert closed.closed and len(closed.qpos) == 50
    # Also where the rate does not divide the length, and after a whole turn, whose quaternion is the other.
    other = rows_of(model, 33, 30, turns=2 * np.pi * 30 / 32)
    other[:, 1:2], other[:, 7:] = 0, model.key_qpos[0][7:]
    spun = resampled(model, other, 30, 0.02)
    assert spun.closed and len(spun.qpos) == 53
    np.testing.assert_allclose(spun.qvel[:, 5], spun.qvel[0, 5], rtol=0.02)
    assert np.abs(spun.qvel[:, :3]).max() < 1e-4
    other[:, 0] = np.linspace(0, 0.045, 33)
    assert not resampled(model, other, 30, 0.02).closed, "a slow walk ends elsewhere"
    for one, two in ((closed.at(50), closed.at(0)), (closed.at(73), closed.at(23))):
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])
    qpos, qvel = opened.at(90)
    np.testing.assert_array_equal(qpos, opened.qpos[-1])
    assert not np.asarray(qvel).any() and not opened.closed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"fps": 0}, "fps 0: fps must be"),
        (lambda a: {"fps": np.array([])}, "fps 0: fps must be"),
        (lambda a: {"joint_pos": a[:, 8:]}, r"this robot needs \[T, 13\]"),
        (lambda a: {"joint_pos": a[:1, 7:]}, "two rows or more"),
        (lambda a: {"joint_pos": np.float64(3)}, r"joint_pos \(\)"),
        (lambda a: {"joint_pos": a[:, 7:] * np.nan}, "not finite"),
        (lambda a: {"body_quat_w": np.zeros((len(a), 2, 4))}, "not finite"),
        (lambda a: {"body_pos_w": a[:, :3]}, r"body_pos_w \(30, 3\)"),
        (lambda a: {"body_pos_w": np.zeros((30, 2, 3, 5))}, r"body_pos_w \(30, 2, 3, 5\)"),
        (lambda a: {"body_pos_w": np.zeros((30, 0, 3))}, r"body_pos_w \(30, 0, 3\)"),
        (lambda a: {"joint_pos": a[:, 7:] + 1e39}, "too large"),
        (lambda a: {"joint_pos": a[:, 7:] * 1j}, "numbers of the type complex128"),
        (lambda a: {"fps": 1e-9}, "fps must be from 1 to 10000"),
        (lambda a: {"fps": 1e300}, "fps must be from 1 to 10000"),
        (lambda a: {"joint_pos": a[:, :6:-1]}, "the order of this robot's model"),
    ],
)
def test_files_that_are_no_motion_are_refused(tmp_path, model, change, said):
    rows, data = rows_of(model, 30, 30), mujoco.MjData(model)
    places = []
    for row in rows:
        data.qpos[:] = row
        mujoco.mj_kinematics(model, data)
        places.append(data.xpos[1:].copy())
    turns = np.tile([1.0, 0, 0, 0], (30, model.nbody - 1, 1))
    bodies = {"body_pos_w": np.array(places), "body_quat_w": turns}
    read_motion(written(tmp_path / "good.npz", rows, **bodies), model, 0.02)
    changed = change(rows)
    file = written(tmp_path / "bad.npz", rows, **(bodies if "order of" in said else {}) | changed)
    with pytest.raises(SeedbedError, match=said):
        read_motion(file, model, 0.02)


def test_files_that_cannot_be_read_are_refused(tmp_path, model, folder):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "less.npz", fps=30)
    np.save(tmp_path / "one.npy", np.zeros(3))
    whole = written(tmp_path / "torn.npz", rows_of(model, 30, 30)).read_bytes()
    (tmp_path / "torn.npz").write_bytes(whole[:900] + bytes(900) + whole[1800:])
    np.savez(tmp_path / "code.npz", fps=np.array([{}], dtype=object), allow_pickle=True)
    for name, said in (
        ("text.npz", "no motion"),
        ("one.npy", "no motion"),
        ("torn.npz", "no motion"),
        ("none.npz", "no motion"),
        ("less.npz", "has no joint_pos, body_pos_w, body_quat_w"),
        ("code.npz", "has no joint_pos"),
    ):
        with pytest.raises(SeedbedError, match=said):
            read_motion(tmp_path / name, model, 0.02)
    with pytest.raises(SeedbedError, match="no motion"):
        G1Motion(xml_file=str(folder / "g1.xml"), motion=str(tmp_path / "none.npz"))
    with pytest.raises(SeedbedError, match="our own motion is for G1"):
        exercises(model, model.key_qpos[0], "left_foot")


def test_an_action_is_worth_half_of_the_strongest_torque(task):
    model = task.compiled()
    data = mujoco.MjData(model)
    assert not model.actuator_ctrllimited.any()
    turns = 2 * np.pi * 10
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], 0.01 * turns**2)
    np.testing.assert_allclose(model.dof_damping[6:], 4 * 0.01 * turns)
    data.qpos[:] = model.key_qpos[0]
    kept = task.begin(jax.random.key(0))
    ctrl = np.asarray(task.control(kept, np.ones(model.nu, np.float32)))
    data.ctrl[:] = data.qpos[7:] + ctrl - np.asarray(task.centre(kept))
    mujoco.mj_forward(model, data)
    strongest = np.minimum(model.jnt_actfrcrange[1:, 1], model.actuator_forcerange[:, 1])
    np.testing.assert_allclose(data.actuator_force, 0.5 * strongest, rtol=1e-4)


def test_torques_are_bounded_by_servos_or_joints(folder, task, tmp_path):
    text, path = (folder / "g1.xml").read_text(), tmp_path / "g1.xml"
    joints = text.replace(' forcerange="-40 40"', "")
    for bound, xml in ((40, text.replace(' actuatorfrcrange="-60 60"', "")), (60, joints)):
        path.write_text(xml)
        other = G1Motion(xml_file=str(path), motion=task.motion)
        gains = other.compiled().actuator_gainprm[:, 0]
        np.testing.assert_allclose(other.reach, 0.5 * bound / gains, rtol=1e-6)
    path = tmp_path / "free.xml"
    path.write_text(joints.replace(' actuatorfrcrange="-60 60"', ""))
    with pytest.raises(SeedbedError, match="the torque of servo .* has no bound, of which an act"):
        _ = G1Motion(xml_file=str(path), motion=task.motion).reach


def test_a_run_finds_its_motion_from_elsewhere(task, monkeypatch):
    file = Path(task.motion)
    monkeypatch.chdir(file.parent)
    assert G1Motion(xml_file=task.xml_file, motion=file.name).motion == str(file)


def plain(model: Any, data: Any, motion: Any, frame: int, kept: dict[str, Any]) -> dict[str, Any]:
    """What the task shows and pays, written plainly on MuJoCo's data; `frame` is the state's."""
    qpos, qvel = motion.qpos[frame].astype(float), motion.qvel[frame].astype(float)
    axes, wanted, turn = np.zeros(9), np.zeros(9), np.zeros(4)
    mujoco.mju_quat2Mat(axes, data.sensor("orientation_pelvis").data)
    mujoco.mju_quat2Mat(wanted, qpos[3:7])
    axes, wanted = axes.reshape(3, 3), wanted.reshape(3, 3)
    inverse = data.qpos[3:7] * [1, -1, -1, -1]
    mujoco.mju_mulQuat(turn, inverse, qpos[3:7])
    leans = 2 * np.arccos(min(abs(turn[0]), 1.0))
    next_qpos, next_qvel = motion.qpos[frame + 1], motion.qvel[frame + 1]
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, data.qpos[3:7])
    rotation = rotation.reshape(3, 3)
    off, bent, fast = data.qpos[:3] - qpos[:3], data.qpos[7:] - qpos[7:], data.qvel[6:] - qvel[6:]
    low, high = model.jnt_range[1:].T
    middle, half = (low + high) / 2, 0.95 * (high - low) / 2
    touched = [data.sensor(f"{side}_foot_floor_found").data[0] > 0 for side in ("left", "right")]
    columns = (axes.T @ wanted)[:, :2]
    return {
        "state": np.concatenate(
            [
                data.sensor("gyro_pelvis").data,
                axes[2],
                columns[:, 0],
                columns[:, 1],
                bent,
                fast,
                kept["action"],
                next_qpos[7:] - model.key_qpos[0][7:],
                next_qvel[6:],
            ]
        ),
        "privileged": np.concatenate(
            [
                rotation.T @ off,
                rotation.T @ (data.qvel[:3] - qvel[:3]),
                data.qpos[2:3],
                bent,
                data.qvel[6:],
                data.actuator_force,
                touched,
            ]
        ),
        "terms": {
            "place": np.exp(-(off @ off) / 0.09),
            "orientation": np.exp(-(leans**2) / 0.16),
            "joint_pos": np.exp(-np.mean(bent**2) / 0.04),
            "joint_vel": np.exp(-np.mean(fast**2)),
            "velocity": np.exp(-np.sum((data.qvel[:3] - qvel[:3]) ** 2) / 0.25),
            "action_rate": np.sum((kept["action"] - kept["earlier"]) ** 2),
            "dof_pos_limits": np.maximum(np.abs(data.qpos[7:] - middle) - half, 0).sum(),
        },
        "over": abs(off[2]) > 0.25 or np.hypot(*off[:2]) > 0.5 or leans > 0.8,
    }


@pytest.fixture(scope="module")
def rolled(task: G1Motion) -> tuple[Any, list[dict[str, Any]]]:
    """Ours from each state of a rollout of MuJoCo, and what the plain formulas say of the same steps."""
    model, rng = task.compiled(), np.random.default_rng(0)
    model.opt.iterations, model.opt.ls_iterations = 100, 50
    data, motion = mujoco.MjData(model), task.followed
    data.qpos[:], data.qvel[:] = motion.qpos[0], motion.qvel[0]
    mujoco.mj_forward(model, data)
    strongest = np.minimum(model.jnt_actfrcrange[1:, 1], model.actuator_forcerange[:, 1])
    reach = task.action_scale * strongest / model.actuator_gainprm[:, 0]
    begun = jax.tree.map(np.asarray, task.begin(jax.random.key(0))._replace(key=()))
    before, actions, found, earlier = [], [], [], np.zeros(model.nu)
    for frame in range(STEPS):
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(data, name)[:] = np.float32(getattr(data, name))
        state = [np.float32(getattr(data, name)) for name in ("qpos", "qvel", "qacc_warmstart")]
        step, start = np.int32(frame // 2), np.int32(frame - frame // 2)
        kept = begun._replace(step=step, start=start, action=np.float32(earlier))
        action = np.float32(rng.uniform(-0.1, 0.1, model.nu))
        before.append(TaskState(state[0], np.zeros(3, np.float32), *state[1:], kept))
        actions.append(action)
        data.ctrl[:] = motion.qpos[frame + 1, 7:] + reach * action
        mujoco.mj_step(model, data, task.frame_skip)
        done = {"action": np.float64(action), "earlier": earlier}
        found.append(plain(model, data, motion, frame + 1, done))
        earlier = np.float64(action)

    def forward(inner: TaskState, action: Any) -> Any:
        kept: Following = inner.kept._replace(key=jax.random.key(0))
        opened = task.reset(jax.random.key(0))
        return task.step(opened._replace(inner=inner._replace(kept=kept)), action)

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *before)
    return jax.jit(simd.vectorize(forward))(stacked, np.stack(actions)), found


@pytest.mark.slow
def test_observations_are_those_of_the_formulas(rolled):
    ours, found = rolled
    for name in ("state", "privileged"):
        wanted = np.stack([each[name] for each in found])
        scale = np.maximum(1.0, np.abs(wanted).max(axis=0))
        np.testing.assert_array_less(np.abs(ours.timestep.observation[name] - wanted) / scale, 2e-4)


@pytest.mark.slow
def test_rewards_and_ends_are_those_of_the_formulas(rolled):
    ours, found = rolled
    for name in found[0]["terms"]:
        wanted = np.array([each["terms"][name] for each in found])
        assert np.ptp(wanted) > 0 or name == "dof_pos_limits"
        np.testing.assert_allclose(ours.metrics[f"reward_{name}"], wanted, rtol=1e-3, atol=1e-4)
    over = np.array([each["over"] for each in found])
    np.testing.assert_array_equal(ours.timestep.terminated, over)
    assert not over[:5].any() and over.any(), "a robot that is pushed about falls within a second"


@pytest.mark.slow
def test_episodes_open_anywhere_in_the_motion(task):
    reset = jax.jit(simd.vectorize(task.reset))
    inner = reset(jax.random.split(jax.random.key(3), 64)).inner
    starts, qpos = np.asarray(inner.kept.start), np.asarray(inner.qpos)
    assert len(np.unique(starts)) > 20
    off = qpos - task.followed.qpos[starts]
    assert 0.015 < np.abs(off[:, :3]).max() <= 0.02 + 1e-5
    assert 0.09 < np.abs(off[:, 7:]).max() <= 0.1 + 1e-5
    np.testing.assert_allclose(off[:, 3:7], 0, atol=1e-6)


def test_following_is_seen_by_what_it_names(task):
    assert sum(sight.size for sight in task.sights) == task.spec.observation["state"].shape[0]


@pytest.mark.slow
def test_following_is_a_task(folder, task):
    check_task(G1Motion(xml_file=task.xml_file, motion=task.motion))
