"""`seedbed list`: its options, and what it prints. It loads no JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from seedbed import strict_json
from seedbed.config import defaults, presets
from seedbed.envs.host import registry
from seedbed.run.trust import AGENTS
from seedbed.viewer import runs

DESCRIPTION = "Lists what can be trained, or what was."


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument(
        "--runs",
        metavar="DIR",
        type=Path,
        nargs="?",
        const=Path("runs"),
        help="list the runs at and below this folder (default: runs) instead",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def show(given: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Prints the list; calls `tell` with its JSON instead, if that is asked for."""
    if given.runs is not None:
        runs.print_overview(given.runs, given.json)
        return
    described = {name: presets.description(name) for name in presets.PRESETS}
    names = registry.names()
    rows = [row.cells() for row in defaults.ROWS]
    if given.json:
        listed = {"presets": described, "agents": AGENTS, "environments": names}
        listed["defaults"] = [dict(zip(defaults.COLUMNS, cells, strict=True)) for cells in rows]
        tell(strict_json.dumps(listed, indent=1))
        return
    console = Console(highlight=False, emoji=False)
    table = Table.grid(padding=(0, 2))
    for name, text in described.items():
        table.add_row(f"  {name}", text)
    console.print("[bold]presets[/]", table, "", "[bold]agents[/]", sep="\n")
    console.print(*(f"  {name}" for name in AGENTS), "  or module:Class", sep="\n")
    console.print("\n[bold]defaults[/] of what no preset names")
    kinds = Table(*defaults.COLUMNS, box=None, pad_edge=False, header_style="")
    for cells in rows:
        kinds.add_row(*cells)
    console.print(Padding(kinds, (0, 2)))
    console.print(
        "\n[bold]environments[/] (or any Gymnasium id, module:factory, a robot's FILE.xml)"
    )
    console.print(Columns(names, padding=(0, 2)))
