"""Guards: work that is used only as x in `where(mask, x, y)` runs only if the mask holds in some lane.

For each mask, this collects the items whose readers are all such selects or items already collected. A write
`store(a, i, where(mask, new, a[i]))` counts as such a select. If an item outside a group has to run between
two items of the group, the group is cut there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from seedbed.simd.ir.graph import Loop, Node
from seedbed.simd.schedule.measure import LOOP, cost
from seedbed.simd.schedule.plan import CIRCLE, Guard, Item, Schedule, sort
from seedbed.simd.schedule.sparse import masked

WORTH = 8.0
"""The least that a guard must save, in additions, to be worth its branch."""


def guarded(schedule: Schedule, items: Iterable[Node | Loop]) -> list[Item]:
    """Returns the items of one body in an order to run them, with guards around some."""
    return _Body(schedule, [*items], frozenset()).arrange()


def saved(item: Item) -> float:
    """Returns what a guard saves that skips an item, in additions."""
    if isinstance(item, Guard):
        return sum(saved(i) for i in item.items)
    return LOOP if isinstance(item, Loop) else cost(item).saved


class _Body:
    """The items of one body, or of one guard in it, while they are grouped."""

    def __init__(self, schedule: Schedule, items: list[Item], inside: frozenset[Node]) -> None:
        self._schedule = schedule
        self._items = items
        self._inside = inside  # masks that are known to hold in some lane here
        # The guard that an item is in; an item without a guard stands for itself.
        self._within: dict[Item, Item] = {item: item for item in items}
        self._members: dict[Guard, set[Item]] = {}
        self._gates: dict[Node, list[Node | Loop]] = {}  # the selects and gated writes of each mask
        for item in items:
            if isinstance(item, Guard):
                continue
            mask = self._mask(item)
            if mask is not None and mask not in inside:
                self._gates.setdefault(mask, []).append(item)

    def arrange(self) -> list[Item]:
        """Groups by one mask after another, the costliest first, then within guards; returns the order."""
        found = [(self._grow(mask), mask) for mask in self._gates]
        worth = [(sum(map(saved, s)), mask) for s, mask in found]
        for value, mask in sorted(worth, key=lambda pair: (-pair[0], pair[1].id)):
            if value < WORTH:
                break
            members = self._grow(mask)
            if sum(map(saved, members)) >= WORTH:
                self._split(mask, members)
        for guard in self._members:
            inside = self._inside | {guard.mask}
            guard.items = _Body(self._schedule, guard.items, inside).arrange()
        return self._sorted()

    def _sorted(self) -> list[Item]:
        tops = sorted({*self._within.values()}, key=self._rank)
        return sort(tops, self._before, self._rank)

    def _rank(self, item: Item) -> int:
        if isinstance(item, Guard):
            return min(self._schedule.rank(i) for i in self._members[item])  # type: ignore[arg-type]
        return self._schedule.rank(item)

    def _before(self, item: Item) -> set[Item]:
        """Returns the guards and single items that have to run directly before an item."""
        members = self._members[item] if isinstance(item, Guard) else (item,)
        found: set[Item] = set()
        for member in members:
            for earlier in self._schedule.before[member]:  # type: ignore[index]
                if earlier in self._within:
                    found.add(self._within[earlier])
        return found - {item}

    def _needed(self, item: Item) -> set[Item]:
        """Returns the guards and single items that have to run, at any distance, before an item."""
        found, waiting = set[Item](), [item]
        while waiting:
            more = self._before(waiting.pop()) - found
            found |= more
            waiting += more
        return found

    def _mask(self, item: Node | Loop) -> Node | None:
        """Returns the mask of a select, a store or a loop, or None if a write has no mask.

        Of a write with several masks it is the first that is not known to hold in some lane here.
        """
        if isinstance(item, Loop):
            return self._mask_of_loop(item)
        if item.op == "select":
            return item.args[0]
        masks = (select.args[0] for select in masked(item))
        return next((mask for mask in masks if mask not in self._inside), None)

    def _mask_of_loop(self, loop: Loop) -> Node | None:
        """Returns the one mask of all writes of a loop, or None.

        The loop must leave nothing but arrays that it writes in place, and the mask must not depend on it.
        """
        live, masks = self._schedule.live, set[Node | None]()
        for k, carry in live.carries[loop]:
            if carry.size is None or (loop, k) not in self._schedule.taken:
                return None
            state = carry.final
            while state is not carry.variable:
                selects = masked(state)
                if not selects:
                    return None
                masks.add(selects[0].args[0])
                state = state.args[0]
        mask = masks.pop() if len(masks) == 1 and not live.records[loop] else None
        return None if mask is None or loop in mask.loops else mask

    def _states(self, item: Item) -> set[Item | None]:
        """Returns the item that made the array a store writes, or those that made a loop's initial values."""
        source = self._schedule.source
        if isinstance(item, Loop):
            return {source(c.init) for _, c in self._schedule.live.carries[item]}
        return {source(item.args[0])} if isinstance(item, Node) else set()

    def _is_free(self, item: Item | None) -> bool:
        return item is not None and self._within.get(item) is item

    def _grow(self, mask: Node) -> set[Item]:
        """Returns the items that matter only in lanes in which the mask holds."""
        source, readers = self._schedule.source, self._schedule.readers
        members: set[Item] = set()
        # Gated writes: if they do not run, the state before them remains, so it has to be made.
        writes: set[Item] = set()
        waiting: list[Item | None] = []
        for item in self._gates[mask]:
            if not self._is_free(item):
                continue
            if isinstance(item, Node) and item.op == "select":
                waiting.append(source(item.args[1]))
            else:
                members.add(item)
                writes.add(item)
                waiting += self._schedule.before[item]  # type: ignore[index]

        def only_under(item: Item, reader: Item) -> bool:
            if reader in members:
                return reader not in writes or item not in self._states(reader)
            if not isinstance(reader, Node) or reader.op != "select" or not self._is_free(reader):
                return False
            condition, true, false = (source(a) for a in reader.args)
            return reader.args[0] is mask and true is item and item not in (condition, false)

        while waiting:
            item = waiting.pop()
            if item is None or item in members or not self._is_free(item):
                continue
            if item in self._schedule.held or item is source(mask):
                continue
            if all(only_under(item, reader) for reader in readers[item]):  # type: ignore[index]
                members.add(item)
                waiting += self._schedule.before[item]  # type: ignore[index]
        return members

    def _split(self, mask: Node, members: set[Item]) -> None:
        """Makes guards of the members and selects of a mask, as few as the items between them allow."""
        source, made = self._schedule.source, self._schedule.source(mask)
        # The mask may depend on a member, through a write between them: such a member cannot be guarded.
        if made in self._within:
            members = members - self._needed(self._within[made])
            for item in members:
                self._schedule.before[item].add(made)  # type: ignore[index, arg-type]
        selects = {
            i
            for i in self._gates[mask]
            if isinstance(i, Node)
            and i.op == "select"
            and i not in members
            and self._is_free(i)
            and source(i.args[1]) in members
        }
        stage = self._stages(members | selects)
        guards: dict[int, Guard] = {}
        for item in sorted(members, key=self._rank):
            guard = guards.setdefault(stage[item], Guard(mask, [], []))
            guard.items.append(item)
        for node in sorted(selects, key=lambda n: n.id):
            if stage[node] in guards:
                guards[stage[node]].selects.append(node)
        for guard in guards.values():
            guard.items += guard.selects
            self._members[guard] = {*guard.items}
            for item in guard.items:
                self._within[item] = guard
        for guard in guards.values():
            guard.kept = sorted(self._kept(guard), key=lambda n: n.id)

    def _stages(self, group: set[Item]) -> dict[Item, int]:
        """Returns how often what comes before an item leaves the group, for all items before the group's.

        Raises RuntimeError if items wait for each other in a circle.
        """
        stage: dict[Item, int] = {}
        before: dict[Item, set[Item]] = {}
        waiting = [(item, False) for item in group]
        while waiting:
            item, ready = waiting.pop()
            if item in stage:
                continue
            if ready:
                stage[item] = max(
                    (stage[e] + (e in group and item not in group) for e in before[item]),
                    default=0,
                )
                continue
            if item in before:
                raise RuntimeError(CIRCLE)
            before[item] = self._before(item)
            waiting.append((item, True))
            waiting += [(e, False) for e in before[item] if e not in stage]
        return stage

    def _kept(self, guard: Guard) -> Iterator[Node]:
        """Yields the values of a guard that later guards of its mask read."""
        for item in guard.items:
            readers = self._schedule.readers[item]  # type: ignore[index]
            if item in guard.selects or all(self._within.get(r) is guard for r in readers):
                continue
            if isinstance(item, Loop):
                yield from self._schedule.live.results[item]
            elif isinstance(item, Node) and item.op not in ("store", "memory", "pack", "rows"):
                yield item
