"""A first analytic policy gradient: a return differentiated through the physics of two poles on a cart.

`python examples/apg_pendulum.py [SEED]`: an actor climbs the gradient of its discounted return over 12 steps,
with a critic's value at their end (SHAC, Xu et al. 2022, without noise). docs/gradients.md has the result.
"""

import sys

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seedbed import simd
from seedbed.envs.device import wrappers
from seedbed.envs.device.locomotion.inverted_double_pendulum import InvertedDoublePendulum
from seedbed.types import trajectory_masks

BATCH, HORIZON, UPDATES, EPOCHS = 16, 12, 1_000, 8  # 192,000 environment steps
GAMMA, LAMBDA, RATE, REWARD_SCALE = 0.99, 0.95, 3e-3, 0.1

# Short episodes: most of what there is to learn is how to catch the poles.
task = wrappers.auto_reset(wrappers.time_limit(InvertedDoublePendulum(), 200))
reset, step = simd.vectorize(task.reset), simd.vectorize(task.step)
zero = nn.Dense(1, kernel_init=nn.initializers.zeros)
network = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, zero])
adam = [optax.adam(optax.cosine_decay_schedule(RATE, n)) for n in (UPDATES, UPDATES * EPOCHS)]
optimizers = optax.chain(optax.clip_by_global_norm(1.0), adam[0]), adam[1]


def act(actor, observation):
    return jnp.tanh(network.apply(actor, observation))


def targets(critic, steps, trace):
    """Lambda-returns of all rows `[HORIZON, B]`, and which rows are not openings of episodes."""
    masks = trajectory_masks(steps, GAMMA, trace)
    values = network.apply(critic, steps.observation[1:])[..., 0]
    offset = REWARD_SCALE * steps.reward[1:] + masks.discount * (1 - masks.trace) * values
    rows = offset, masks.discount * masks.trace
    _, total = jax.lax.scan(lambda y, x: (x[0] + x[1] * y,) * 2, values[-1], rows, reverse=True)
    return total, masks.valid


def actor_loss(actor, critic, states):
    """The negative return from the start of the rollout and of each episode in it; and the rollout."""

    def one(states, _):
        states = step(states, act(actor, states.timestep.observation))
        return states, states.timestep

    last, later = jax.lax.scan(one, states, length=HORIZON)
    steps = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), states.timestep, later)
    total, valid = targets(critic, steps, 1.0)
    return -(total * valid * steps.first[:-1].at[0].set(True)).sum() / BATCH, (last, steps)


def critic_loss(critic, observation, total, valid):
    return jnp.square(network.apply(critic, observation)[..., 0] - total).mean(where=valid)


@jax.jit
def update(params, moments, states):
    (actor, critic), (actor_moments, critic_moments) = params, moments
    slope, (states, steps) = jax.grad(actor_loss, has_aux=True)(actor, critic, states)
    change, actor_moments = optimizers[0].update(slope, actor_moments)
    total, valid = targets(critic, steps, LAMBDA)
    for _ in range(EPOCHS):
        slope = jax.grad(critic_loss)(critic, steps.observation[:-1], total, valid)
        better, critic_moments = optimizers[1].update(slope, critic_moments)
        critic = optax.apply_updates(critic, better)
    return (optax.apply_updates(actor, change), critic), (actor_moments, critic_moments), states


def play(actor, env, seed):
    """The return of an episode in Gymnasium's own task, on MuJoCo."""
    (observation, _), total, ended, policy = env.reset(seed=seed), 0.0, False, jax.jit(act)
    while not ended:
        action = policy(actor, observation.astype(np.float32))
        observation, reward, terminated, truncated, _ = env.step(np.asarray(action))
        total, ended = total + reward, terminated or truncated
    return total


if __name__ == "__main__":
    keys = jax.random.split(jax.random.key(int(sys.argv[1]) if len(sys.argv) > 1 else 0), 2 + BATCH)
    params = tuple(network.init(k, jnp.zeros(task.spec.observation.shape)) for k in keys[:2])
    moments = tuple(o.init(p) for o, p in zip(optimizers, params, strict=True))
    states, env = reset(keys[2:]), gymnasium.make(InvertedDoublePendulum.gymnasium_id)
    for i in range(1, UPDATES + 1):
        params, moments, states = update(params, moments, states)
        if i % 200 == 0:
            scores = [play(params[0], env, seed) for seed in range(10)]
            mean, worst = np.mean(scores), min(scores)
            print(f"{i * BATCH * HORIZON:,} steps: mean {mean:,.0f}, worst {worst:,.0f}")
