"""The plan of a program's code: the live operations, their loop bodies, their fusion and their order."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from seedbed.simd.ir.graph import FLOATS, Graph, Loop, LoopCarry, Node, Record, innermost
from seedbed.simd.ir.program import Program
from seedbed.simd.schedule.sparse import listed


@dataclasses.dataclass(frozen=True)
class FusedMultiplyAdd:
    """A product fused into a sum: `±a * b ± c`, rounded once if the CPU has fused multiply-add."""

    a: Node
    b: Node
    c: Node
    minus_product: bool
    minus_c: bool


@dataclasses.dataclass(eq=False, repr=False)
class Guard:
    """A group of items that run only if `mask` holds in some lane."""

    mask: Node
    items: list[Item]
    # the items `select(mask, x, y)`; each is y if the group does not run
    selects: list[Node]
    # values of the items that later guards of the same mask read
    kept: list[Node] = dataclasses.field(default_factory=list)


Item = Node | Loop | Guard


class Liveness:
    """The nodes, carries and records that a program's results need, and the readers of each node."""

    def __init__(self, program: Program) -> None:
        self.graph: Graph = program.graph
        self.outputs = [n for o in program.outputs for n in o.nodes.reshape(-1)]
        self.nodes: set[Node] = set()
        self.carries: dict[Loop, list[tuple[int, LoopCarry]]] = {}
        self.records: dict[Loop, list[tuple[int, Record]]] = {}
        # the "result" nodes of the scalars that a loop carries
        self.results: dict[Loop, list[Node]] = {}
        self.indices: dict[Loop, list[Node]] = {}
        # for a loop that does not visit all rows, the node that lists the rows to visit
        self.rows: dict[Loop, Node] = {}
        self.readers: dict[Node, list[Node]] = {}
        self.fused: dict[Node, FusedMultiplyAdd] = {}
        self._mark(self.outputs)
        self._list_rows()
        self._fuse()

    def _mark(self, roots: Iterable[Node]) -> None:
        waiting, seen = [*roots], set[tuple[Loop, str, int]]()
        while waiting:
            node = waiting.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            waiting += node.args
            if node.op not in ("variable", "result", "record", "index"):
                continue
            loop = self.graph.loops[node.value[0]]
            if loop not in self.carries:
                self.carries[loop], self.records[loop] = [], []
                self.results[loop], self.indices[loop] = [], []
                waiting += [loop.condition] if loop.condition is not None else []
            if node.op == "index":
                self.indices[loop].append(node)
                continue
            if node.op == "result" and loop.carries[node.value[1]].size is None:
                self.results[loop].append(node)
            kind = "record" if node.op == "record" else "carry"
            if (loop, kind, k := node.value[1]) in seen:
                continue
            seen.add((loop, kind, k))
            if kind == "record":
                self.records[loop].append((k, loop.records[k]))
                waiting += loop.records[k].values
            else:
                self.carries[loop].append((k, loop.carries[k]))
                waiting += [loop.carries[k].init, loop.carries[k].final]
        for pairs in (*self.carries.values(), *self.records.values()):
            pairs.sort(key=lambda pair: pair[0])
        for nodes in self.results.values():
            nodes.sort(key=lambda node: node.id)

    def _list_rows(self) -> None:
        for loop in sorted(self.carries, key=lambda each: each.number):
            rows = listed(self.graph, loop, [c for _, c in self.carries[loop]])
            if rows is not None and not self.records[loop]:
                self.rows[loop] = rows
                self.nodes.add(rows)
        for node in sorted(self.nodes, key=lambda n: n.id):
            for arg in node.args:
                self.readers.setdefault(arg, []).append(node)

    def operands(self, node: Node) -> tuple[Node, ...]:
        """Returns the nodes that the computation of a node reads."""
        fused = self.fused.get(node)
        return (fused.a, fused.b, fused.c) if fused is not None else node.args

    def ends(self, loop: Loop) -> Iterator[Node]:
        """Yields the nodes that a loop's body reads at its end, and its condition."""
        for _, carry in self.carries[loop]:
            yield carry.final
        for _, record in self.records[loop]:
            yield from record.values
        if loop.condition is not None:
            yield loop.condition

    def _fuse(self) -> None:
        """Fuses each float product into the sum or difference that reads it.

        The sum must be its only reader, and both must depend on the same loops.
        """
        held = {*self.outputs}
        for loop, carries in self.carries.items():
            held |= {*self.ends(loop), *(c.init for _, c in carries)}

        def fusible(product: Node, reader: Node) -> bool:
            return (
                product.op == "mul"
                and product.dtype in FLOATS
                and self.readers[product] == [reader]
                and product not in held
                and product.loops == reader.loops
            )

        for node in sorted(self.nodes, key=lambda n: n.id):
            if node.op not in ("add", "sub") or node.dtype not in FLOATS:
                continue
            for product, other in ((node.args[1], node.args[0]), node.args):
                if fusible(product, node):
                    second = product is node.args[1]
                    self.fused[node] = FusedMultiplyAdd(
                        product.args[0],
                        product.args[1],
                        other,
                        minus_product=node.op == "sub" and second,
                        minus_c=node.op == "sub" and not second,
                    )
                    self.nodes.discard(product)
                    break


class Schedule:
    """The items of every loop body, and the constraints on their order.

    Items outside loops are under None.
    """

    def __init__(self, live: Liveness) -> None:
        self.live = live
        self.items: dict[Loop | None, list[Node | Loop]] = {None: []}
        # item -> the items of the same body that must come before it
        self.before: dict[Node | Loop, set[Node | Loop]] = {}
        # item -> the items of the same body that read its values
        self.readers: dict[Node | Loop, set[Node | Loop]] = {}
        # items that are read at the end of a body, or are results of the program
        self.held: set[Node | Loop] = set()
        # (loop, number) of carried arrays that stay in the memory of their first state
        self.taken: set[tuple[Loop, int]] = set()
        self._ranks: dict[Node | Loop, int] = {}
        self._place()
        self._connect()
        self._arrange()

    def _place(self) -> None:
        nodes = [n for n in self.live.nodes if n.op not in _GIVEN]
        for item in (*nodes, *self.live.carries):
            self.items.setdefault(innermost(item.loops), []).append(item)
            self.before[item], self.readers[item] = set(), set()
        for items in self.items.values():
            items.sort(key=self._written)

    def source(self, node: Node) -> Node | Loop | None:
        """Returns the item that makes a node; None if there is none, as for a constant or an index."""
        if node.op in ("result", "record"):
            return self.live.graph.loops[node.value[0]]
        return node if node in self.before else None

    def needed(self, node: Node) -> set[Node | Loop]:
        """Returns the item that makes a node, and all items of its body that must come before that."""
        source = self.source(node)
        return self._needed([] if source is None else [source])

    def _needed(self, waiting: list[Node | Loop]) -> set[Node | Loop]:
        found: set[Node | Loop] = set()
        while waiting:
            item = waiting.pop()
            if item not in found:
                found.add(item)
                waiting += self.before[item]
        return found

    def rank(self, item: Node | Loop) -> int:
        """Returns an item's position in the order of `_arrange`."""
        return self._ranks[item]

    def lists(self, loop: Loop) -> list[Node]:
        """Returns the lists of rows that a loop, and the loops inside it at any depth, visit."""
        inside = [loop]
        for each in inside:
            inside += [item for item in self.items.get(each, []) if isinstance(item, Loop)]
        return [*dict.fromkeys(self.live.rows[each] for each in inside if each in self.live.rows)]

    def _arrange(self) -> None:
        """Ranks items by a depth-first walk from the last items of each body to the items that they read.

        The walk follows the order of the program. A sum that the program builds step by step over a long
        stretch is thus computed in one go, in a register.
        """
        for items in self.items.values():
            for last in items:
                if not self.readers[last]:
                    self._walk(last)
            for item in items:
                self._walk(item)

    def _walk(self, last: Node | Loop) -> None:
        waiting: list[tuple[Node | Loop, bool]] = [(last, False)]
        opened = set[Node | Loop]()
        while waiting:
            item, seen = waiting.pop()
            if item in self._ranks:
                continue
            if seen:
                self._ranks[item] = len(self._ranks)
                continue
            if item in opened:
                raise RuntimeError(CIRCLE)
            opened.add(item)
            waiting.append((item, True))
            earlier = sorted(self.before[item], key=self._written, reverse=True)
            waiting += [(e, False) for e in earlier if e not in self._ranks]

    def _written(self, item: Node | Loop) -> tuple[int, int]:
        """Returns a sort key: the position of an item in the program as it was traced."""
        if isinstance(item, Node):
            return item.id, 0
        results = [c.variable.id for _, c in self.live.carries[item]]
        results += [r.array.id for _, r in self.live.records[item]]
        return max(results, default=0), 1

    def _connect(self) -> None:
        users: dict[Node, list[tuple[Node | Loop | None, Loop | None]]] = {}

        def use(node: Node, reader: Node | Loop | None, block: Loop | None) -> None:
            users.setdefault(node, []).append((reader, block))
            made = self.source(node)
            if made is None:
                return
            reader = _lifted(reader, block, innermost(made.loops))
            if reader is None:
                self.held.add(made)
            elif reader is not made:
                self.before[reader].add(made)
                self.readers[made].add(reader)

        for node in self.live.nodes:
            if node in self.before:
                for arg in self.live.operands(node):
                    use(arg, node, innermost(node.loops))
        for loop, carries in self.live.carries.items():
            for _, carry in carries:
                use(carry.init, loop, innermost(loop.loops))
            if loop in self.live.rows:
                use(self.live.rows[loop], loop, innermost(loop.loops))
            for node in self.live.ends(loop):
                use(node, None, loop)
        for node in self.live.outputs:
            use(node, None, None)
        for node in self.live.nodes:
            # readers of the old state come before the store
            if node.op == "store":
                home = innermost(node.loops)
                for reader, block in users[node.args[0]]:
                    first = _lifted(reader, block, home)
                    if first is not None and first is not node:
                        self.before[node].add(first)
        for loop in sorted(self.live.carries, key=lambda each: each.number):
            for k, carry in self.live.carries[loop]:
                if carry.size is not None and self._may_take(loop, k, carry.init):
                    self._take(loop, k, users[carry.init])

    def _may_take(self, loop: Loop, k: int, state: Node) -> bool:
        """Returns whether a loop may write carry number `k`, an array, in the memory of its first state."""
        # if the state is made outside a loop around this one, each iteration needs it unchanged
        if state.op in ("memory", "store", "result"):
            return innermost(state.loops) is innermost(loop.loops)
        if state.op != "variable":
            return False
        around = self.live.graph.loops[state.value[0]]
        final = around.carries[state.value[1]].final
        is_own = final.op == "result" and final.value == (loop.number, k)
        return is_own and innermost(loop.loops) is around

    def _take(
        self, loop: Loop, k: int, users: list[tuple[Node | Loop | None, Loop | None]]
    ) -> None:
        """Lets a loop overwrite an array's first state, if its other readers can come before the loop."""
        home = innermost(loop.loops)
        readers = [_lifted(reader, block, home) for reader, block in users]
        if readers.count(loop) != 1 or None in readers:
            return
        others = {r for r in readers if r is not None and r is not loop}
        if any(loop in self._needed([other]) for other in others):
            return
        self.before[loop] |= others
        self.taken.add((loop, k))


CIRCLE = "the operations of a program wait for each other"
_GIVEN = ("constant", "variable", "index", "result", "record", "table", "operand")


def _lifted(
    reader: Node | Loop | None, block: Loop | None, home: Loop | None
) -> Node | Loop | None:
    """Returns the item of body `home` that contains a reader in body `block`; None is the end of `home`."""
    while block is not home and block is not None:
        reader, block = block, innermost(block.loops)
    return reader


def sort(
    items: Sequence[Item],
    before: Callable[[Item], Iterable[Item]],
    rank: Callable[[Item], int],
) -> list[Item]:
    """Returns the items ordered by `before`; of the items that are ready, the lowest rank comes first.

    Raises RuntimeError if items wait for each other in a circle.
    """
    waiting: dict[Item, int] = {}
    after: dict[Item, list[Item]] = {item: [] for item in items}
    for item in items:
        earlier = [e for e in before(item) if e in after and e is not item]
        waiting[item] = len(earlier)
        for e in earlier:
            after[e].append(item)
    heap = [(rank(item), i) for i, item in enumerate(items) if not waiting[item]]
    place = {item: i for i, item in enumerate(items)}
    heapq.heapify(heap)
    ordered: list[Item] = []
    while heap:
        item = items[heapq.heappop(heap)[1]]
        ordered.append(item)
        for later in after[item]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(heap, (rank(later), place[later]))
    if len(ordered) != len(items):
        raise RuntimeError(CIRCLE)
    return ordered
