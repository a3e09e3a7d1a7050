"""The search for items in a stream of rows; `types.Replay` says what an item is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedbed.replay.host.layout import Layout

# The step before a stream's first row, so that rows before the first opening row get negative steps.
_BEFORE = -(1 << 40)


class CompletedItems(NamedTuple):
    """Items that rows have completed; leaves are `[I]` int64."""

    env: np.ndarray  # environment of the group
    row: np.ndarray  # the row that completed the item, among the rows handed in
    begin: np.ndarray  # first row of the item that is kept, counted from the stream's start
    length: np.ndarray  # rows kept
    front: np.ndarray  # rows of padding before these
    number: np.ndarray  # of the item in its episode, from 0


_NOTHING = CompletedItems(**{name: np.zeros(0, np.int64) for name in CompletedItems._fields})


class Sequencer:
    """A search for the items of one group's stream, which takes a few rows at a time.

    The step of a row counts rows from the opening row (`first`) of its episode, which has step 0. Rows before
    the first opening row of a stream belong to no item. One thread at a time may call the methods: the holder
    of the writer's `sealing`.
    """

    def __init__(self, layout: Layout) -> None:
        self._experience, self._context = layout.experience, layout.context
        self._last = np.full(layout.group_size, _BEFORE, np.int64)
        # Rows of the stream so far.
        self.rows = 0

    def restart(self) -> None:
        """Starts a new stream. Call from the thread that holds `sealing`."""
        self._last[:] = _BEFORE
        self.rows = 0

    def steps(self, first: np.ndarray) -> np.ndarray:
        """Returns the steps `[n, k]` of the next k rows, given their `first` `[n, k]`. Changes nothing.

        Call from the thread that holds `sealing`.
        """
        rows = np.arange(first.shape[1])
        onward = self._last[:, None] + 1 + rows
        if not first.any():
            return onward
        opening = np.maximum.accumulate(np.where(first, rows, -1), axis=1)
        return np.where(opening >= 0, rows - opening, onward)

    def complete(self, steps: np.ndarray, ended: np.ndarray) -> CompletedItems:
        """Returns the items that the next k rows complete, in the order of rows, environments and steps.

        `steps` are those of the rows, and `ended` says whether an episode ended there; both are `[n, k]`.
        This advances the stream by the k rows. Call from the thread that holds `sealing`.
        """
        sequence, period = self._experience.sequence, self._experience.period
        first_row, starts = self.rows, steps - sequence
        self._last = steps[:, -1].copy()
        self.rows += steps.shape[1]
        whole = (starts >= 0) & (starts % period == 0)
        cut_short = bool(ended.any())
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
        return CompletedItems(
            env=env,
            row=row,
            begin=begin,
            length=kept + learned + 1,
            front=self._context - kept,
            number=start // period,
        )


class CoreStates:
    """The core states with which one group's items begin, kept until the items are complete.

    An item's core state is the one before acting on the first of its `steps` rows (after those for stacking).
    It is zeros if the rows that warm up the memory (`burn_in`) begin before the episode: the opening row
    resets the memory anyway.
    """

    def __init__(self, layout: Layout) -> None:
        self._leaves = layout.core_leaves
        self._burn_in, self._period = layout.experience.burn_in, layout.experience.period
        self._kept = (self._burn_in + layout.experience.sequence) // self._period + 1
        self._ring = [leaf.zeros(layout.group_size, self._kept) for leaf in self._leaves]

    def collect(
        self, steps: np.ndarray, cores: list[np.ndarray], found: CompletedItems
    ) -> list[np.ndarray]:
        """Returns the core states of the items in `found`, leaves `[I, ...]`.

        This also keeps the core states that later items need. `cores` has the core states of the k rows,
        leaves `[n, k, ...]` (or longer than k). `steps` `[n, k]` are the steps of the rows, and `found` are
        the items that they complete. Call from the thread that holds `sealing`, once for each row.
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
