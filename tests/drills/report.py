"""Writes docs/faults.md and docs/results/drill.json: `python report.py FOLDER`, the drill's `--basetemp`."""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
_LINES, _CHARACTERS = 3, 200
# What a host or learner says whenever it starts.
_ALWAYS = ("listening at", "to join:", "or, elsewhere", "looking for", "compiling", "training ")
_INTRODUCTION = """# Faults

What happens to a run with actors on other machines (`seedbed train --listen`) when something breaks: what
the user sees, and how soon everybody steps again.

{how}

Every timestep is accounted for: what the environments have recorded is compared with what the learner has
learned from (`tests/drills/accounts.py`). No transition is learned from twice, or taken for another
environment's. Of a life that ends only the steps after its last whole unroll are lost, and if it is the
learner that dies, the unrolls that it had queued.

Lines are quoted as that commit wrote them; some are worded otherwise by now.

- *Recovery*: seconds from the end of the fault, or from the fault itself if it is a death, until all {envs}
  environments step: median, and worst.
- *Others*: rate of the slowest host that the fault does not touch, as a part of its usual one: median, and
  worst; "-" where all are touched. A fault beside which it was below 0.8 was made again, up to three times
  in all, because other users of the machine slow a run down, too: {again} of {faults}.
- *Lives*: whose environments begin anew; nobody's where the stream goes on.
"""


def shape_of(line: str) -> str:
    """Returns a line without what differs between runs."""
    return re.sub(r"\d[\d.,:]*", "#", line)


def told(found: list[dict[str, Any]], victims: list[str], names: tuple[str, ...]) -> list[str]:
    """Returns the lines that these logs have in at least half of the seeds."""
    counts, examples = Counter[str](), dict[str, str]()
    for each, victim in zip(found, victims, strict=True):
        shapes = {}
        for log, lines in each["said"].items():
            if log in names or ("victim" in names and log == victim):
                shapes |= {shape_of(line): line for line in lines if not line.startswith(_ALWAYS)}
        counts.update(shapes.keys())
        examples = shapes | examples
    often = [shape for shape in examples if counts[shape] >= len(found) / 2]
    return [examples[shape][:_CHARACTERS] for shape in often[:_LINES]]


def cell(lines: list[str]) -> str:
    """Writes lines into a cell of a table."""
    return "<br>".join(line.replace("|", "\\|") for line in lines) or "nothing"


def row(fault: Any, runs: list[dict[str, Any]]) -> str:
    """Writes the row of a fault."""
    found = [run["found"][fault.name] for run in runs]
    victims = [run["victims"][fault.name] for run in runs]
    recovery = [each["recovery_s"] for each in found]
    others = [each["others"] for each in found if each["others"] == each["others"]]
    visitors = tuple(
        {log for each in found for log in each["said"]} - {"learner", "host0", "host1", "host2"}
    )
    lives = (
        "nobody's" if fault.keeps_lives else {"host": "the victim's", "all": "all"}[fault.touches]
    )
    return " | ".join(
        (
            f"| {fault.name}",
            cell(told(found, victims, ("learner",))),
            cell(told(found, victims, ("victim", *visitors))),
            f"{statistics.median(recovery):.1f}, {max(recovery):.1f}",
            f"{statistics.median(others):.2f}, {min(others):.2f}" if others else "-",
            f"{lives} |",
        )
    )


def main() -> None:
    """Reads what the drill has found, and writes the page."""
    paths = sorted(Path(sys.argv[1]).glob("**/found.json"))
    runs = [json.loads(path.read_text()) for path in paths]
    if not runs:
        sys.exit(f"there is no found.json below {sys.argv[1]}: name the drill's --basetemp")
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commits = sorted({run["commit"] for run in runs})
    seconds = [run["seconds"] for run in runs]
    how = textwrap.fill(
        "`pytest -m slow tests/drills/test_drill.py` makes each of these faults, in random order, on "
        f"five machines made of namespaces: {len(runs)} seeds of {min(seconds):.0f} to {max(seconds):.0f} s, "
        f"on {runs[0]['cores']} cores of {cpu[1] if cpu else 'a CPU'}, commit {' and '.join(commits)}. "
        "`tests/drills/report.py` has written this page.",
        width=110,
    )
    rows = [row(fault, runs) for fault in FAULTS]
    table = [
        "| fault | the learner says | the actor says | recovery, s | others | lives |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    made = [each for run in runs for each in run["found"].values()]
    text = _INTRODUCTION.format(
        how=how,
        envs=runs[0]["environments"],
        again=sum(each.get("tries", 1) > 1 for each in made),
        faults=len(made),
    )
    PAGE.write_text(f"{text}\n" + "\n".join(table) + "\n")
    for run in runs:
        for each in run["found"].values():
            del each["said"]
    (ROOT / "docs/results/drill.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
