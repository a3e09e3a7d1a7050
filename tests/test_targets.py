"""Fetch, Grasp, Ur5e and ReacherAngle against MuJoCo's C code, and what happens at a target."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from seedbed import simd
from seedbed.envs.device import wrappers
from seedbed.envs.device.targets.fetch import Fetch
from seedbed.envs.device.targets.grasp import Grasp
from seedbed.envs.device.targets.reacher_angle import ReacherAngle
from seedbed.envs.device.targets.ur5e import Ur5e

TASKS = (Fetch(), Grasp(), Ur5e(), ReacherAngle())
tasks = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__.lower())
KEYS = jax.random.split(jax.random.key(0), 16)


@functools.cache
def rolled(task, steps=40):
    """States [steps + 1] of 16 environments, and the actions [steps] between them."""
    step, state = jax.jit(simd.vectorize(task.step)), simd.vectorize(task.reset)(KEYS)
    states, actions, rng = [state], [], np.random.default_rng(0)
    for _ in range(steps):
        actions.append(rng.uniform(-1, 1, (16, *task.spec.action.shape)).astype(np.float32))
        states.append(step(states[-1], actions[-1]))
    return jax.device_get(states), actions


def target_of(task, inner):
    return np.asarray(task.mocap(inner.kept)["mocap_pos"])[0]


class Oracle:
    """A step of MuJoCo's C code from a state of ours."""

    def __init__(self, task):
        self.task, self.model = task, mujoco.MjModel.from_xml_path(str(task.model_path))
        self.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
        self.model.opt.tolerance = 0
        self.data = mujoco.MjData(self.model)

    def step(self, inner, action):
        data = self.data
        mujoco.mj_resetData(self.model, data)
        data.qpos[:], data.qvel[:] = inner.qpos, inner.qvel
        low = len(inner.qpos_low)
        data.qpos[:low] += inner.qpos_low
        data.qacc_warmstart[:] = inner.qacc_warmstart
        data.mocap_pos[0] = target_of(self.task, inner)
        data.ctrl[:] = action
        for _ in range(self.task.frame_skip):
            mujoco.mj_step(self.model, data)
        mujoco.mj_rnePostConstraint(self.model, data)
        return data

    def at(self, name):
        return self.data.body(name).xpos.copy()

    def axes(self, name):
        return self.data.body(name).xmat.reshape(3, 3)

    def speed(self, name):
        return self.data.sensor(name).data.copy()

    def touches(self, names):
        return [float(np.any(self.data.body(name).cfrc_ext)) for name in names]

    def polar(self, way):
        return [np.linalg.norm(way), *(way / (1e-6 + np.linalg.norm(way)))]

    def seen_by(self, name):
        """What a body sees of the target and of the bodies of the task."""
        axes, here = self.axes(name), self.at(name)
        parts = [axes[:, 0], axes[:, 2], self.polar(axes.T @ (self.at("target") - here))]
        parts += [axes.T @ (self.at(each) - here) for each in self.task.limbs]
        return [*parts, *(axes.T @ self.speed(each) for each in self.task.limbs)]

    def judged(self, seeker_before):
        """The observation and the reward, by Brax's definitions and in the order of the task's page."""
        return getattr(self, f"_{type(self.task).__name__.lower()}")(seeker_before)

    def _way(self, name):
        return self.at("target") - self.at(name)

    def _fetch(self, before):
        feet = [f"{end}_{side}_lower" for end in ("front", "back") for side in ("right", "left")]
        way = self._way("torso")
        toward = way / (1e-6 + np.linalg.norm(way))
        up, height = self.axes("torso")[2, 2], self.at("torso")[2]
        hit = np.linalg.norm(way) < 2.0
        reward = 0.1 * (self.at("torso") - before) @ toward + 0.1 * 0.02 * (up + height)
        reward += hit * (toward @ self.axes("torso")[:, 0])
        return np.concatenate([*self.seen_by("torso"), self.touches(feet)]), reward, hit

    def _ur5e(self, before):
        way = self._way("wrist_3_link")
        hit = np.linalg.norm(way) < 0.02
        moved = (self.at("wrist_3_link") - before) @ (way / (1e-6 + np.linalg.norm(way)))
        seen = np.concatenate([*self.seen_by("wrist_3_link"), self.data.qpos])
        return seen, hit + 0.1 * moved, hit

    def _reacherangle(self, before):
        del before
        tip, angles = self.data.sensor("tip").data, self.data.qpos
        way, speed = tip - self.at("target"), self.speed("tip_velocity")[:2]
        seen = [np.cos(angles), np.sin(angles), self.at("target")[:2], speed, way]
        return np.concatenate(seen), -np.linalg.norm(way), False

    def _grasp(self, before):
        del before
        tips = [f"{finger}_distal" for finger in ("thumb", "second", "third", "fourth")]
        palm, thing, thumb = self.at("palm"), self.at("object"), self.speed("thumb_proximal")
        way, onward = thing - palm, self.polar(self._way("object"))
        speed = np.array(onward[1:]) @ self.speed("object")
        hit = onward[0] < 1.1
        seen = [self.polar(way), self.polar(self._way("palm"))]
        seen += [self.at(each) - palm for each in self.task.limbs if each != "palm"]
        seen += [-palm, *map(self.speed, self.task.limbs), way, thumb]
        seen += [[thumb @ np.array(self.polar(way)[1:])], onward, [speed]]
        seen += [self.touches(["object", "palm", *tips])]
        reward = 0.1 * 0.02 * (thumb @ np.array(self.polar(way)[1:]))
        reward += 0.1 * 0.02 / (1 + np.linalg.norm(way[:2])) + 1.5 * 0.02 * speed + 5 * hit
        reward += 0.2 * 0.02 * sum(self.touches(tips))
        return np.concatenate(seen), reward, hit


@pytest.mark.quick("reacherangle")
@tasks
def test_a_step_is_that_of_mujoco_with_brax_s_observation_and_reward(task):
    (states, actions), oracle = rolled(task), Oracle(task)
    wrong, paid = [], []
    for before, action, after in zip(states, actions, states[1:], strict=False):
        for i in range(0, 16, 5):
            inner = jax.tree.map(lambda x, i=i: x[i], before.inner)
            oracle.step(inner, action[i])
            seeker = getattr(inner.kept, "seeker", np.zeros(3))
            seen, reward, hit = oracle.judged(np.asarray(seeker))
            observation = np.asarray(after.timestep.observation[i])
            scale = np.maximum(1, np.abs(seen))
            wrong.append((np.abs(observation - seen) / scale).max())
            paid.append(abs(after.timestep.reward[i] - reward))
            if "hits" in after.metrics:
                assert after.metrics["hits"][i] == hit
    print(type(task).__name__, np.quantile(wrong, [0.9, 1]), max(paid))
    assert max(wrong) < 1e-4 and max(paid) < 1e-6


@pytest.mark.quick("reacherangle")
@tasks
def test_it_touches_and_moves_and_never_terminates(task):
    states, _ = rolled(task)
    last = states[-1]
    assert not any(state.timestep.terminated.any() for state in states)
    assert np.isfinite(last.timestep.observation).all()
    assert float(np.max(last.metrics["solver_error"])) < 1e-4
    moved = np.abs(last.inner.qpos - states[0].inner.qpos).max(1)
    assert (moved > 0.05).all()


@pytest.mark.quick("ur5e")
@pytest.mark.parametrize("task", TASKS[:3], ids=("fetch", "grasp", "ur5e"))
def test_a_target_that_is_reached_pays_once_and_goes_elsewhere(task):
    state = jax.tree.map(lambda x: x[0], rolled(task)[0][-1])
    step = jax.jit(task.step)
    idle = np.zeros(task.spec.action.shape, np.float32)
    # One step tells where the seeker will be: the target is put there.
    there = step(state, idle).inner.kept.seeker
    kept = state.inner.kept._replace(target=there)
    inner, oracle = state.inner._replace(kept=kept), Oracle(task)
    at = step(state._replace(inner=inner), idle)
    oracle.step(inner, idle)
    _, reward, hit = oracle.judged(np.asarray(kept.seeker))
    assert hit and at.metrics["hits"] == 1
    np.testing.assert_allclose(at.timestep.reward, reward, atol=1e-4)
    assert at.inner.kept.count == state.inner.kept.count + 1
    drawn = np.asarray(at.inner.kept.target)
    distance = np.hypot(*drawn[:2])
    assert task.target_distances[0] <= distance <= task.target_distances[1]
    assert np.linalg.norm(drawn - there) > 0
    after = step(at, idle)
    reached = np.linalg.norm(drawn - after.inner.kept.seeker) < task.target_radius
    assert after.metrics["hits"] == reached


@pytest.mark.parametrize("task", TASKS[:3], ids=("fetch", "grasp", "ur5e"))
def test_targets_are_drawn_over_the_whole_disc_and_differ_between_episodes(task):
    draw = jax.jit(jax.vmap(lambda key: task.begin(key).target))
    targets = np.asarray(draw(jax.random.split(jax.random.key(1), 4000)))
    distance = np.hypot(targets[:, 0], targets[:, 1])
    low, high = task.target_distances
    assert low <= distance.min() < low + 0.01 * high and high * 0.99 < distance.max() <= high
    np.testing.assert_allclose(distance.mean(), (low + high) / 2, rtol=0.03)
    assert np.abs(targets[:, :2].mean(0)).max() < 0.05 * high
    heights = {"Fetch": (1, 1), "Ur5e": (0.5, 0.5), "Grasp": (0, 8)}[type(task).__name__]
    np.testing.assert_allclose([targets[:, 2].min(), targets[:, 2].max()], heights, atol=0.02)


def test_the_target_does_not_depend_on_how_the_arm_begins():
    reset = jax.jit(simd.vectorize(ReacherAngle().reset))
    states = reset(jax.random.split(jax.random.key(1), 1000))
    begun = np.stack([*np.asarray(states.inner.qpos).T, *np.asarray(states.inner.qvel).T])
    target = np.asarray(states.inner.kept)[:, :2].T
    apart = np.hypot(*target)
    both = np.corrcoef(np.concatenate([begun, target, apart[None] ** 2]))[:4, 4:]
    assert np.abs(both).max() < 0.15


@pytest.mark.slow
def test_the_palm_carries_what_the_fingers_hold():
    """The fingers close around the object, and the palm lifts it: what Brax's palm cannot do by friction."""
    task = Grasp()
    step = jax.jit(simd.vectorize(task.step))
    state = simd.vectorize(task.reset)(KEYS[:1])

    fingers = [1.0, 0.0, 0.4, 0.8] * 4
    # It closes for half a second, and moves at 2 m/s for two.
    for steps, speed in ((25, (0, 0, 0)), (100, (0.1, 0, 0.2))):
        for _ in range(steps):
            state = step(state, np.array([[*fingers, *speed]], np.float32))
    thing = np.asarray(state.inner.qpos[0, :3])
    palm = np.asarray(state.inner.qpos[0, 7:10])
    np.testing.assert_allclose(palm, [2, 0, 8], atol=0.3)
    np.testing.assert_allclose(thing - palm, [0, 0, -3], atol=0.5)


@pytest.mark.slow
def test_an_evaluation_sums_the_metrics_of_each_episode():
    from seedbed.agents.ppo import Ppo
    from seedbed.fused import playing
    from seedbed.types import bind

    task = ReacherAngle(episode_steps=20)
    agent = bind(Ppo(hidden_sizes=(8,)), task.spec)
    params = agent.init(jax.random.key(0)).params
    found = playing.evaluate(env=task, agent=agent, params=params, episodes=5, seed=0)
    # The whole reward is one metric.
    assert found["episode_reward_dist_mean"] == pytest.approx(found["episode_return_mean"], 1e-5)
    assert "episode_solver_error_mean" not in found and found["episode_length_mean"] == 20


@pytest.mark.slow
def test_auto_reset_draws_other_targets():
    env = wrappers.training(Ur5e(episode_steps=3))
    step, reset = jax.jit(simd.vectorize(env.step)), jax.jit(simd.vectorize(env.reset))
    state, seen = reset(jax.random.key(3)[None]), []
    for _ in range(9):
        state = step(state, jnp.zeros((1, 6)))
        task = state.inner[0][0] if isinstance(state.inner[0], tuple) else state.inner[0]
        if state.timestep.first:
            seen.append(np.asarray(task.kept.target[0]))
    assert len(seen) == 2 and np.abs(seen[0] - seen[1]).max() > 1e-3
