"""Playing a policy: the evaluation that every agent has, and `Policy` for single observations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.ops.counts import next_count
from seedbed.runtime.inference import environment_keys
from seedbed.runtime.stacking import stack_timesteps, zero_timesteps
from seedbed.transport.pool import ActorPool
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    EnvSpec,
    HostEnvConfig,
    SeedbedError,
    Timestep,
    Tree,
)


class Carry(NamedTuple):
    """What a player remembers of B environments."""

    frames: Timestep  # [S, B, ...] the newest last
    actor_state: ActorState  # [B, ...]
    counter: Array  # uint32 [2], a count of steps


Play = Callable[[Tree, Carry, Timestep, Array], tuple[Carry, Tree]]
"""A compiled step of playing: (params, carry, timestep `[B]`, key) -> (carry, action `[B]`)."""

MAX_EPISODE_STEPS = 30_000
"""Steps an episode of evaluation may take on average; Atari's longest has 27,000."""


def compile_play(agent: Agent, frame_stack: int) -> Play:
    """Compiles acting as evaluation does; `agent` is bound. The key is not consumed, but folded."""

    def play(params: Tree, carry: Carry, timestep: Timestep, key: Array) -> tuple[Carry, Tree]:
        frames = jax.tree.map(
            lambda leaf, new: jnp.concatenate([leaf[1:], new[None]]), carry.frames, timestep
        )
        stacked = jax.tree.map(lambda leaf: leaf[0], stack_timesteps(frames, frame_stack))
        num_envs = timestep.first.shape[0]
        env_ids = jnp.arange(num_envs, dtype=jnp.uint32)
        keys = environment_keys(key, env_ids, carry.counter)
        action, _, state = agent.act(params, carry.actor_state, stacked, keys, evaluate=True)
        return Carry(frames, state, next_count(carry.counter)), action

    return jax.jit(play)


class Player:
    """Acts in B environments as evaluation does: recurrent state and frame stack are kept here."""

    def __init__(self, play: Play, params: Tree, carry: Carry, seed: int) -> None:
        """Starts from `carry`; parameters go to the device once."""
        self._play, self._params, self._carry = play, jax.device_put(params), carry
        self._key = jax.random.key(seed)

    def act(self, timestep: Timestep) -> Tree:
        """Chooses actions, numpy `[B, ...]`, for timesteps `[B, ...]`."""
        self._carry, action = self._play(self._params, self._carry, timestep, self._key)
        return jax.tree.map(np.asarray, action)


def empty_carry(agent: Agent, spec: EnvSpec, frame_stack: int, num_envs: int) -> Carry:
    """Makes the memory of a player that has seen nothing; `spec` is of single frames."""
    env_ids = jnp.arange(num_envs, dtype=jnp.uint32)
    frames = zero_timesteps(spec, (frame_stack, num_envs))
    return Carry(frames, agent.actor_state(env_ids, num_envs), jnp.zeros(2, jnp.uint32))


def evaluation_envs(episodes: int) -> int:
    """Chooses how many environments play at once, so that each plays the same number of episodes."""
    return next(n for n in range(min(episodes, 16), 0, -1) if episodes % n == 0)


def evaluation_pool(env: HostEnvConfig, envs: int, seed: int, timeout_s: float) -> ActorPool:
    """Starts the actor process of an evaluation in `envs` environments, which play whole games."""
    whole = env.for_evaluation()
    return ActorPool(whole, actors=1, envs_per_actor=envs, seed=seed, groups=1, timeout_s=timeout_s)


def evaluate(
    *,
    env: HostEnvConfig,
    agent: Agent,
    params: Tree,
    episodes: int,
    seed: int,
    actor_timeout_s: float,
) -> dict[str, Any]:
    """Plays `episodes` whole episodes in an actor process of their own, and summarises raw returns.

    Returns mean, standard deviation, minimum and maximum of the return, the mean length and the number
    of episodes. Raises SeedbedError if one does not end.
    """
    envs = evaluation_envs(episodes)
    with evaluation_pool(env, envs, seed, actor_timeout_s) as pool:
        carry = empty_carry(agent, pool.spec, env.frame_stack, envs)
        player = Player(compile_play(agent, env.frame_stack), params, carry, seed)
        result = play_episodes(pool, player, episodes, threading.Event())
    assert result is not None, "nobody stopped it"
    return result


def play_episodes(
    pool: ActorPool, player: Player, episodes: int, stop: threading.Event
) -> dict[str, Any] | None:
    """Plays an equal number of episodes in each environment of a pool; None if `stop` came first.

    Raises SeedbedError if an environment has not played its episodes within `MAX_EPISODE_STEPS` for each.
    """
    quota = episodes // pool.num_envs
    tally = _Tally(pool.num_envs, quota)
    steps = 0
    while not tally.done and steps < quota * MAX_EPISODE_STEPS:
        if stop.is_set():
            return None
        for group in pool.poll(0.2):
            slot = pool.slots[group]
            timestep = jax.tree.map(np.array, slot.timestep)
            tally.add(timestep)
            jax.tree.map(np.copyto, slot.action, player.act(timestep))
            pool.reply(group)
            steps += 1
    returns, lengths = np.concatenate(tally.returns), np.concatenate(tally.lengths)
    if not tally.done:
        raise SeedbedError(
            f"{episodes - returns.size} of {episodes} episodes of the evaluation did not end within "
            f"{steps:,} steps: give the environment a time limit"
        )
    return {
        "episode_return_mean": float(returns.mean()),
        "episode_return_std": float(returns.std()),
        "episode_return_min": float(returns.min()),
        "episode_return_max": float(returns.max()),
        "episode_length_mean": float(lengths.mean()),
        "episodes": len(returns),
    }


class _Tally:
    """Counts returns until each environment has played its quota; later episodes are ignored."""

    def __init__(self, num_envs: int, quota: int) -> None:
        self.returns: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self._left = np.full(num_envs, quota)
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)

    @property
    def done(self) -> bool:
        return not self._left.any()

    def add(self, timestep: Timestep) -> None:
        self._return = np.where(timestep.first, 0.0, self._return + timestep.reward)
        self._length = np.where(timestep.first, 0, self._length + 1)
        ended = (timestep.terminated | timestep.truncated) & (self._left > 0)
        self._left[ended] -= 1
        self.returns.append(self._return[ended])
        self.lengths.append(self._length[ended])


class Policy:
    """A trained policy for people's own loops: give it observations, it remembers what it must."""

    def __init__(
        self, agent: Agent, spec: EnvSpec, frame_stack: int, params: Tree, seed: int = 0
    ) -> None:
        """Holds a bound agent and its parameters; `spec` is of single frames."""
        self.agent, self.spec, self.params = agent, spec, params
        self._frame_stack, self._seed = frame_stack, seed
        self._play = compile_play(agent, frame_stack)
        self._player: Player | None = None
        self._first = True
        self._batch: int | None = None

    def reset(self) -> None:
        """Forgets the past: the next observation opens an episode."""
        self._first = True

    def act(
        self, observation: Tree, first: Array | None = None, reward: Array | None = None
    ) -> Tree:
        """Chooses the action for one observation, or actions `[B, ...]` for a batch `[B, ...]`.

        `first` (a bool, or bools `[B]`) marks observations that open an episode; without it only the one
        after construction or `reset` does. `reward` (a number, or `[B]`) is what the last action earned:
        an agent with a memory takes it in, and others pass it over. Raises ValueError if the shape fits
        neither one nor a batch.
        """
        batch = self._batch_size(observation)
        lead = (lambda leaf: leaf) if batch is not None else (lambda leaf: np.asarray(leaf)[None])
        num_envs = 1 if batch is None else batch
        if self._player is None or self._batch != num_envs:
            carry = empty_carry(self.agent, self.spec, self._frame_stack, num_envs)
            self._player = Player(self._play, self.params, carry, self._seed)
            self._batch, self._first = num_envs, True
        opening = np.broadcast_to(np.asarray(first if first is not None else self._first), num_envs)
        self._first = False
        dtypes = jax.tree.map(lambda leaf: np.dtype(leaf.dtype), self.spec.observation)
        observation = jax.tree.map(lambda leaf, d: np.asarray(lead(leaf), d), observation, dtypes)
        flag = np.zeros(num_envs, bool)
        earned = np.zeros(num_envs, np.float32)
        if reward is not None:
            earned = np.where(opening, earned, np.asarray(reward, np.float32))
        timestep = Timestep(observation, earned, flag, flag, np.array(opening))
        action = self._player.act(timestep)
        return action if batch is not None else jax.tree.map(lambda leaf: leaf[0], action)

    def _batch_size(self, observation: Tree) -> int | None:
        """Returns the batch size, or None for a single observation."""
        want = jax.tree.leaves(self.spec.observation)[0].shape
        got = np.shape(jax.tree.leaves(observation)[0])
        if got == want:
            return None
        if got[1:] == want:
            return got[0]
        raise ValueError(
            f"observation has shape {got}: expected {want}, or {('B', *want)} for a batch"
        )
