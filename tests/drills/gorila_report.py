"""Writes docs/results/gorila-drill.json and prints its table: `python gorila_report.py FOLDER`.

FOLDER is the drill's `--basetemp`. The table is for docs/gorila.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from gorila_faults import FAULTS

ROOT = Path(__file__).parents[2]


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """Writes the row of a fault: the median and the worst of all seeds in which it was made."""
    found = [run["found"][name] for run in runs if name in run["found"]]
    cells = []
    for figure in ("back_s", "recovery_s"):
        values = [each[figure] for each in found if each[figure]]
        cells.append(f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-")
    return f"| {name} | {cells[0]} | {cells[1]} | {len(found)} |"


def main() -> None:
    """Reads what the drill has found, writes the file and prints the table."""
    paths = sorted(Path(sys.argv[1]).glob("**/found.json"))
    runs = sorted((json.loads(path.read_text()) for path in paths), key=lambda run: run["seed"])
    if not runs:
        sys.exit(f"there is no found.json below {sys.argv[1]}: name the drill's --basetemp")
    (ROOT / "docs/results/gorila-drill.json").write_text(json.dumps(runs, indent=1) + "\n")
    seconds = [run["seconds"] for run in runs]
    total = {name: sum(run["books"][name] for run in runs) for name in runs[0]["books"]}
    print(
        f"{len(runs)} seeds of {min(seconds):.0f} to {max(seconds):.0f} s, commit {runs[0]['commit']}"
    )
    print(f"{sum(run['items'] for run in runs):,} items, pushes {total}\n")
    print("| fault | back, s | all go on, s | times |\n|---|---|---|---|")
    print("\n".join(row(fault.name, runs) for fault in FAULTS))


if __name__ == "__main__":
    main()
