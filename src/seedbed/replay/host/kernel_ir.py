"""The LLVM IR of the kernels that `kernels.py` calls.

In the docstrings here, %name is an argument of the kernel. A kernel returns 0 unless its docstring says
otherwise. The functions here return IR as text; they compute nothing themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from seedbed.compression import ACCELERATION
from seedbed.llvm import Function

CHUNK = 8
"""The number of consecutive rows of one environment that are compressed together."""
LEAST_BYTES = 1024
"""The least bytes of a large row. Only large rows are worth a kernel call to copy, or compression."""
# Bytes of a cache line, and of a vector here.
_LINE = 64
# Cache lines that are copied in a turn of the loop.
_LINES = 4
_DECLARATIONS = """
declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)
!0 = !{i32 1}
"""


def module() -> str:
    """Returns the LLVM IR of all kernels; `kernels.py` documents what each of them does."""
    functions = [_copy(streamed=False), _copy(streamed=True)]
    functions += [_scatter("scatter", "copy"), _scatter("stream", "copy_past_caches")]
    functions += [_gather(), _compress(), _decompress(), _weigh(), _draw()]
    return _DECLARATIONS + "\n".join(functions)


def _copy(streamed: bool) -> str:
    """Writes a function that copies a row of %size bytes from %s to %d, and prefetches the next row.

    The next row is at %next_s and goes to %next_d. If `streamed`, stores bypass the caches and %next_d is not
    prefetched. A row has at least `LEAST_BYTES` bytes: the loop runs at least once.
    """
    name = "copy_past_caches" if streamed else "copy"
    f = Function(f"internal void @{name}(ptr %d, ptr %s, i64 %size, ptr %next_d, ptr %next_s)")
    d, s, size = "%d", "%s", "%size"
    # Stores that bypass the caches must be of whole cache lines.
    if streamed:
        odd = f.op(f"and i64 {f.op('ptrtoint ptr %d to i64')}, {_LINE - 1}")
        head = f.op(f"and i64 {f.op(f'sub i64 {_LINE}, {odd}')}, {_LINE - 1}")
        f.line(f"call void @llvm.memcpy.p0.p0.i64(ptr %d, ptr %s, i64 {head}, i1 false)")
        d, s, size = f.at(d, head, "i8"), f.at(s, head, "i8"), f.op(f"sub i64 %size, {head}")
    turn = _LINE * _LINES
    turns = f.op(f"udiv i64 {size}, {turn}")
    with f.repeat(turns) as carry:
        first = f.op(f"mul i64 {carry.index}, {turn}")
        for line in range(_LINES):
            at = f.op(f"add i64 {first}, {line * _LINE}")
            _fetch(f, f.at("%next_s", at, "i8"), to_write=False)
            if not streamed:
                _fetch(f, f.at("%next_d", at, "i8"), to_write=True)
            value = f.op(f"load <{_LINE} x i8>, ptr {f.at(s, at, 'i8')}, align 1")
            how = f"align {_LINE}, !nontemporal !0" if streamed else "align 1"
            f.line(f"store <{_LINE} x i8> {value}, ptr {f.at(d, at, 'i8')}, {how}")
    done = f.op(f"mul i64 {turns}, {turn}")
    rest = f.op(f"sub i64 {size}, {done}")
    f.line(
        f"call void @llvm.memcpy.p0.p0.i64(ptr {f.at(d, done, 'i8')}, ptr {f.at(s, done, 'i8')}, "
        f"i64 {rest}, i1 false)"
    )
    return f.text()


def _fetch(f: Function, address: str, to_write: bool) -> None:
    f.line(f"call void @llvm.prefetch.p0(ptr {address}, i32 {int(to_write)}, i32 3, i32 1)")


def _call_copy(f: Function, copy: str, d: str, s: str, size: str, next_d: str, next_s: str) -> None:
    f.line(f"call void @{copy}(ptr {d}, ptr {s}, i64 {size}, ptr {next_d}, ptr {next_s})")


def _scatter(name: str, copy: str) -> str:
    """Writes the kernel that copies %n rows of %size bytes from %s to every %stride bytes of %d."""
    f = Function(f"i64 @{name}(ptr %d, i64 %stride, ptr %s, i64 %size, i64 %n)")
    with f.between("0", "%n") as index:
        d = f.at("%d", f.op(f"mul i64 {index}, %stride"), "i8")
        s = f.at("%s", f.op(f"mul i64 {index}, %size"), "i8")
        # After the last row, these addresses may be outside the arrays. Prefetching them does no harm.
        next_d, next_s = f.at(d, "%stride", "i8"), f.at(s, "%size", "i8")
        _call_copy(f, copy, d, s, "%size", next_d, next_s)
    # Stores that bypass the caches must be visible to other threads before these learn of the rows.
    f.line("fence seq_cst")
    return f.text("i64 0")


def _gather() -> str:
    """Writes the kernel that finds the rows of %count items and copies them for each leaf of %table.

    A line of %table is (address of the result, address of the source, bytes of a row, number of rows at the
    start of [steps, count] that the result leaves out). Rows of 1 and 4 bytes have loops of their own, and
    rows of `LEAST_BYTES` and more are prefetched.
    """
    f = Function(
        "i64 @gather(ptr %chunks, ptr %offset, ptr %front, ptr %length, i64 %most, i64 %steps, "
        "i64 %count, i64 %padding, ptr %rows, ptr %table, i64 %leaves)"
    )
    _find_rows(f)
    every = f.op("mul i64 %steps, %count")
    with f.between("0", "%leaves") as leaf:
        line = f.scaled("%table", leaf, 4, "i64")
        result, source = (f.op(f"inttoptr i64 {_load(f, line, str(i))} to ptr") for i in (0, 1))
        size, skipped = _load(f, line, "2"), _load(f, line, "3")
        for small in (1, 4):
            is_it = f.op(f"icmp eq i64 {size}, {small}")
            with _when(f, is_it), f.between(skipped, every) as index:
                d, s = _row_pair(f, result, source, index, skipped, size)
                kind = f"i{8 * small}"
                f.line(f"store {kind} {f.op(f'load {kind}, ptr {s}, align 1')}, ptr {d}, align 1")
        with _when(f, f.op(f"icmp sge i64 {size}, {LEAST_BYTES}")):
            last = f.op(f"sub i64 {every}, 1")
            with f.between(skipped, every) as index:
                d, s = _row_pair(f, result, source, index, skipped, size)
                more = f.op(f"icmp slt i64 {index}, {last}")
                after = f.op(f"select i1 {more}, i64 {f.op(f'add i64 {index}, 1')}, i64 {last}")
                next_d, next_s = _row_pair(f, result, source, after, skipped, size)
                _call_copy(f, "copy", d, s, size, next_d, next_s)
        other = f.op(f"icmp slt i64 {size}, {LEAST_BYTES}")
        for small in (1, 4):
            other = f.op(f"and i1 {other}, {f.op(f'icmp ne i64 {size}, {small}')}")
        with _when(f, other), f.between(skipped, every) as index:
            d, s = _row_pair(f, result, source, index, skipped, size)
            f.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {d}, ptr {s}, i64 {size}, i1 false)")
    return f.text("i64 0")


def _find_rows(f: Function) -> None:
    """Adds code that writes the row numbers of all items, [steps, count], to %rows; padding is %padding."""
    with f.between("0", "%steps") as step, f.between("0", "%count") as item:
        at = f.op(f"sub i64 {step}, {_load(f, '%front', item)}")
        # A step before the item is negative, so as an unsigned number it is too large, like one after it.
        there = f.op(f"icmp ult i64 {at}, {_load(f, '%length', item)}")
        behind = f.op(f"add i64 {at}, {_load(f, '%offset', item)}")
        at = f.op(f"select i1 {there}, i64 {behind}, i64 0")
        mine = f.op(f"mul i64 {item}, %most")
        chunk = _load(f, "%chunks", f.op(f"add i64 {mine}, {f.op(f'udiv i64 {at}, {CHUNK}')}"))
        row = f.op(
            f"add i64 {f.op(f'mul i64 {chunk}, {CHUNK}')}, {f.op(f'urem i64 {at}, {CHUNK}')}"
        )
        row = f.op(f"select i1 {there}, i64 {row}, i64 %padding")
        index = f.op(f"add i64 {f.op(f'mul i64 {step}, %count')}, {item}")
        f.line(f"store i64 {row}, ptr {f.at('%rows', index, 'i64')}, align 8")


def _row_pair(
    f: Function, result: str, source: str, index: str, skipped: str, size: str
) -> tuple[str, str]:
    """Returns the addresses of a row in the result and in the source.

    `result` and `source` are the addresses of both. `index` is the number of the row in %rows, and `skipped`
    the number of rows that the result leaves out at its start.
    """
    d = f.at(result, f.op(f"mul i64 {f.op(f'sub i64 {index}, {skipped}')}, {size}"), "i8")
    return d, f.at(source, f.op(f"mul i64 {_load(f, '%rows', index)}, {size}"), "i8")


@contextmanager
def _when(f: Function, condition: str) -> Iterator[None]:
    """Runs the code that is written inside the `with` block only if `condition`, an i1, is true."""
    yes, on = f.fresh("yes"), f.fresh("on")
    f.line(f"br i1 {condition}, label %{yes}, label %{on}")
    f.open(yes)
    yield
    f.label(on)


def _load(f: Function, base: str, index: str) -> str:
    return f.op(f"load i64, ptr {f.at(base, index, 'i64')}, align 8")


def _compress() -> str:
    """Writes the kernel that compresses %n chunks of %size bytes, packed one after the other into %d.

    The chunks' addresses are at %s; their sizes in %d go to %sizes. A chunk that lz4 cannot bring to %most
    bytes is copied as it is. %lz4 is the address of `LZ4_compress_fast`.
    """
    f = Function(
        "i64 @compress(ptr %s, i64 %size, i64 %n, ptr %d, i64 %most, ptr %sizes, ptr %lz4)"
    )
    size, most = f.op("trunc i64 %size to i32"), f.op("trunc i64 %most to i32")
    end = f.op("alloca i64, align 8")
    f.line(f"store i64 0, ptr {end}, align 8")
    with f.between("0", "%n") as index:
        begun = f.op(f"load i64, ptr {end}, align 8")
        d, s = f.at("%d", begun, "i8"), f.op(f"inttoptr i64 {_load(f, '%s', index)} to ptr")
        room = f"i32 {size}, i32 {most}, i32 {ACCELERATION}"
        found = f.op(f"call i32 %lz4(ptr {s}, ptr {d}, {room})")
        failed = f.op(f"icmp sle i32 {found}, 0")
        copied = f.op(f"select i1 {failed}, i64 %size, i64 0")
        f.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {d}, ptr {s}, i64 {copied}, i1 false)")
        taken = f.op(f"select i1 {failed}, i64 %size, i64 {f.op(f'sext i32 {found} to i64')}")
        f.line(f"store i64 {taken}, ptr {f.at('%sizes', index, 'i64')}, align 8")
        f.line(f"store i64 {f.op(f'add i64 {begun}, {taken}')}, ptr {end}, align 8")
    return f.text("i64 0")


def _decompress() -> str:
    """Writes the kernel that copies rows of %n pieces of chunks, decompressed, to %d.

    The leaves of `Pieces` are at %work, one after the other. %lz4 is the address of `LZ4_decompress_safe`.
    The kernel returns the number of chunks that could not be decompressed.
    """
    f = Function(
        "i64 @decompress(ptr %memory, ptr %work, i64 %n, ptr %d, i64 %size, i64 %stride, "
        "ptr %scratch, i64 %whole, ptr %lz4)"
    )
    columns = [f.at("%work", f.op(f"mul i64 %n, {column}"), "i64") for column in range(5)]
    whole = f.op("trunc i64 %whole to i32")
    failures = f.op("alloca i64, align 8")
    f.line(f"store i64 0, ptr {failures}, align 8")
    with f.between("0", "%n") as index:
        offset, bytes_, start, rows, place = (_load(f, column, index) for column in columns)
        blob = f.at("%memory", offset, "i8")
        packed = f.op(f"icmp ne i64 {bytes_}, %whole")
        yes, no, out = f.fresh("packed"), f.fresh("plain"), f.fresh("rows")
        f.line(f"br i1 {packed}, label %{yes}, label %{no}")
        f.open(no)
        f.line(f"br label %{out}")
        f.open(yes)
        few = f.op(f"trunc i64 {bytes_} to i32")
        found = f.op(f"call i32 %lz4(ptr {blob}, ptr %scratch, i32 {few}, i32 {whole})")
        wrong = f.op(f"zext i1 {f.op(f'icmp ne i32 {found}, {whole}')} to i64")
        total = f.op(f"add i64 {f.op(f'load i64, ptr {failures}, align 8')}, {wrong}")
        f.line(f"store i64 {total}, ptr {failures}, align 8")
        f.label(out)
        chunk = f.op(f"phi ptr [%scratch, %{yes}], [{blob}, %{no}]")
        first = f.at(chunk, f.op(f"mul i64 {start}, %size"), "i8")
        goal = f.at("%d", f.op(f"mul i64 {place}, %size"), "i8")
        with f.between("0", rows) as row:
            d = f.at(goal, f.op(f"mul i64 {row}, %stride"), "i8")
            s = f.at(first, f.op(f"mul i64 {row}, %size"), "i8")
            _call_copy(f, "copy", d, s, "%size", f.at(d, "%stride", "i8"), s)
    failed = f.op(f"load i64, ptr {failures}, align 8")
    return f.text(f"i64 {failed}")


def _weigh() -> str:
    """Writes the kernel that sets %n leaves of the sum tree %nodes, and updates their ancestors.

    The leaf of a slot is node %first + slot. Each of its %depth ancestors becomes the sum of two children.
    """
    f = Function("i64 @weigh(ptr %nodes, i64 %depth, i64 %first, ptr %slots, ptr %weights, i64 %n)")
    with f.between("0", "%n") as index:
        leaf = f.op(f"add i64 %first, {_load(f, '%slots', index)}")
        weight = f.op(f"load double, ptr {f.at('%weights', index, 'double')}, align 8")
        f.line(f"store double {weight}, ptr {f.at('%nodes', leaf, 'double')}, align 8")
        with f.between("0", "%depth") as level:
            up = f.op(f"lshr i64 {leaf}, {level}")
            parent = f.op(f"lshr i64 {up}, 1")
            left, right = _children(f, f.op(f"shl i64 {parent}, 1"))
            sum_ = f.op(f"fadd double {left}, {right}")
            f.line(f"store double {sum_}, ptr {f.at('%nodes', parent, 'double')}, align 8")
    return f.text("i64 0")


def _draw() -> str:
    """Writes the kernel that finds, for each of %n uniform numbers, the leaf whose share contains it.

    It descends %depth levels from the root of the sum tree %nodes. The slot of a leaf is its node - %first.
    """
    f = Function("i64 @draw(ptr %nodes, i64 %depth, i64 %first, ptr %uniforms, ptr %slots, i64 %n)")
    node, over = (f.op(f"alloca {kind}, align 8") for kind in ("i64", "double"))
    total = f.op(f"load double, ptr {f.at('%nodes', '1', 'double')}, align 8")
    with f.between("0", "%n") as index:
        uniform = f.op(f"load double, ptr {f.at('%uniforms', index, 'double')}, align 8")
        f.line(f"store i64 1, ptr {node}, align 8")
        f.line(f"store double {f.op(f'fmul double {uniform}, {total}')}, ptr {over}, align 8")
        with f.between("0", "%depth"):
            child = f.op(f"shl i64 {f.op(f'load i64, ptr {node}, align 8')}, 1")
            left, right = _children(f, child)
            left_over = f.op(f"load double, ptr {over}, align 8")
            beyond = f.op(f"fcmp oge double {left_over}, {left}")
            # Rounding may leave a rest as large as the node's sum. Never enter an empty right child.
            goes = f.op(f"and i1 {beyond}, {f.op(f'fcmp ogt double {right}, 0.0')}")
            rest = f.op(f"fsub double {left_over}, {left}")
            f.line(
                f"store double {f.op(f'select i1 {goes}, double {rest}, double {left_over}')}, "
                f"ptr {over}, align 8"
            )
            below = f.op(f"or i64 {child}, {f.op(f'zext i1 {goes} to i64')}")
            f.line(f"store i64 {below}, ptr {node}, align 8")
        leaf = f.op(f"load i64, ptr {node}, align 8")
        f.line(
            f"store i64 {f.op(f'sub i64 {leaf}, %first')}, ptr {f.at('%slots', index, 'i64')}, align 8"
        )
    return f.text("i64 0")


def _children(f: Function, left: str) -> tuple[str, str]:
    """Returns the values of two siblings; `left` is the number of the left node, which is even."""
    pair = f.at("%nodes", left, "double")
    values = [f.op(f"load double, ptr {f.at(pair, i, 'double')}, align 8") for i in (0, 1)]
    return values[0], values[1]
