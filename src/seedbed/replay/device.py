"""Replay on the device: pure functions over a ring of records, for the fused runtime.

Environments step together, and a row of the ring is one step of all. An item is a window of
`experience.steps` rows of one environment, so overlapping items share their rows: nothing is stored
twice. The ring's length is a multiple of `period`, and an item begins at each of its rows that is one.

Items therefore begin every `period` steps of the stream, not of an episode as in the host's replay.
Without `cross_episodes`, an item belongs to the episode of its first learned row: where that ends, the
rest is padding. What of the next episode comes before the next item begins is then learned from in no
item; with a `period` beyond 1, `cross_episodes` wastes nothing. Rows that warm up the memory may be of an
earlier episode, since `first` resets it. An item whose first learned row is the end of an episode has no
transition, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed.types import Array, Replay, SeedbedError, Timestep, Tree


class Record(NamedTuple):
    """What is kept of a step; one environment's as a template, leaves `[T, B, ...]` when added."""

    timestep: Timestep
    action: Tree  # taken on the timestep
    extras: Tree  # of that action
    core: Tree  # recurrent state before it, kept where an item begins; () if there is none


class ReplayState(NamedTuple):
    """A ring of R rows of B environments, in which R / period items of each may begin."""

    records: Record  # leaves [R, B, ...], those of `core` [R / period, B, ...]
    sums: tuple[Array, ...]  # sum tree over [R / period x B] items, () if all are drawn alike
    position: Array  # int32 scalar: the row to be written next
    filled: Array  # int32 scalar: rows written, at most R


class Sample(NamedTuple):
    """A batch of items of L timesteps."""

    timesteps: Timestep  # [L, batch, ...]
    action: Tree  # [L - 1, batch, ...]
    extras: Tree  # [L - 1, batch, ...]
    core: Tree  # [batch, ...] before row 0
    importance: Array  # [batch] float32, at most 1


def initial(experience: Replay, template: Record, num_envs: int) -> ReplayState:
    """An empty replay for records like `template`, whose leaves have a shape and a dtype."""
    if not 0 < experience.min_size <= experience.capacity:
        raise SeedbedError(
            f"replay: min_size is {experience.min_size}; give 1 to {experience.capacity}, the capacity"
        )
    places = -(-experience.capacity // num_envs) + _partial(experience)

    def empty(length: int) -> Callable[[Array], Array]:
        return lambda leaf: jnp.zeros((length, num_envs, *leaf.shape), leaf.dtype)

    records = jax.tree.map(empty(places * experience.period), template)
    prioritised = experience.priority_exponent > 0
    return ReplayState(
        records=records._replace(core=jax.tree.map(empty(places), template.core)),
        sums=_empty_sums(places * num_envs) if prioritised else (),
        position=jnp.int32(0),
        filled=jnp.int32(0),
    )


def size(experience: Replay, state: ReplayState) -> Array:
    """How many items there are to draw, an int32 scalar."""
    ring = _shape(experience, state)
    complete = (state.filled - experience.steps) // experience.period + 1
    return jnp.clip(complete, 0, ring.kept) * ring.num_envs


def ready(experience: Replay, state: ReplayState) -> Array:
    """Whether there are items enough to learn from, a bool scalar."""
    return size(experience, state) >= experience.min_size


def add(
    experience: Replay,
    state: ReplayState,
    records: Record,
    priorities: Callable[[Timestep, Tree], Array],
) -> ReplayState:
    """Writes records `[T, B, ...]` of the next T steps over the oldest.

    `priorities` is `ReplayAgent.initial_priorities`; it is not called where all items are drawn alike. The
    ring is written in place where the state is donated or carried through a loop.
    """
    shape = _shape(experience, state)
    steps = records.timestep.first.shape[0]
    if steps > shape.kept * experience.period:
        raise SeedbedError(
            f"replay: {steps} steps of {shape.num_envs} environments at once are more than the capacity of "
            f"{experience.capacity} items, one every {experience.period} steps; raise the capacity"
        )
    # Indices rather than a slice: T steps need not divide the ring, which may wrap around in them.
    written = (state.position + jnp.arange(steps)) % shape.rows
    begun, beginning = _beginnings(experience, state, steps)
    old, new = state.records, records
    ring = jax.tree.map(
        lambda leaf, given: leaf.at[written].set(given, unique_indices=True),
        old._replace(core=()),
        new._replace(core=()),
    )
    core = jax.tree.map(
        lambda leaf, given: leaf.at[beginning].set(given[begun], mode="drop"), old.core, new.core
    )
    state = ReplayState(
        records=ring._replace(core=core),
        sums=state.sums,
        position=(state.position + steps) % shape.rows,
        filled=jnp.minimum(state.filled + steps, shape.rows),
    )
    if not state.sums:
        return state
    return _enter(experience, state, steps, priorities)


def sample(experience: Replay, state: ReplayState, key: Array) -> tuple[Sample, Array]:
    """Draws `batch` items with replacement, and says which, int32 `[batch]`; consumes the key.

    While there are none what it returns means nothing. Importance weights: Schaul et al. (2016),
    "Prioritized experience replay", section 3.4, over the batch's largest.
    """
    if state.sums:
        items, drawn = _draw(state.sums, key, experience.batch)
        importance = (drawn / drawn.min()) ** -experience.importance_exponent
    else:
        ring = _shape(experience, state)
        most = jnp.maximum(size(experience, state), 1)
        number = jax.random.randint(key, (experience.batch,), 0, most)
        place = (_newest(experience, state) - number // ring.num_envs) % ring.places
        items = place * ring.num_envs + number % ring.num_envs
        importance = jnp.ones(experience.batch)
    timesteps, action, extras = _windows(experience, state, state.records[:3], items)
    core = _at(state.records.core, *_where(state, items))
    action, extras = jax.tree.map(lambda leaf: leaf[:-1], (action, extras))
    return Sample(timesteps, action, extras, core, importance), items


def update(experience: Replay, state: ReplayState, items: Array, priorities: Array) -> ReplayState:
    """Gives `items` of the last `sample` new priorities `[batch]`, above 0; before anything is added."""
    if not state.sums:
        return state
    return state._replace(sums=_set(state.sums, items, priorities**experience.priority_exponent))


def _partial(experience: Replay) -> int:
    """How many items of an environment have begun at most, of which rows are still to come."""
    return -(-(experience.steps - 1) // experience.period)


class _Shape(NamedTuple):
    rows: int
    num_envs: int
    places: int  # rows where an item may begin
    kept: int  # items of an environment, at most


def _shape(experience: Replay, state: ReplayState) -> _Shape:
    rows, num_envs = state.records.timestep.first.shape
    places = rows // experience.period
    return _Shape(rows, num_envs, places, places - _partial(experience))


def _newest(experience: Replay, state: ReplayState) -> Array:
    """The place of the newest complete item; those before it are before it in the ring."""
    rows = _shape(experience, state).rows
    return (state.position - experience.steps) % rows // experience.period


def _beginnings(experience: Replay, state: ReplayState, steps: int) -> tuple[Array, Array]:
    """At which of the next steps items may begin, and their places; out of range where none is left."""
    shape, period = _shape(experience, state), experience.period
    begun = -state.position % period + period * jnp.arange(-(-steps // period))
    place = (state.position + begun) % shape.rows // period
    return jnp.minimum(begun, steps - 1), jnp.where(begun < steps, place, shape.places)


def _enter(
    experience: Replay,
    state: ReplayState,
    steps: int,
    priorities: Callable[[Timestep, Tree], Array],
) -> ReplayState:
    """Gives the items that the last `steps` rows completed their priorities, those they pushed out 0."""
    shape, period = _shape(experience, state), experience.period
    newest, back = _newest(experience, state), jnp.arange(-(-steps // period))
    behind = (state.position - experience.steps) % period + period * back
    entered = (behind < steps) & (back < size(experience, state) // shape.num_envs)
    items = _items((newest - back) % shape.places, shape.num_envs)
    records = state.records
    timesteps, extras = _windows(
        experience, state, (records.timestep._replace(observation=()), records.extras), items
    )
    scaled = priorities(timesteps, extras) ** experience.priority_exponent
    values = jnp.where(jnp.repeat(entered, shape.num_envs), scaled, state.sums[0][items])
    out = shape.kept + back[: shape.places - shape.kept]
    gone = _items((newest - out) % shape.places, shape.num_envs)
    return state._replace(
        sums=_set(
            state.sums,
            jnp.concatenate([items, gone]),
            jnp.concatenate([values, jnp.zeros(gone.shape)]),
        )
    )


def _items(places: Array, num_envs: int) -> Array:
    """The items `[N x B]` that begin at `places` `[N]`."""
    return (places[:, None] * num_envs + jnp.arange(num_envs)[None]).reshape(-1)


def _where(state: ReplayState, items: Array) -> tuple[Array, Array]:
    """The places of items, and their environments."""
    num_envs = state.records.timestep.first.shape[1]
    return items // num_envs, items % num_envs


def _windows(experience: Replay, state: ReplayState, tree: Tree, items: Array) -> Tree:
    """Items `[N]` of parts of the ring, `(timestep, ...)`: leaves `[L, N, ...]`, cut as they should be."""
    place, env = _where(state, items)
    rows = experience.period * place[None] + jnp.arange(experience.steps)[:, None]
    window = rows % _shape(experience, state).rows
    timesteps, *rest = _at(tree, window, jnp.broadcast_to(env[None], window.shape))
    return (timesteps if experience.cross_episodes else _cut(experience, timesteps)), *rest


def _at(tree: Tree, rows: Array, envs: Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf.at[rows, envs].get(mode="promise_in_bounds"), tree)


def _cut(experience: Replay, timesteps: Timestep) -> Timestep:
    """Makes padding of what follows the end of the first learned row's episode.

    The observations stay as they are: no transition has them.
    """
    ended = jnp.logical_or(timesteps.terminated, timesteps.truncated)
    over = jax.lax.cummax(ended[experience.burn_in : -1].astype(jnp.int32)) > 0
    before = jnp.zeros((experience.burn_in + 1, over.shape[1]), bool)
    padding = jnp.concatenate([before, over])
    return timesteps._replace(
        reward=jnp.where(padding, 0.0, timesteps.reward),
        terminated=timesteps.terminated & ~padding,
        truncated=timesteps.truncated & ~padding,
        first=timesteps.first | padding,
    )


# The sum tree: level 0 holds the items' values, and each level above the sums of pairs of the one below.
# Arrays of their own for the levels let XLA read one while it writes the next in place.


def _empty_sums(items: int) -> tuple[Array, ...]:
    depth = max(items - 1, 1).bit_length()
    return tuple(jnp.zeros(1 << level) for level in reversed(range(depth + 1)))


def _set(sums: tuple[Array, ...], items: Array, values: Array) -> tuple[Array, ...]:
    """Sets values of items `[N]`; sums are made anew from their parts, so that no error builds up."""
    levels = [sums[0].at[items].set(values)]
    nodes = items
    for level in sums[1:]:
        below, nodes = levels[-1], nodes // 2
        if level.size <= _IN_ORDER * nodes.size:
            levels.append(below[0::2] + below[1::2])
        else:
            levels.append(level.at[nodes].set(below[2 * nodes] + below[2 * nodes + 1]))
    return tuple(levels)


_IN_ORDER = 16
"""About as many sums in order cost as much as one at an index."""


_LEVELS = 8
"""Levels through which one uniform number leads: float32 has 23 bits, too few for a million items."""


def _draw(sums: tuple[Array, ...], key: Array, number: int) -> tuple[Array, Array]:
    """Draws items in proportion to their values, and returns those; consumes the key.

    An item of value 0 is drawn only if all are 0.
    """
    below = sums[-2::-1]
    uniform = jax.random.uniform(key, (-(-len(below) // _LEVELS), number))
    node, value = jnp.zeros(number, jnp.int32), jnp.broadcast_to(sums[-1], number)
    target = value
    for i, level in enumerate(below):
        if i % _LEVELS == 0:
            target = uniform[i // _LEVELS] * value
        left, right = level.reshape(-1, 2)[node].T
        # Rounding may leave more than there is: never go where there is nothing.
        rightwards = (target >= left) & (right > 0)
        target = jnp.where(rightwards, target - left, target)
        node, value = 2 * node + rightwards, jnp.where(rightwards, right, left)
    return node, value
