"""Turns a program into the LLVM IR of a function that runs it for `W` examples at once.

The function is `@program(ptr in, ptr out, ptr shared, ptr memory)`. `in` and `out` hold `W` numbers for each
element of each operand in turn (bools as 32-bit 0 or 1). `shared` holds the addresses of the operands that
all examples share, and `memory` the arrays that are not on the stack.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from seedbed.simd.cpu.arrays import Arrays, Storage
from seedbed.simd.cpu.instructions import SCALARS, Writer
from seedbed.simd.cpu.kernel import ENTRY, HEAD
from seedbed.simd.cpu.slots import Slots
from seedbed.simd.cpu.stack_budget import Room
from seedbed.simd.ir.graph import Loop, LoopCarry, Node
from seedbed.simd.ir.program import Program, Unsupported
from seedbed.simd.schedule.guards import guarded
from seedbed.simd.schedule.plan import Guard, Item, Liveness, Schedule


def emit(program: Program, width: int, *, fma: bool = True, room: Room | None = None) -> str:
    """Returns the text of `@program` and of its constants and declarations, always the same for a program.

    Arrays take memory from `room`. Raises Unsupported for types outside SCALARS or arrays over MOST_BYTES.
    """
    writer = Writer(width, fma=fma)
    arrays = Arrays(writer, room or Room())
    write(program, writer, arrays, Slots(program, writer, arrays))
    body = [*arrays.places, ENTRY, *writer.lines, "ret void", "}", ""]
    return "\n".join([*arrays.globals, *writer.declarations(), HEAD, *body])


class Ends(Protocol):
    """The memory from which a program reads its operands, and to which it writes its results."""

    def read(self, node: Node, kind: str) -> str:
        """Writes the load of an "input" node of the LLVM type `kind`; returns its name."""
        ...

    def whole(self, node: Node) -> str:
        """Writes what gives the address of an "operand" node; returns its name."""
        ...

    def at(self, result: int, element: int) -> str:
        """Returns the address of an element of a result."""
        ...

    def write(self, dtype: str, address: str, name: str) -> None:
        """Writes the store of an element, a vector, of a result of type `dtype`."""
        ...


def write(program: Program, writer: Writer, arrays: Arrays, ends: Ends) -> None:
    """Writes the instructions of a program, which end in an open block.

    Raises Unsupported for types outside SCALARS or arrays over MOST_BYTES.
    """
    _Emitter(program, writer, arrays, ends).write()


class _Emitter:
    def __init__(self, program: Program, writer: Writer, arrays: Arrays, ends: Ends) -> None:
        self._program = program
        self._w, self._arrays, self._ends = writer, arrays, ends
        self._live = Liveness(program)
        self._schedule = Schedule(self._live)
        self._names: dict[Node, str] = {}
        self._splats: dict[Node, str] = {}
        self._storage: dict[Node, Storage] = {}
        self._carried: dict[tuple[Loop, int], Storage] = {}
        self._recorded: dict[tuple[Loop, int], Storage] = {}
        wide = sorted({n.dtype for n in self._live.nodes} - {*SCALARS})
        if wide:
            raise Unsupported(f"a kernel has no {wide[0]}: use float32, int32, uint32 or bool")
        self._alive: str | None = None  # mask of the lanes that are still in the while loop around

    def write(self) -> None:
        self._emit(guarded(self._schedule, self._schedule.items[None]))
        for k, operand in enumerate(self._program.outputs):
            for i, node in enumerate(operand.nodes.reshape(-1)):
                address = self._ends.at(k, i)
                self._ends.write(operand.dtype, address, self._name(node, uniform=False))

    # Names of values

    def _name(self, node: Node, *, uniform: bool) -> str:
        """Returns the operand for a node: a scalar if `uniform`, else a vector."""
        if node.op == "constant":
            return self._w.constant(node.value, node.dtype, uniform=uniform)
        if node.uniform and not uniform:
            if node not in self._splats:
                self._splats[node] = self._w.splat(self._names[node], node.dtype)
            return self._splats[node]
        return self._names[node]

    def _define(self, node: Node, name: str) -> None:
        self._names[node] = name
        readers = self._live.readers.get(node, ())
        if node.uniform and any(not reader.uniform for reader in readers):
            self._splats[node] = self._w.splat(name, node.dtype)

    # Items

    def _emit(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Guard):
                self._emit_guard(item)
            elif isinstance(item, Loop):
                self._emit_loop(item)
            else:
                self._emit_node(item)

    def _emit_node(self, node: Node) -> None:
        w, uniform = self._w, node.uniform
        kind = w.kind(node.dtype, uniform=uniform)
        if node.op == "input":
            self._define(node, self._ends.read(node, kind))
        elif node.op in ("pack", "memory"):
            self._fill(node)
        elif node.op == "rows":
            masks = self._storage_of(node.args[0])
            self._storage[node] = self._arrays.rows(masks, node.value, alive=self._alive)
        elif node.op == "store":
            self._storage[node] = storage = self._storage_of(node.args[0])
            self._put(storage, self._element(storage, node.args[1], node.value), node.args[2])
        elif node.op == "load":
            storage = self._storage_of(node.args[0])
            address = self._element(storage, node.args[1], node.value)
            self._define(node, self._arrays.get(storage, address, uniform=uniform))
        elif node in self._live.fused:
            fused = self._live.fused[node]
            a, b, c = (self._name(n, uniform=uniform) for n in (fused.a, fused.b, fused.c))
            self._define(node, w.fused(fused, a, b, c, kind))
        elif node.op == "select":
            condition, true, false = node.args
            self._define(
                node,
                w.select(
                    self._name(condition, uniform=condition.uniform),
                    kind,
                    self._name(true, uniform=uniform),
                    self._name(false, uniform=uniform),
                    uniform=condition.uniform,
                ),
            )
        elif node.op == "convert":
            self._define(node, w.convert(node, self._name(node.args[0], uniform=uniform)))
        elif node.op == "bitcast":
            before = w.kind(node.args[0].dtype, uniform=uniform)
            name = self._name(node.args[0], uniform=uniform)
            bits = name if before == kind else w.op(f"bitcast {before} {name} to {kind}")
            self._define(node, bits)
        else:
            args = [self._name(a, uniform=uniform) for a in node.args]
            before = w.kind(node.args[0].dtype, uniform=uniform)
            mask = w.kind("bool", uniform=uniform)
            self._define(node, w.compute(node, args, before, mask))

    # Memory

    def _storage_of(self, node: Node) -> Storage:
        """Returns the storage of a state of an array."""
        if node.op == "operand":
            return Storage(self._ends.whole(node), node.dtype, node.value[1], uniform=True)
        if node.op == "table" and node not in self._storage:
            self._storage[node] = self._arrays.table(node)
        if node.op in ("variable", "result", "record"):
            known = self._recorded if node.op == "record" else self._carried
            return known[self._live.graph.loops[node.value[0]], node.value[1]]
        return self._storage[node]

    def _element(self, storage: Storage, base: Node, offset: int) -> str:
        if base.op == "constant":
            return self._arrays.at(storage, int(base.value) + offset)
        if not base.uniform:
            return self._arrays.own(storage, self._name(base, uniform=False), offset)
        return self._arrays.beyond(storage, self._name(base, uniform=True), offset)

    def _put(self, storage: Storage, address: str, node: Node) -> None:
        name = self._name(node, uniform=storage.uniform)
        if storage.masked and self._alive is not None:
            old = self._arrays.get(storage, address, uniform=False)
            kind = self._w.kind(storage.dtype)
            name = self._w.select(self._alive, kind, name, old, uniform=False)
        self._arrays.put(storage, address, name)

    def _fill(self, node: Node) -> None:
        """Makes a new array: the elements of a "pack" node, or the copy for a "memory" node."""
        new = self._arrays.new
        if node.op == "memory":
            self._storage[node] = new(node.dtype, node.value, uniform=False)
            self._arrays.copy(self._storage_of(node.args[0]), self._storage[node])
            return
        self._storage[node] = storage = new(node.dtype, node.value, uniform=node.uniform)
        for i, element in enumerate(node.args):
            self._put(storage, self._arrays.at(storage, i), element)

    # Control flow

    def _emit_guard(self, guard: Guard) -> None:
        w, mask = self._w, guard.mask
        name = self._name(mask, uniform=mask.uniform)
        some = name if mask.uniform else w.any_lane(name)
        before, inside, done = self._w.block, w.fresh("guard"), w.fresh("done")
        outer: dict[Node, str] = {}  # values of the selects if the mask holds in no lane
        for node in guard.selects:
            other = node.args[2]
            if other not in outer:
                outer[node] = self._name(other, uniform=node.uniform)
            elif other.uniform and not node.uniform:
                outer[node] = w.splat(outer[other], node.dtype)
            else:
                outer[node] = outer[other]
        w.line(f"br i1 {some}, label %{inside}, label %{done}")
        self._w.label(inside)
        splats = dict(self._splats)
        self._emit(guard.items)
        after = self._w.block
        self._splats = splats
        self._w.jump(done)
        self._w.label(done)
        for node in (*guard.selects, *guard.kept):
            kind = w.kind(node.dtype, uniform=node.uniform)
            name = w.op(
                f"phi {kind} [{self._names[node]}, %{after}], [{outer.get(node, 'poison')}, %{before}]"
            )
            self._names[node] = name
        for node in (*guard.selects, *guard.kept):
            self._define(node, self._names[node])

    def _emit_loop(self, loop: Loop) -> None:
        """Writes a loop and names its scalar results."""
        inits = self._enter(loop)
        rows = self._live.rows.get(loop)
        lefts = self._go_round(loop, inits) if rows is None else self._visit(loop, inits, rows)
        for node in self._live.results[loop]:
            self._define(node, lefts[loop.carries[node.value[1]].variable])

    def _visit(self, loop: Loop, inits: dict[Node, str], rows: Node) -> dict[Node, str]:
        """Writes a loop over the listed rows, skipped if there are none; returns its final scalars."""
        w, before = self._w, self._w.block
        inside, done = w.fresh("visit"), w.fresh("done")
        some = w.op(f"icmp ne i32 {self._count(rows)}, 0")
        w.line(f"br i1 {some}, label %{inside}, label %{done}")
        w.label(inside)
        lefts, after = self._go_round(loop, inits), w.block
        w.jump(done)
        w.label(done)
        for node in inits:
            kind = w.kind(node.dtype, uniform=node.uniform)
            lefts[node] = w.op(f"phi {kind} [{lefts[node]}, %{after}], [{inits[node]}, %{before}]")
        return lefts

    def _count(self, rows: Node) -> str:
        """Returns the operand for the number of listed rows."""
        storage = self._storage[rows]
        return self._arrays.get(storage, self._arrays.at(storage, rows.value), uniform=True)

    def _go_round(self, loop: Loop, inits: dict[Node, str]) -> dict[Node, str]:
        """Writes a loop and returns its final scalars, by variable. A counted loop runs at least once."""
        splats = dict(self._splats)
        before, head = self._w.block, self._w.fresh("loop")
        self._w.jump(head)
        self._w.label(head)
        hole = len(self._w.lines)
        for node in inits:
            self._define(node, f"%{self._w.fresh('v')}")
        names = {node: self._names[node] for node in inits}
        run = self._run_while if loop.length is None else self._run_counted
        phis = [
            f"{names[node]} = phi {self._w.kind(node.dtype, uniform=node.uniform)} "
            f"[{init}, %{before}], {{}}"
            for node, init in inits.items()
        ]
        latch, finals = run(loop, head, hole, before)
        self._w.lines[hole:hole] = [
            phi.format(f"[{finals[node]}, %{latch}]") for phi, node in zip(phis, inits, strict=True)
        ]
        self._splats = splats
        return names if loop.length is None else finals

    def _enter(self, loop: Loop) -> dict[Node, str]:
        """Reserves memory for a loop's arrays and records; returns its initial scalars, by variable."""
        inits: dict[Node, str] = {}
        for k, carry in self._live.carries[loop]:
            if carry.size is None:
                inits[carry.variable] = self._name(carry.init, uniform=carry.variable.uniform)
                continue
            self._carried[loop, k] = self._carry_array(loop, k, carry)
        for k, record in self._live.records[loop]:
            size = (loop.length or 0) * len(record.values)
            self._recorded[loop, k] = self._arrays.new(
                record.array.dtype, size, uniform=record.array.uniform
            )
        return inits

    def _carry_array(self, loop: Loop, k: int, carry: LoopCarry) -> Storage:
        first = self._storage_of(carry.init)
        if (loop, k) in self._schedule.taken:
            # If the array belongs to a loop around, lanes that have left that loop keep their values.
            is_outer = carry.init.op == "variable"
            return dataclasses.replace(
                first, masked=first.masked or (is_outer and bool(self._alive))
            )
        storage = self._arrays.new(carry.variable.dtype, carry.size or 0, uniform=False)
        self._arrays.copy(first, storage)
        return storage

    def _run_counted(
        self, loop: Loop, head: str, hole: int, before: str
    ) -> tuple[str, dict[Node, str]]:
        w, length = self._w, str(loop.length)
        counter, after = f"%{w.fresh('i')}", f"%{w.fresh('i')}"
        index = counter
        if loop.reverse:
            index = w.op(f"sub i32 {(loop.length or 0) - 1}, {counter}")
        if loop in self._live.rows:
            rows = self._live.rows[loop]
            listed, length = self._storage[rows], self._count(rows)
            index = self._arrays.get(listed, self._arrays.beyond(listed, counter, 0), uniform=True)
        for node in self._live.indices[loop]:
            self._define(node, index)
        self._emit(guarded(self._schedule, self._schedule.items.get(loop, [])))
        for k, record in self._live.records[loop]:
            storage = self._recorded[loop, k]
            row = w.op(f"mul i32 {index}, {len(record.values)}")
            for j, node in enumerate(record.values):
                self._put(storage, self._arrays.beyond(storage, row, j), node)
        finals = self._finals(loop)
        self._move_arrays(loop, None)
        w.line(f"{after} = add i32 {counter}, 1")
        more, done = w.op(f"icmp slt i32 {after}, {length}"), w.fresh("done")
        latch = self._w.block
        w.line(f"br i1 {more}, label %{head}, label %{done}")
        self._w.label(done)
        w.lines.insert(hole, f"{counter} = phi i32 [0, %{before}], [{after}, %{latch}]")
        return latch, finals

    def _run_while(
        self, loop: Loop, head: str, hole: int, before: str
    ) -> tuple[str, dict[Node, str]]:
        w, condition = self._w, loop.condition
        assert condition is not None
        first = self._schedule.needed(condition)
        items = self._schedule.items.get(loop, [])
        self._emit(guarded(self._schedule, [i for i in items if i in first]))
        name = self._name(condition, uniform=condition.uniform)
        if self._alive is not None and not condition.uniform:
            name = w.op(f"and {w.kind('bool')} {name}, {self._alive}")
        some = name if condition.uniform else w.any_lane(name)
        body, done = w.fresh("body"), w.fresh("done")
        w.line(f"br i1 {some}, label %{body}, label %{done}")
        self._w.label(body)
        # The only lane of a GPU's thread is in the loop as long as the loop runs.
        mask, outer = None if condition.uniform or w.width == 1 else name, self._alive
        self._alive, lists = mask or outer, dict(self._storage)
        self._shorten_lists(loop)
        self._emit(guarded(self._schedule, [i for i in items if i not in first]))
        self._alive = outer
        self._storage |= {node: lists[node] for node in lists if node.op == "rows"}
        finals = self._finals(loop)
        self._move_arrays(loop, mask)
        for _, carry in self._live.carries[loop]:
            if carry.size is None and mask is not None and carry.final is not carry.variable:
                kind = w.kind(carry.variable.dtype)
                old = self._names[carry.variable]
                finals[carry.variable] = w.select(
                    mask, kind, finals[carry.variable], old, uniform=False
                )
        latch = self._w.block
        self._w.jump(head)
        self._w.label(done)
        return latch, finals

    def _shorten_lists(self, loop: Loop) -> None:
        """Shortens the row lists of loops inside a while loop to rows that matter to lanes still in it."""
        for rows in self._schedule.lists(loop):
            if rows in self._storage and self._alive is not None:
                masks, longer = self._storage_of(rows.args[0]), self._storage[rows]
                self._storage[rows] = self._arrays.rows(masks, rows.value, longer, self._alive)

    def _move_arrays(self, loop: Loop, mask: str | None) -> None:
        """Copies carried arrays to the storage from which the next iteration reads them."""
        moves: list[tuple[Storage, Storage, str | None]] = []
        for k, carry in self._live.carries[loop]:
            if carry.size is not None:
                source, target = self._storage_of(carry.final), self._carried[loop, k]
                lanes = mask or (self._alive if target.masked else None)
                moves += [(source, target, lanes)] if source.address != target.address else []
        self._arrays.move(moves)

    def _finals(self, loop: Loop) -> dict[Node, str]:
        return {
            c.variable: self._name(c.final, uniform=c.variable.uniform)
            for _, c in self._live.carries[loop]
            if c.size is None
        }
