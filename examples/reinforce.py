"""An agent of your own: REINFORCE (Williams 1992) with a value as its baseline (docs/write-an-agent.md).

Start in this folder. `seedbed train CartPole-v1 --agent reinforce:Reinforce` steps environments of the host;
`seedbed train cartpole --agent reinforce:Reinforce` is fused.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from seedbed.ops import distributions, losses, returns
from seedbed.types import ActorState, EnvSpec, LearnerState, OnPolicy, Output, trajectory_masks


class Network(nn.Module):
    """A network from observations `[..., D]` to logits `[..., actions]` and values `[...]`."""

    actions: int

    @nn.compact
    def __call__(self, x):
        policy, value = (nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))) for _ in range(2))
        return nn.Dense(self.actions)(policy), nn.Dense(1)(value)[..., 0]


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """The agent, for vectors and Discrete actions; its fields are options, `--agent.NAME`."""

    spec: EnvSpec | None = None  # the runtime fills it before it calls a method
    unroll: int = 32
    batch: int = 32
    gamma: float = 0.99
    learning_rate: float = 3e-3
    epochs = minibatches = 1  # without a type: no options, the gradient is of the policy that acted

    experience = property(lambda self: OnPolicy(self.unroll, self.batch, synchronous=True))

    def init(self, key):
        params = Network(self.spec.action.n).init(key, jnp.zeros(self.spec.observation.shape))
        moments = optax.scale_by_adam().init(params)
        return LearnerState(params, moments, updates=jnp.int32(0), progress=jnp.float32(0))

    def actor_state(self, env_ids, num_envs):
        return ActorState(core=(), per_env=())

    def act(self, params, actor_state, timestep, keys, evaluate):
        logits, _ = Network(self.spec.action.n).apply(params, timestep.observation)
        drawn = logits.argmax(-1) if evaluate else jax.vmap(jax.random.categorical)(keys, logits)
        return drawn.astype(jnp.int32), (), actor_state

    def prepare(self, state, trajectory, key):
        steps, masks = trajectory.timesteps, trajectory_masks(trajectory.timesteps, self.gamma, 1.0)
        _, values = Network(self.spec.action.n).apply(state.params, steps.observation)
        rewards = (1 - self.gamma) * steps.reward[1:]  # returns are then as large as rewards were
        monte_carlo = jax.vmap(returns.lambda_returns, 1, 1)
        targets = monte_carlo(values[1:], rewards, masks.discount, masks.trace)
        return steps.observation[:-1], trajectory.action, targets, values[:-1], masks.valid

    def gradients(self, state, minibatch, key):
        return jax.grad(self.loss, has_aux=True)(state.params, *minibatch)

    def loss(self, params, observation, action, targets, baseline, valid):
        logits, values = Network(self.spec.action.n).apply(params, observation)
        log_prob = distributions.Categorical(logits).log_prob(action)
        policy_rows = losses.policy_gradient_losses(log_prob, targets - baseline)
        loss = losses.masked_mean(policy_rows + losses.value_losses(values, targets), valid)
        return loss, Output({"loss/total": loss}, weight=valid.sum(dtype=jnp.float32))

    def clip_gradient(self, grads):
        return grads

    def apply(self, state, grads, output):
        changes, moments = optax.scale_by_adam().update(grads, state.optimizer_state)
        rate = self.learning_rate * (1 - state.progress)
        params = optax.tree.add_scale(state.params, -rate, changes)
        return state._replace(params=params, optimizer_state=moments, updates=state.updates + 1)
