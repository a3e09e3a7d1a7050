"""Which items begin and end in a stream of rows; `types.Replay` says what an item is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedbed.replay.layout import Layout

_BEFORE = -(
    1 << 40
)  # the step of a row that belongs to no episode: before the stream's first opening row


class Found(NamedTuple):
    """Items that were completed, by the row that did it; leaves are `[I]` int64."""

    env: np.ndarray
    row: np.ndarray  # of those handed in, the one that completed the item
    begin: np.ndarray  # row of the stream, the first that is kept
    length: np.ndarray  # rows kept
    front: np.ndarray  # rows of padding before these
    number: np.ndarray  # 0 where its learned part is the first of the episode, then 1, ...


_NOTHING = Found(*(np.zeros(0, np.int64) for _ in Found._fields))


class Sequencer:
    """Finds the items of one group's stream as its rows come, a few at a time.

    Steps count the rows of an episode, or with `cross_episodes` those of the stream, from 0 at an opening
    row (`first`). Rows before the first of these in a stream belong to no item.
    """

    def __init__(self, layout: Layout) -> None:
        self._experience, self._context = layout.experience, layout.context
        self._last = np.full(layout.group_size, _BEFORE, np.int64)
        self.rows = 0  # of the stream so far

    def restart(self) -> None:
        """Begins a new stream."""
        self._last[:] = _BEFORE
        self.rows = 0

    def steps(self, first: np.ndarray) -> np.ndarray:
        """Returns the steps `[n, k]` of the next k rows, from their `first` `[n, k]`."""
        rows = np.arange(first.shape[1])
        if self._experience.cross_episodes:
            first = first & (np.cumsum(first, axis=1) == 1) & (self._last < 0)[:, None]
        onward = self._last[:, None] + 1 + rows
        if not first.any():
            return onward
        opening = np.maximum.accumulate(np.where(first, rows, -1), axis=1)
        return np.where(opening >= 0, rows - opening, onward)

    def complete(self, steps: np.ndarray, ended: np.ndarray) -> Found:
        """Finds the items that rows with these `steps` and ends of episodes, both `[n, k]`, complete.

        They are in the order of rows, environments, and steps. The rows count as seen.
        """
        sequence, period = self._experience.sequence, self._experience.period
        first_row, starts = self.rows, steps - sequence
        self._last = steps[:, -1].copy()
        self.rows += steps.shape[1]
        whole = (starts >= 0) & (starts % period == 0)
        cut_short = not self._experience.cross_episodes and bool(ended.any())
        if not cut_short and not whole.any():
            return _NOTHING
        env, row = np.nonzero(whole)
        found = [(env, row, starts[env, row])]
        if cut_short:
            env, row = np.nonzero(ended & (steps > 0))
            last = steps[env, row]
            for back in range(-(-(sequence - 1) // period)):
                start = ((last - 1) // period - back) * period
                cut = (start >= 0) & (start > last - sequence)
                found.append((env[cut], row[cut], start[cut]))
        env, row, start = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.lexsort((start, env, row))
        env, row, start = env[order], row[order], start[order]
        kept = np.minimum(self._context, start)
        learned = steps[env, row] - start
        begin = first_row + row - learned - kept
        return Found(env, row, begin, kept + learned + 1, self._context - kept, start // period)


class CoreStates:
    """The memory with which acting entered the rows where items of one group begin, until these are complete.

    Where warming up begins before the episode does, memory is zeros: the opening row resets it.
    """

    def __init__(self, layout: Layout) -> None:
        self._leaves = layout.core_leaves
        self._burn_in, self._period = layout.experience.burn_in, layout.experience.period
        self._kept = (self._burn_in + layout.experience.sequence) // self._period + 1
        self._ring = [leaf.zeros(layout.group_size, self._kept) for leaf in self._leaves]

    def collect(self, steps: np.ndarray, cores: list[np.ndarray], found: Found) -> list[np.ndarray]:
        """Keeps what items will need of `cores` `[n, k, ...]`; returns that of the items found, `[I, ...]`.

        The rows are those whose steps, `[n, k]`, and items are given.
        """
        result = [leaf.zeros(len(found.env)) for leaf in self._leaves]
        if not self._leaves:
            return result
        due = steps + self._burn_in
        begins = (steps >= 0) & (due % self._period == 0)
        bounds = np.searchsorted(found.row, np.arange(steps.shape[1] + 1))
        known = found.number * self._period >= self._burn_in
        for row in range(steps.shape[1]):
            env = np.flatnonzero(begins[:, row])
            place = due[env, row] // self._period % self._kept
            for ring, core in zip(self._ring, cores, strict=True):
                ring[env, place] = core[env, row]
            mine = np.arange(bounds[row], bounds[row + 1])
            mine = mine[known[mine]]
            place = found.number[mine] % self._kept
            for ring, out in zip(self._ring, result, strict=True):
                out[mine] = ring[found.env[mine], place]
        return result
