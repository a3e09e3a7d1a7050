"""The update loop: the only place where a batch becomes new parameters.

The functions that take `axis` are pure, and are called while JAX traces a program. With several devices,
`axis` names the mapped axis that divides the batch, and each device handles its share. On one device it is
None.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.exit_status import TrainingDiverged
from seedbed.ops.keys import AXIS as AXIS
from seedbed.run.leaves import not_finite
from seedbed.types import (
    Agent,
    Array,
    LearnerState,
    Output,
    Trajectory,
    Tree,
)

STRATA = 8
"""The number of parts of a batch that are shuffled separately. 1, 2, 4 or 8 devices get equal minibatches."""


_AGAIN = "Go on from the last checkpoint with --resume and"
_REMEDY = f"{_AGAIN} a lower --agent.learning-rate"


def require_finite(
    metrics: dict[str, Any], update: int, member: str = "", swept: bool = False
) -> None:
    """Raises TrainingDiverged if a metric of the update with number `update` is not finite.

    `member` names the one of a population whose metrics they are. If an option is `swept`, it has values of
    its own for that one.
    """
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        remedy = f"{_AGAIN} another value in its place in --sweep" if swept else _REMEDY
        raise TrainingDiverged(
            f"{bad[0]}{member and f' of {member}'} is {metrics[bad[0]]} at learner step {update}: training "
            f"stopped before these parameters were used. {remedy}"
        )


def require_finite_gradient(grads: Tree, update: int) -> None:
    """Raises TrainingDiverged if a gradient, that of the update with number `update`, is not finite."""
    if (name := not_finite(grads)) is not None:
        raise TrainingDiverged(
            f"the gradient of {name} is not finite at learner step {update}: training stopped before it was "
            f"applied. {_REMEDY}"
        )


def require_finite_state(state: LearnerState, update: int) -> None:
    """Raises TrainingDiverged if a leaf of a learner state, that after `update` updates, is not finite."""
    if (name := not_finite(state)) is not None:
        raise TrainingDiverged(
            f"the learner state is not finite at learner step {update} ({name}): it is not saved. {_REMEDY}"
        )


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
    weight = jnp.asarray(output.weight)

    def part(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)  # an agent's metric may be a number of Python
        return leaf * weight.astype(leaf.dtype)

    parts = jax.tree.map(part, (grads, output.metrics))
    sums, total = _summed((parts, weight), axis)
    grads, metrics = jax.tree.map(lambda x: x / jnp.maximum(total, 1.0).astype(x.dtype), sums)
    return grads, Output(metrics, total, output.priorities)


def _summed(tree: Tree, axis: str) -> Tree:
    """Returns the sums over devices of all leaves, which travel together: each message takes a while."""
    leaves, structure = jax.tree.flatten(tree)
    found: list[Array] = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        chosen = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        joined = jax.lax.psum(jnp.concatenate([leaves[i].ravel() for i in chosen]), axis)
        ends = np.cumsum([leaves[i].size for i in chosen])[:-1]
        for i, part in zip(chosen, jnp.split(joined, ends), strict=True):
            found[i] = part.reshape(leaves[i].shape)
    return structure.unflatten(found)


def minibatch_gradient(
    agent: Agent, state: LearnerState, batch: Tree, key: Array, index: Array, axis: str | None
) -> tuple[Tree, Output]:
    """Computes the gradient, clipped, of part `index` of a shuffled batch, and its output.

    Every runtime learns through this function and `Agent.apply`. `state.optimizer_state` is (). The key is
    folded with `index`, not consumed.
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
    grads, output = agent.gradients(local, part, jax.random.fold_in(key, index))
    grads, output = averaged(grads, output, axis)
    return agent.clip_gradient(grads), output


def learn(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: Array, axis: str | None
) -> Update:
    """Runs every epoch and minibatch on a trajectory, as one traced program. Consumes the key."""
    prepare_key, key = jax.random.split(key)
    batch = agent.prepare(state._replace(optimizer_state=()), trajectory, prepare_key)

    def epoch(state: LearnerState, number: Array) -> tuple[LearnerState, Output]:
        order_key, loss_key = jax.random.split(jax.random.fold_in(key, number))
        order = shuffled(agent, batch, order_key, axis)

        def step(state: LearnerState, index: Array) -> tuple[LearnerState, Output]:
            read = state._replace(optimizer_state=())
            grads, output = minibatch_gradient(agent, read, order, loss_key, index, axis)
            return agent.apply(state, grads, output._replace(priorities=())), output

        return jax.lax.scan(step, state, jnp.arange(agent.minibatches))

    state, outputs = jax.lax.scan(epoch, state, jnp.arange(agent.epochs))
    priorities = jax.tree.map(lambda leaf: leaf[-1, -1], outputs.priorities)
    return Update(state, jax.tree.map(jnp.mean, outputs.metrics), priorities)
