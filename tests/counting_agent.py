"""An agent whose recurrent state counts steps and whose action is a function of what it sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.testing import counting
from seedbed.types import (
    ActorState,
    EnvSpec,
    LearnerState,
    OnPolicy,
    Output,
    Replay,
    trajectory_masks,
)


@dataclasses.dataclass(frozen=True)
class CountingAgent:
    """Acts `sum(observation) % n`; counts the steps since `first`; learns the mean reward."""

    spec: EnvSpec | None = None
    unroll: int = 5
    batch: int = 4
    epochs: int = 1
    minibatches: int = 1
    actions: int = 7
    synchronous: bool = False
    poison_after: int = -1  # updates after which the loss is NaN; -1 for never

    @property
    def experience(self):
        return OnPolicy(self.unroll, self.batch, self.synchronous)

    def init(self, key):
        del key
        return LearnerState(
            params={"mean": jnp.zeros(())},
            optimizer_state={"seen": jnp.zeros(())},
            updates=jnp.int32(0),
            progress=jnp.float32(0),
        )

    def actor_state(self, env_ids, num_envs):
        del num_envs
        return ActorState(jnp.zeros(env_ids.shape[0], jnp.int32), env_ids.astype(jnp.int32))

    def act(self, params, actor_state, timestep, keys, evaluate):
        del params, evaluate
        count = jnp.where(timestep.first, 0, actor_state.core)
        leaves = jax.tree.leaves(timestep.observation)
        total = sum(
            jnp.sum(leaf.astype(jnp.float32).reshape(leaf.shape[0], -1), axis=1) for leaf in leaves
        )
        action = (total.astype(jnp.int32) % self.actions).astype(jnp.int32)
        draw = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
        extras = {"count": count, "env": actor_state.per_env, "draw": draw}
        return action, extras, ActorState(count + 1, actor_state.per_env)

    def prepare(self, state, trajectory, key):
        del state, key
        valid = trajectory_masks(trajectory.timesteps, 1.0, 1.0).valid
        return {"reward": trajectory.timesteps.reward[1:], "valid": valid}

    def gradients(self, state, minibatch, key):
        del key
        weight = jnp.sum(minibatch["valid"].astype(jnp.float32))

        def loss(params):
            error = jnp.where(minibatch["valid"], minibatch["reward"] - params["mean"], 0.0)
            return jnp.sum(0.5 * error**2) / jnp.maximum(weight, 1.0)

        value, grads = jax.value_and_grad(loss)(state.params)
        if self.poison_after >= 0:
            value = jnp.where(state.updates >= self.poison_after, jnp.nan, value)
        return grads, Output({"loss/total": value}, weight)

    def clip_gradient(self, grads):
        return grads

    def apply(self, state, grads, output):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
        seen = state.optimizer_state["seen"] + output.weight
        return state._replace(
            params=params, optimizer_state={"seen": seen}, updates=state.updates + 1
        )


@dataclasses.dataclass(frozen=True)
class CountingReplayAgent(CountingAgent):
    """The counting agent, learning from replayed sequences."""

    sequence: int = 6
    period: int = 6
    burn_in: int = 3
    capacity: int = 150
    min_size: int = 20
    ratio: float = 0.5
    actions: int = counting.NUM_ACTIONS
    poison_from: int = 10**6  # the episode from which priorities of new items are 0

    @property
    def experience(self):
        return Replay(
            batch=self.batch, sequence=self.sequence, period=self.period, burn_in=self.burn_in,
            capacity=self.capacity, min_size=self.min_size, ratio=self.ratio,
            priority_exponent=0.9, importance_exponent=0.6,
        )  # fmt: skip

    def initial_priorities(self, timesteps, extras):
        poisoned = timesteps.reward.max(0) > 1000 * self.poison_from
        return jnp.where(poisoned, 0.0, 1.0 + extras["count"].max(0).astype(jnp.float32))

    def prepare(self, state, trajectory, key):
        return super().prepare(state, trajectory, key) | {"importance": trajectory.importance[None]}

    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(priorities=1.0 / minibatch["importance"][0])


def check_item(steps, action, extras, core):
    """Checks that an item `[T + 1, ...]` is a piece of one episode, padded on either side."""
    real = np.flatnonzero(steps.observation[:, counting.ENV])
    begin, end = real[0], real[-1]
    assert len(real) == end - begin + 1 and end >= begin + 1
    padding = np.ones(len(steps.first), bool)
    padding[real] = False
    assert (steps.first == (padding | (steps.observation[:, counting.STEP] == 0))).all()
    assert not (steps.terminated | steps.truncated | (steps.reward != 0))[padding].any()
    env, episode, opening, _ = steps.observation[begin].tolist()
    if begin == 0:
        assert core == opening or opening == 0
    else:
        assert opening == 0 and begin == 3, (
            "only what comes before an episode is padded at the front"
        )
    for row in range(begin, end):
        step = opening + row - begin
        assert extras["count"][row] == step
        expected = [env, episode, step + 1, int(action[row])]
        assert steps.observation[row + 1].tolist() == expected
        assert steps.reward[row + 1] == 1000 * episode + step + 1
    length = counting.episode_length(env, episode, 7)
    over = (steps.terminated | steps.truncated)[end]
    assert over == (opening + end - begin == length)
    assert end == len(steps.first) - 1 or over, "padded at the end, but the episode goes on"
    return (env, episode, opening + max(3 - begin, 0))
