"""An agent whose recurrent state counts steps and whose action is a function of what it sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from seedbed.types import ActorState, EnvSpec, LearnerState, OnPolicy, Output, trajectory_masks


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
