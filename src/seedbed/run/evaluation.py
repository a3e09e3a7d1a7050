"""Playing a policy: evaluation in host environments, shared by all agents, and policies for users' loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.actors.local import local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.arguments import refusal
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.machine import require_linux
from seedbed.ops.keys import environment_keys, later
from seedbed.run.hoisting import Hoisted
from seedbed.run.measures import successes
from seedbed.run.stacking import act_on_frames, zero_timesteps
from seedbed.types import ActorState, Agent, Array, EnvSpec, SeedbedError, Timestep, Tree


class PlayerState(NamedTuple):
    """The state that a player keeps of B environments between steps."""

    frames: Timestep  # [S, B, ...] single frames, the newest last
    actor_state: ActorState  # [B, ...]
    counter: Array  # uint32 [2], the count of steps so far


Play: TypeAlias = Hoisted
"""A step of playing: (B, `Derived`, state, timestep `[B, ...]`, key) -> (state, action `[B, ...]`)."""

MAX_EPISODE_STEPS = 200_000
"""Steps of an evaluation after which one of its episodes must have ended. Atari's longest have 27,000."""


def compile_play(agent: Agent) -> Play:
    """Returns a function that acts with the evaluation policy of a bound agent.

    It is compiled at its first call for each B. It derives keys from its key, environment and step, and does
    not consume the key.
    """

    def play(
        params: Tree, before: PlayerState, timestep: Timestep, key: Array
    ) -> tuple[PlayerState, Tree]:
        frames = jax.tree.map(
            lambda leaf, new: jnp.concatenate([leaf[1:], new[None]]), before.frames, timestep
        )
        env_ids = jnp.arange(timestep.first.shape[0], dtype=jnp.uint32)
        keys = environment_keys(key, env_ids, before.counter)
        action, _, state = act_on_frames(
            agent, params, before.actor_state, frames, keys, evaluate=True
        )
        return PlayerState(frames, state, later(before.counter, 1)), action

    return Hoisted(play)


def greedily(agent: Agent) -> Agent:
    """Returns the agent whose evaluations take the best action; raises SeedbedError if there is none."""
    of = getattr(agent, "greedy", None)
    if of is None:
        raise SeedbedError(
            f"{type(agent).__name__} has no method greedy, which returns the agent that never draws an "
            "action in evaluations: add it, or leave out greedy"
        )
    return cast(Agent, of())


class Player:
    """A player of B environments that acts as in evaluations, and keeps recurrent state and frame stack.

    Use each from one thread at a time.
    """

    def __init__(self, play: Play, params: Tree, state: PlayerState, seed: int) -> None:
        """Starts from `state`, and copies the parameters to the device once."""
        self._play, self.state = play, state
        self._params = play.derive(jax.device_put(params))
        self._key = jax.random.key(seed)

    def act(self, timestep: Timestep) -> Tree:
        """Returns actions, numpy `[B, ...]`, for timesteps `[B, ...]`, and updates the state.

        Call from one thread at a time.
        """
        size = len(timestep.first)
        self.state, action = self._play(size, self._params, self.state, timestep, self._key)
        return jax.tree.map(np.asarray, action)


def initial_player(agent: Agent, spec: EnvSpec, frame_stack: int, num_envs: int) -> PlayerState:
    """Returns the state of a player that has seen nothing. `agent` is bound; `spec` is of single frames."""
    env_ids = jnp.arange(num_envs, dtype=jnp.uint32)
    frames = zero_timesteps(spec, (frame_stack, num_envs))
    return PlayerState(frames, agent.actor_state(env_ids, num_envs), jnp.zeros(2, jnp.uint32))


def evaluation_envs(episodes: int) -> int:
    """Returns the number of environments that play at once: the largest divisor of `episodes` up to 16."""
    return next(n for n in range(min(episodes, 16), 0, -1) if episodes % n == 0)


def evaluation_pool(env: HostEnvConfig, envs: int, seed: int, timeout_s: float) -> ActorPool:
    """Starts the actor process of an evaluation: one group of `envs` environments with whole episodes."""
    launcher = Launcher(env=env.for_evaluation(), envs_per_group=envs, groups=1, seed=seed)
    return local_pool(launcher, actors=1, timeout_s=timeout_s)


def evaluate(
    *,
    env: HostEnvConfig,
    agent: Agent,
    params: Tree,
    episodes: int,
    seed: int,
    actor_timeout_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Plays `episodes` whole episodes with a bound agent, in an actor process of its own.

    Returns the mean, standard deviation, minimum and maximum of the raw return, the mean length and the
    number of episodes. Calls `tell` with notices of the actor. Raises SeedbedError if an episode does not
    end, or if the actor fails for good.
    """
    require_linux("an environment of the host", "evaluate on a Linux machine")
    envs = evaluation_envs(episodes)
    with evaluation_pool(env, envs, seed, actor_timeout_s) as pool:
        state = initial_player(agent, pool.spec, env.frame_stack, envs)
        player = Player(compile_play(agent), params, state, seed)
        result = play_episodes(pool, player, episodes, threading.Event())
    for notice in pool.take_notices():
        tell(notice)
    assert result is not None, "nobody stopped it"
    return result


def play_episodes(
    pool: ActorPool, player: Player, episodes: int, stop: threading.Event
) -> dict[str, Any] | None:
    """Plays `episodes // B` episodes in each of the B environments of a pool, which must have one group.

    Returns a summary as `evaluate` does, or None if `stop` was set first. Raises SeedbedError if none of the
    episodes that are left ends within `MAX_EPISODE_STEPS`. No other thread may poll the pool meanwhile.
    """
    quota = episodes // pool.num_envs
    tally = _Tally(pool.num_envs, quota)
    steps = 0  # since an episode has ended
    while not tally.done and steps < MAX_EPISODE_STEPS:
        if stop.is_set():
            return None
        for group in pool.poll(0.2):
            slot = pool.slots[group]
            timestep = jax.tree.map(np.array, slot.timestep)
            steps = 0 if tally.add(timestep, slot.success) else steps + 1
            jax.tree.map(np.copyto, slot.action, player.act(timestep))
            pool.reply(group)
    returns, lengths = np.concatenate(tally.returns), np.concatenate(tally.lengths)
    if not tally.done:
        raise SeedbedError(
            f"{episodes - returns.size} of {episodes} episodes of the evaluation did not end, none within "
            f"{steps:,} steps: give the environment a time limit, of fewer steps"
        )
    told = np.array(tally.successes)
    return summary_of(returns, lengths, {"success": told} if told.size else None)


def summary_of(
    returns: np.ndarray, lengths: np.ndarray, sums: Mapping[str, np.ndarray] | None = None
) -> dict[str, Any]:
    """Returns the metrics of an evaluation from the raw returns and the lengths of its episodes.

    `sums` are the environment's metrics [episodes], summed over each episode, by name.
    """
    told = {f"episode_{name}_mean": float(x.mean()) for name, x in sorted((sums or {}).items())}
    # An environment's own metric `return` or `length` gives way.
    return told | {
        "episode_return_mean": float(returns.mean()),
        "episode_return_std": float(returns.std()),
        "episode_return_min": float(returns.min()),
        "episode_return_max": float(returns.max()),
        "episode_length_mean": float(lengths.mean()),
        "episodes": len(returns),
    }


class _Tally:
    """The returns and lengths of the first `quota` episodes of each environment; later ones are ignored."""

    def __init__(self, num_envs: int, quota: int) -> None:
        self.returns: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.successes: list[float] = []  # of those episodes that told of it
        self._left = np.full(num_envs, quota)
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)

    @property
    def done(self) -> bool:
        return not self._left.any()

    def add(self, timestep: Timestep, success: Array) -> bool:
        """Adds a step; returns whether it has ended an episode that counts."""
        self._return = np.where(timestep.first, 0.0, self._return + timestep.reward)
        self._length = np.where(timestep.first, 0, self._length + 1)
        ended = (timestep.terminated | timestep.truncated) & (self._left > 0)
        self._left[ended] -= 1
        self.returns.append(self._return[ended])
        self.lengths.append(self._length[ended])
        self.successes += successes(success[ended])
        return bool(ended.any())


class SpecPolicy:
    """A trained policy for users' own loops, on arrays of the environment's spec.

    It keeps recurrent state and frame stack by itself. Use each from one thread at a time.
    """

    def __init__(
        self, agent: Agent, spec: EnvSpec, frame_stack: int, params: Tree, seed: int = 0
    ) -> None:
        """Keeps a bound agent and its parameters. `spec` is of single frames."""
        self.agent, self.spec, self.params = agent, spec, params
        self._frame_stack, self._seed = frame_stack, seed
        self._players: dict[bool, Player] = {}
        self._state: PlayerState | None = None
        self._first = True
        self._batch: int | None = None

    def reset(self) -> None:
        """Makes the next observation open an episode, unless `act` gets `first`.

        Call from one thread at a time.
        """
        self._first = True

    def act(
        self,
        observation: Tree,
        first: Array | None = None,
        reward: Array | None = None,
        greedy: bool = False,
    ) -> Tree:
        """Returns the action for one observation, or actions `[B, ...]` for a batch `[B, ...]`.

        `first` (a bool, or bools `[B]`) marks observations that open an episode. Without it, only the first
        observation after construction or `reset`, or after a change of B, does. `reward` (a number, or `[B]`)
        is the reward of the last action, which agents with a memory need within an episode. With `greedy`,
        the action is the best by the policy, and none is drawn. Raises SeedbedError if a shape or a dtype
        fits neither one observation nor a batch, or if a reward is not finite, or missing. Call from one
        thread at a time.
        """
        batch = self._batch_size(observation)
        lead = (lambda leaf: leaf) if batch is not None else (lambda leaf: np.asarray(leaf)[None])
        num_envs = 1 if batch is None else batch
        if self._state is None or self._batch != num_envs:
            self._state = initial_player(self.agent, self.spec, self._frame_stack, num_envs)
            self._batch, self._first = num_envs, True
        opening = _per_env("first", self._first if first is None else first, num_envs, bool)
        if reward is None and not opening.all() and jax.tree.leaves(self._state.actor_state.core):
            raise SeedbedError(
                f"act: reward is None, but {type(self.agent).__name__} has a memory, which sees the reward "
                "of the last action: give it, as in act(observation, reward=reward)"
            )
        earned = _per_env("reward", 0.0 if reward is None else reward, num_envs, np.float32)
        self._first = False
        dtypes = jax.tree.map(lambda leaf: np.dtype(leaf.dtype), self.spec.observation)
        observation = jax.tree.map(lambda leaf, d: np.asarray(lead(leaf), d), observation, dtypes)
        flag = np.zeros(num_envs, bool)
        earned = np.where(opening, np.float32(0), earned)
        timestep = Timestep(observation, earned, flag, flag, opening)
        player = self._player(greedy)
        player.state = self._state
        action = player.act(timestep)
        self._state = player.state
        return action if batch is not None else jax.tree.map(lambda leaf: leaf[0], action)

    def _player(self, greedy: bool) -> Player:
        """Returns the player of one of the two ways to act, made at its first use."""
        if greedy not in self._players:
            play = compile_play(greedily(self.agent) if greedy else self.agent)
            assert self._state is not None, "act has made it"
            self._players[greedy] = Player(play, self.params, self._state, self._seed)
        return self._players[greedy]

    def _batch_size(self, observation: Tree) -> int | None:
        """Returns the batch size, or None for one observation; raises SeedbedError if neither fits."""
        want = jax.tree.leaves(self.spec.observation)[0].shape
        got = np.shape(jax.tree.leaves(observation)[0])
        if got == want:
            return None
        if got[1:] == want:
            return got[0]
        raise SeedbedError(
            f"observation has shape {got}: expected {want}, or {('B', *want)} for a batch"
        )


def _per_env(name: str, value: Array, size: int, dtype: type) -> np.ndarray:
    """Returns one value for each of `size` environments; raises SeedbedError if it is no such array."""
    kinds, what = ("b", "a bool") if dtype is bool else ("fiub", "a finite number")
    remedy = f"give {what}, or an array of shape ({size},)"
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise refusal(f"act: {name}", value, remedy) from error
    if given.dtype.kind not in kinds or given.shape not in ((), (size,)):
        raise refusal(f"act: {name}", value, remedy)
    with np.errstate(over="ignore"):
        cast = np.array(np.broadcast_to(given, size), dtype)
    if not np.isfinite(cast).all():
        raise refusal(f"act: {name}", given.tolist(), remedy)
    return cast
