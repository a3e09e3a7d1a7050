"""Wrappers of on-device environments: properties of random rollouts, batched both ways."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd

from seedbed import physics, simd
from seedbed.config.settle import called
from seedbed.envs.device import changes, randomisation, wrappers
from seedbed.envs.device.classic.acrobot import Acrobot
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.mountain_car import MountainCar
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.locomotion.inverted_double_pendulum import InvertedDoublePendulum
from seedbed.envs.device.mujoco import MujocoTask, Verdict, noisy_rest
from seedbed.envs.device.probes import DelayProbe, TruncationProbe
from seedbed.envs.device.randomisation import Offset, Scale
from seedbed.envs.host.contract import is_on_device
from seedbed.spaces import PRIVILEGED
from seedbed.types import (
    ArraySpec,
    Box,
    Environment,
    EnvSpec,
    EnvState,
    SeedbedError,
    Timestep,
    action_array,
)

BATCH, STEPS = 24, 40


@dataclasses.dataclass(frozen=True)
class Walk:
    """A walk in the plane that terminates outside a disc; its reward is the action's sum."""

    episode_steps: int = 6
    frame_skip: int = 1
    radius: float = 2.0

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(ArraySpec((2,), "float32"), Box((2,), (-1.0, -1.0), (1.0, 1.0)))

    def reset(self, key):
        x, no = jax.random.normal(key, (2,)), jnp.bool_(False)
        return EnvState(x, Timestep(x, jnp.float32(0), no, no, ~no), {"cost": jnp.float32(0)})

    def step(self, state, action):
        x, no = state.inner + action, jnp.bool_(False)
        outside = jnp.square(x).sum() > self.radius**2
        return EnvState(x, Timestep(x, action.sum(), outside, no, no), {"cost": action[0]})


def actions(env: Environment, seed: int) -> np.ndarray:
    """Random actions [STEPS, BATCH, ...], half of a box's outside its bounds."""
    rng, spec = np.random.default_rng(seed), action_array(env.spec.action)
    if spec.dtype == "int32":
        return rng.integers(0, env.spec.action.n, (STEPS, BATCH), dtype=np.int32)
    return rng.normal(size=(STEPS, BATCH, *spec.shape)).astype(np.float32)


def plain(state: EnvState) -> EnvState:
    """The state with the data of its keys, as numpy arrays."""

    def data(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(data, state)


@functools.cache
def functions(env: Environment, batched=simd.vectorize):
    return jax.jit(batched(env.reset)), jax.jit(batched(env.step))


def roll(env: Environment, seed: int = 0, batched=simd.vectorize, key=jax.random.key) -> EnvState:
    """All states of random rollouts `[STEPS + 1, BATCH, ...]`."""
    reset, step = functions(env, batched)
    states = [reset(jax.random.split(key(seed), BATCH))]
    for action in actions(env, seed):
        states.append(step(states[-1], action))
    return jax.tree.map(lambda *rows: np.stack(rows), *map(plain, states))


@pytest.mark.parametrize("seed", range(5))
def test_the_step_after_an_end_opens_a_new_episode(seed):
    env = wrappers.training(Walk())
    states = roll(env, seed)
    now = states.timestep
    ended = now.terminated | now.truncated
    assert now.first[0].all() and (now.first[1:] == ended[:-1]).all()
    assert ended[:-1].any() and (now.terminated & ~now.truncated).any()
    opening = now.observation[now.first]
    assert len(np.unique(opening, axis=0)) == len(opening)  # between environments and in each
    for quiet in (now.reward, now.terminated, now.truncated, states.metrics["cost"]):
        assert not quiet[now.first].any()
    # The true last observation, and all others within an episode, are the child's own.
    moved = states.inner[0][0][:-1] + actions(env, seed)
    within = ~now.first[1:]
    np.testing.assert_array_equal(now.observation[1:][within], moved[within])
    np.testing.assert_allclose(now.reward[1:][within], actions(env, seed).sum(-1)[within])


def test_the_action_of_a_reset_is_ignored():
    env = wrappers.training(Walk())
    reset, step = functions(env)
    state, count = reset(jax.random.split(jax.random.key(3), BATCH)), 0
    for action in actions(env, 3):
        one, other = plain(step(state, action)), plain(step(state, action * jnp.nan))
        opened = (jax.tree.map(lambda x, i=one.timestep.first: x[i], s) for s in (one, other))
        jax.tree.map(np.testing.assert_array_equal, *opened)
        count += one.timestep.first.sum()
        state = step(state, action)
    assert count > 20


@pytest.mark.parametrize("seed", range(3))
def test_truncation_comes_at_the_limit_whether_or_not_the_episode_terminates(seed):
    states = roll(wrappers.training(Walk(radius=3)), seed)
    now, length = states.timestep, np.zeros(BATCH, int)
    for t in range(1, STEPS + 1):
        length = np.where(now.first[t], 0, length + 1)
        outside = np.square(now.observation[t]).sum(-1) > 9
        assert (now.truncated[t] == (length == 6)).all()
        assert (now.terminated[t] == outside & ~now.first[t]).all()
    assert (now.truncated & now.terminated).any() and (now.truncated & ~now.terminated).any()


def all_of(env: Environment) -> Environment:
    """Every wrapper that suits an environment, but those that reset it."""
    env = changes.clip_action(env) if isinstance(env.spec.action, Box) else env
    env = changes.normalise_observation(changes.scale_reward(env, 0.5))
    return wrappers.episode_statistics(env)


ALIKE = (
    (lambda env: wrappers.training(all_of(env)), "within"),
    (lambda env: all_of(wrappers.training(env)), "around"),
)


@pytest.mark.quick("task6")
@pytest.mark.parametrize(
    "task",
    [Walk(), CartPole(), Pendulum(), Acrobot(), MountainCar(), DelayProbe(), TruncationProbe()],
)
def test_a_kernel_does_what_vmap_does(task):
    env = wrappers.training(all_of(task))
    ours, theirs = roll(env), roll(env, batched=jax.vmap)
    for name in ("first", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(ours.timestep, name), getattr(theirs.timestep, name))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, theirs)


@dataclasses.dataclass(frozen=True)
class Counter:
    """Counts its steps, and its only critics see the last action."""

    episode_steps: int = 9
    frame_skip: int = 1

    @property
    def spec(self) -> EnvSpec:
        shown = {"count": ArraySpec((), "float32"), PRIVILEGED: ArraySpec((1,), "float32")}
        return EnvSpec(shown, Box((1,), (-9.0,), (9.0,)))

    def reset(self, key):
        return EnvState.opening(jnp.float32(0), self._shown(0.0, jnp.zeros(1)))

    def step(self, state, action):
        count = state.inner + 1
        return EnvState.after(count, self._shown(count, action), 0.0, False)

    def _shown(self, count, action):
        return {"count": jnp.float32(count), PRIVILEGED: action}


def test_observations_and_actions_are_late_by_what_each_episode_draws():
    env = wrappers.training(changes.delay(Counter(), observation=3, action=2))
    now = roll(env).timestep
    given, drawn = actions(env, 0), set()
    for i in range(BATCH):
        begin = np.flatnonzero(now.first[:, i])
        for start, end in itertools.pairwise([*begin, STEPS + 1]):
            # Of a step, the row; the action that leads to it is in the row before.
            count = now.observation["count"][start:end, i]
            seen = now.observation[PRIVILEGED][start:end, i, 0]
            taken = given[start : end - 1, i, 0]
            fits = [
                (late, behind)
                for late in range(4)
                for behind in range(3)
                if np.array_equal(count, np.maximum(0, np.arange(end - start) - late))
                and np.allclose(seen[1:], np.append(np.zeros(behind), taken)[: end - start - 1])
            ]
            if end - start > 5:
                (fit,) = fits
                drawn.add(fit)
    assert len(drawn) == 12, "each number of steps is drawn"


def test_rewards_are_scaled_and_actions_clipped():
    env = wrappers.training(changes.scale_reward(changes.clip_action(Walk()), 0.25))
    now = roll(env).timestep
    clipped = np.clip(actions(env, 0), -1, 1).sum(-1)
    np.testing.assert_allclose(
        now.reward[1:], np.where(now.first[1:], 0, 0.25 * clipped), rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "factor"),
    [
        (lambda env: wrappers.episode_statistics(changes.scale_reward(env, 0.5)), 1),
        (lambda env: changes.scale_reward(wrappers.episode_statistics(env), 0.5), 2),
    ],
)
def test_statistics_are_of_the_rewards_that_the_wrapper_sees(wrap, factor):
    states = roll(wrap(wrappers.training(Walk())))
    now, total, length = states.timestep, np.zeros(BATCH), np.zeros(BATCH)
    for t in range(STEPS + 1):
        total = np.where(now.first[t], 0, total + factor * now.reward[t])
        length = np.where(now.first[t], 0, length + 1)
        np.testing.assert_allclose(states.metrics["episode_return"][t], total, atol=1e-5)
        np.testing.assert_array_equal(states.metrics["episode_length"][t], length)
    assert set(states.metrics) == {"cost", "episode_return", "episode_length"}


@pytest.mark.quick("around")
@pytest.mark.parametrize("env", [wrap(Walk()) for wrap, _ in ALIKE], ids=[n for _, n in ALIKE])
def test_observations_are_normalised_as_gymnasiums(env):
    shown, seen = (
        roll(env).timestep.observation,
        roll(wrappers.training(changes.clip_action(Walk()))),
    )
    for i in range(BATCH):
        running = RunningMeanStd(shape=(2,), dtype=np.float64)
        for t in range(STEPS + 1):
            x = seen.timestep.observation[t, i].astype(np.float64)
            running.update(x[None])
            wanted = (x - running.mean) / np.sqrt(running.var + 1e-8)
            np.testing.assert_allclose(shown[t, i], wanted, rtol=2e-4, atol=2e-4)


def test_a_wrapper_passes_on_what_it_wraps():
    env = all_of(wrappers.training(Walk()))
    assert is_on_device(env) and env.spec == Walk().spec
    assert (env.episode_steps, env.frame_skip) == (6, 1)
    assert wrappers.time_limit(Walk(), 3).episode_steps == 3
    assert wrappers.training(DelayProbe()).episode_steps == 0
    assert env == all_of(wrappers.training(Walk())) and hash(env) is not None
    assert wrappers.resets_itself(env) and not wrappers.resets_itself(all_of(Walk()))


def test_a_tasks_metrics_are_not_those_of_its_episodes():
    env = wrappers.episode_statistics(wrappers.episode_statistics(Walk()))
    with pytest.raises(SeedbedError, match=r"Walk: .* episode_length and episode_return, which"):
        jax.eval_shape(env.reset, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Broken(Walk):
    part: str = ""

    def step(self, state, action):
        after = super().step(state, action)
        now, wide = after.timestep, jnp.zeros(2)
        changed = {
            "reward": after._replace(timestep=now._replace(reward=wide)),
            "int reward": after._replace(timestep=now._replace(reward=jnp.int32(1))),
            "terminated": after._replace(timestep=now._replace(terminated=jnp.float32(0))),
            "observation": after._replace(timestep=now._replace(observation=jnp.zeros(3))),
            "metric": after._replace(metrics={"cost": wide}),
            "metrics": after._replace(metrics={}),
            "inner": after._replace(inner=jnp.zeros(3)),
        }
        return changed[self.part]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("reward", r"Broken.step: the reward is float32\[2\], not float32\[\]"),
        ("int reward", "the reward is .*int32.*not .*float32"),
        ("terminated", "terminated is .*float32.*not .*bool"),
        ("observation", r"the observation is float32\[3\], not float32\[2\]; let spec, reset"),
        ("metric", "the metric 'cost' is"),
        ("metrics", r"metrics after reset are \['cost'\], after step \[\]"),
        ("inner", r"`inner` after reset has .*\[2\].*; after step .*\[3\]"),
    ],
)
def test_what_a_task_gets_wrong_is_named(part, text):
    env = wrappers.auto_reset(Broken(part=part))
    with pytest.raises(SeedbedError, match=text):
        jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(2)), jax.random.key(0))


DRAWS = (Scale("body_mass", 0.5, 2, log=True), Offset("dof_damping", 0.1, 0.3, of="slider"))
POLES = InvertedDoublePendulum(episode_steps=5, integrator="euler")


@pytest.mark.slow
def test_the_model_is_drawn_anew_in_every_episode():
    states = roll(wrappers.training(randomisation.randomise(POLES, *DRAWS)))
    now, leaves, model = states.timestep, states.inner[0][0][1], POLES.physics_model()
    derived = {"body_invweight0", "dof_invweight0"}
    assert set(leaves) == {"body_mass", "body_inertia", "dof_damping"} | derived
    for name, drawn in leaves.items():
        assert drawn.shape[2:] == getattr(model, name).shape
        assert len(np.unique(drawn[now.first], axis=0)) == now.first.sum()
        kept = ~now.first[1:]
        np.testing.assert_array_equal(drawn[1:][kept], drawn[:-1][kept])
    heavier = leaves["body_mass"][now.first][:, 1:] / model.body_mass[1:].astype(np.float32)
    assert heavier.min() > 0.5 and heavier.max() < 2 and abs(np.median(np.log(heavier))) < 0.2
    turned = leaves["body_inertia"][now.first][:, 1:] / model.body_inertia[1:].astype(np.float32)
    np.testing.assert_allclose(turned, np.broadcast_to(heavier[..., None], turned.shape), rtol=1e-5)
    added = leaves["dof_damping"][now.first] - model.dof_damping.astype(np.float32)
    assert (added[:, 0] > 0.099).all() and (added[:, 0] < 0.301).all() and not added[:, 1:].any()


@pytest.mark.slow
def test_the_drawn_model_is_what_is_simulated():
    """Compares with the task around a model that was changed by hand."""
    env = randomisation.randomise(POLES, *DRAWS)
    states, model = roll(env), POLES.physics_model()
    leaves = {name: leaf[0] for name, leaf in states.inner[1].items()}

    def by_hand(state, action, leaves):
        return dataclasses.replace(POLES, model=model.replace(**leaves)).step(state, action)

    before, after = (jax.tree.map(lambda x, t=t: x[t], states) for t in (3, 4))
    ours = jax.jit(simd.vectorize(by_hand))(
        before._replace(inner=before.inner[0]), actions(env, 0)[3], leaves
    )
    np.testing.assert_allclose(ours.inner.qvel, after.inner[0].qvel, rtol=1e-4, atol=1e-4)
    plainly = functions(POLES)[1](before._replace(inner=before.inner[0]), actions(env, 0)[3])
    assert np.abs(plainly.inner.qvel - after.inner[0].qvel).max() > 0.01


SERVOS = """<mujoco><default><geom contype="0"/></default><worldbody><body><freejoint/><geom size=".2"/>
<body pos=".3 0 0"><joint name="hip"/><geom size=".1"/></body>
<body pos="-.3 0 0"><joint name="knee"/><geom size=".1"/></body>
</body></worldbody><actuator><position name="hip" joint="hip" kp="20"/>
<position name="knee" joint="knee" kp="30" kv="1"/><velocity name="spin" joint="knee" kv="2"/>
<motor joint="hip"/><position name="soft" joint="hip" kp="1" kv="1"/></actuator></mujoco>"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Servos(MujocoTask):
    """A task of the robot above, on which nothing is asked of it."""

    frame_skip: int = 1

    def initial(self, key):
        return noisy_rest(self.physics_model(), key, 0.01)

    def observe(self, now):
        return now.qpos

    def judge(self, before, now, action):
        return Verdict(jnp.float32(0), jnp.bool_(False), {})


@pytest.mark.slow
def test_servos_are_varied_with_both_of_their_numbers():
    draws = Scale("kp", 0.5, 2, of="hip"), Offset("kv", 0.1, 0.2), Offset("gravity", -1, 1)
    env = randomisation.randomise(Servos(xml_file="", model=physics.load(SERVOS)), *draws)
    leaves = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64)).inner[1]
    gain, bias, gravity = (
        np.asarray(leaves[name]) for name in ("actuator_gainprm", "actuator_biasprm", "gravity")
    )
    np.testing.assert_array_equal(gain[:, :2, 0], -bias[:, :2, 1])
    assert (gain[:, 0, 0].min() < 15) and (gain[:, 0, 0].max() > 30)
    assert (gain[:, 1] == [30, 0, 0]).all()
    assert (bias[:, 0, 2] == 0).all()  # no kv in the file
    assert ((bias[:, 1, 2] < -1.1) & (bias[:, 1, 2] > -1.2)).all()
    # A velocity servo, whose gain is its kv, and a motor.
    np.testing.assert_array_equal(gain[:, 2, 0], -bias[:, 2, 2])
    assert (gain[:, 3] == [1, 0, 0]).all() and not bias[:, 3].any()
    # A position servo, whose kp is as large as its kv.
    assert (gain[:, 4, 0] == 1).all() and (bias[:, 4, 1] == -1).all() and (bias[:, 4, 2] < -1).all()
    assert np.ptp(gravity, axis=0).min() > 1.5


def test_the_integrator_is_changed_within_wrappers_and_nothing_else_is():
    wrapped = wrappers.time_limit(randomisation.randomise(POLES, *DRAWS), 7)
    exact = wrappers.with_integrator(wrapped, "xml")
    assert exact.episode_steps == 7 and exact.env.draws == wrapped.env.draws
    assert exact.env.env == dataclasses.replace(POLES, integrator="xml")
    assert exact.env.env.model is None
    assert wrappers.with_integrator(exact, "euler") == wrapped
    assert called(wrapped) == called(POLES) == type(POLES).__name__


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: wrappers.with_integrator(Walk(), "euler"), "Walk has no option integrator"),
        (
            lambda: wrappers.with_integrator(
                dataclasses.replace(POLES, model=POLES.physics_model()), "xml"
            ),
            "InvertedDoublePendulum has a model of its own",
        ),
        (
            lambda: dataclasses.replace(POLES, model=InvertedDoublePendulum().physics_model()),
            "InvertedDoublePendulum.integrator is euler, but its model, which is used, has another",
        ),
        (lambda: wrappers.time_limit(Walk(), 0), "time_limit: 0 steps"),
        (lambda: wrappers.time_limit(Walk(), "ten"), "time_limit: 'ten' steps"),
        (lambda: wrappers.time_limit(Walk(), True), "time_limit: True steps"),
        (lambda: wrappers.time_limit(Walk(), 10**18), "time_limit: 10{18} steps"),
        (lambda: changes.scale_reward(Walk(), float("nan")), "the factor is nan"),
        (lambda: changes.clip_action(CartPole()), "CartPole are Discrete"),
        (lambda: changes.delay(Walk(), observation=-1), "observation is -1 steps"),
        (lambda: changes.delay(Walk(), action=1.0), "action is 1.0 steps"),
        (lambda: changes.delay(CartPole(), action=1), "of which no 0 means that nothing is done"),
        (lambda: changes.normalise_observation(Counted()), "observation of Counted is uint8"),
        (lambda: varied(DRAWS[0], env=Walk()), r"Walk has no physics_model\(\)"),
        (lambda: varied(Scale("geom_type", 1, 1)), "'geom_type' cannot be"),
        (lambda: varied(Scale("body_mas", 1, 1)), "mean body_mass"),
        (lambda: varied(Scale("body_mass", 0, 1)), "factors are positive"),
        (lambda: varied(Scale("body_mass", 2, 1)), "the lower first"),
        (lambda: varied(Offset("body_ipos", 0, float("nan"))), "two finite numbers"),
        (lambda: varied(Offset("dof_damping", -1, 0)), "may make it -"),
        (lambda: varied(Offset("body_mass", -20, 0, of="cart")), "may make it -"),
        (lambda: varied(Scale("dof_damping", 1, 2, of="sliders")), "named 'sliders'; .*slider"),
        (lambda: varied(Scale("kp", 1, 2)), "'kp' has no element"),
        (lambda: varied({"body_mass": (0.5, 2)}), "is no draw; give Scale"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make, text):
    with pytest.raises(SeedbedError, match=text):
        make()


def varied(*draws, env=POLES):
    return randomisation.randomise(env, *draws)


class Counted(Walk):
    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(ArraySpec((2,), "uint8"), Box((2,), (-1.0, -1.0), (1.0, 1.0)))
