"""Masks of actions and privileged observations: no agent forgets them, in no place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import seedbed
from masked_environment import Masked
from seedbed.agents.awr import Awr
from seedbed.agents.base import Params
from seedbed.agents.dqn import Dqn
from seedbed.agents.es import Es
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.agents.vmpo import Vmpo
from seedbed.config.configuration import TrainConfig
from seedbed.config.defaults import _task as settings_task
from seedbed.envs.device.changes import normalise_observation
from seedbed.envs.device.probes import MaskProbe, PrivilegedProbe
from seedbed.envs.host.gym import FactoryEnv, GymHost
from seedbed.ops.masks import masked, random_allowed
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.stacking import FrameTrajectory, stack_trajectory, stacked_spec
from seedbed.spaces import ACTION_MASK, PRIVILEGED, policy_spec
from seedbed.testing.checks import check_task
from seedbed.types import (
    ActorState,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    OnPolicy,
    SeedbedError,
    Timestep,
    Trajectory,
    bind,
)

VECTOR = ArraySpec((2,), "float32")
KEY = jax.random.key(0)


def shown(rng: np.random.Generator, spec: EnvSpec, *rows: int, forbid: int | None = None) -> Any:
    """Draws observations `[*rows, ...]`; choice `forbid` is forbidden everywhere, others at random."""
    found = jax.tree.map(
        lambda x: rng.normal(size=(*rows, *x.shape)).astype(np.float32), spec.observation
    )
    if forbid is not None:
        mask = rng.random((*rows, *spec.observation[ACTION_MASK].shape)) < 0.5
        mask[..., 0] = mask[..., 3] = True
        mask[..., forbid] = False
        found[ACTION_MASK] = mask
    return found


def timesteps(rng: np.random.Generator, observation: Any, *rows: int) -> Timestep:
    """Draws timesteps `[*rows]` of episodes without an auto-reset, so that all rows count."""
    no = np.zeros(rows, bool)
    return Timestep(
        observation, rng.normal(size=rows).astype(np.float32), no, rng.random(rows) < 0.1, no
    )


def unroll(agent, params, spec: EnvSpec, forbid: int | None = None) -> Trajectory:
    """Acts for a batch, as a runtime does, in observations that do not depend on the actions."""
    kept = agent.experience
    rows = kept.unroll if isinstance(kept, OnPolicy) else kept.steps - 1
    batch, rng = kept.batch, np.random.default_rng(0)
    steps = timesteps(rng, shown(rng, spec, rows + 1, batch, forbid=forbid), rows + 1, batch)
    steps = jax.tree.map(jnp.asarray, steps)
    before = state = agent.actor_state(jnp.arange(batch), batch)
    done, act = [], jax.jit(functools.partial(agent.act, evaluate=False))
    for t in range(rows):
        now = jax.tree.map(lambda x, t=t: x[t], steps)
        keys = jax.random.split(jax.random.fold_in(KEY, t), batch)
        action, extras, state = act(params, state, now, keys)
        done.append((action, extras))
    action, extras = jax.tree.map(lambda *x: jnp.stack(x), *done)
    return Trajectory(steps, action, extras, before, (), np.ones(batch, np.float32))


class ShiftedR2d2(R2d2):
    """R2D2 whose values of choice 1 are those of the parameters plus the exploration rate."""

    def _values(self, weights, *rest, **more):
        q, lstm = super()._values(weights["own"], *rest, **more)
        return q.at[..., 1].add(weights["shift"]), lstm

    def _initial_weights(self, key):
        return {"own": super()._initial_weights(key), "shift": jnp.float32(0)}


def shift(agent, params: Params, by: float) -> Params:
    """Adds a number to the score of choice 1, wherever the networks compute it."""
    if isinstance(agent, ShiftedR2d2):
        return params._replace(weights=params.weights | {"shift": jnp.float32(by)})
    layers = params.weights["params"]
    path = ("PolicyHead_0", "Dense_0") if "PolicyHead_0" in layers else ("Dense_0",)

    def moved(tree, path):
        if not path:
            return tree | {"bias": tree["bias"].at[1].add(by)}
        return tree | {path[0]: moved(tree[path[0]], path[1:])}

    return params._replace(weights={"params": moved(layers, path)})


SMALL: dict[str, Any] = {"batch": 4, "hidden_sizes": (8,), "normalise_observations": True}
FOUR = EnvSpec({"a": VECTOR, ACTION_MASK: ArraySpec((4,), "bool")}, Discrete(4))
TWO_SETS = dataclasses.replace(FOUR, action=MultiDiscrete((3, 1)))
AGENTS = {
    "ppo": (Ppo(unroll=5, entropy_cost=0.1, **SMALL), FOUR),
    "ppo of two sets": (Ppo(unroll=5, entropy_cost=0.1, **SMALL), TWO_SETS),
    "impala with a memory": (Impala(unroll=5, recurrent=True, lstm_size=8, **SMALL), FOUR),
    "vmpo": (Vmpo(unroll=5, entropy_cost=0.1, **SMALL), FOUR),
    "awr": (Awr(unroll=5, min_size=4, entropy_cost=0.1, **SMALL), FOUR),
    "dqn": (Dqn(n_step=2, min_size=4, priority_exponent=0.5, **SMALL), FOUR),
    "dqn, one network": (Dqn(n_step=2, min_size=4, double=False, **SMALL), FOUR),
    "r2d2": (
        ShiftedR2d2(sequence=4, burn_in=2, min_size=4, lstm_size=8, head_size=8, **SMALL),
        FOUR,
    ),
}


@pytest.mark.quick("ppo")
@pytest.mark.parametrize("name", AGENTS)
def test_what_a_forbidden_choice_scores_changes_nothing(name):
    agent, spec = AGENTS[name]
    agent = bind(agent, spec)

    def learn(by: float) -> Any:
        state = jax.jit(agent.init)(KEY)
        state = state._replace(params=shift(agent, state.params, by))
        if isinstance(agent, Dqn | R2d2):
            state = agent.with_params(state, state.params)
        trajectory = unroll(agent, state.params, spec, forbid=1)
        if not isinstance(agent.experience, OnPolicy):
            trajectory = trajectory._replace(
                actor_state=ActorState(trajectory.actor_state.core, ())
            )
        batch = agent.prepare(state, trajectory, KEY)
        grads, output = agent.gradients(state._replace(optimizer_state=()), batch, KEY)
        return trajectory.action, trajectory.extras, batch, grads, output

    plain, shifted = jax.jit(learn)(0.0), jax.jit(learn)(50.0)
    choices = (
        np.asarray(plain[0]) if isinstance(spec.action, Discrete) else np.asarray(plain[0])[..., 0]
    )
    assert len(np.unique(choices)) > 1 and not (choices == 1).any()
    if name == "vmpo":  # it tells all parameters, with forbidden ones replaced
        assert (plain[1].parameters[..., 1] == shifted[1].parameters[..., 1]).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), plain, shifted
    )


@pytest.mark.quick("ppo of two sets", "dqn")
@pytest.mark.parametrize("name", AGENTS)
def test_evaluations_take_no_forbidden_choice_and_greedy_ones_the_best(name):
    agent, spec = AGENTS[name]
    agent = bind(agent, spec)
    rng = np.random.default_rng(1)
    params = shift(agent, jax.jit(agent.init)(KEY).params, 50.0)
    now = timesteps(rng, shown(rng, spec, 64, forbid=1), 64)
    state = agent.actor_state(jnp.arange(64), 64)
    keys = jax.random.split(KEY, (2, 64))
    act = jax.jit(functools.partial(agent.act, evaluate=True))
    greedily = jax.jit(functools.partial(agent.greedy().act, evaluate=True))
    draws = [act(params, state, now, each)[0] for each in keys]
    best = [greedily(params, state, now, each)[0] for each in keys]
    for action in (*draws, *best):
        assert not (np.asarray(action).reshape(64, -1)[:, 0] == 1).any()
    np.testing.assert_array_equal(*best)


def test_random_choices_are_even_over_the_allowed_ones():
    scores = jnp.where(jnp.array([True, False, True, True, False]), jnp.arange(5.0), -1e9)
    uniform = (jnp.arange(3000) + 0.5) / 3000
    drawn = random_allowed(jnp.tile(scores, (3000, 1)), uniform)
    np.testing.assert_array_equal(np.bincount(drawn, minlength=5), [1000, 0, 1000, 1000, 0])


def test_a_mask_of_nothing_forbids_nothing_set_by_set():
    action, scores = MultiDiscrete((2, 3)), jnp.arange(5.0)[None]
    mask = {"first": np.zeros((1, 2), np.int8), "second": np.array([[0, 1, 1]], np.int8)}
    found = masked(action, scores, {"observation": 0, ACTION_MASK: mask})
    np.testing.assert_array_equal(found, [[0, 1, -1e9, 3, 4]])
    assert masked(action, scores, np.zeros((1, 7))) is scores


@pytest.mark.parametrize(
    ("observation", "action", "complaint"),
    [
        (
            {"a": VECTOR, ACTION_MASK: VECTOR},
            Discrete(3),
            "has 2 numbers but the action .* 3 choices",
        ),
        ({"a": VECTOR, ACTION_MASK: VECTOR}, Box((1,), (0,), (1,)), "0 choices; give one number"),
        (
            {ACTION_MASK: VECTOR, PRIVILEGED: VECTOR},
            Discrete(2),
            "only action_mask, privileged; add",
        ),
    ],
)
def test_a_spec_whose_parts_do_not_fit_is_refused(observation, action, complaint):
    with pytest.raises(SeedbedError, match=complaint):
        EnvSpec(observation, action)


def test_stacked_frames_have_the_newest_mask_alone():
    stacked = stacked_spec(FOUR, 3)
    assert stacked.observation["a"].shape == (6,) and stacked.observation[ACTION_MASK].shape == (4,)
    rng = np.random.default_rng(0)
    steps = timesteps(rng, shown(rng, FOUR, 2 + 3, 2, forbid=1), 5, 2)
    seen = stack_trajectory(FrameTrajectory(steps, (), (), ActorState((), ())), 3).timesteps
    np.testing.assert_array_equal(seen.observation[ACTION_MASK], steps.observation[ACTION_MASK][2:])
    assert seen.observation["a"].shape == (3, 2, 6)


@pytest.mark.parametrize("sets", [0, 2])
def test_masks_of_info_come_with_the_observation(sets):
    made: list[Masked] = []

    def make() -> Masked:
        made.append(Masked(sets))
        return made[-1]

    host = GymHost(make, "masked", 3, 7)
    size = 3 * (sets or 1)
    assert host.spec.observation == {
        "observation": ArraySpec((2,), "float32"),
        ACTION_MASK: ArraySpec((size,), "uint8"),
    }
    timestep = host.reset()
    assert [env.resets for env in made] == [1, 1, 1]
    for _ in range(30):
        mask = timestep.observation[ACTION_MASK]
        np.testing.assert_array_equal(mask, [np.concatenate(env._masks) for env in made])
        action = mask.reshape(3, -1, 3).argmax(-1).astype(np.int32)
        timestep = host.step(action if sets else action[:, 0])
    assert [env.resets for env in made] == [5, 5, 5]


def test_a_policy_may_get_observations_without_their_mask():
    host = GymHost(Masked, "masked", 1, 0)
    one, two = host.encode(np.ones(2, np.float32)), host.encode(np.ones((5, 2), np.float32))
    np.testing.assert_array_equal(one[ACTION_MASK], np.ones(3))
    assert one["observation"].shape == (2,) and two[ACTION_MASK].shape == (5, 3)
    given = {"observation": np.ones(2, np.float32), ACTION_MASK: np.array([0, 1, 1])}
    np.testing.assert_array_equal(host.encode(given)[ACTION_MASK], [0, 1, 1])


@pytest.mark.parametrize(("privileged", "seen"), [((3,), (4, 5)), ((), (5,)), ((2, 2), (6,))])
def test_what_is_privileged_says_nothing_about_a_batch(privileged, seen):
    class Told(Masked):
        def __init__(self) -> None:
            super().__init__()
            one, other = (spaces.Box(-1, 1, shape) for shape in (privileged, seen))
            self.observation_space = spaces.Dict({PRIVILEGED: one, "state": other})

    host = GymHost(Told, "told", 1, 0)
    for batch in ((), (7,)):
        found = host.encode({"state": np.ones((*batch, *seen), np.float32)})
        assert found[ACTION_MASK].shape == (*batch, 3)


def test_a_policy_takes_what_a_vector_environment_tells():
    vector = gymnasium.vector.SyncVectorEnv([Masked] * 3)
    observation, info = vector.reset(seed=0)
    assert "_action_mask" in info
    host = GymHost(Masked, "masked", 1, 0)
    found = host.encode({"observation": observation, **info})
    np.testing.assert_array_equal(found[ACTION_MASK], info["action_mask"])
    np.testing.assert_array_equal(found["observation"], observation)
    vector.close()


def test_masks_of_a_method_are_heeded():
    class Asked(Masked):
        def _told(self) -> dict[str, Any]:
            super()._told()
            return {}

        def action_masks(self) -> np.ndarray:
            assert self._t < 7, "nothing is chosen at the end"
            return np.concatenate(self._masks).astype(bool)

    host = GymHost(lambda: gymnasium.wrappers.TimeLimit(Asked(), 100), "asked", 2, 0)
    timestep = host.reset()
    for _ in range(12):
        mask = timestep.observation[ACTION_MASK]
        assert mask.shape == (2, 3)
        timestep = host.step(mask.argmax(-1).astype(np.int32))


def test_the_end_of_an_episode_needs_no_mask_and_a_late_one_is_refused():
    class AtTheEnd(Masked):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 1.0, True, False, {}

    host = GymHost(AtTheEnd, "masked", 1, 0)
    host.reset()
    np.testing.assert_array_equal(
        host.step(np.zeros(1, np.int32)).observation[ACTION_MASK], [[1, 1, 1]]
    )

    class CutOff(AtTheEnd):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 1.0, False, True, {}

    host = GymHost(CutOff, "masked", 1, 0)
    host.reset()
    with pytest.raises(SeedbedError, match="no action_mask, which that of the first reset had"):
        host.step(np.zeros(1, np.int32))

    class Late(Masked):
        def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
            return super().reset(**given)[0], {"action_mask": None}

    host = GymHost(Late, "late", 1, 0)
    action = host.reset() and host._envs[0]._masks[0][None].argmax(-1)  # type: ignore[attr-defined]
    with pytest.raises(SeedbedError, match="which that of the first reset had not"):
        host.step(action.astype(np.int32))


def test_checks_of_tasks_take_no_forbidden_choice():
    @dataclasses.dataclass(frozen=True)
    class Strict(MaskProbe):
        def step(self, state, action):
            after = super().step(state, action)
            wrong = after.metrics["forbidden"] > 0
            reward = jnp.where(wrong, jnp.nan, after.timestep.reward)
            return after._replace(timestep=after.timestep._replace(reward=reward))

    check_task(Strict())


def test_a_mask_that_is_missing_later_or_has_no_form_is_one_line():
    host = GymHost(lambda: Masked(forgets=True), "masked", 1, 0)
    host.reset()
    with pytest.raises(SeedbedError, match="index 0, step 2: info has no action_mask"):
        for _ in range(3):
            host.step(host._envs[0]._masks[0][None].argmax(-1).astype(np.int32))  # type: ignore[attr-defined]

    class Short(Masked):
        def _told(self) -> dict[str, Any]:
            return super()._told() | {"action_mask": [1, 1]}

    with pytest.raises(
        SeedbedError, match=r"info\['action_mask'\] is \[1, 1\], a list, expected 3 bools"
    ):
        GymHost(Short, "masked", 1, 0).reset()


HOST = {
    "ppo": Ppo(unroll=8, batch=8, hidden_sizes=(16,)),
    "dqn": Dqn(min_size=64, epsilon=1.0, hidden_sizes=(16,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOST)
def test_a_run_its_evaluations_and_loaded_policies_keep_to_the_mask(name, tmp_path):
    # A forbidden choice raises: in acting, in evaluation, in a loop of the user's.
    run = tmp_path / "run"
    runtime = CentralConfig(steps=600, actors=1, envs_per_actor=4, evaluate_episodes=4)
    env = FactoryEnv("masked_environment:Masked")
    summary = seedbed.train(TrainConfig(env, HOST[name], runtime), run=run)
    assert summary["learner_steps"] > 2
    assert seedbed.evaluate(run, episodes=8)["episode_length_mean"] == 6
    assert seedbed.evaluate(run, episodes=8, greedy=True)["episode_return_mean"] == 6
    seedbed.export(run, tmp_path / "out")
    for folder in ("run", "out"):
        policy, env, over = seedbed.load(tmp_path / folder), Masked(), False
        observation, info = env.reset(seed=0)
        while not over:
            seen = {"observation": observation, **info}
            observation, _, over, _, info = env.step(int(policy.act(seen, greedy=True)))


DEVICE = {
    "ppo": Ppo(unroll=16, batch=32, learning_rate=3e-3),
    "dqn": Dqn(min_size=500, batch=64, ratio=16.0, epsilon_power=3.0, learning_rate=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE)
def test_what_looks_best_is_forbidden_on_the_device(name, tmp_path):
    told: list[float] = []
    runtime = FusedConfig(steps=60_000, envs=32, log_every_s=0.1)
    seedbed.train(
        TrainConfig(MaskProbe(), DEVICE[name], runtime),
        run=tmp_path / "run",
        callback=lambda line: told.append(line.get("episode_return_mean", 0.0)),
    )
    assert min(told) >= 0, "a forbidden choice costs 100"
    result = seedbed.evaluate(tmp_path / "run", episodes=64)
    assert result["episode_forbidden_mean"] == 0
    assert result["episode_return_mean"] > 6


@pytest.mark.slow
def test_a_critic_explains_what_the_policy_cannot_see(tmp_path):
    env = PrivilegedProbe()
    agent = Ppo(gamma=0.0, trace_decay=0.0, unroll=16, batch=64, epochs=4, learning_rate=1e-3)
    config = TrainConfig(env, agent, FusedConfig(steps=60_000, envs=64, log_every_s=0.1))
    last: dict[str, Any] = {}
    seedbed.train(config, run=tmp_path / "run", callback=last.update)
    assert last["explained_variance"] > 0.8
    result = seedbed.evaluate(tmp_path / "run", episodes=256)
    # The secret adds 3 in each step with either sign; the rest is at most 8, or 16 with the secret.
    blind = result["episode_return_mean"]
    assert blind < 12
    seedbed.export(tmp_path / "run", tmp_path / "out")
    for folder in ("run", "out"):
        policy = seedbed.load(tmp_path / folder)
        action = policy.act({"observation": np.array([[1.0], [-1.0]], np.float32)})
        assert action[0] > 0.5 and action[1] < -0.5


def test_networks_of_critics_alone_see_the_privileged_part():
    spec = PrivilegedProbe().spec
    for agent in (Ppo(unroll=4, **SMALL), Sac(batch=4, min_size=4, hidden_sizes=(8,))):
        agent = bind(agent, spec)
        state = jax.jit(agent.init)(KEY)
        rng = np.random.default_rng(0)
        now = timesteps(rng, shown(rng, spec, 5), 5)
        other = now._replace(
            observation=now.observation | {PRIVILEGED: now.observation[PRIVILEGED] + 1}
        )
        blind = now._replace(observation={"observation": now.observation["observation"]})
        keys = jax.random.split(KEY, 5)
        actor = agent.actor_state(jnp.arange(5), 5)

        @functools.partial(jax.jit, static_argnames="evaluate")
        def act(timestep, evaluate, agent=agent, params=state.params, actor=actor, keys=keys):
            return agent.act(params, actor, timestep, keys, evaluate=evaluate)[0]

        np.testing.assert_array_equal(act(now, False), act(other, False))
        np.testing.assert_array_equal(act(now, True), act(blind, True))
        trajectory = unroll(agent, state.params, spec)
        seen = trajectory.timesteps.observation
        moved = trajectory._replace(
            timesteps=trajectory.timesteps._replace(
                observation=seen | {PRIVILEGED: seen[PRIVILEGED] + 1}
            )
        )

        @jax.jit
        def learn(each, agent=agent, state=state):
            batch = agent.prepare(state, each, KEY)
            return agent.gradients(state._replace(optimizer_state=()), batch, KEY)[1].metrics

        losses = [learn(trajectory), learn(moved)]
        name = "loss/critic" if isinstance(agent, Sac) else "loss/value"
        assert losses[0][name] != losses[1][name]
        assert losses[0]["entropy"] == losses[1]["entropy"]
    assert policy_spec(spec).observation == {"observation": ArraySpec((1,), "float32")}


def test_agents_without_a_critic_leave_the_privileged_part_out():
    spec = dataclasses.replace(PrivilegedProbe().spec, action=Discrete(2))
    for agent in (Es(batch=4, hidden_sizes=(4,)), Dqn(batch=4, min_size=4, hidden_sizes=(4,))):
        agent = bind(agent, spec)
        sizes = {
            leaf.shape[0]
            for leaf in jax.tree.leaves(agent.init(KEY).params.weights)
            if leaf.ndim == 2
        }
        assert 1 in sizes and 2 not in sizes


def test_only_what_networks_are_given_is_judged():
    """A mask may have any shape, and what is privileged may be a picture for agents that do not see it."""
    grid = {"pay": VECTOR, ACTION_MASK: ArraySpec((20, 20), "bool")}
    for agent in (Ppo(), Dqn(), R2d2()):
        bind(agent, EnvSpec(grid, Discrete(400)))
    hidden = EnvSpec({"pay": VECTOR, PRIVILEGED: ArraySpec((64, 64), "float32")}, Discrete(2))
    for agent in (Es(), Dqn()):
        bind(agent, hidden)
    cube = EnvSpec({"pay": VECTOR, ACTION_MASK: ArraySpec((36, 36, 1), "bool")}, Discrete(1296))
    with pytest.raises(SeedbedError, match="torso is nature but the environment shows no images"):
        bind(Ppo(torso="nature"), cube)
    assert settings_task("device", cube).observation == "vectors"
    with pytest.raises(SeedbedError, match="sees vectors"):
        bind(Es(), EnvSpec(ArraySpec((64, 64, 3), "uint8"), Discrete(2)))


def test_normalised_observations_keep_their_mask():
    bare, task = MaskProbe(), normalise_observation(MaskProbe())
    states = [jax.jit(env.reset)(KEY) for env in (bare, task)]
    steps = [jax.jit(env.step) for env in (bare, task)]
    for _ in range(3):
        shown = [state.timestep.observation for state in states]
        assert shown[0].keys() == shown[1].keys()
        np.testing.assert_array_equal(shown[0][ACTION_MASK], shown[1][ACTION_MASK])
        states = [step(state, jnp.int32(0)) for step, state in zip(steps, states, strict=True)]
