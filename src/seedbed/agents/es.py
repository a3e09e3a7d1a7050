"""ES: evolution strategies, which weigh the noise on the parameters by the ranks of returns.

Source: Salimans et al. (2017), "Evolution Strategies as a Scalable Alternative to Reinforcement Learning".
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.evolution import EvolutionAgent
from seedbed.types import Tree


@dataclasses.dataclass(frozen=True)
class Es(EvolutionAgent):
    """An agent that learns by ES; its fields are the hyperparameters, its methods are pure functions."""

    learning_rate: float = 0.01
    """Step size of Adam."""
    weight_decay: float = 0.005
    """Weight of the squared parameters, a cost."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("more than 0", lambda x: x > 0, "learning_rate")
        self._require("0 or more", lambda x: x >= 0, "weight_decay")

    def _fitness(self, returns: Array) -> Array:
        """Returns the ranks of returns, from -1/2 to 1/2, divided by the noise; equal ones share a rank."""
        below = (returns[None] < returns[:, None]).sum(1, dtype=jnp.int32)
        equal = (returns[None] == returns[:, None]).sum(1, dtype=jnp.int32)
        rank = below + 0.5 * (equal - 1)
        return (rank / (returns.size - 1) - 0.5) / self.noise

    def _optimizer(self) -> optax.GradientTransformation:
        def decay(grads: Tree, weights: Tree) -> Tree:
            return jax.tree.map(lambda g, x: g + self.weight_decay * x, grads, weights)

        return optax.chain(optax.stateless(decay), optax.adam(self.learning_rate))
