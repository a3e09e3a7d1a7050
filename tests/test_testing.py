"""`seedbed.testing`: the checks pass what is right and name what is wrong."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from counting_agent import CountingAgent, CountingReplayAgent
from seedbed.agents.apg import Apg
from seedbed.agents.awr import Awr
from seedbed.agents.dqn import Dqn
from seedbed.agents.es import Es
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.agents.vmpo import Vmpo
from seedbed.envs.device import changes
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.spaces import ACTION_MASK
from seedbed.testing.agent_check import AgentCheck
from seedbed.testing.checks import check_agent, check_task
from seedbed.testing.probes import Noise
from seedbed.testing.trainers import ReplayTrainer
from seedbed.types import (
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    EnvState,
    MultiDiscrete,
    SeedbedError,
    bind,
)

CHOICE = EnvSpec(ArraySpec((4,), "float32"), Discrete(7))
REAL = EnvSpec(
    {"a": ArraySpec((4,), "float32"), "k": ArraySpec((), "int32")}, Box((1,), (-1.0,), (2.0,))
)
HIDDEN = np.random.default_rng(0)
IMAGES = EnvSpec(ArraySpec((20, 20, 1), "uint8"), MultiDiscrete((3, 2)))
SMALL = {"batch": 8, "hidden_sizes": (8,)}
MEMORY = {"lstm_size": 4, "unroll": 6, **SMALL}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "spec"),
    [
        pytest.param(CountingAgent(), CHOICE, id="counting"),
        pytest.param(CountingReplayAgent(actions=7), CHOICE, id="counting with replay"),
        pytest.param(
            Ppo(normalise_observations=True, normalise_returns=True, **SMALL), REAL,
            id="a PPO with all of its statistics",
        ),
        pytest.param(Ppo(recurrent=True, **MEMORY), CHOICE, id="a PPO with memory"),
        pytest.param(Impala(**SMALL), IMAGES, id="an IMPALA of images"),
        pytest.param(Impala(recurrent=True, **MEMORY), REAL, id="an IMPALA with memory"),
        pytest.param(Vmpo(**SMALL), CHOICE, id="a V-MPO"),
        pytest.param(Awr(capacity=100, min_size=10, **MEMORY), REAL, id="an AWR"),
        pytest.param(Apg(normalise_returns=False, **MEMORY), REAL, id="an APG"),
        pytest.param(Dqn(**SMALL), CHOICE, id="a DQN"),
        pytest.param(Sac(**SMALL), REAL, id="a SAC"),
        pytest.param(
            R2d2(sequence=6, burn_in=3, lstm_size=4, head_size=4, **SMALL), CHOICE, id="an R2D2"
        ),
    ],
)  # fmt: skip
def test_our_agents_hold_the_contract(agent, spec):
    check_agent(agent, spec)


class NotFinite(CountingAgent):
    def init(self, key):
        return super().init(key)._replace(params={"mean": jnp.float32(jnp.nan)})


class OneBuffer(CountingAgent):
    def init(self, key):
        one = jnp.zeros(())
        return super().init(key)._replace(params={"mean": one}, optimizer_state={"seen": one})


class Impure(CountingAgent):
    def act(self, *given, evaluate):
        action, extras, state = super().act(*given, evaluate)
        return action, extras | {"count": extras["count"] + int(HIDDEN.integers(2**30))}, state


class LooksAround(CountingAgent):
    def act(self, params, actor_state, timestep, keys, evaluate):
        shown = timestep.observation - timestep.observation.mean(0, keepdims=True)
        return super().act(
            params, actor_state, timestep._replace(observation=100 * shown), keys, evaluate
        )


class Remembers(CountingAgent):
    def act(self, params, actor_state, timestep, keys, evaluate):
        never = timestep._replace(first=jnp.zeros_like(timestep.first))
        return super().act(params, actor_state, never, keys, evaluate)


class LearnsFromResets(CountingAgent):
    def prepare(self, state, trajectory, key):
        batch = super().prepare(state, trajectory, key)
        return batch | {"action": trajectory.action}

    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return {"mean": grads["mean"] - minibatch["action"].mean()}, output


class NoWeight(CountingAgent):
    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(weight=jnp.float32(1))


class BatchWeight(CountingAgent):
    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(weight=jnp.float32(self.experience.batch))


class NoChoice(CountingAgent):
    def act(self, *given, evaluate):
        action, extras, state = super().act(*given, evaluate)
        return action + 6, extras, state


class LooksAroundInEvaluations(LooksAround):
    def act(self, params, actor_state, timestep, keys, evaluate):
        if evaluate:
            return super().act(params, actor_state, timestep, keys, evaluate)
        return CountingAgent.act(self, params, actor_state, timestep, keys, evaluate)


class ByPlace(CountingAgent):
    def actor_state(self, env_ids, num_envs):
        state = super().actor_state(env_ids, num_envs)
        return state._replace(core=state.core + jnp.arange(len(env_ids)))


class NeverCounts(CountingAgent):
    def apply(self, state, grads, output):
        return super().apply(state, grads, output)._replace(updates=state.updates)


class CountsToOne(CountingAgent):
    def apply(self, state, grads, output):
        return super().apply(state, grads, output)._replace(updates=jnp.int32(1))


class BeginsAgain(CountingAgent):
    def apply(self, state, grads, output):
        return super().apply(state, grads, output)._replace(progress=jnp.float32(0))


class SetsProgress(CountingAgent):
    def apply(self, state, grads, output):
        return super().apply(state, grads, output)._replace(progress=state.progress + 1)


class NeverLearns(CountingAgent):
    def apply(self, state, grads, output):
        return super().apply(state, grads, output)._replace(params=state.params)


class NoPriority(CountingReplayAgent):
    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(priorities=0 * output.priorities)


class EndlessPriority(CountingReplayAgent):
    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(priorities=output.priorities.at[0].set(jnp.inf))


class NoFirstPriority(CountingReplayAgent):
    def initial_priorities(self, timesteps, extras):
        return 0 * super().initial_priorities(timesteps, extras)


class WarmsUp(CountingAgent):
    """Its first two steps are of size 0, as those of an optimizer whose own count begins then."""

    def init(self, key):
        state = super().init(key)
        return state._replace(optimizer_state=(state.optimizer_state, jnp.int32(0)))

    def apply(self, state, grads, output):
        own, made = state.optimizer_state
        after = super().apply(state._replace(optimizer_state=own), grads, output)
        params = jax.tree.map(
            lambda old, new: jnp.where(made < 2, old, new), state.params, after.params
        )
        return after._replace(params=params, optimizer_state=(after.optimizer_state, made + 1))


@dataclasses.dataclass(frozen=True)
class ByReward(Ppo):
    """Its networks see the last reward, without a memory."""

    def act(self, params, actor_state, timestep, keys, evaluate):
        return super().act(params, actor_state, shown(timestep), keys, evaluate)

    def gradients(self, state, minibatch, key):
        return super().gradients(state, minibatch, key)

    def prepare(self, state, trajectory, key):
        seen = trajectory._replace(timesteps=shown(trajectory.timesteps))
        return super().prepare(state, seen, key)


def shown(timestep):
    seen = timestep.observation.at[..., 0].add(timestep.reward)
    return timestep._replace(observation=seen)


class Crossing(CountingReplayAgent):
    """Its items go on into the next episode."""

    crosses = True

    @property
    def experience(self):
        own = super().experience
        return dataclasses.replace(
            own, period=2, sequence=4, burn_in=0, cross_episodes=self.crosses
        )


class Cut(Crossing):
    crosses = False


def test_items_go_on_through_resets_where_they_do_in_the_fused_runtime():
    inner = {}
    for kind in (Crossing, Cut):
        trainer = ReplayTrainer(bind(kind(actions=7), CHOICE), noise, 40, 3).train(learning=False)
        first = np.stack([item.rows.timestep.first for item in trainer.items])
        # A padded row is a reset, too, and none follows it.
        inner[kind] = [rows for rows in first[:, 1:-1] if rows.any() and not rows[-1]]
        assert all(len(each) < 4 + 2 * 2 + 2 for each in trainer._episodes if kind is Crossing)
    assert inner[Crossing] and not inner[Cut]


def noise(num_envs, seed):
    return Noise(CHOICE, num_envs, seed)


def test_steps_that_begin_small_are_right():
    check_agent(WarmsUp(actions=7), CHOICE)


@pytest.mark.slow
def test_networks_may_see_the_last_reward():
    check_agent(ByReward(**SMALL), CHOICE)


def test_agents_of_whole_episodes_are_refused():
    with pytest.raises(SeedbedError, match="Es learns from returns of whole episodes"):
        check_agent(Es(), CHOICE)


def test_other_actions_keep_to_the_bounds():
    bounds = (-1.0, 0.0, -np.inf, -np.inf, -3.4e38), (2.0, np.inf, 5.0, np.inf, 3.4e38)
    low, high = bounds
    check = AgentCheck(
        bind(Ppo(**SMALL), EnvSpec(ArraySpec((2,), "float32"), Box((5,), low, high))), 0
    )
    for action in (np.zeros((1, 1, 5)), np.ones((1, 1, 5)), np.full((1, 1, 5), 0.5)):
        other = check._other_actions(action)
        assert (other != action).all() and (other >= low).all() and (other <= high).all()


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        (NotFinite, r"init returned a number that is not finite \(the learner state.*mean"),
        (OneBuffer, r"init gave .*mean.* and .*seen.* one buffer; copy one"),
        (Impure, "act does something else when it is called again"),
        (LooksAround, "act went wrong: the result for an environment depends on the others"),
        (Remembers, "act went wrong: what it remembers goes on into the next episode"),
        (LearnsFromResets, "gradients went wrong: it learns from rows that are resets"),
        (NoWeight, "gradients gave 1.0 as Output.weight, but .* of 20 rows are valid"),
        (BatchWeight, "gradients gave 4.0 as Output.weight, but .* of 20 rows are valid"),
        (NoChoice, r"act returned an action that is no choice, or a forbidden one \("),
        (LooksAroundInEvaluations, "act went wrong: the result for an environment depends on"),
        (ByPlace, "actor_state went wrong: what an environment begins with depends on its place"),
        (NeverCounts, "apply made `updates` 7 of 7; add one"),
        (CountsToOne, "apply made `updates` 1 of 7; add one"),
        (BeginsAgain, "apply changed `progress`"),
        (SetsProgress, "apply changed `progress`"),
        (NeverLearns, "apply changed no parameter"),
        (NoPriority, "gradients gave the priority 0.0; give finite numbers above 0"),
        (EndlessPriority, "gradients gave the priority inf; give finite numbers above 0"),
        (NoFirstPriority, "initial_priorities gave the priority 0.0; give finite numbers above 0"),
    ],
)
def test_what_is_wrong_with_an_agent_is_named(agent, told):
    with pytest.raises(SeedbedError, match=f"^{agent.__name__}.{told}"):
        check_agent(agent(actions=7), CHOICE)


class Forbidden(Ppo):
    def act(self, params, actor_state, timestep, keys, evaluate):
        seen = timestep.observation
        seen = seen | {ACTION_MASK: jnp.ones_like(seen[ACTION_MASK])}
        return super().act(params, actor_state, timestep._replace(observation=seen), keys, evaluate)


class Unsquashed(Ppo):
    def act(self, *given, evaluate):
        action, extras, state = super().act(*given, evaluate)
        return 2 * action, extras, state


@pytest.mark.slow
def test_actions_beyond_bounds_and_masks_are_named():
    masked = EnvSpec(
        {"x": ArraySpec((2,), "float32"), ACTION_MASK: ArraySpec((3,), "float32")}, Discrete(3)
    )
    check_agent(Ppo(**SMALL), masked)
    with pytest.raises(SeedbedError, match="act returned an action that is no choice, or a forb"):
        check_agent(Forbidden(**SMALL), masked)
    with pytest.raises(
        SeedbedError, match="act returned an action beyond the bounds .*; squash it"
    ):
        check_agent(Unsquashed(**SMALL), REAL)


def test_an_agent_without_a_spec_is_refused():
    with pytest.raises(SeedbedError, match=r"CountingAgent.spec is None; give check_agent a spec"):
        check_agent(CountingAgent())


@dataclasses.dataclass(frozen=True)
class Walk:
    """Walks on a line by what is given, and ends at a distance of 3."""

    episode_steps: int = 20
    frame_skip: int = 1
    spec = EnvSpec(ArraySpec((), "float32"), Box((1,), (-1.0,), (1.0,)))

    def reset(self, key):
        return EnvState.opening(place := 0.1 * jax.random.normal(key), place)

    def step(self, state, action):
        place = self.move(state.inner, action[0])
        return EnvState.after(place, place, -jnp.abs(place), self.over(place))

    def move(self, place, by):
        return place + by

    def over(self, place):
        return jnp.abs(place) > 3


class Grows(Walk):
    def move(self, place, by):
        return place + jnp.sqrt(0.9 - by)

    def over(self, place):
        return False


class Endless(Walk):
    def over(self, place):
        return False


class Far(Walk):
    spec = EnvSpec(ArraySpec((), "float32"), Box((1,), (5.0,), (10.0,)))

    def move(self, place, by):
        return place + 0.1 * jnp.sqrt(9.5 - by)


class Unbounded(Walk):
    """Its bounds are those of float32, as Gymnasium writes that there are none."""

    spec = EnvSpec(ArraySpec((), "float32"), Box((1,), (-3.4e38,), (np.inf,)))


class Random(Walk):
    def move(self, place, by):
        return place + HIDDEN.normal()


class RandomStart(Walk):
    def reset(self, key):
        return EnvState.opening(place := 0 * jax.random.normal(key) + HIDDEN.normal(), place)


class AlwaysFirst(Walk):
    """It passes on the timestep of its reset, as `dataclasses.replace` would."""

    def step(self, state, action):
        after = super().step(state, action)
        return after._replace(timestep=after.timestep._replace(first=state.timestep.first))


class Plain:
    spec, episode_steps, frame_skip = Walk.spec, 1, 1
    reset, step = Walk.reset, Walk.step


@dataclasses.dataclass(frozen=True)
class NoFrames:
    spec, episode_steps = Walk.spec, 1
    reset, step = Walk.reset, Walk.step


class RewardsStart(Walk):
    def reset(self, key):
        state = super().reset(key)
        return state._replace(timestep=state.timestep._replace(reward=jnp.float32(1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needy(Walk):
    length: float


def test_tasks_hold_the_contract():
    check_task(Walk(), steps=50)
    check_task(CartPole(), steps=50)
    check_task(changes.scale_reward(CartPole(), 0.1), steps=50)
    check_task(Unbounded(), steps=50)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (Grows(), "Grows: observation is not finite after 1 steps"),
        (Far(), "Far: observation is not finite"),
        (Endless(episode_steps=0), "Endless: no episode ended in 50 steps of 16 environments"),
        (Random(), "Random.step is not a function of its arguments"),
        (RandomStart(), "RandomStart.reset is not a function of its arguments"),
        (RewardsStart(), "RewardsStart.reset opens an episode with a reward"),
        (AlwaysFirst(), "AlwaysFirst.step leaves `first` set, or sets it: return EnvState.after"),
        (Plain(), "Plain is no dataclass: decorate it"),
        (NoFrames(), "NoFrames has no 'frame_skip'"),
        (Needy(length=1.0), "Needy.length has no default"),
        (changes.scale_reward(Needy(length=1.0), 0.1), "Needy.length has no default"),
    ],
)
def test_what_is_wrong_with_a_task_is_named(task, told):
    with pytest.raises(SeedbedError, match=f"^{told}"):
        check_task(task, steps=50)
