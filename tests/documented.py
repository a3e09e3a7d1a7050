"""Runs the Python blocks of pages: `python documented.py fast|all PAGE ...`.

A block may have marks, comments in the lines above it that no reader sees:

    <!-- not run: why -->      the block is a part of a file, or needs what tests do not have
    <!-- slow -->              the block runs in the slow tests only
    <!-- before: code -->      is run first
    <!-- saved as: name.py --> the block is a file that later blocks import; tests in it are run with pytest
    <!-- output differs -->    what the page shows of its output is of one machine

Blocks of a page share their names and the working folder. A block of no language, or a line "prints `...`",
directly below a block is what it must print.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*-->\n)*)\n?^```(?P<language>\w*)\n(?P<code>.*?)^```\n"
    r"(?:\n```\n(?P<output>.*?)^```|\n(?:It )?prints `(?P<line>[^`]*)`)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    marks: dict[str, str]  # a mark's word, and what follows the colon
    output: str | None

    @property
    def slow(self) -> bool:
        """Whether it runs in the slow tests only."""
        return "slow" in self.marks

    @property
    def place(self) -> str:
        """Its page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Returns all blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        marks = {}
        for comment in re.findall(r"<!--(.*?)-->", match["marks"], re.DOTALL):
            word, _, value = comment.strip().partition(":")
            marks[word] = value.strip()
        output = match["line"] if match["output"] is None else match["output"]
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, match["language"], match["code"], marks, output))
    return found


def python_blocks(page: Path) -> list[Block]:
    """Returns the Python blocks of a page."""
    return [block for block in blocks(page) if block.language == "python"]


def run_page(page: Path, which: str) -> Iterator[str]:
    """Runs the blocks of a page; yields what is wrong."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in python_blocks(page):
        if "not run" in block.marks:
            continue
        if name := block.marks.get("saved as"):
            Path(name).write_text(block.code)
            if name.startswith("test_") and chosen(block, which):
                yield from tested(block, name)
        elif chosen(block, which):
            yield from run(block, names)


def chosen(block: Block, which: str) -> bool:
    """Returns whether a block runs: all do, or those that are not slow."""
    return which == "all" or not block.slow


def tested(block: Block, name: str) -> Iterator[str]:
    """Runs a file of tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield f"{block.place}: {done.stdout[-2000:]}"


def run(block: Block, names: dict[str, Any]) -> Iterator[str]:
    """Runs a block in the names of its page, and compares what it prints."""
    said = io.StringIO()
    try:
        exec(block.marks.get("before", ""), names)
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * (block.line - 1) + block.code, block.place, "exec"), names)
    except Exception:
        yield f"{block.place}: {traceback.format_exc()}"
        return
    if block.output is not None and "output differs" not in block.marks:
        shown, printed = block.output.split(), said.getvalue().split()
        if shown != printed:
            yield f"{block.place}: printed {said.getvalue()!r}, the page shows {block.output!r}"


def main() -> int:
    """Runs the pages that the command line names, and prints what is wrong."""
    which, pages = sys.argv[1], sys.argv[2:]
    sys.path.insert(0, str(Path.cwd()))
    wrong = [text for page in pages for text in run_page(Path(page), which)]
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
