"""The update loop: the only place where a batch becomes new parameters.

The functions that take `axis` are pure, and are called while JAX traces a program. With several devices,
`axis` names the mapped axis that divides the batch, and each device handles its share. On one device it is
None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seedbed.ops.collectives import data_axis
from seedbed.replay import device
from seedbed.replay.device import ReplayState
from seedbed.runtime.inference import Device, Unroll, to_trajectory
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    LearnerState,
    Output,
    ReplayAgent,
    Trajectory,
    Tree,
)

AXIS = "batch"
STRATA = 8
"""The number of parts of a batch that are shuffled separately. 1, 2, 4 or 8 devices get equal minibatches."""


class _Rest(NamedTuple):
    """The part of the learner state that an update donates: all but the parameters, which acting uses."""

    optimizer_state: Tree
    updates: Array
    progress: Array
    auxiliary: Tree


class Update(NamedTuple):
    """The result of learning from a batch."""

    state: LearnerState
    metrics: dict[str, Array]  # scalars, means over the minibatches
    priorities: Tree  # [B] float32: new priorities of the batch's items; () outside replay


def progress_of(done: int, steps: int) -> np.float32:
    """Returns `LearnerState.progress`, from 0 to 1, after `done` of a run's `steps` transitions.

    Every runtime passes it to the compiled update as an operand, so that a new value compiles nothing.
    """
    return np.float32(min(1.0, done / steps))


def count_transitions(first: Array) -> Array:
    """Returns the number of transitions, int32, that led to timesteps with these `first` flags.

    A step that led to a timestep with `first` set is an auto-reset, and does not count.
    """
    return jnp.sum(~first, dtype=jnp.int32)


def shuffled(agent: Agent, batch: Tree, key: Array, axis: str | None) -> Tree:
    """Reorders axis 1 of a batch so that its consecutive parts are random minibatches.

    Environments are shuffled within strata, and each minibatch takes an equal share of every stratum. The
    strata, and so the minibatches, do not depend on the number of devices if it divides the number of strata
    evenly. The key is folded, not consumed, but each epoch needs its own. With one minibatch, the batch is
    returned as it is.
    """
    if agent.minibatches == 1:
        return batch
    width = jax.tree.leaves(batch)[0].shape[1]
    devices = 1 if axis is None else jax.lax.axis_size(axis)
    strata = math.gcd(STRATA, width * devices // agent.minibatches)
    local = max(strata // devices, 1)
    begin = 0 if axis is None else jax.lax.axis_index(axis) * local
    share = width // (local * agent.minibatches)

    def order(stratum: Array) -> Array:
        within = jax.random.permutation(jax.random.fold_in(key, begin + stratum), width // local)
        return within + stratum * (width // local)

    orders = jax.vmap(order)(jnp.arange(local)).reshape(local, agent.minibatches, share)
    chosen = orders.transpose(1, 0, 2).reshape(width)
    return jax.tree.map(lambda leaf: jnp.take(leaf, chosen, axis=1), batch)


def averaged(grads: Tree, output: Output, axis: str | None) -> tuple[Tree, Output]:
    """Averages gradients and metrics over devices, weighted by the devices' numbers of valid rows.

    This is exact, because both are means over valid rows. `weight` of the result is the sum over devices;
    priorities stay those of the device's own items.
    """
    if axis is None:
        return grads, output
    total = jax.lax.psum(output.weight, axis)
    share = output.weight / jnp.maximum(total, 1.0)

    def mean(leaf: Array) -> Array:
        return jax.lax.psum(leaf * share.astype(leaf.dtype), axis)

    metrics = jax.tree.map(mean, output.metrics)
    return jax.tree.map(mean, grads), Output(metrics, total, output.priorities)


def prepare(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: Array, axis: str | None
) -> Tree:
    """Turns a trajectory, or a device's share of one, into a batch. Consumes the key."""
    with data_axis(axis):
        return agent.prepare(state, trajectory, key)


def update_minibatch(
    agent: Agent, state: LearnerState, batch: Tree, key: Array, index: Array, axis: str | None
) -> tuple[LearnerState, Output]:
    """Applies the gradient of part `index` of a shuffled batch; returns the new state and the output.

    Every runtime learns through this function. The key is folded with `index`, not consumed.
    """
    size = jax.tree.leaves(batch)[0].shape[1] // agent.minibatches
    part = jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * size, size, axis=1), batch
    )
    local = state
    # Without this, JAX would sum the gradients of replicated parameters itself.
    if axis is not None:
        params, auxiliary = jax.tree.map(
            lambda leaf: jax.lax.pcast(leaf, axis, to="varying"), (state.params, state.auxiliary)
        )
        local = state._replace(params=params, auxiliary=auxiliary)
    with data_axis(axis):
        grads, output = agent.gradients(local, part, jax.random.fold_in(key, index))
    grads, output = averaged(grads, output, axis)
    return agent.apply(state, grads, output), output


def learn(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: Array, axis: str | None
) -> Update:
    """Runs every epoch and minibatch on a trajectory, as one traced program. Consumes the key."""
    prepare_key, key = jax.random.split(key)
    batch = prepare(agent, state, trajectory, prepare_key, axis)

    def epoch(state: LearnerState, number: Array) -> tuple[LearnerState, Output]:
        order_key, loss_key = jax.random.split(jax.random.fold_in(key, number))
        order = shuffled(agent, batch, order_key, axis)

        def step(state: LearnerState, index: Array) -> tuple[LearnerState, Output]:
            return update_minibatch(agent, state, order, loss_key, index, axis)

        return jax.lax.scan(step, state, jnp.arange(agent.minibatches))

    state, outputs = jax.lax.scan(epoch, state, jnp.arange(agent.epochs))
    priorities = jax.tree.map(lambda leaf: leaf[-1, -1], outputs.priorities)
    return Update(state, jax.tree.map(jnp.mean, outputs.metrics), priorities)


def learn_from_replay(
    agent: ReplayAgent,
    updates: int,
    state: LearnerState,
    replay: ReplayState,
    due: Array,
    key: Array,
) -> tuple[LearnerState, ReplayState, dict[str, Array]]:
    """Learns from `updates` batches of replay if `due`, a bool scalar, is true. For one device only.

    Returns the new state, the replay with new priorities, and metrics: means over the updates, or 0 if `due`
    is false. The key is folded with the count of updates, not consumed.
    """
    experience = agent.experience

    def step(
        now: tuple[LearnerState, Tree], _: None
    ) -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        state, sums = now
        held = replay._replace(sums=sums)
        update_key = jax.random.fold_in(key, state.updates)
        draw_key, update_key = jax.random.split(update_key)
        drawn, items = device.sample(experience, held, draw_key)
        trajectory = Trajectory(
            timesteps=drawn.timesteps,
            action=drawn.action,
            extras=drawn.extras,
            actor_state=ActorState(drawn.core, ()),
            params_version=(),
            importance=drawn.importance,
        )
        update = learn(agent, state, trajectory, update_key, None)
        held = device.update(experience, held, items, update.priorities)
        return (update.state, held.sums), update.metrics

    def learn_all() -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        now, metrics = jax.lax.scan(step, (state, replay.sums), None, length=updates)
        return now, jax.tree.map(jnp.mean, metrics)

    def wait() -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        metrics = jax.eval_shape(learn_all)[1]
        return (state, replay.sums), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

    # Only the parts that learning changes pass through `cond`, which would copy the replay's records.
    (state, sums), metrics = jax.lax.cond(due, learn_all, wait)
    return state, replay._replace(sums=sums), metrics


class Learner:
    """Compiled updates on one device, or data-parallel on several. For one thread at a time."""

    def __init__(
        self, agent: Agent, frame_stack: int, devices: Sequence[Device], key: Array
    ) -> None:
        """Takes the agent, bound, and the run's key, from which each update derives its own.

        Compiles nothing yet: the first update does.
        """
        self.agent, self.key = agent, key
        self.devices = list(devices)
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        axis = AXIS if len(self.devices) > 1 else None
        prepare = functools.partial(_prepare, agent, frame_stack, axis)
        shuffle = functools.partial(shuffled, agent, axis=axis)
        step = functools.partial(_step, agent, axis)
        whole, rows, envs = P(), P(None, AXIS), P(AXIS)
        unroll_specs = Unroll(rows, rows, rows, envs, rows, envs)  # type: ignore[arg-type]
        self._unroll_sharding = Unroll(*(NamedSharding(self.mesh, spec) for spec in unroll_specs))  # type: ignore[arg-type]
        if axis is not None:
            prepare = jax.shard_map(
                prepare, mesh=self.mesh, in_specs=(whole, unroll_specs, whole), out_specs=rows
            )
            shuffle = jax.shard_map(shuffle, mesh=self.mesh, in_specs=(rows, whole), out_specs=rows)
            step = jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=(whole, whole, rows, whole, whole),
                out_specs=(whole, whole, Output(whole, whole, envs)),  # type: ignore[arg-type]
            )
        self._prepare = jax.jit(prepare)
        self._shuffle = jax.jit(shuffle)
        self._step = jax.jit(step, donate_argnums=1)
        self._measure = jax.jit(_measure)
        self._assemble = jax.jit(_assemble)

    def place(self, state: LearnerState) -> LearnerState:
        """Returns a copy of a learner state on each of the learner's devices.

        The copy shares no buffer with the original, so that `update` may donate it.
        """
        return jax.device_put(jax.tree.map(jnp.copy, state), NamedSharding(self.mesh, P()))

    def assemble(self, unrolls: Sequence[Unroll]) -> Unroll:
        """Joins unrolls along B and divides them among the learner's devices. Does not wait.

        Several unrolls must be those of groups; a batch from replay is a single unroll. Call from the
        learner's thread.
        """
        home = [jax.device_put(unroll, self.devices[0]) for unroll in unrolls]
        joined = home[0] if len(home) == 1 else self._assemble(home)
        if len(self.devices) == 1:
            return joined
        return jax.device_put(joined, self._unroll_sharding)

    def update(
        self, state: LearnerState, unroll: Unroll, progress: np.float32
    ) -> tuple[Update, Array]:
        """Runs every epoch and minibatch on a batch; returns the update and the batch's transitions, int32.

        Donates all of the state except the parameters. `progress` is the result of `progress_of` before the
        batch. Outside replay the metrics include the lag. Does not wait for the results. Call from the
        learner's thread.
        """
        key = jax.random.fold_in(self.key, state.updates)
        metrics, transitions = self._measure(unroll, state.updates)
        # Place it like the rest of the state, or the first minibatch would compile a program of its own.
        placed = jax.device_put(progress, NamedSharding(self.mesh, P()))
        state = state._replace(progress=placed)
        prepare_key, key = jax.random.split(key)
        batch = self._prepare(state, unroll, prepare_key)
        outputs: list[Output] = []
        for epoch in range(self.agent.epochs):
            order_key, loss_key = jax.random.split(jax.random.fold_in(key, epoch))
            order = self._shuffle(batch, order_key) if self.agent.minibatches > 1 else batch
            for index in range(self.agent.minibatches):
                params, rest, output = self._step(
                    state.params, _rest(state), order, loss_key, np.int32(index)
                )
                state = _whole(params, rest)
                outputs.append(output)
        found = [output.metrics for output in outputs]
        metrics |= jax.tree.map(lambda *values: sum(values) / len(values), *found)
        return Update(state, metrics, outputs[-1].priorities), transitions


def _measure(unroll: Unroll, updates: Array) -> tuple[dict[str, Array], Array]:
    """Returns metrics and the number of transitions, int32, of an unroll.

    The metrics are the mean and the largest lag: the updates between choosing an action and learning from it.
    With replay there are none.
    """
    rows = jax.tree.leaves(unroll.action)[0].shape[0]
    transitions = count_transitions(unroll.timesteps.first[-rows:])
    if isinstance(unroll.params_version, tuple):
        return {}, transitions
    lag = updates - unroll.params_version
    mean, most = jnp.mean(lag.astype(jnp.float32)), jnp.max(lag)
    return {"lag_mean": mean, "lag_max": most}, transitions


def _prepare(
    agent: Agent,
    frame_stack: int,
    axis: str | None,
    state: LearnerState,
    unroll: Unroll,
    key: Array,
) -> Tree:
    return prepare(agent, state, to_trajectory(unroll, frame_stack), key, axis)


def _step(
    agent: Agent, axis: str | None, params: Tree, rest: _Rest, batch: Tree, key: Array, index: Array
) -> tuple[Tree, _Rest, Output]:
    state, output = update_minibatch(agent, _whole(params, rest), batch, key, index, axis)
    return state.params, _rest(state), output


def _rest(state: LearnerState) -> _Rest:
    return _Rest(state.optimizer_state, state.updates, state.progress, state.auxiliary)


def _whole(params: Tree, rest: _Rest) -> LearnerState:
    return LearnerState(params, rest.optimizer_state, rest.updates, rest.progress, rest.auxiliary)


def _assemble(unrolls: Sequence[Unroll]) -> Unroll:
    def rows(*leaves: Array) -> Array:
        return jnp.concatenate(leaves, axis=1)

    def envs(*leaves: Array) -> Array:
        return jnp.concatenate(leaves, axis=0)

    return Unroll(
        timesteps=jax.tree.map(rows, *(u.timesteps for u in unrolls)),
        action=jax.tree.map(rows, *(u.action for u in unrolls)),
        extras=jax.tree.map(rows, *(u.extras for u in unrolls)),
        actor_state=jax.tree.map(envs, *(u.actor_state for u in unrolls)),
        params_version=rows(*(u.params_version for u in unrolls)),
    )
