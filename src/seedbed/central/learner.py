"""The compiled updates of the central runtime, on one device or on several."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seedbed.central.inference import Unroll, to_trajectory
from seedbed.run.devices import Device
from seedbed.run.update import AXIS, Update, count_transitions, prepare, shuffled, update_minibatch
from seedbed.types import Agent, Array, LearnerState, Output, Tree


class _Rest(NamedTuple):
    """The part of the learner state that an update donates: all but the parameters, which acting uses."""

    optimizer_state: Tree
    updates: Array
    progress: Array
    auxiliary: Tree


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
