"""The data of a replay behind one lock: rows, images, core states and items."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seedbed.replay.host.arena import Arena, Files
from seedbed.replay.host.items import Items, Windows
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.records import Records
from seedbed.replay.host.segments import Segments


class ReplayStorage:
    """The rows, core states and items of a replay.

    `lock` guards the tables. It is re-entrant, and waiting threads are notified when a set is full, when
    items are published or drawn, and when a pin is released. It is held for short times only: rows are copied
    without it (core states are small, and are copied under it). Rows that are being copied are pinned; rows
    that are being written, or that belong to unfinished items, are held: see `Segments`. With a folder, data
    lies in files there; the constructor raises SeedbedError if it cannot make the folder.
    """

    def __init__(self, layout: Layout, folder: Path | None) -> None:
        self.layout = layout
        self.files = None if folder is None else Files(folder)
        self.lock = threading.Condition()
        self.records = Records(layout, self.files, self.lock)
        self.rows, self.frames = self.records.segments, self.records.frames
        self.cores: Segments | None = None
        self._core_views: list[np.ndarray] = []
        if layout.core_leaves:
            count = -(-layout.experience.capacity // layout.core_rows) + 2
            sizes = [layout.core_rows * leaf.num_bytes for leaf in layout.core_leaves]
            self.cores = Segments(Arena("cores", count, sizes, self.files), layout.core_rows)
            for leaf, view in zip(layout.core_leaves, self.cores.arena.views, strict=True):
                self._core_views.append(view.view(leaf.dtype).reshape(-1, *leaf.shape))
        self.items = Items(layout, self.rows, self.cores)

    @property
    def segments(self) -> dict[str, Segments]:
        """Returns the segments of rows, of images, and of core states if there are any, by name."""
        named = {"rows": self.rows, "images": self.frames.segments}
        return named if self.cores is None else {**named, "cores": self.cores}

    def publish(
        self, windows: Windows, cores: list[np.ndarray], priorities: np.ndarray | None
    ) -> None:
        """Adds I items with their core states, leaves `[I, ...]`; from then on they can be drawn.

        `windows.core` is overwritten. `priorities` is `[I]`, or None for the largest priority so far. Call
        from the thread that holds the writer's `sealing`, without `lock`. It waits while a save copies a
        segment of core states that must be used again.
        """
        with self.lock:
            if self.cores is not None:
                for item in range(len(windows.env)):
                    windows.core[item] = self._allocate_core(self.cores)
                for view, core in zip(self._core_views, cores, strict=True):
                    view[windows.core] = core
            self.items.add(windows, priorities)
            if self.cores is not None:
                np.subtract.at(self.cores.holds, windows.core // self.cores.units, 1)
            self.lock.notify_all()

    def _allocate_core(self, cores: Segments) -> int:
        while (row := cores.allocate(1)) is None:
            oldest = cores.oldest()
            self.items.evict_cores_of(oldest)
            self.lock.wait_for(lambda pins=cores.pins, oldest=oldest: not pins[oldest])
        cores.holds[row // cores.units] += 1
        return row

    def read_cores(self, windows: Windows, batch: list[np.ndarray]) -> None:
        """Copies the core states of items `[B]` to `batch`, `[B, ...]` for each leaf. Call under `lock`."""
        for view, out in zip(self._core_views, batch, strict=True):
            np.take(view, windows.core, axis=0, out=out, mode="clip")

    def stats(self) -> dict[str, float]:
        """Returns items, inserted, bytes, bytes_per_frame (a row) and the compression of images, as a ratio.

        Any thread may call this.
        """
        with self.lock:
            rows = self.rows.units_held * CHUNK
            images = self.frames.segments.units_held
            compression = self.frames.compression()
            cores = 0 if self.cores is None else self.cores.units_held
            items, inserted = self.items.count, self.items.inserted
        raw = sum(leaf.num_bytes for leaf in self.layout.leaves if not leaf.compressed)
        core = sum(leaf.num_bytes for leaf in self.layout.core_leaves)
        bytes_ = rows * raw + images + cores * core + self.items.num_bytes
        return {
            "items": items,
            "inserted": inserted,
            "bytes": bytes_,
            "bytes_per_frame": bytes_ / max(1, rows),
            "compression": compression,
        }

    def check_valid(self, sets: Sequence[int]) -> None:
        """Raises AssertionError if an invariant is broken.

        `sets` are the first chunks of the sets whose rows are held. Call from the thread that holds the
        writer's `sealing`, while no thread appends.
        """
        with self.lock:
            self.items.check_valid()
            self.frames.check_valid()
            held = np.bincount(
                np.array(sets, np.int64) // self.rows.units, minlength=len(self.rows.holds)
            )
            assert (held == self.rows.holds).all(), "holds of rows are miscounted"
            assert self.cores is None or not self.cores.holds.any(), "memory is held for nobody"
            for name, segments in self.segments.items():
                assert (segments.references >= 0).all(), f"{name}: negative references"
                assert (segments.pins >= 0).all(), f"{name}: negative pins"
                used = (segments.references > 0) | (segments.holds > 0) | (segments.pins > 0)
                assert (segments.opened[used] >= 0).all(), f"{name}: a used segment is closed"
