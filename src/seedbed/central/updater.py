"""The places where parameters live: where a learner pulls them from, and where gradients change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seedbed.run.devices import Device
from seedbed.run.group import joined, placed
from seedbed.run.update import AXIS
from seedbed.types import Agent, Array, LearnerState, Output, Tree

Gradient: TypeAlias = Callable[[LearnerState, Tree, Array, np.int32], tuple[Tree, Output]]
"""An agent's `run.update.minibatch_gradient`: takes the state without the optimizer's, a batch, a key and the
number of the minibatch. It is not compiled yet."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Scalars with names, in one array: one for each takes longer to bring to the host than to compute."""

    values: Array  # [M] float32, numpy or on a device
    names: tuple[str, ...]

    @classmethod
    def of(cls, metrics: dict[str, Any]) -> Metrics:
        """Packs scalars. Call it while JAX traces a program."""
        names = tuple(sorted(metrics))
        values = [jnp.asarray(metrics[name], jnp.float32) for name in names]
        return cls(jnp.stack(values) if values else jnp.zeros(0), names)


class Learned(NamedTuple):
    """The figures of a minibatch, and the new priorities of its items."""

    metrics: Metrics
    priorities: Tree  # as `Output.priorities`

    @classmethod
    def of(cls, output: Output) -> Learned:
        """Takes the output of an agent's loss. Call it while JAX traces a program."""
        return cls(Metrics.of(output.metrics), output.priorities)


Step: TypeAlias = Callable[[Tree, Array, np.int32], Learned]
"""Learns from a minibatch: takes a batch, a key and the number of the minibatch."""


class Updater(Protocol):
    """The place where parameters live: the learner pulls them from it, and gradients change them there.

    For one thread at a time.
    """

    @property
    def state(self) -> LearnerState:
        """The whole learner state, for checkpoints; valid until the next step."""
        ...

    def begin(self, progress: np.float32) -> None:
        """Begins a batch; schedules follow `progress`, the result of `progress_of` before it."""
        ...

    def pull(self) -> LearnerState:
        """Returns everything that gradients read, with `optimizer_state` (); valid until the next step.

        The parameters stay valid after that.
        """
        ...

    def compile(self, gradient: Gradient) -> Step:
        """Returns what computes the gradient of a minibatch, and applies it or sends it.

        It does not wait until the gradient is applied.
        """
        ...

    def settle(self) -> None:
        """Waits until every gradient has been applied, or discarded."""
        ...

    def refresh(self, progress: np.float32) -> bool:
        """Looks for the gradients of others while no batch comes; returns whether there may be some."""
        ...


class LocalUpdater:
    """The learner state on the learner's devices, a copy on each; an `Updater`."""

    def __init__(self, agent: Agent, state: LearnerState, devices: Sequence[Device]) -> None:
        """Copies the state of a bound agent to the devices: the copy shares no buffer with it.

        Every process that has some of the devices gives the same state.
        """
        self._whole = NamedSharding(Mesh(np.array(devices), (AXIS,)), P())
        self._agent, self._progress = agent, np.float32(state.progress)
        self._state = jax.tree.map(lambda leaf: placed(jnp.copy(leaf), self._whole), state)

    @property
    def state(self) -> LearnerState:
        """The whole learner state; valid until the next step. For one thread at a time."""
        return self._state

    def begin(self, progress: np.float32) -> None:
        """Begins a batch, whose schedules follow `progress`. For one thread at a time."""
        self._progress = progress

    def pull(self) -> LearnerState:
        """Returns the learner state without the optimizer's. For one thread at a time."""
        # On a CPU, programs take a number of the host at less cost than it takes to bring one to the device.
        return self._state._replace(optimizer_state=(), progress=self._progress)

    def compile(self, gradient: Gradient) -> Step:
        """Returns what learns from a minibatch, as one program. It is for one thread at a time.

        The program is given the memory of the state, but for that of the parameters: acting uses them.
        """
        agent = self._agent

        def learned(
            params: Tree, rest: LearnerState, batch: Tree, key: Array, index: np.int32
        ) -> tuple[LearnerState, Learned]:
            state = rest._replace(params=params)
            grads, output = gradient(state._replace(optimizer_state=()), batch, key, index)
            state = agent.apply(state, grads, output._replace(priorities=()))
            return jax.lax.with_sharding_constraint(state, self._whole), Learned.of(output)

        jit = jax.jit if self._whole.is_fully_addressable else joined().jit
        return functools.partial(self._step, jit(learned, donate_argnums=1))

    def _step(
        self, program: Callable[..., Any], batch: Tree, key: Array, index: np.int32
    ) -> Learned:
        rest = self._state._replace(params=(), progress=self._progress)
        self._state, learned = program(self._state.params, rest, batch, key, index)
        return learned

    def settle(self) -> None:
        """Waits until every gradient has been applied. For one thread at a time."""
        jax.block_until_ready(self._state)

    def refresh(self, progress: np.float32) -> bool:
        """Returns False: nobody else changes this state."""
        del progress
        return False
