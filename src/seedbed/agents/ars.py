"""ARS: random search along the better of the noises, for linear policies (V2-t of the paper).

Source: Mania, Guy and Recht (2018), "Simple random search of static linear policies is competitive for
reinforcement learning".
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
class Ars(EvolutionAgent):
    """An agent that learns by ARS; its fields are the hyperparameters, its methods are pure functions."""

    hidden_sizes: tuple[int, ...] = ()
    best: int = 4
    """Noises of a generation that are learned from: those with the highest return of their two episodes."""
    learning_rate: float = 0.02
    """Step size; steps are divided by the deviation of the returns that are learned from."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("more than 0", lambda x: x > 0, "learning_rate")
        most = f"from 1 to half of batch, {self.batch // 2}"
        self._require(most, lambda x: 1 <= x <= self.batch // 2, "best")

    def _fitness(self, returns: Array) -> Array:
        """Returns the returns of the best noises over their deviation, for others 0."""
        better = returns.reshape(-1, 2).max(1)
        best = jnp.zeros(better.size, bool).at[jnp.argsort(-better)[: self.best]].set(True)
        taken = jnp.repeat(best, 2)
        # The mean over all episodes becomes the paper's mean over the best pairs.
        share = returns.size / self.best

        def mean(x: Array) -> Array:
            return jnp.where(taken, x, 0.0).sum() / (2 * self.best)

        apart = jnp.where(taken, returns - mean(returns), 0.0)
        deviation = jnp.sqrt(mean(jnp.square(apart)))
        # If all are equal, nothing is to be learned.
        return share * apart / jnp.where(deviation > 0, deviation, 1.0)

    def _initial_weights(self, key: Array) -> Tree:
        """Makes the weights of a policy that does nothing, if it is linear, as in the paper."""
        weights = super()._initial_weights(key)
        return weights if self.hidden_sizes else jax.tree.map(jnp.zeros_like, weights)

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate)
