"""The eleven MuJoCo tasks against Gymnasium's own, state by state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from kinds_of_task import TASKS
from seedbed import physics, simd
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.device.locomotion.hopper import Hopper
from seedbed.envs.device.locomotion.humanoid import Humanoid, HumanoidBody
from seedbed.envs.device.locomotion.humanoid_standup import HumanoidStandup
from seedbed.envs.device.locomotion.pusher import Pusher
from seedbed.envs.device.locomotion.reacher import Reacher
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noise, noisy_rest
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.targets.fetch import Fetch
from seedbed.types import ArraySpec, Box, EnvSpec, EnvState, SeedbedError

CHANGED: dict[str, Any] = {
    "main_body": "aux_1",
    "contact_force_range": (-0.1, 0.3),
    "contact_cost_range": (0.002, 0.01),
    "impact_cost_range": (0.002, 0.01),
    "healthy_state_range": (-0.5, 0.5),
    "healthy_angle_range": (-0.01, 0.01),
    "frame_skip": 3,
}
BASE_FIELDS = {field.name for field in dataclasses.fields(MujocoTask)} - {"frame_skip"}
named = pytest.mark.parametrize("kind", TASKS, ids=lambda kind: kind.__name__)
# A kernel of a humanoid compiles for ten seconds.
LARGE = (Humanoid, HumanoidStandup)
named_but_long = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LARGE else ()) for kind in TASKS],
    ids=lambda kind: kind.__name__,
)


def twin(task: Any, **options: Any) -> Any:
    """Gymnasium's task with these options, whose constraint problem is solved as far as MuJoCo goes."""
    env: Any = gymnasium.make(task.gymnasium_id, **options).unwrapped
    env.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    env.model.opt.tolerance, env.model.opt.iterations = 1e-12, 100
    if task.integrator == "euler":
        env.model.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER
    return env


def state_of(task: Any, data: Any) -> physics.Data:
    """What is in mjData, as physics.Data."""
    model = task.physics_model()
    state = physics.init(model, np.float32(data.qpos), np.float32(data.qvel))
    blank = physics.make_data(model, state)
    ours = {"time", "qpos_low", "qvel_low", "diverged", "ncon", "solver_niter", "solver_error"}
    names = [name for name in physics.Data._fields if name not in ours]
    return blank._replace(**{name: np.float32(getattr(data, name)) for name in names})


def carried(task: Any, data: Any) -> TaskState:
    now = state_of(task, data)
    kept = jax.tree.map(np.float32, task.keep(now, ()))
    return TaskState(now.qpos, now.qpos_low, now.qvel, now.qacc_warmstart, kept)


class Step(NamedTuple):
    """A step of Gymnasium's task from a state that float32 holds."""

    before: TaskState
    now: physics.Data
    action: np.ndarray
    observation: np.ndarray
    reward: float
    terminated: bool
    info: dict[str, float]


def roll(task: Any, env: Any, count: int, restart: bool = True) -> Step:
    """Steps of a rollout with actions beyond their bounds; leaves [count, ...]."""
    rng, steps, age = np.random.default_rng(0), [], 0
    env.reset(seed=0)
    for _ in range(count):
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(env.data, name)[:] = np.float32(getattr(env.data, name))
        before = carried(task, env.data)
        action = np.float32(env.action_space.high * rng.uniform(-1.2, 1.2, env.model.nu))
        observation, reward, terminated, _, info = env.step(action)
        info = {name: x for name, x in info.items() if "reward" in name or "penalty" in name}
        now = state_of(task, env.data)
        steps.append(Step(before, now, action, observation, reward, terminated, info))
        age += 1
        if restart and (age == 60 or (terminated and age > 12)):
            env.reset()
            age = 0
    return jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def error(ours: Any, theirs: np.ndarray) -> np.ndarray:
    return np.abs(np.asarray(ours, np.float64) - theirs) / np.maximum(1, np.abs(theirs))


@functools.cache
def stepper(task: MujocoTask) -> Any:
    """The batched step, (TaskState, actions) -> EnvState."""

    def step(before: TaskState, action: jax.Array) -> EnvState:
        return task.step(EnvState(before, None, {}), action)

    return jax.jit(simd.vectorize(step))


# Euler's part in a step is small.
STEPS = [
    pytest.param(kind, name, marks=pytest.mark.slow if long else ())
    for kind in TASKS
    for name in ("xml", "euler")[: 1 + kind().physics_model().opt.integrator]
    for long in [kind in LARGE or (name == "euler" and kind is not Ant)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "integrator"), STEPS)
def test_a_step_is_gymnasiums(kind, integrator):
    task = kind(integrator=integrator)
    steps = roll(task, twin(task), 150)
    state = stepper(task)(steps.before, steps.action)
    wrong = error(state.timestep.observation, steps.observation)
    wrenches = 78 if isinstance(task, HumanoidBody) else 0  # cfrc_ext, last in the observation
    if wrenches:
        largest = np.abs(steps.observation[:, -wrenches:]).max(1, keepdims=True)
        difference = np.asarray(state.timestep.observation) - steps.observation
        wrong[:, -wrenches:] = np.abs(difference[:, -wrenches:]) / np.maximum(1, largest)
    quantiles = np.quantile(wrong.max(1), [0.95, 1.0])
    print(kind.__name__, integrator, quantiles, error(state.timestep.reward, steps.reward).max())
    assert (quantiles <= [1e-4, 5e-4]).all()
    assert error(state.timestep.reward, steps.reward).max() <= 1e-4
    np.testing.assert_array_equal(state.timestep.terminated, steps.terminated)
    assert not np.asarray(state.timestep.truncated | state.timestep.first).any()
    own = dict(state.metrics)
    assert own.pop("solver_error").max() < 1e-4  # it is right
    for name, value in own.items():
        assert error(value, steps.info[name]).max() <= 1e-4, name
    assert error(state.inner.qpos, steps.now.qpos).max() <= 1e-4
    for ours, theirs in zip(
        jax.tree.leaves(state.inner.kept),
        jax.tree.leaves(jax.vmap(task.keep, (0, None))(steps.now, ())),
        strict=True,
    ):
        assert error(ours, np.asarray(theirs)).max() <= 1e-5


def changed(task: Any, name: str) -> Any:
    """Another value of an option."""
    value = getattr(task, name)
    if name == "healthy_z_range":
        return (0.75, 0.9) if isinstance(task, Ant) else (1.22, 1.3)
    if name in CHANGED:
        return CHANGED[name]
    return not value if isinstance(value, bool) else 1.7 * value + 0.1


@pytest.mark.slow
@named_but_long
def test_every_option_is_gymnasiums(kind):
    plain = kind()
    names = [f.name for f in dataclasses.fields(kind) if f.name not in BASE_FIELDS]
    default = roll(plain, twin(plain), 80, restart=False)
    judged = shown_and_judged(plain, default)
    for name in names:
        if name == "reset_noise_scale":
            continue  # see resets
        options = {name: changed(plain, name)}
        task = dataclasses.replace(plain, **options)
        env = twin(task, **options)
        steps = roll(task, env, 80, restart=False)
        observation, verdict = shown_and_judged(task, steps)
        assert error(observation, steps.observation).max() < 2e-5, name
        assert error(verdict.reward, steps.reward).max() < 5e-5, name
        terminated = np.broadcast_to(verdict.terminated, steps.terminated.shape)
        np.testing.assert_array_equal(terminated, steps.terminated, name)
        assert task.spec.observation.shape == env.observation_space.shape
        same = jax.tree.map(
            lambda a, b: a.shape == b.shape and bool((a == b).all()), judged, (observation, verdict)
        )
        # an option that changes nothing has not been tested
        assert name == "uph_cost_weight" or not all(jax.tree.leaves(same)), name


def shown_and_judged(task: Any, steps: Step) -> tuple[Any, Verdict]:
    """What the task says of Gymnasium's own states."""

    def both(before: TaskState, now: physics.Data, action: Any) -> tuple[Any, Verdict]:
        return task.observe(now), task.judge(before, now, action)

    return jax.vmap(both)(steps.before, steps.now, steps.action)


@named
def test_options_are_those_of_gymnasiums_constructor(kind):
    env = gymnasium.make(kind.gymnasium_id)
    wanted = dict(inspect.signature(type(env.unwrapped).__init__).parameters)
    for name in ("self", "default_camera_config", "kwargs"):
        del wanted[name]
    have = {field.name: field.default for field in dataclasses.fields(kind)}
    assert {name: have.pop(name) for name in wanted} == {n: p.default for n, p in wanted.items()}
    assert set(have) == {"episode_steps", "integrator", "model"}
    assert env.spec is not None
    task = kind()
    assert task.episode_steps == env.spec.max_episode_steps
    assert task.dt == env.unwrapped.dt  # type: ignore[attr-defined]
    space: Any = env.action_space
    assert task.spec.action == Box(
        space.shape, tuple(space.low.tolist()), tuple(space.high.tolist())
    )


def small(task: Any) -> Any:
    """The task with all that its observation can go without, or with, the other way round."""
    return dataclasses.replace(task, **{k: not v for k, v in task.gymnasium_options().items()})


@named
def test_observation_options_reach_gymnasium(kind):
    for task in (kind(), small(kind())):
        env = gymnasium.make(task.gymnasium_id, **task.gymnasium_options())
        assert task.spec.observation == ArraySpec(env.observation_space.shape, "float32")
        assert hash(task) == hash(dataclasses.replace(task))


@pytest.mark.slow
@named_but_long
def test_resets_are_drawn_as_gymnasiums(kind):
    options = {"reset_noise_scale": 0.03} if hasattr(kind, "reset_noise_scale") else {}
    task = kind(**options)
    env = twin(task, **options)
    keys = jax.random.split(jax.random.key(1), 2000)
    state = jax.jit(simd.vectorize(task.reset))(keys)
    assert np.asarray(state.timestep.first).all()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.metrics))
    assert not any(np.asarray(x).any() for x in state.timestep[1:4])
    theirs = {"qpos": [], "qvel": []}
    for seed in range(1000):
        env.reset(seed=seed)
        for name, rows in theirs.items():
            rows.append(getattr(env.data, name).copy())
    for name, rows in theirs.items():
        ours, wanted = np.float64(getattr(state.inner, name)), np.stack(rows)
        spread = wanted.std(0)
        assert (np.abs(ours.mean(0) - wanted.mean(0)) <= 0.2 * spread + 1e-7).all()
        np.testing.assert_allclose(ours.std(0), spread, rtol=0.1, atol=1e-7)
        # the tails tell uniform from normal
        for q in (0.01, 0.1, 0.9, 0.99):
            difference = np.quantile(ours, q, axis=0) - np.quantile(wanted, q, axis=0)
            assert (np.abs(difference) <= 0.4 * spread + 1e-7).all()
    for i in range(5):
        mujoco.mj_resetData(env.model, env.data)
        env.set_state(np.float64(state.inner.qpos[i]), np.float64(state.inner.qvel[i]))
        assert error(state.timestep.observation[i], env._get_obs()).max() < 2e-5
        kept = jax.tree.leaves(carried(task, env.data).kept)
        for ours, wanted in zip(jax.tree.leaves(state.inner.kept), kept, strict=True):
            assert abs(ours[i] - wanted) < 1e-6


@pytest.mark.slow
def test_places_are_drawn_where_gymnasium_draws_them():
    keys = jax.random.split(jax.random.key(2), 4000)
    target = np.asarray(jax.jit(simd.vectorize(Reacher().initial))(keys)[0])[:, -2:]
    square = (target**2).sum(1)
    assert square.max() <= 0.04
    assert abs(square.mean() - 0.02) < 0.0006  # uniform in a disc: so is the radius squared
    place = np.asarray(jax.jit(simd.vectorize(Pusher().initial))(keys)[0])[:, -4:-2]
    assert np.linalg.norm(place, axis=1).min() > 0.17
    assert ((place >= [-0.3, -0.2]) & (place < [0, 0.2])).all()
    # uniform: as many in each part as it has of the area
    area = 0.12 - np.pi * 0.17**2 / 2
    assert abs((place[:, 0] < -0.17).mean() - 0.052 / area) < 0.03


@pytest.mark.slow
def test_a_diverged_simulation_ends_the_episode():
    task = Hopper(integrator="euler")
    steps = roll(task, twin(task), 150)
    run = stepper(task)
    well = run(steps.before, steps.action)
    qvel = steps.before.qvel.copy()
    qvel[3], qvel[4] = 1e9, np.nan
    state = run(steps.before._replace(qvel=qvel), steps.action)
    bad = np.isin(np.arange(150), [3, 4])
    assert np.asarray(state.timestep.terminated)[bad].all()
    assert not np.asarray(state.timestep.reward)[bad].any()
    assert np.isfinite(state.timestep.observation).all()
    for ours, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(well), strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[~bad], np.asarray(wanted)[~bad])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lift(MujocoTask):
    """A user's task: a ball on a slide, without a bound on its motor, is to hover at 1 m."""

    xml_file: str
    frame_skip: int = 2

    def initial(self, key):
        return noise(key, 1, 0.1), jnp.zeros(1, jnp.float32)

    def observe(self, now):
        return {"height": now.xpos[self.body("ball"), 2], "speed": now.qvel}

    def judge(self, before, now, action):
        height = now.xpos[self.body("ball"), 2]
        return Verdict(-jnp.abs(height - 1), height < 0.5, {"height": height})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DampedLift(Lift):
    """A task with an option that is called as a robot's, and is none of the model's."""

    kd: float = 0.5


@pytest.fixture
def lift(tmp_path):
    path = tmp_path / "lift.xml"
    path.write_text(
        """<mujoco><worldbody><body name="ball" pos="0 0 1">
        <joint name="up" type="slide" axis="0 0 1"/><geom size="0.1" mass="2"/></body></worldbody>
        <actuator><motor joint="up"/></actuator></mujoco>"""
    )
    return Lift(xml_file=str(path))


@pytest.mark.slow
def test_a_users_task(lift):
    spec = EnvSpec(
        {"height": ArraySpec((), "float32"), "speed": ArraySpec((1,), "float32")},
        Box((1,), (-np.inf,), (np.inf,)),
    )
    assert lift.spec == spec
    assert lift.gymnasium_options() == {}
    state = jax.jit(simd.vectorize(lift.reset))(jax.random.split(jax.random.key(0), 4))
    state = jax.jit(simd.vectorize(lift.step))(state, jnp.full((4, 1), 2 * 9.81))
    np.testing.assert_allclose(state.timestep.observation["speed"], 0, atol=1e-6)
    np.testing.assert_allclose(state.timestep.reward, -abs(state.metrics["height"] - 1))


class Metronome(Lift):
    """A task whose policy sees the time."""

    def observe(self, now):
        return super().observe(now) | {"time": now.time}


@pytest.mark.slow
def test_the_time_goes_on_from_step_to_step_where_it_is_read(lift):
    task = Metronome(xml_file=lift.xml_file)
    state = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), 4))
    step = jax.jit(simd.vectorize(task.step))
    for count in range(1, 4):
        state = step(state, jnp.zeros((4, 1)))
        time = state.timestep.observation["time"]
        np.testing.assert_allclose(time, count * task.dt, rtol=1e-6)
    assert lift.reset(jax.random.key(0)).inner.time == ()


class Kicked(Lift):
    """A task that kicks a body at a time."""

    def velocities(self, before):
        return before.qvel + jnp.where(before.time > 0.5 * self.dt, 1.0, 0.0)


@pytest.mark.slow
def test_a_kick_may_come_at_a_time(lift):
    task = Kicked(xml_file=lift.xml_file)
    state = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), 4))
    step, speeds = jax.jit(simd.vectorize(task.step)), []
    for _ in range(2):
        state = step(state, jnp.full((4, 1), 2 * 9.81))
        speeds.append(state.timestep.observation["speed"][:, 0])
    np.testing.assert_allclose(speeds[1] - speeds[0], 1.0, atol=1e-5)


@pytest.mark.slow
def test_a_clock_among_the_sensors_goes_on(lift, tmp_path):
    path = tmp_path / "clock.xml"
    text = Path(lift.xml_file).read_text()
    path.write_text(text.replace("</mujoco>", '<sensor><clock name="clock"/></sensor></mujoco>'))
    task = Lift(xml_file=str(path))
    state = task.reset(jax.random.key(0))
    step = jax.jit(task.step)
    for _ in range(2):
        state = step(state, jnp.zeros(1))
    assert abs(state.inner.time - 2 * task.dt) < 1e-6


def test_an_episode_may_begin_at_a_keyframe(lift, tmp_path):
    path = tmp_path / "keyed.xml"
    text = Path(lift.xml_file).read_text()
    key = '<keyframe><key name="high" qpos="3"/></keyframe></mujoco>'
    path.write_text(text.replace("</mujoco>", key))
    model = physics.load(path)
    qpos, qvel = noisy_rest(model, jax.random.key(0), 0.1, keyframe="high")
    np.testing.assert_allclose(qpos, 3, atol=0.1)
    assert qpos != 3 and qvel.shape == (1,)
    with pytest.raises(SeedbedError, match="no keyframe 'low'.* that it has: high"):
        noisy_rest(model, jax.random.key(0), 0.1, keyframe="low")


def test_the_model_may_be_traced(lift):
    def speed(state: EnvState, mass: jax.Array) -> jax.Array:
        changed = lift.physics_model().replace(body_mass=jnp.stack([jnp.float32(0), mass]))
        task = dataclasses.replace(lift, model=changed)
        assert task == lift
        return task.step(state, jnp.ones(1)).timestep.observation["speed"][0]

    state = jax.jit(simd.vectorize(lift.reset))(jax.random.split(jax.random.key(0), 2))
    got = jax.jit(simd.vectorize(speed))(state, jnp.asarray([1.0, 4.0]))
    np.testing.assert_allclose(got, 0.004 * (np.array([1, 0.25]) - 9.81), rtol=1e-5)


def test_a_file_that_was_edited_is_read_again(lift, tmp_path, monkeypatch):
    """The path is that of the working directory; a task that has read its file keeps to that."""
    text, other = Path(lift.xml_file).read_text(), tmp_path / "other"
    other.mkdir()
    (other / "lift.xml").write_text(text.replace('mass="2"', 'mass="30"'))
    monkeypatch.chdir(tmp_path)
    first = Lift(xml_file="./lift.xml")
    masses = [first.physics_model().body_mass[1]]
    Path("lift.xml").write_text(text.replace('mass="2"', 'mass="10"'))
    masses += [each.physics_model().body_mass[1] for each in (first, Lift(xml_file="./lift.xml"))]
    monkeypatch.chdir(other)
    masses += [Lift(xml_file="./lift.xml").physics_model().body_mass[1]]
    assert masses == [2, 2, 10, 30]


def test_an_option_of_a_user_s_may_have_the_name_of_a_robot_s(lift):
    task = DampedLift(xml_file=lift.xml_file, kd=2.0, model=lift.physics_model())
    assert task.physics_model().dof_damping == 0


@pytest.mark.parametrize(
    ("kind", "option", "value", "words"),
    [
        (Fetch, "target_radius", -1.0, "0 or more"),
        (Ant, "reset_noise_scale", -0.1, "0 or more"),
        (Fetch, "target_distances", (17.0, 2.0), "the smaller number first"),
        (Humanoid, "healthy_z_range", (2.0, 1.0), "the smaller number first"),
    ],
)
def test_sizes_and_ranges_that_cannot_be_are_refused(kind, option, value, words):
    with pytest.raises(SeedbedError, match=rf"{kind.__name__}.{option} is .*{words}"):
        kind(**{option: value})


@pytest.mark.parametrize("body", [-1, 14])
def test_a_body_that_ant_lacks_is_refused(body):
    with pytest.raises(SeedbedError, match=f"main_body is {body}; give 0 to 13"):
        jax.eval_shape(Ant(main_body=body).reset, jax.random.key(0))


@pytest.mark.parametrize("kind", [Ant, Fetch, Go1Joystick])
@pytest.mark.parametrize(
    ("option", "value", "least"), [("frame_skip", 0, 1), ("episode_steps", -1, 0)]
)
def test_steps_that_cannot_be_are_refused(kind, option, value, least):
    words = rf"{kind.__name__}.{option} is {value}; give {least} or more"
    with pytest.raises(SeedbedError, match=words):
        kind(**{option: value})


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(SeedbedError, match="no MJCF file .*gone.xml"):
        Lift(xml_file=str(tmp_path / "gone.xml")).physics_model()
    with pytest.raises(SeedbedError, match="no body 'tail'; it has .*torso"):
        Ant(main_body="tail").body("tail")
