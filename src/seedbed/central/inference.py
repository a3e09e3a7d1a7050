"""Batched acting on one device, which keeps the groups' frames and actor states between calls."""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.ops.keys import environment_keys
from seedbed.run import devices
from seedbed.run.devices import Device
from seedbed.run.hoisting import Derived, Hoisted
from seedbed.run.stacking import act_on_frames, zero_timesteps
from seedbed.types import ActorState, Agent, Array, EnvSpec, Timestep, Tree


class ActOutput(NamedTuple):
    """The results of acting on k groups. Leaves are `[k, n, ...]`, or `[n, ...]` for one group."""

    action: Tree
    extras: Tree
    actor_state: ActorState  # before acting
    params_version: int  # of the parameters that acted


class ActMemory(NamedTuple):
    """Device memory of G groups of n environments. Frames are a ring: frame i is in place i modulo S."""

    frames: Timestep  # [G, S, n, ...] the newest S timesteps, not stacked
    actor_state: ActorState  # [G, n, ...]


class ActRequest(NamedTuple):
    """The input of one call, for k groups. Padding has group id G, and its writes are dropped."""

    timestep: Timestep  # [k, n, ...]
    group: Array  # [k] int32
    place: Array  # [k] int32: the place of the timestep in the ring
    counter: Array  # uint32 [k, 2], steps of the group so far; its keys are derived from them


def act_output(agent: Agent, spec: EnvSpec, frame_stack: int, size: int) -> ActOutput:
    """Returns the shapes and dtypes of what a bound agent's acting gives for one group of `size`.

    `spec` is of single frames.
    """

    def act(key: Array) -> tuple[Tree, Tree, ActorState]:
        params = agent.init(key).params
        state = agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)
        frames, keys = zero_timesteps(spec, (frame_stack, size)), jax.random.split(key, size)
        action, extras, _ = act_on_frames(agent, params, state, frames, keys, evaluate=False)
        return action, extras, state

    action, extras, state = jax.eval_shape(act, jax.random.key(0))
    return ActOutput(action=action, extras=extras, actor_state=state, params_version=0)


def _act(
    agent: Agent,
    frame_stack: int,
    params: Tree,
    run_key: Array,
    memory: ActMemory,
    group_envs: Array,
    request: ActRequest,
) -> tuple[ActMemory, Tree, Tree, ActorState]:
    """Acts on timesteps; returns the new memory, actions, extras and the actor states before acting.

    `run_key` is not consumed.
    """
    group, size = request.group, group_envs.shape[1]

    def flat(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])

    def grouped(leaf: Array) -> Array:
        return leaf.reshape(-1, size, *leaf.shape[1:])

    frames = jax.tree.map(
        lambda leaf, value: leaf.at[group, request.place].set(value, mode="drop"),
        memory.frames,
        request.timestep,
    )
    newest = _newest(frames, group, request.place, frame_stack)
    state = jax.tree.map(lambda leaf: leaf.at[group].get(mode="clip"), memory.actor_state)
    envs = group_envs.at[group].get(mode="clip")
    keys = jax.vmap(environment_keys, (None, 0, 0))(run_key, envs, request.counter)
    action, extras, new_state = act_on_frames(
        agent, params, jax.tree.map(flat, state), newest, flat(keys), evaluate=False
    )
    action, extras, new_state = jax.tree.map(grouped, (action, extras, new_state))
    actor_state = jax.tree.map(
        lambda leaf, value: leaf.at[group].set(value, mode="drop"), memory.actor_state, new_state
    )
    return ActMemory(frames, actor_state), action, extras, state


def _seat(agent: Agent, memory: ActMemory, env_ids: Array, num_envs: Array) -> ActMemory:
    """Gives environments `[G, n]` what depends on their number and on `num_envs`; they keep their cores."""
    per_env = agent.actor_state(env_ids.reshape(-1), num_envs).per_env
    per_env = jax.tree.map(lambda leaf: leaf.reshape(*env_ids.shape, *leaf.shape[1:]), per_env)
    return memory._replace(actor_state=memory.actor_state._replace(per_env=per_env))


def _newest(frames: Timestep, group: Array, place: Array, frame_stack: int) -> Timestep:
    """Returns the newest S timesteps of each group in their order; leaves are `[S, k * n, ...]`."""
    ring = (place[:, None] + 1 + jnp.arange(frame_stack)[None]) % frame_stack

    def rows(leaf: Array) -> Array:
        ordered = jnp.swapaxes(leaf.at[group[:, None], ring].get(mode="clip"), 0, 1)
        return ordered.reshape(frame_stack, -1, *leaf.shape[3:])

    return jax.tree.map(rows, frames)


class PublishedParams(NamedTuple):
    """Parameters of a finished update, and the number of updates that made them."""

    params: Derived
    version: int


class Inference:
    """Acting on one device for a fixed set of groups, which have the numbers 0 to G - 1 here.

    One thread, the inference thread, acts; any thread may publish.
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
        """Allocates memory for the groups of environment ids `group_envs` `[G, n]`, out of `num_envs`."""
        self.device, self.policy = device, devices.policy_of(device)
        self.num_groups, self.group_size = group_envs.shape
        self._frame_stack = frame_stack
        with jax.default_device(device):
            self._group_envs = jax.device_put(jnp.asarray(group_envs, jnp.uint32), device)
            state = agent.actor_state(self._group_envs.reshape(-1), num_envs)
            state = jax.tree.map(
                lambda leaf: leaf.reshape(*group_envs.shape, *leaf.shape[1:]), state
            )
            frames = zero_timesteps(spec, (self.num_groups, frame_stack, self.group_size))
            # JAX cannot donate leaves that share a buffer.
            memory = jax.tree.map(jnp.array, ActMemory(frames, state))
            self._memory = jax.device_put(memory, device)
        self._run_key = jax.device_put(run_key, device)
        self._act = Hoisted(functools.partial(_act, agent, frame_stack), donate=(1,))
        self._seat = jax.jit(functools.partial(_seat, agent), donate_argnums=0)
        self._counter = np.zeros(self.num_groups, np.uint64)
        self._published: PublishedParams | None = None
        self._renewed: PublishedParams | None = None
        self._changed = threading.Condition()  # guards `_published`; notified when it changes
        self.sizes = batch_sizes(self.num_groups, self.policy.pads)

    def publish(self, params: Tree, version: int) -> None:
        """Waits until parameters, and what is computed from them once, are on the device for the next call.

        Any thread may call this.
        """
        derived = self._act.derive(jax.tree.map(self._placed, params))
        published = PublishedParams(jax.block_until_ready(derived), version)
        with self._changed:
            self._published = published
            self._changed.notify_all()

    def _placed(self, leaf: Array) -> Array:
        """Returns an array on this device, the same one if it is there."""
        # `jax.device_put` takes four times as long to find that it is.
        here = isinstance(leaf, jax.Array) and leaf.devices() == {self.device}
        return leaf.addressable_data(0) if here else jax.device_put(leaf, self.device)

    def compile(self, spec: EnvSpec) -> None:
        """Compiles acting for all `sizes`; leaves the memory as it is.

        Call it after the first `publish` and before the inference thread starts.
        """
        for size in self.sizes:
            nobody, zeros = np.full(size, self.num_groups, np.int32), np.zeros(size, np.int32)
            timestep = zero_timesteps(spec, (size, self.group_size))
            self._call(ActRequest(timestep, nobody, zeros, np.zeros((size, 2), np.uint32)))
        jax.block_until_ready(self._memory)

    def seat(self, places: np.ndarray, groups: int) -> None:
        """Takes the places of the groups that have environments, when these have changed.

        `groups` is how many there are on all devices, of all processes; `places` `[G]` has, for each group of
        this device, its place among them, from 0 on.
        Environments get the `ActorState.per_env` of their places, such as exploration rates, and keep the
        rest. It compiles at the first call only. Call from the inference thread, or before it starts.
        """
        size = self.group_size
        env_ids = (places[:, None] * size + np.arange(size)).astype(np.uint32)
        self._memory = self._seat(self._memory, env_ids, np.uint32(groups * size))

    def renew(self) -> bool:
        """Returns whether parameters were published since it last did so, also of the same version.

        Call from the inference thread only.
        """
        with self._changed:
            published = self._published
        newer, self._renewed = published is not self._renewed, published
        return newer

    def wait_for_newer(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` until `renew` would return True. Call from the inference thread only."""
        with self._changed:
            self._changed.wait_for(lambda: self._published is not self._renewed, timeout_s)

    def act(self, timestep: Timestep, groups: list[int]) -> ActOutput:
        """Starts acting on numpy timesteps `[k, n, ...]` of `groups`; k is one of `sizes`.

        Rows beyond `groups` are padding. Returns the results without waiting for them. The arrays must stay
        unchanged until the actions are ready. Call from the inference thread only.
        """
        size, count = timestep.first.shape[0], len(groups)
        group = np.full(size, self.num_groups, np.int32)
        counter = np.zeros(size, np.uint64)
        group[:count], counter[:count] = groups, self._counter[groups]
        place = (counter % np.uint64(self._frame_stack)).astype(np.int32)
        halves = counter.astype("<u8").view(np.uint32).reshape(size, 2)
        output = self._call(ActRequest(timestep, group, place, halves))
        self._counter[groups] += np.uint64(1)
        if self.policy.queues:
            # Else they would be copied one after another, when they are asked for.
            jax.copy_to_host_async((output.action, output.extras, output.actor_state))
        return output

    def _call(self, request: ActRequest) -> ActOutput:
        with self._changed:
            published = self._published
        assert published is not None, "publish parameters before acting"
        size = request.group.size
        self._memory, action, extras, state = self._act(
            size, published.params, self._run_key, self._memory, self._group_envs, request
        )
        return ActOutput(
            action=action, extras=extras, actor_state=state, params_version=published.version
        )


def batch_sizes(num_groups: int, pads: bool) -> tuple[int, ...]:
    """Returns the numbers of groups for which acting is compiled, in increasing order.

    If a device `pads`, a call is padded to the next size. If not, it takes the largest size that is ready.
    """
    if not pads and num_groups <= 4:
        return tuple(range(1, num_groups + 1))
    powers = [1 << i for i in range(num_groups.bit_length()) if 1 << i < num_groups]
    return (*powers, num_groups)
