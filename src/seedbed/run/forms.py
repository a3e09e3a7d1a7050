"""The formats of an environment's observations and actions, for policies in users' own loops."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from seedbed.envs.host.spaces import encoded, spec_leaves
from seedbed.spaces import PRIVILEGED, without
from seedbed.types import Array, Discrete, EnvSpec, Tree


class SpaceCodec(Protocol):
    """The formats of an environment's observations and actions. A closed `HostEnv` also provides them."""

    @property
    def spec(self) -> EnvSpec:
        """The shapes and types of single frames and actions."""
        ...

    def encode(self, observation: Any) -> Tree:
        """Converts the environment's own form of an observation, or a batch of them, to the spec's form."""
        ...

    def decode(self, action: Array) -> Any:
        """Converts an action in the spec's form, or a batch of them, to the environment's own form."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainForms:
    """The formats of the spec itself: arrays are not converted, except to the spec's dtypes."""

    spec: EnvSpec
    first: np.ndarray | None = None
    """The environment's action for choices that are all 0, to which choices add; None: nothing is added."""

    def encode(self, observation: Any) -> Tree:
        """Returns arrays in the spec's dtypes; raises SeedbedError if they do not fit or are not finite."""
        shown = spec_leaves(without(self.spec.observation, PRIVILEGED))
        return encoded(shown, observation)

    def decode(self, action: Array) -> Any:
        """Returns actions as they are, or as the environment has them whose `first` is known."""
        given = np.asarray(action)
        if self.first is None:
            return given
        lead = given.shape[: given.ndim - (not isinstance(self.spec.action, Discrete))]
        values = given.reshape((*lead, *self.first.shape)) + self.first
        return values.astype(self.first.dtype)[()]
