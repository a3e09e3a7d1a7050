"""dm_control's tasks: MuJoCo's C code on dm_control's own files, and its formulas written plainly, judge."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from seedbed import simd
from seedbed.api import make_gymnasium
from seedbed.config.defaults import configure
from seedbed.config.presets import PRESETS
from seedbed.config.resolve import resolve_env, train_config
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.packaged import packaged_file
from seedbed.envs.device.randomisation import Offset, Scale, randomise
from seedbed.envs.device.suite.task import random_pose, tolerance
from seedbed.envs.host.registry import resolve
from seedbed.envs.names import ON_DEVICE
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError
from suite_reference import Reference
from suite_reference import tolerance as reference_tolerance

NAMES = [name for name in ON_DEVICE if name.startswith("dm/")]
STEPS = 40


def reference(name: str) -> Reference:
    """The judge of a task."""
    domain, task = name.removeprefix("dm/").split("-")
    return Reference(packaged_file("dm_control/walker.xml").parent, domain, task)


@pytest.mark.quick("dm/reacher-easy")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_seen_and_paid_is_dm_controls(name):
    """From each state of a rollout of MuJoCo's, one step of ours; solvers converge on both sides."""
    task, judge = resolve_env(name), reference(name)
    opened: Any = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(3), 8))
    target = np.asarray(opened.inner.kept)[0, 0] if task.targets else None
    judge.put(target)
    data, rng = judge.data, np.random.default_rng(0)
    data.qpos[:], data.qvel[:] = opened.inner.qpos[0], opened.inner.qvel[0]
    mujoco.mj_forward(judge.model, data)
    low, high = task.action_bounds().T
    before, actions, seen, paid = [], [], [], []
    for i in range(STEPS):
        if i == STEPS // 2:
            judge.succeed()
        for field in ("qpos", "qvel", "qacc_warmstart"):
            getattr(data, field)[:] = np.float32(getattr(data, field))
        mujoco.mj_forward(judge.model, data)
        state = [np.float32(getattr(data, field)) for field in ("qpos", "qvel", "qacc_warmstart")]
        residue = np.zeros_like(opened.inner.qpos_low[0])
        kept = np.asarray(opened.inner.kept)[0] if task.targets else ()
        before.append(TaskState(state[0], residue, *state[1:], kept))
        actions.append(np.float32(rng.uniform(low, high)))
        observation, reward = judge.step(np.float64(actions[-1]))
        seen.append(observation)
        paid.append(reward)
    first = jax.tree.map(lambda leaf: leaf[:1].repeat(STEPS, 0), opened)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *before)
    ours = jax.jit(simd.vectorize(task.step))(first._replace(inner=stacked), np.stack(actions))
    observed = ours.timestep.observation
    assert set(observed) == set(seen[0])
    for key, found in observed.items():
        wanted = np.stack([one[key] for one in seen])
        scale = np.maximum(1.0, np.abs(wanted).max(axis=0))
        # Fifteen light links in a row amplify rounding: in float64, differences are 1e-12.
        most = 1e-3 if name.endswith("swimmer15") else 1e-4
        np.testing.assert_array_less(np.abs(found - wanted) / scale, most, err_msg=key)
    np.testing.assert_allclose(ours.timestep.reward, paid, atol=1e-4)
    assert max(paid) > 0.1, "what is never paid would be equal whatever the reward is"
    assert not ours.timestep.terminated.any()


@pytest.mark.parametrize(
    ("shape", "at_margin"),
    [("gaussian", 0.1), ("linear", 0.0), ("linear", 0.5), ("quadratic", 0.0), ("long_tail", 0.1)],
)
def test_tolerance_is_dm_controls(shape, at_margin):
    x = np.linspace(-6, 9, 301, dtype=np.float32)
    for low, high, margin in (
        (0.0, 0.0, 2.0),
        (-1.0, 2.5, 1.5),
        (1.0, np.inf, 3.0),
        (0.0, 1.0, 0.0),
    ):
        ours = tolerance(x, (low, high), margin, shape, at_margin)
        wanted = reference_tolerance(np.float64(x), low, high, margin, shape, at_margin)
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_what_is_paid_has_gradients_where_the_goal_is_met():
    """Of a standing walker, whose height is above a bound without an upper one."""
    for x in (0.9, 1.2, 1.5):
        slope = jax.grad(lambda x: tolerance(x, (1.2, np.inf), 0.6))(jnp.float32(x))
        assert (slope > 0.1 if x < 1.2 else slope == 0) or x == 1.2
        assert np.isfinite(slope)
    for shape in ("gaussian", "linear", "quadratic", "long_tail"):
        slope = jax.grad(lambda x, shape=shape: tolerance(x, (1.0, 2.0), 1.0, shape, 0.1))
        assert slope(jnp.float32(0.5)) > 0 > slope(jnp.float32(2.5)) and slope(1.5) == 0


def opened(name: str, count: int = 512) -> Any:
    """Episodes of a task, just opened."""
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(simd.vectorize(resolve_env(name).reset))(keys)


@pytest.mark.slow
def test_joints_open_anywhere_within_their_range():
    model = resolve_env("dm/walker-walk").physics_model()
    qpos = np.asarray(opened("dm/walker-walk").inner.qpos)
    assert not qpos[:, :2].any()
    np.testing.assert_allclose(np.abs(qpos[:, 2]).max(), np.pi, atol=0.05)
    low, high = model.jnt_range[3:].T
    assert (qpos[:, 3:] >= low - 1e-6).all() and (qpos[:, 3:] <= high + 1e-6).all()
    assert (qpos[:, 3:].min(0) < low + 0.05 * (high - low)).all()
    assert (qpos[:, 3:].max(0) > high - 0.05 * (high - low)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dm/finger-spin", "dm/humanoid-stand"])
def test_nothing_touches_when_an_episode_opens(name):
    """In MuJoCo's C code; without drawing again, some of these would touch."""
    judge, task = reference(name), resolve_env(name)

    def touching(poses: Any) -> int:
        count = 0
        for qpos in np.asarray(poses):
            judge.data.qpos[:] = qpos
            mujoco.mj_forward(judge.model, judge.data)
            count += judge.data.ncon > 0
        return count

    keys = jax.random.split(jax.random.key(0), 64)
    drawn = jax.vmap(lambda key: random_pose(task.physics_model(), key))(keys)
    assert touching(drawn) > 0 and touching(opened(name, 64).inner.qpos) == 0


@pytest.mark.slow
def test_a_cheetah_has_come_to_rest():
    inner = opened("dm/cheetah-run", 64).inner
    speed = np.abs(np.asarray(inner.qvel)).max(1)
    assert np.median(speed) < 0.1 and np.asarray(inner.qpos)[:, 3:].std(0).min() > 0.02


def test_a_target_is_drawn_for_each_episode_and_pictures_show_it():
    task = resolve_env("dm/reacher-easy")
    places = np.asarray(opened("dm/reacher-easy").inner.kept)[:, 0]
    reach = np.linalg.norm(places[:, :2], axis=1)
    assert 0.05 <= reach.min() < 0.06 and 0.19 < reach.max() <= 0.2
    finger = resolve_env("dm/finger-turn_easy").compiled()
    assert finger.body("target").geomnum == 1 and finger.geom("target").size[0] == 0.07
    assert resolve_env("dm/fish-upright").compiled().geom("target").rgba[3] == 0
    model = task.compiled()
    assert model.nmocap == 1 and model.geom("target").size[0] == 0.05
    np.testing.assert_array_equal(task.mocap(places[:1])["mocap_pos"], places[:1])


def test_they_are_gymnasium_environments():
    env: Any = make_gymnasium("dm/pendulum-swingup", 4, seed=0)
    seen, _ = env.reset()
    assert seen["orientation"].shape == (4, 2)
    rewards = [env.step(env.action_space.sample())[1] for _ in range(3)]
    assert np.shape(rewards) == (3, 4)
    env.close()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dm/swimmer-swimmer6", {"links": 0}, "SwimmerSwimmer6.links is 0; give 3 or more"),
        ("dm/cartpole-two_poles", {"poles": 0}, "CartpoleTwoPoles.poles is 0; give 1 or more"),
        ("dm/reacher-easy", {"radius": -1.0}, "ReacherEasy.radius is -1.0; give 0 or more"),
        ("dm/walker-walk", {"speed": float("nan")}, "WalkerWalk.speed is nan; give 0 or more"),
        ("dm/walker-walk", {"frame_skip": 0}, "WalkerWalk.frame_skip is 0; give 1 or more"),
        ("dm/reacher-easy", {"radius": "x"}, "radius is 'x', a str: give a number"),
        ("dm/reacher-easy", {"xml_file": "dm_control/walker.xml"}, "has no site 'target'"),
        ("dm/cartpole-two_poles", {"xml_file": "dm_control/walker.xml"}, "has no body 'pole_1'"),
        ("dm/point_mass-easy", {"xml_file": "dm_control/walker.xml"}, "has no geom 'target'"),
    ],
)
def test_wrong_options_and_files_are_named(name, options, words):
    with pytest.raises(SeedbedError, match=words):
        task = dataclasses.replace(resolve_env(name), **options)
        jax.eval_shape(task.reset, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dm/reacher-easy", "dm/fish-swim"])
def test_models_may_vary(name):
    """Sizes and places that a task reads, and the pose in which it opens."""
    draws = [Scale("geom_size", 1.5, 1.5), Offset("geom_pos", 0.0, 0.0), Offset("qpos0", 0.0, 0.0)]
    usual = resolve_env(name)
    varied, idle = randomise(usual, *draws), jnp.zeros((512, usual.spec.action.shape[0]))
    state = jax.jit(simd.vectorize(varied.reset))(jax.random.split(jax.random.key(0), 512))
    reward = jax.jit(simd.vectorize(varied.step))(state, idle).timestep.reward
    assert np.isfinite(reward).all()
    # From the same state, sizes of their own pay more.
    same = state._replace(inner=state.inner[0])
    other = jax.jit(simd.vectorize(usual.step))(same, idle).timestep.reward
    assert (reward > other + 0.01).any()


def test_a_varied_finger_keeps_the_softness_of_its_contacts():
    task: Any = randomise(resolve_env("dm/finger-spin"), Scale("body_mass", 1.0, 1.0))
    usual = task.env.physics_model().body_invweight0
    assert usual[3, 0] == usual[3, 1] > 0
    leaves = jax.jit(task._drawn)(jax.random.key(0))
    np.testing.assert_allclose(leaves["body_invweight0"], usual, rtol=1e-4)


def test_a_wrapped_task_learns_like_the_task():
    env = randomise(resolve_env("dm/walker-walk"), Scale("body_mass", 0.9, 1.1))
    assert configure(env).agent == PRESETS["dm/walker-walk/ppo"]().agent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dm/acrobot-swingup", "dm/fish-swim", "dm/hopper-hop"])
def test_they_pass_the_checks_of_tasks(name):
    check_task(resolve_env(name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dm/ball_in_cup-catch", "none of dm_control's tasks that are simulated: `seedbed list`"),
        ("dm/walker-wlk", "simulated; did you mean dm/walker-walk"),
    ],
)
def test_tasks_that_there_are_not_are_named(name, words):
    with pytest.raises(SeedbedError, match=words):
        resolve(name)


def test_missing_files_are_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SeedbedError, match=r'dm_control/walker.xml is .* pip install "seedbed\[dm\]"'
    ):
        packaged_file("dm_control/walker.xml")


def test_a_file_that_was_edited_is_read_again(tmp_path):
    file = packaged_file("dm_control/cartpole.xml")
    shutil.copytree(file.parent / "common", tmp_path / "common")
    path, masses = tmp_path / "cartpole.xml", []
    for mass in ('mass="1"', 'mass="30"'):
        path.write_text(file.read_text().replace('mass="1"', mass))
        task = dataclasses.replace(resolve_env("dm/cartpole-balance"), xml_file=str(path))
        masses.append(task.physics_model().body_mass.max())
    assert masses == [1, 30]


def test_another_integrator_and_another_model_replace_the_files():
    task = resolve_env("dm/cartpole-balance")
    fast = dataclasses.replace(task, integrator="euler")
    assert task.physics_model().opt.integrator != fast.physics_model().opt.integrator
    heavy = dataclasses.replace(fast.physics_model(), body_mass=jnp.full(3, 2.0))
    assert dataclasses.replace(task, model=heavy).physics_model() is heavy


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("dm/")])
def test_presets_train_the_task_of_their_name(name):
    """But that a humanoid on the ground is paid for getting up."""
    task = name.rpartition("/")[0]
    changed = {"standing_margin": 1.2} if task == "dm/humanoid-walk" else {}
    assert PRESETS[name]().env == dataclasses.replace(resolve_env(task), **changed)


def test_tasks_without_a_preset_learn_like_those_with_one():
    chosen, walks = train_config("dm/fish-swim"), PRESETS["dm/walker-walk/ppo"]()
    assert chosen.agent == walks.agent
