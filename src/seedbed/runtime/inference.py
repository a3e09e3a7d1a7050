"""Batched acting on one device: actor state, frame stacks and unrolls stay there between steps."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.ops.counts import fold_count
from seedbed.runtime.stacking import stack_timesteps, zero_timesteps
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    EnvSpec,
    OnPolicy,
    Timestep,
    Trajectory,
    Tree,
    action_array,
    learns_from_replay,
)

ROWS = 16
"""Steps of timesteps that are held where they go to replay: enough for their moving to be rare."""

Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""


class Unroll(NamedTuple):
    """A completed unroll of one group, unstacked: what `to_trajectory` needs."""

    timesteps: Timestep  # [S - 1 + T + 1, B, ...] single frames
    action: Tree  # [T, B, ...]
    extras: Tree  # [T, B, ...]
    actor_state: ActorState  # [B, ...] before acting on row 0
    params_version: Tree  # [T, B] int32; () from replay
    importance: Tree = ()  # [B] float32 from replay


class Acted(NamedTuple):
    """What acting on k groups gave; of `extras` and `core` only what replay keeps, else ()."""

    action: Tree  # [k, n, ...]
    extras: Tree  # [k, n, ...]
    core: Tree  # [k, n, ...] before acting


class Kept(NamedTuple):
    """What an unroll has besides its timesteps, where the learner takes it from this device."""

    action: Tree  # [G, T, n, ...]
    extras: Tree  # [G, T, n, ...]
    params_version: Array  # [G, T, n] int32
    start_state: ActorState  # [G, n, ...] before row 0


class Store(NamedTuple):
    """Device memory of G groups of n environments; row R of unrolls is T + 1 with S - 1 frames before."""

    timesteps: Timestep  # [G, S - 1 + T + 1, n, ...]
    actor_state: ActorState  # [G, n, ...]
    kept: Kept | tuple[()]  # () where experience goes to replay on the host


class Calls(NamedTuple):
    """What one inference call handles: k groups, padded with group id G, whose writes are dropped."""

    timestep: Timestep  # [k, n, ...]
    group: Array  # [k] int32
    row: Array  # [k] int32, the row of the unroll that this timestep fills
    counter: Array  # uint32 [k, 2], counts of the groups' steps so far; they make the keys


def to_trajectory(unroll: Unroll, frame_stack: int) -> Trajectory:
    """Stacks frames and so turns an unroll into what agents learn from."""
    timesteps = stack_timesteps(unroll.timesteps, frame_stack)
    return Trajectory(timesteps, *unroll[1:])


def environment_keys(run_key: Array, env_ids: Array, step: Array) -> Array:
    """Makes one key per environment, `[B]`, that depends on nothing but (run, environment, step).

    `step` is a count, uint32 `[2]`.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(fold_count(run_key, step), env_ids)


def make_store(
    agent: Agent, spec: EnvSpec, frame_stack: int, group_envs: np.ndarray, num_envs: int
) -> Store:
    """Allocates the store for groups of environments `group_envs` `[G, n]` out of `num_envs`."""
    groups, size = group_envs.shape
    unroll = rows_of(agent)
    params = jax.eval_shape(agent.init, jax.random.key(0)).params
    state = agent.actor_state(jnp.asarray(group_envs.reshape(-1)), num_envs)
    timestep = stack_timesteps(zero_timesteps(spec, (frame_stack, groups * size)), frame_stack)
    timestep = jax.tree.map(lambda leaf: leaf[0], timestep)
    keys = jax.random.split(jax.random.key(0), groups * size)
    act = functools.partial(agent.act, evaluate=False)
    _, extras, _ = jax.eval_shape(act, params, state, timestep, keys)
    action = action_array(spec.action)

    def rows(leaf: Array) -> Array:
        return jnp.zeros((groups, unroll, size, *leaf.shape[1:]), leaf.dtype)

    state = jax.tree.map(lambda leaf: leaf.reshape(groups, size, *leaf.shape[1:]), state)
    timesteps = zero_timesteps(spec, (groups, frame_stack + unroll, size))
    if learns_from_replay(agent):
        return Store(timesteps, state, ())
    kept = Kept(
        action=jnp.zeros((groups, unroll, size, *action.shape), action.dtype),
        extras=jax.tree.map(rows, extras),
        params_version=jnp.zeros((groups, unroll, size), jnp.int32),
        start_state=state,
    )
    return Store(timesteps, state, kept)


def rows_of(agent: Agent) -> int:
    """Steps between two moves of the timesteps on the device: an unroll, where experience is one."""
    experience = agent.experience
    return experience.unroll if isinstance(experience, OnPolicy) else ROWS


def _newest(timesteps: Timestep, group: Array, row: Array, frame_stack: int) -> Timestep:
    """Reads row `row` `[k]` of each of `group` `[k]` with its frames stacked; leaves `[k * n, ...]`."""
    window = row[:, None] + jnp.arange(frame_stack)[None]

    def frames(leaf: Array) -> Array:
        rows = jnp.swapaxes(leaf.at[group[:, None], window].get(mode="clip"), 0, 1)
        return rows.reshape(frame_stack, -1, *leaf.shape[3:])

    stacked = stack_timesteps(jax.tree.map(frames, timesteps), frame_stack)
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _act(
    agent: Agent,
    frame_stack: int,
    params: Tree,
    version: Array,
    run_key: Array,
    store: Store,
    group_envs: Array,
    calls: Calls,
) -> tuple[Store, Acted]:
    """Stores the timesteps, acts on them and stores what acting produced."""
    group, row = calls.group, calls.row
    size = group_envs.shape[1]

    def flat(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])

    def grouped(leaf: Array) -> Array:
        return leaf.reshape(-1, size, *leaf.shape[1:])

    timesteps = jax.tree.map(
        lambda leaf, value: leaf.at[group, row + frame_stack - 1].set(value, mode="drop"),
        store.timesteps,
        calls.timestep,
    )
    timestep = _newest(timesteps, group, row, frame_stack)
    state = jax.tree.map(lambda leaf: leaf.at[group].get(mode="clip"), store.actor_state)
    envs = group_envs.at[group].get(mode="clip")
    keys = jax.vmap(environment_keys, (None, 0, 0))(run_key, envs, calls.counter)
    action, extras, new_state = agent.act(
        params, jax.tree.map(flat, state), timestep, flat(keys), evaluate=False
    )
    action, extras, new_state = jax.tree.map(grouped, (action, extras, new_state))
    actor_state = jax.tree.map(
        lambda leaf, value: leaf.at[group].set(value, mode="drop"), store.actor_state, new_state
    )
    if not isinstance(store.kept, Kept):
        return Store(timesteps, actor_state, ()), Acted(action, extras, state.core)
    kept = _keep(store.kept, calls, action, extras, version, state)
    return Store(timesteps, actor_state, kept), Acted(action, (), ())


def _keep(
    kept: Kept,
    calls: Calls,
    action: Tree,
    extras: Tree,
    version: Array,
    state: ActorState,
) -> Kept:
    """Writes the row of the unroll that belongs to the timestep."""
    group, row = calls.group, calls.row

    def write(leaf: Array, rows: Array, value: Array) -> Array:
        return leaf.at[group, rows].set(value.astype(leaf.dtype), mode="drop")

    opening = jnp.where(row == 0, group, kept.params_version.shape[0])
    versions = jnp.broadcast_to(version, calls.timestep.first.shape)
    return Kept(
        action=jax.tree.map(lambda leaf, x: write(leaf, row, x), kept.action, action),
        extras=jax.tree.map(lambda leaf, x: write(leaf, row, x), kept.extras, extras),
        params_version=write(kept.params_version, row, versions),
        start_state=jax.tree.map(
            lambda leaf, x: leaf.at[opening].set(x, mode="drop"), kept.start_state, state
        ),
    )


def _close(
    frame_stack: int, store: Store, group: Array, timestep: Timestep
) -> tuple[Store, Unroll | None]:
    """Stores the timestep `[n, ...]` after a group's last row, and moves it to row 0 of the next unroll.

    Returns the unroll that it completes, if that is kept.
    """
    full = jax.tree.map(
        lambda leaf, value: leaf.at[group, -1].set(value), store.timesteps, timestep
    )
    timesteps = jax.tree.map(
        lambda leaf: leaf.at[group, :frame_stack].set(leaf[group, -frame_stack:]), full
    )
    kept = store.kept
    if not isinstance(kept, Kept):
        return Store(timesteps, store.actor_state, ()), None
    mine = jax.tree.map(lambda leaf: leaf[group], kept)
    unroll = Unroll(
        timesteps=jax.tree.map(lambda leaf: leaf[group], full),
        action=mine.action,
        extras=mine.extras,
        actor_state=mine.start_state,
        params_version=mine.params_version,
    )
    return Store(timesteps, store.actor_state, kept), unroll


class Published(NamedTuple):
    """Finished parameters and the learner step that made them."""

    params: Tree
    version: int


class Inference:
    """Acting on one device for a fixed set of groups; one thread calls it, another publishes to it.

    With a synchronous agent a group rests when it has completed its unrolls of a batch, until the next
    parameters are published.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        frame_stack: int,
        device: Device,
        group_envs: np.ndarray,
        num_envs: int,
        run_key: Array,
    ) -> None:
        """Allocates the store and stages for groups `group_envs` `[G, n]` of environment ids."""
        self.device = device
        self.num_groups, self.group_size = group_envs.shape
        self.unroll = rows_of(agent)
        with jax.default_device(device):
            self._group_envs = jax.device_put(jnp.asarray(group_envs, jnp.uint32), device)
            store = make_store(agent, spec, frame_stack, group_envs, num_envs)
            # Leaves that share a buffer could not be donated.
            self._store = jax.device_put(jax.tree.map(jnp.copy, store), device)
        self._run_key = jax.device_put(run_key, device)
        self._act = jax.jit(functools.partial(_act, agent, frame_stack), donate_argnums=3)
        self._close = jax.jit(functools.partial(_close, frame_stack), donate_argnums=0)
        self._row = np.zeros(self.num_groups, np.int32)
        self._hold = np.zeros(self.num_groups, np.int32)
        experience, self._quota = agent.experience, 0
        if isinstance(experience, OnPolicy) and experience.synchronous:
            self._quota, rest = divmod(experience.batch, num_envs)
            assert self._quota and not rest, "CentralConfig.resolved sees to that"
        elif isinstance(experience, OnPolicy):
            # First unrolls begin one after the other: groups that completed theirs together would fill the
            # queue at once and then wait for the learner. What comes before row 0 moves on is not kept.
            self._hold += np.arange(self.num_groups) * self.unroll // self.num_groups
        # Unrolls since `renew` found these parameters; a group may complete `_quota`, or any number if 0.
        self._completed = np.zeros(self.num_groups, np.int32)
        self._renewed: Published | None = None
        self._counter = np.zeros(self.num_groups, np.uint64)
        self._published: Published | None = None
        self._changed = threading.Condition()  # guards `_published`
        self.sizes = batch_sizes(self.num_groups, device.platform)

    def publish(self, params: Tree, version: int) -> None:
        """Makes finished parameters the ones that act from the next call on; any thread may call it."""
        published = Published(jax.block_until_ready(jax.device_put(params, self.device)), version)
        with self._changed:
            self._published = published
            self._changed.notify_all()

    def compile(self, spec: EnvSpec) -> None:
        """Runs every batch size and the closing of an unroll once, without a lasting effect."""
        for size in self.sizes:
            timestep = jax.tree.map(np.asarray, zero_timesteps(spec, (size, self.group_size)))
            nobody, zeros = np.full(size, self.num_groups, np.int32), np.zeros(size, np.int32)
            self._call(Calls(timestep, nobody, zeros, np.zeros((size, 2), np.uint32)))
        timestep = jax.tree.map(np.asarray, zero_timesteps(spec, (self.group_size,)))
        self._store, _ = self._close(self._store, np.int32(0), timestep)
        jax.block_until_ready(self._store)

    def arrive(self, group: int, timestep: Timestep) -> Unroll | None:
        """Takes note of a group's next timestep, numpy `[n, ...]`, which `act` is to be called for.

        If it completes the group's unroll, the next begins with it, and the complete one is returned,
        unless replay has its rows. The arrays may change afterwards.
        """
        if self._row[group] < self.unroll:
            return None
        copy = jax.tree.map(np.array, timestep)
        self._store, unroll = self._close(self._store, np.int32(group), copy)
        self._row[group] = 0
        self._completed[group] += 1
        return unroll

    def may_act(self, group: int) -> bool:
        """Whether the group need not wait for newer parameters."""
        return not self._quota or bool(self._completed[group] < self._quota)

    @property
    def acting_groups(self) -> int:
        """The number of groups that need not wait for newer parameters."""
        return self.num_groups if not self._quota else int((self._completed < self._quota).sum())

    def renew(self) -> bool:
        """Lets all groups act again if parameters have been published since; returns whether they were.

        Those of an update that changed nothing count too: they have the same version.
        """
        with self._changed:
            published = self._published
        if published is self._renewed:
            return False
        self._renewed = published
        self._completed[:] = 0
        return True

    def wait_for_newer(self, timeout_s: float) -> None:
        """Waits until `renew` has something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._published is not self._renewed, timeout_s)

    def act(self, timestep: Timestep, groups: list[int]) -> Acted:
        """Starts acting on numpy timesteps `[k, n, ...]` of `groups` (a size of `sizes`, or fewer: padded).

        Returns what acting gave, not yet waited for. The arrays must stay unchanged until the actions are
        ready.
        """
        size, count = timestep.first.shape[0], len(groups)
        group = np.full(size, self.num_groups, np.int32)
        row, counter = np.zeros(size, np.int32), np.zeros(size, np.uint64)
        group[:count], row[:count] = groups, self._row[groups]
        counter[:count] = self._counter[groups]
        halves = counter.astype("<u8").view(np.uint32).reshape(size, 2)
        acted = self._call(Calls(timestep, group, row, halves))
        self._counter[groups] += np.uint64(1)
        self._row[groups] += self._hold[groups] == 0
        self._hold[groups] = np.maximum(self._hold[groups] - 1, 0)
        return acted

    def restart(self, group: int) -> None:
        """Drops the half unroll of a group whose actor was restarted."""
        self._row[group] = 0

    def _call(self, calls: Calls) -> Acted:
        with self._changed:
            published = self._published
        assert published is not None, "publish parameters before acting"
        self._store, acted = self._act(
            published.params,
            np.int32(published.version),
            self._run_key,
            self._store,
            self._group_envs,
            calls,
        )
        return acted


def batch_sizes(num_groups: int, platform: str) -> tuple[int, ...]:
    """Lists the numbers of groups for which acting is compiled.

    On a CPU padding is paid in full, so a batch takes the largest size that is ready; elsewhere calls
    are padded to the next size.
    """
    if platform == "cpu" and num_groups <= 4:
        return tuple(range(1, num_groups + 1))
    powers = [1 << i for i in range(num_groups.bit_length()) if 1 << i < num_groups]
    return (*powers, num_groups)
