"""A replay shard: it keeps the steps of some groups of environments, and learners draw from it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from seedbed import trees
from seedbed.paramserver.job import Job
from seedbed.paramserver.messages import BlockLayout, Kind
from seedbed.paramserver.replay_folder import layout_of, open_replay, role_of
from seedbed.paramserver.role import COORDINATOR, Role, end_on_signals, parse, run_role
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import Sample, empty_sample
from seedbed.run.devices import keep_to_the_host
from seedbed.run.programs import keep_programs
from seedbed.streams.addresses import Listening
from seedbed.streams.messages import Message, ProtocolError, require_fields
from seedbed.streams.server import Client
from seedbed.types import SeedbedError, StorageError, Timestep, Tree, learns_from_replay

MOST_BYTES = 1 << 28
"""The largest block of a message to or from a replay shard."""


class RowLayout:
    """The block of one step of a group: timestep, action, extras and core state, leaves `[n, ...]`."""

    def __init__(self, layout: Layout) -> None:
        leaves = [*layout.leaves, *layout.core_leaves]
        shapes = [
            jax.ShapeDtypeStruct((layout.group_size, *leaf.shape), leaf.dtype) for leaf in leaves
        ]
        self._block = BlockLayout(shapes)
        self.size = self._block.size
        action = len(layout.leaves) - len(trees.leaves(layout.extras)) - len(layout.timestep_leaves)
        self._structure: Tree = (
            layout.timestep,
            tuple(0 for _ in range(action)),
            layout.extras,
            layout.core,
        )

    def write(self, step: Tree, block: np.ndarray) -> None:
        """Copies (timestep, action, extras, core) into a block."""
        self._block.write(trees.leaves(step), block)

    def views(self, block: np.ndarray) -> tuple[Timestep, Tree, Tree, Tree]:
        """Returns (timestep, action, extras, core) in a block, the action as a tuple of leaves."""
        return trees.unflatten(self._structure, self._block.views(block))


class SampleLayout:
    """The block of some drawn items."""

    def __init__(self, layout: Layout, count: int) -> None:
        self._structure = empty_sample(layout, count)
        self._block = BlockLayout(trees.leaves(self._structure))
        self.size = self._block.size

    def views(self, block: np.ndarray) -> Sample:
        """Returns the items in a block, as views."""
        return trees.unflatten(self._structure, self._block.views(block))


@dataclasses.dataclass
class _Source:
    """What a learner has sent."""

    acked: int = 0  # the number of its last row
    added: int = 0  # items that came of its rows
    groups: set[int] = dataclasses.field(default_factory=set)


class ReplayShard:
    """A replay and its saves: a `role.Work`. For one thread."""

    def __init__(self, role: Role, job: Job, shard: int, save: str | None) -> None:
        """Goes on from the save of this name, or from the newest if it is None, if there is one.

        With another number of shards than before, it takes its streams over from all former ones.
        """
        agent = job.agent
        assert learns_from_replay(agent)
        self._rows = RowLayout(layout_of(job))
        priorities = jax.jit(agent.initial_priorities)
        self.replay = open_replay(
            role.directory.path.parent,
            job,
            shard,
            save,
            lambda *items: np.asarray(priorities(*items)),
        )
        self._epoch = role.number
        self._owners: dict[int, int] = {}  # learners by group
        self._sources: dict[int, _Source] = {}  # by learner
        self._samples: dict[int, SampleLayout] = {}  # by the number of items
        self._saving: threading.Thread | None = None
        self._saved: dict[str, str] = {}  # errors by the name of the save; "" if there was none

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Opens the stream of a learner; what it has sent before and is here need not come again."""
        client.connection.limit = MOST_BYTES
        if said["role"] == COORDINATOR:
            return {"epoch": self._epoch}
        source = self._sources.setdefault(said["number"], _Source())
        return {"epoch": self._epoch, "acked": source.acked, **self._figures(source)}

    def leave(self, client: Client) -> None:
        """Does nothing: a learner may come back."""

    def take(self, client: Client, message: Message) -> None:
        """Takes a message; raises ProtocolError and ConnectionError."""
        kind, fields = message.kind, message.fields
        if kind is Kind.APPEND:
            self._append(client, message)
        elif kind is Kind.DRAW:
            wanted = require_fields(fields, tag=int, count=int)
            self._draw(client, wanted["tag"], wanted["count"])
        elif kind is Kind.PRIORITIES:
            slots, generations, priorities = self._priorities(message)
            try:
                self.replay.update_priorities(slots, generations, priorities)
            except SeedbedError as error:
                # It is the learner's fault, and not this shard's.
                raise ProtocolError(str(error)) from error
        elif kind is Kind.SAVE and client.role == COORDINATOR:
            name = require_fields(fields, name=str)["name"]
            client.send(Kind.SAVE, begun=self._save(name, fields["keep"]))
        else:
            raise ProtocolError(f"{kind.name} came out of turn")

    def _append(self, client: Client, message: Message) -> None:
        """Adds rows that have not come before, and tells what is here."""
        fields, source = message.fields, self._sources[client.number]
        first = require_fields(fields, first=int)["first"]
        ends = [self._group(group) for group in require_fields(fields, ends=list)["ends"]]
        rows = [
            (self._group(group), bool(opens))
            for group, opens in require_fields(fields, rows=list)["rows"]
        ]
        if len(message.block) != len(rows) * self._rows.size:
            raise ProtocolError(f"{len(rows)} rows have {len(message.block)} bytes")
        block = np.frombuffer(message.block, np.uint8)
        for index, (group, opens) in enumerate(rows):
            if first + index <= source.acked:
                continue
            # The stream of a group that another learner had begun has ended.
            if opens or self._owners.get(group) != client.number:
                self.replay.restart(group)
                self._owners[group] = client.number
            row = self._rows.views(block[index * self._rows.size : (index + 1) * self._rows.size])
            before = self.replay.inserted_of(group)
            self.replay.append(group, *row)
            self.replay.seal_pending()
            source.added += self.replay.inserted_of(group) - before
            source.acked = first + index
        for group in ends:
            if self._owners.get(group) != client.number:
                continue
            before = self.replay.inserted_of(group)
            self.replay.restart(group)
            self.replay.seal_pending()
            source.added += self.replay.inserted_of(group) - before
        figures = self._figures(source)
        client.send(Kind.APPENDED, acked=source.acked, ends=ends, **figures)

    def _group(self, group: Any) -> int:
        """Returns the number of a group of this shard; raises ProtocolError if it is none."""
        if type(group) is not int or not 0 <= group < self.replay.layout.num_groups:
            raise ProtocolError(f"this shard has no group {group}")
        return group

    def _figures(self, source: _Source) -> dict[str, Any]:
        return {
            "added": source.added,
            "items": self.replay.items,
            "total": self.replay.total_weight,
        }

    def _draw(self, client: Client, tag: int, count: int) -> None:
        """Sends items, drawn in proportion to their weights."""
        if not self.replay.items or not 0 < count <= self.replay.layout.experience.batch:
            client.send(Kind.ITEMS, tag=tag, count=0, total=self.replay.total_weight)
            return
        layout = self._samples.get(count)
        if layout is None:
            layout = self._samples[count] = SampleLayout(self.replay.layout, count)
        total, block = self.replay.total_weight, np.empty(layout.size, np.uint8)
        self.replay.sample(count, out=layout.views(block))
        client.send(Kind.ITEMS, block, tag=tag, count=count, total=total)

    def _priorities(self, message: Message) -> list[np.ndarray]:
        count = require_fields(message.fields, count=int)["count"]
        if count > len(message.block):
            raise ProtocolError(f"{count} priorities have {len(message.block)} bytes")
        layout = priorities_layout(count)
        if len(message.block) != layout.size:
            raise ProtocolError(f"{count} priorities have {len(message.block)} bytes")
        return layout.views(np.frombuffer(message.block, np.uint8))

    def _save(self, name: str, keep: str | None) -> bool:
        """Begins to save beside the work, unless this save is there; returns False if another is being made.

        `report` says how it has ended.
        """
        if self._saving is not None and self._saving.is_alive():
            return False
        if self._saved.get(name) == "":
            return True
        self._saved = {}

        def write() -> None:
            try:
                self.replay.save(name, keep)
                self._saved = {name: ""}
            except (StorageError, SeedbedError) as error:
                self._saved = {name: str(error)}

        self._saving = threading.Thread(target=write, daemon=True)
        self._saving.start()
        return True

    def tick(self, now_s: float) -> bool:
        """Seals what waits; returns True: a shard always has more to do."""
        del now_s
        if self.replay.pending:
            self.replay.seal_pending()
        return True

    def report(self) -> dict[str, Any]:
        """Returns figures: those of the replay, draws and saves."""
        return {
            **self.replay.stats(),
            "total": self.replay.total_weight,
            "saved": self._saved,
            "notices": self.replay.take_notices(),
        }

    def close(self) -> None:
        """Waits until nothing is saved."""
        if self._saving is not None:
            self._saving.join()


def priorities_layout(count: int) -> BlockLayout:
    """Returns the block of the slots, generations and priorities of some items."""
    numbers = np.zeros(count, np.int64)
    return BlockLayout([numbers, numbers, np.zeros(count, np.float64)])


def main() -> None:
    """Serves a replay shard of a run. Call from the main thread."""
    given = parse("A replay shard")
    keep_to_the_host()
    keep_programs()

    def make() -> tuple[Role, ReplayShard, Listening | None]:
        job = Job.read(given.run, trusted=given.trusted)
        role = Role(given.run, role_of(given.number), given.start)
        end_on_signals(role)
        at = job.listening(given.hosted)
        return role, ReplayShard(role, job, given.number, given.save), at

    run_role(make)


if __name__ == "__main__":
    main()
