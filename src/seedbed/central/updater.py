"""The places where parameters live: where a learner pulls them from, and pushes gradients to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seedbed.run.devices import Device
from seedbed.run.group import joined, placed
from seedbed.run.update import AXIS
from seedbed.types import Agent, LearnerState, Output, Tree


class Updater(Protocol):
    """The place where parameters live: the learner pulls them from it and pushes gradients to it.

    For one thread at a time.
    """

    @property
    def state(self) -> LearnerState:
        """The whole learner state, for checkpoints; valid until the next `push`."""
        ...

    def begin(self, progress: np.float32) -> None:
        """Begins a batch; schedules follow `progress`, the result of `progress_of` before it."""
        ...

    def pull(self) -> LearnerState:
        """Returns everything that gradients read, with `optimizer_state` (); valid until the next `push`.

        The parameters stay valid after that.
        """
        ...

    def push(self, grads: Tree, output: Output) -> None:
        """Applies a clipped gradient, or sends it. Does not wait until it is applied."""
        ...

    def settle(self) -> None:
        """Waits until every push has been applied, or discarded."""
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
        self._state = jax.tree.map(lambda leaf: placed(jnp.copy(leaf), self._whole), state)
        compiled = jax.jit if self._whole.is_fully_addressable else joined().jit
        self._apply = compiled(functools.partial(_apply, agent), donate_argnums=1)

    @property
    def state(self) -> LearnerState:
        """The whole learner state; valid until the next `push`. For one thread at a time."""
        return self._state

    def begin(self, progress: np.float32) -> None:
        """Begins a batch, whose schedules follow `progress`. For one thread at a time."""
        # Placed like the rest of the state, or the first minibatch would compile a program of its own.
        self._state = self._state._replace(progress=placed(progress, self._whole))

    def pull(self) -> LearnerState:
        """Returns the learner state without the optimizer's. For one thread at a time."""
        return self._state._replace(optimizer_state=())

    def push(self, grads: Tree, output: Output) -> None:
        """Applies a clipped gradient; donates the state but for the parameters, which acting uses.

        For one thread at a time.
        """
        params, rest = self._state.params, self._state._replace(params=())
        self._state = self._apply(params, rest, grads, output._replace(priorities=()))

    def settle(self) -> None:
        """Waits until every push has been applied. For one thread at a time."""
        jax.block_until_ready(self._state)

    def refresh(self, progress: np.float32) -> bool:
        """Returns False: nobody else changes this state."""
        del progress
        return False


def _apply(
    agent: Agent, params: Tree, rest: LearnerState, grads: Tree, output: Output
) -> LearnerState:
    return agent.apply(rest._replace(params=params), grads, output)
