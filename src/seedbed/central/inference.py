"""Batched acting on one device, which keeps actor states, frames and open unrolls between calls."""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.run.devices import Device
from seedbed.run.keys import environment_keys
from seedbed.run.stacking import stack_timesteps, zero_timesteps
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
"""Steps between two moves of the timesteps on the device, if experience goes to replay: moves are rare."""


class Unroll(NamedTuple):
    """A completed unroll of T transitions: of one group, of several groups joined, or of items of replay."""

    timesteps: Timestep  # [S - 1 + T + 1, B, ...] single frames, not stacked
    action: Tree  # [T, B, ...]
    extras: Tree  # [T, B, ...]
    actor_state: ActorState  # [B, ...] before acting on row 0
    params_version: Tree  # [T, B] int32; () from replay
    importance: Tree = ()  # [B] float32 from replay


class Acted(NamedTuple):
    """The results of acting on k groups. `extras` and `core` are () unless experience goes to replay."""

    action: Tree  # [k, n, ...]
    extras: Tree  # [k, n, ...]
    core: Tree  # [k, n, ...] recurrent state before acting


class Kept(NamedTuple):
    """The parts of open unrolls besides their timesteps, if the learner takes unrolls from this device."""

    action: Tree  # [G, T, n, ...]
    extras: Tree  # [G, T, n, ...]
    params_version: Array  # [G, T, n] int32
    start_state: ActorState  # [G, n, ...] before acting on row 0


class Store(NamedTuple):
    """Device memory of G groups of n environments: S - 1 earlier rows, then the T + 1 rows of an unroll."""

    timesteps: Timestep  # [G, S - 1 + T + 1, n, ...]
    actor_state: ActorState  # [G, n, ...]
    kept: Kept | tuple[()]  # () if experience goes to replay on the host


class Calls(NamedTuple):
    """The input of one inference call: k groups. Padding has group id G, and its writes are dropped."""

    timestep: Timestep  # [k, n, ...]
    group: Array  # [k] int32
    row: Array  # [k] int32, the row of the unroll that the timestep fills
    counter: Array  # uint32 [k, 2], steps of the group so far; its keys are derived from them


def to_trajectory(unroll: Unroll, frame_stack: int) -> Trajectory:
    """Converts an unroll to a trajectory, from which agents learn, by stacking its frames."""
    timesteps = stack_timesteps(unroll.timesteps, frame_stack)
    return Trajectory(timesteps, *unroll[1:])


def make_store(
    agent: Agent, spec: EnvSpec, frame_stack: int, group_envs: np.ndarray, num_envs: int
) -> Store:
    """Makes the initial store for the groups of environment ids `group_envs` `[G, n]`, out of `num_envs`."""
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
    """Returns the steps between two moves of timesteps on the device: an unroll, or `ROWS` with replay."""
    experience = agent.experience
    return experience.unroll if isinstance(experience, OnPolicy) else ROWS


def _newest(timesteps: Timestep, group: Array, row: Array, frame_stack: int) -> Timestep:
    """Returns row `row[i]` of each group `group[i]`, with frames stacked; leaves are `[k * n, ...]`."""
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
    """Stores the timesteps, acts on them and stores the results. `run_key` is not consumed."""
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
    """Writes the results of acting to the unrolls' rows; at row 0, also `state`, which is before acting."""
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
    """Stores a timestep `[n, ...]` as row T of a group's unroll, and moves it to row 0 of the next one.

    The S - 1 rows before it move with it. Returns the completed unroll, or None with replay.
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
    """Parameters of a finished update, and the number of updates that made them."""

    params: Tree
    version: int


class Inference:
    """Acting on one device for a fixed set of groups, which have the numbers 0 to G - 1 here.

    One thread, the inference thread, acts; any thread may publish. With a synchronous agent, a group that has
    completed its unrolls of a batch rests until the next parameters are published.
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
        """Allocates the store for the groups of environment ids `group_envs` `[G, n]`, out of `num_envs`."""
        self.device = device
        self.num_groups, self.group_size = group_envs.shape
        self.unroll = rows_of(agent)
        with jax.default_device(device):
            self._group_envs = jax.device_put(jnp.asarray(group_envs, jnp.uint32), device)
            store = make_store(agent, spec, frame_stack, group_envs, num_envs)
            # JAX cannot donate leaves that share a buffer.
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
            # queue at once and then wait for the learner. The steps before a group's turn are not kept.
            self._hold += np.arange(self.num_groups) * self.unroll // self.num_groups
        # Unrolls completed since `renew` found new parameters; each group's limit is `_quota`, 0 means none.
        self._completed = np.zeros(self.num_groups, np.int32)
        self._renewed: Published | None = None
        self._counter = np.zeros(self.num_groups, np.uint64)
        self._published: Published | None = None
        self._changed = threading.Condition()  # guards `_published`; notified when it changes
        self.sizes = batch_sizes(self.num_groups, device.platform)

    def publish(self, params: Tree, version: int) -> None:
        """Waits until parameters are on the device, for the next call to use. Any thread may call this."""
        published = Published(jax.block_until_ready(jax.device_put(params, self.device)), version)
        with self._changed:
            self._published = published
            self._changed.notify_all()

    def compile(self, spec: EnvSpec) -> None:
        """Compiles acting for all `sizes` and the closing of unrolls; leaves the initial store as it is.

        Call it after the first `publish` and before the inference thread starts.
        """
        for size in self.sizes:
            timestep = jax.tree.map(np.asarray, zero_timesteps(spec, (size, self.group_size)))
            nobody, zeros = np.full(size, self.num_groups, np.int32), np.zeros(size, np.int32)
            self._call(Calls(timestep, nobody, zeros, np.zeros((size, 2), np.uint32)))
        timestep = jax.tree.map(np.asarray, zero_timesteps(spec, (self.group_size,)))
        self._store, _ = self._close(self._store, np.int32(0), timestep)
        jax.block_until_ready(self._store)

    def arrive(self, group: int, timestep: Timestep) -> Unroll | None:
        """Takes a group's next timestep, numpy `[n, ...]`. Call it before `act` gets that timestep.

        If it completes the unroll, the next one begins with it, and the completed one is returned (None with
        replay). The arrays may change afterwards. Call from the inference thread only.
        """
        if self._row[group] < self.unroll:
            return None
        copy = jax.tree.map(np.array, timestep)
        self._store, unroll = self._close(self._store, np.int32(group), copy)
        self._row[group] = 0
        self._completed[group] += 1
        return unroll

    def may_act(self, group: int) -> bool:
        """Returns whether a group need not wait for newer parameters. Call from the inference thread only."""
        return not self._quota or bool(self._completed[group] < self._quota)

    @property
    def acting_groups(self) -> int:
        """The number of groups for which `may_act` is true. Read it from the inference thread only."""
        return self.num_groups if not self._quota else int((self._completed < self._quota).sum())

    def renew(self) -> bool:
        """Lets all groups act again if parameters were published since it last did; returns whether so.

        Parameters with the same version as before count too. Call from the inference thread only.
        """
        with self._changed:
            published = self._published
        if published is self._renewed:
            return False
        self._renewed = published
        self._completed[:] = 0
        return True

    def wait_for_newer(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` until `renew` would return True. Call from the inference thread only."""
        with self._changed:
            self._changed.wait_for(lambda: self._published is not self._renewed, timeout_s)

    def act(self, timestep: Timestep, groups: list[int]) -> Acted:
        """Starts acting on numpy timesteps `[k, n, ...]` of `groups`; k is one of `sizes`.

        Rows beyond `groups` are padding. Returns the results without waiting for them. The arrays must stay
        unchanged until the actions are ready. Call from the inference thread only.
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
        """Drops the open unroll of a group whose actor restarted. Call from the inference thread only."""
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
    """Returns the numbers of groups for which acting is compiled, in increasing order.

    On a CPU, a padded row costs as much as any other, so a call takes the largest size that is ready. On
    other devices, a call is padded to the next size.
    """
    if platform == "cpu" and num_groups <= 4:
        return tuple(range(1, num_groups + 1))
    powers = [1 << i for i in range(num_groups.bit_length()) if 1 << i < num_groups]
    return (*powers, num_groups)
