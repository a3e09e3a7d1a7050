"""What learners and parameter shards must agree on: who has what, and how it lies in their memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from seedbed.paramserver.division import Division
from seedbed.paramserver.messages import BlockLayout
from seedbed.types import Agent, LearnerState, Tree


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of an agent's learner state among parameter shards. Immutable; for any thread."""

    agent: Agent  # bound
    shards: int
    gradient: Tree  # the shapes of a whole gradient, as `check_agent` returns them

    @functools.cached_property
    def state(self) -> LearnerState:
        """The shapes of the whole learner state."""
        return jax.eval_shape(self.agent.init, jax.random.key(0))

    @functools.cached_property
    def division(self) -> Division:
        """The division itself."""
        return Division(self.gradient, self.state, self.shards)

    def part(self, tree: Tree, shard: int) -> Tree:
        """Returns a shard's part of a tree of arrays, or of their shapes."""
        if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
            return jax.eval_shape(lambda whole: self.division.part(whole, shard), tree)
        return self.division.part(tree, shard)

    def state_layout(self, shard: int) -> BlockLayout:
        """Returns the block of a shard's part of the learner state, as it sends it to the coordinator."""
        return BlockLayout(jax.tree.leaves(self.part(self.state, shard)))


class ShardLayout:
    """The blocks of the streams between a parameter shard and its learners. Immutable; for any thread.

    A learner sends its part of the gradient. It gets parameters, and behind them the state that only learning
    needs (`LearnerState.auxiliary`), which is sent only if it has changed.
    """

    def __init__(self, plan: Plan, shard: int) -> None:
        gradient, state = plan.part(plan.gradient, shard), plan.part(plan.state, shard)
        self._gradient, self._params, self._auxiliary = (
            jax.tree.structure(tree) for tree in (gradient, state.params, state.auxiliary)
        )
        self._up = BlockLayout(jax.tree.leaves(gradient))
        self._first = BlockLayout(jax.tree.leaves(state.params))
        self._second = BlockLayout(jax.tree.leaves(state.auxiliary))
        self.up_bytes = self._up.size
        self.params_bytes = self._first.size
        self.down_bytes = self._first.size + self._second.size

    def write_gradient(self, grads: Tree, block: np.ndarray) -> None:
        """Copies a shard's part of a gradient into a block."""
        self._up.write(jax.tree.leaves(grads), block)

    def gradient(self, block: np.ndarray) -> Tree:
        """Returns the gradient in a block, as views."""
        return jax.tree.unflatten(self._gradient, self._up.views(block))

    def write_params(self, params: Tree, block: np.ndarray) -> None:
        """Copies a shard's part of the parameters into a block."""
        self._first.write(jax.tree.leaves(params), block[: self.params_bytes])

    def params(self, block: np.ndarray) -> Tree:
        """Returns the parameters in a block, as views."""
        return jax.tree.unflatten(self._params, self._first.views(block[: self.params_bytes]))

    def write_auxiliary(self, leaves: Sequence[np.ndarray], block: np.ndarray) -> None:
        """Copies a shard's part of the state that only learning needs, its leaves, into a block."""
        self._second.write(leaves, block[self.params_bytes :])

    def auxiliary(self, block: np.ndarray) -> Tree:
        """Returns the state that only learning needs in a block, as views."""
        found: list[Any] = self._second.views(block[self.params_bytes :])
        return jax.tree.unflatten(self._auxiliary, found)
