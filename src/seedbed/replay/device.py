"""Replay on the device: pure functions over a ring of records, for the fused runtime.

Environments step together, and a row of the ring is one step of all of them. An item is a window of
`experience.steps` rows of one environment, so overlapping items share their rows: nothing is stored
twice. The ring's length is a multiple of `period`, and an item begins at each row number that is a multiple
of `period`.

Items therefore begin every `period` steps of the stream, and not of an episode as in the host's replay.
Without `cross_episodes`, an item belongs to the episode of its first learned row, and the rows after the end
of that episode are padding. The rows of the next episode before the next item begins are then in no item:
if `period` is above 1, openings of episodes are learned from less often than other steps, or never, if all
episodes have the same place among the items. `cross_episodes` avoids that. The rows that warm up the memory
(`burn_in`) may be of an earlier episode, since `first` resets the memory. An item without a transition, such
as one that is cut and begins with the end of an episode, is never drawn by prioritised replay, and otherwise
adds nothing to an update.

In all functions B is the number of environments and T a number of steps. Being pure, they may be called by
any thread, and under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed.ops.priorities import draw_weights, importance_weights, is_prioritised
from seedbed.types import Array, Replay, SeedbedError, Timestep, Tree


class Record(NamedTuple):
    """The data of a step. Leaves are of one environment in a template, and `[T, B, ...]` when added."""

    timestep: Timestep
    action: Tree  # chosen at the timestep
    extras: Tree  # returned by acting with that action
    # The recurrent state before acting, stored only for rows where an item begins; () if there is none.
    core: Tree


class ReplayState(NamedTuple):
    """A ring of R rows of B environments, in which R / period items of each environment may begin.

    Item number i is of environment i % B. It begins at place i // B, which is row (i // B) * period.
    """

    records: Record  # leaves [R, B, ...], those of `core` [R / period, B, ...]
    sums: tuple[Array, ...]  # sum tree over R / period * B items; () if all are drawn alike
    position: Array  # int32 scalar: the row to be written next
    filled: Array  # int32 scalar: rows written, at most R


class Sample(NamedTuple):
    """A batch of items of L timesteps, L being `experience.steps`."""

    timesteps: Timestep  # [L, batch, ...]
    action: Tree  # [L - 1, batch, ...]
    extras: Tree  # [L - 1, batch, ...]
    core: Tree  # [batch, ...] recurrent state before acting on row 0
    importance: Array  # [batch] float32, at most 1


def initial(experience: Replay, template: Record, num_envs: int) -> ReplayState:
    """Returns an empty replay for `num_envs` environments, whose records are like `template`.

    The leaves of `template` are of one environment and need only a shape and a dtype. Raises SeedbedError if
    `min_size` is not in 1 to `capacity`.
    """
    if not 0 < experience.min_size <= experience.capacity:
        raise SeedbedError(
            f"replay: min_size is {experience.min_size}; give 1 to {experience.capacity}, the capacity"
        )
    places = -(-experience.capacity // num_envs) + _partial(experience)

    def empty(length: int) -> Callable[[Array], Array]:
        return lambda leaf: jnp.zeros((length, num_envs, *leaf.shape), leaf.dtype)

    records = jax.tree.map(empty(places * experience.period), template)
    return ReplayState(
        records=records._replace(core=jax.tree.map(empty(places), template.core)),
        sums=_empty_sums(places * num_envs) if is_prioritised(experience) else (),
        position=jnp.int32(0),
        filled=jnp.int32(0),
    )


def size(experience: Replay, state: ReplayState) -> Array:
    """Returns the number of items that can be drawn, an int32 scalar."""
    ring = _shape(experience, state)
    complete = (state.filled - experience.steps) // experience.period + 1
    return jnp.clip(complete, 0, ring.kept) * ring.num_envs


def ready(experience: Replay, state: ReplayState) -> Array:
    """Returns whether there are `min_size` items, so that learning may begin, a bool scalar."""
    return size(experience, state) >= experience.min_size


def add(
    experience: Replay,
    state: ReplayState,
    records: Record,
    priorities: Callable[[Timestep, Tree], Array],
) -> ReplayState:
    """Returns the replay with the records `[T, B, ...]` of the next T steps in place of the oldest rows.

    `priorities` is `ReplayAgent.initial_priorities`; it is not called if all items are drawn alike. The ring
    is written in place if the state is donated or carried through a loop. Raises SeedbedError if the T steps
    are more than the capacity.
    """
    shape = _shape(experience, state)
    steps = records.timestep.first.shape[0]
    if steps > shape.kept * experience.period:
        raise SeedbedError(
            f"replay: {steps} steps of {shape.num_envs} environments at once are more than the capacity of "
            f"{experience.capacity} items, one every {experience.period} steps; raise the capacity"
        )
    # Indices rather than a slice, because the rows may wrap around the end of the ring.
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
    """Draws `batch` items with replacement and returns them and their numbers; consumes the key.

    The numbers are int32 `[batch]`. If there are no items, the result is meaningless.
    """
    if state.sums:
        items, drawn = _draw(state.sums, key, experience.batch)
        # Items of value 0 are drawn if there are no others; they have no transition to weigh.
        importance = importance_weights(experience, jnp.where(drawn == 0, 1.0, drawn))
    else:
        ring = _shape(experience, state)
        most = jnp.maximum(size(experience, state), 1)
        number = jax.random.randint(key, (experience.batch,), 0, most)
        place = (_newest(experience, state) - number // ring.num_envs) % ring.places
        items = place * ring.num_envs + number % ring.num_envs
        importance = jnp.ones(experience.batch)
    records = state.records
    timesteps, action, extras = _windows(
        experience, state, (records.timestep, records.action, records.extras), items
    )
    core = _at(records.core, *_where(state, items))
    action, extras = jax.tree.map(lambda leaf: leaf[:-1], (action, extras))
    batch = Sample(
        timesteps=timesteps, action=action, extras=extras, core=core, importance=importance
    )
    return batch, items


def update(experience: Replay, state: ReplayState, items: Array, priorities: Array) -> ReplayState:
    """Returns the replay with new priorities `[batch]`, above 0, of the `items` that `sample` returned.

    Call it before the next `add`. It changes nothing if all items are drawn alike. After an invalid priority
    all new values are NaN, so that no later update hides it from `all_valid`.
    """
    if not state.sums:
        return state
    sound = _valid(priorities).all() & all_valid(state)
    values = jnp.where(sound, draw_weights(experience, priorities), jnp.nan)
    return state._replace(sums=_set(state.sums, items, values))


def all_valid(state: ReplayState) -> Array:
    """Returns whether all priorities that `add` and `update` got were finite and above 0, a bool scalar.

    It is always true if all items are drawn alike. An invalid priority's value is NaN, and so are the sums
    above it.
    """
    return jnp.isfinite(state.sums[-1][0]) if state.sums else jnp.bool_(True)


def _valid(priorities: Array) -> Array:
    return jnp.isfinite(priorities) & (priorities > 0)


def _partial(experience: Replay) -> int:
    """Returns the largest number of items of an environment that have begun and still lack rows."""
    return -(-(experience.steps - 1) // experience.period)


class _Shape(NamedTuple):
    rows: int
    num_envs: int
    places: int  # number of rows where an item may begin
    kept: int  # largest number of complete items of an environment


def _shape(experience: Replay, state: ReplayState) -> _Shape:
    rows, num_envs = state.records.timestep.first.shape
    places = rows // experience.period
    return _Shape(rows, num_envs, places, places - _partial(experience))


def _newest(experience: Replay, state: ReplayState) -> Array:
    """Returns the place of the newest complete item; older items are at the places before it in the ring."""
    rows = _shape(experience, state).rows
    return (state.position - experience.steps) % rows // experience.period


def _beginnings(experience: Replay, state: ReplayState, steps: int) -> tuple[Array, Array]:
    """Returns the numbers of those of the next steps at which items begin, and the places of these items.

    Both are `[ceil(steps / period)]`. If fewer items begin, the last place is out of range.
    """
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
    """Sets the values of the items that the last `steps` rows completed, and 0 for those replaced."""
    shape, period = _shape(experience, state), experience.period
    newest, back = _newest(experience, state), jnp.arange(-(-steps // period))
    behind = (state.position - experience.steps) % period + period * back
    entered = (behind < steps) & (back < size(experience, state) // shape.num_envs)
    items = _items((newest - back) % shape.places, shape.num_envs)
    records = state.records
    timesteps, extras = _windows(
        experience, state, (records.timestep._replace(observation=()), records.extras), items
    )
    given = priorities(timesteps, extras)
    scaled = jnp.where(_valid(given), draw_weights(experience, given), jnp.nan)
    # An item without a transition is never drawn. It would add nothing to an update, and as the least
    # probable one it would lower the importance of all others.
    scaled = jnp.where((~timesteps.first[experience.burn_in + 1 :]).any(0), scaled, 0.0)
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
    """Returns the numbers `[N * B]` of the items that begin at `places` `[N]`."""
    return (places[:, None] * num_envs + jnp.arange(num_envs)[None]).reshape(-1)


def _where(state: ReplayState, items: Array) -> tuple[Array, Array]:
    """Returns the places of items, and their environments."""
    num_envs = state.records.timestep.first.shape[1]
    return items // num_envs, items % num_envs


def _windows(experience: Replay, state: ReplayState, tree: Tree, items: Array) -> Tree:
    """Returns the rows of `items` `[N]` from parts of the ring, leaves `[L, N, ...]`.

    `tree` is `(timestep, ...)`, with leaves `[R, B, ...]`. Without `cross_episodes`, rows after the end of an
    item's episode become padding.
    """
    place, env = _where(state, items)
    rows = experience.period * place[None] + jnp.arange(experience.steps)[:, None]
    window = rows % _shape(experience, state).rows
    timesteps, *rest = _at(tree, window, jnp.broadcast_to(env[None], window.shape))
    return (timesteps if experience.cross_episodes else _cut(experience, timesteps)), *rest


def _at(tree: Tree, rows: Array, envs: Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf.at[rows, envs].get(mode="promise_in_bounds"), tree)


def _cut(experience: Replay, timesteps: Timestep) -> Timestep:
    """Turns the rows after the end of the first learned row's episode into padding.

    Their observations stay as they are, because no transition uses them.
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


# The sum tree: level 0 holds the items' values (priorities to the power `priority_exponent`), and each level
# above holds the sums of pairs of the level below. Each level is an array of its own, so that XLA can read
# one level while it writes the next one in place.


def _empty_sums(items: int) -> tuple[Array, ...]:
    depth = max(items - 1, 1).bit_length()
    return tuple(jnp.zeros(1 << level) for level in reversed(range(depth + 1)))


def _set(sums: tuple[Array, ...], items: Array, values: Array) -> tuple[Array, ...]:
    """Returns the tree with new values of items `[N]`.

    Sums are computed again from their two parts, so that rounding errors do not build up.
    """
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
"""About this many sums in order cost as much as one sum at an index."""


_LEVELS = 8
"""The number of levels that one uniform number is used for.

A uniform float32 has 23 random bits, too few to draw from a million items with one number.
"""


def _draw(sums: tuple[Array, ...], key: Array, number: int) -> tuple[Array, Array]:
    """Draws `number` items in proportion to their values; returns them and their values; consumes the key.

    An item of value 0 is drawn only if all values are 0.
    """
    below = sums[-2::-1]
    uniform = jax.random.uniform(key, (-(-len(below) // _LEVELS), number))
    node, value = jnp.zeros(number, jnp.int32), jnp.broadcast_to(sums[-1], number)
    target = value
    for i, level in enumerate(below):
        if i % _LEVELS == 0:
            target = uniform[i // _LEVELS] * value
        left, right = level.reshape(-1, 2)[node].T
        # Because of rounding the target may be too large: never enter an empty right child.
        rightwards = (target >= left) & (right > 0)
        target = jnp.where(rightwards, target - left, target)
        node, value = 2 * node + rightwards, jnp.where(rightwards, right, left)
    return node, value
