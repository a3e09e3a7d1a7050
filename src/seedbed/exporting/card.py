"""The model card and the curve of an exported policy."""

from __future__ import annotations

import csv
import html
import io
import re
from typing import Any

from seedbed.envs.host.pickled import called
from seedbed.printable import printable

CURVE = "curve.csv"
_COLUMNS = {
    "env_steps": "env_steps",
    "wall_s": "wall_s",
    "return": "episode_return_mean",
    "evaluation": "evaluation/episode_return_mean",
    "evaluated_at": "evaluation/env_steps",
}
"""Columns of the curve, and the metrics that they hold."""
_EVALUATION = "evaluation/"


def curve(lines: list[dict[str, Any]]) -> str:
    """Returns the returns over steps and seconds as CSV; what a line lacks is empty.

    An evaluation stands in the first line that has it, with the steps of what was evaluated.
    """
    text, at = io.StringIO(), None
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for line in lines:
        before, at = at, line.get(f"{_EVALUATION}env_steps")
        if at == before:
            line = {key: value for key, value in line.items() if not key.startswith(_EVALUATION)}
        table.writerow(["" if line.get(key) is None else line[key] for key in _COLUMNS.values()])
    return text.getvalue()


def evaluation_of(lines: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    """Returns the evaluation of the checkpoint of a step, or None if there was none."""
    for line in reversed(lines):
        if line.get(f"{_EVALUATION}env_steps") == step:
            return {
                key.removeprefix(_EVALUATION): value
                for key, value in line.items()
                if key.startswith(_EVALUATION)
            }
    return None


def readme(contract: dict[str, Any]) -> str:
    """Returns the model card for a contract."""
    training, agent = contract["training"], contract["agent"]
    title = training["name"] or agent["class"]
    command = training["command"]
    rows = [
        ("agent", _shown(agent["name"] or agent["class"])),
        ("environment", _environment(contract["environment"])),
        ("score", _score(training["evaluation"], contract["evaluation_draws"])),
        ("trained for", f"{training['env_steps']:,} environment steps"),
        ("seed", _shown(training["member"] or training["seed"])),
        ("command", _code(command) if command else "trained from Python"),
        ("exported by", f"Seedbed {contract['seedbed']}"),
    ]
    if robot := contract["robot"]:
        drives = (
            f"{len(robot['joint_names'])} joints, {robot['rate_hz']:g} steps a second; how is in"
        )
        rows.append(
            ("robot", f"{drives} `robot` of `contract.json` and the metadata of `policy.onnx`")
        )
    files = [
        ("policy.onnx", f"the policy for ONNX runtimes, opset {contract['graph']['opset']}"),
        ("contract.json", "what to feed it, what it gives, and how memory goes on"),
        ("parameters.safetensors", "the parameters, for `seedbed.load`"),
        (CURVE, "returns over steps and seconds of training"),
    ]
    lines = [
        f"# {_shown(title)}",
        "",
        "A policy trained with Seedbed. Nothing in this folder is executable.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in rows),
        "",
        "| file | what it is |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in files),
        "",
        "## Inputs and outputs",
        "",
        "B is the number of environments"
        + (f", {contract['graph']['batch']} here." if contract["graph"]["batch"] != "any" else "."),
        "",
        "| array | shape | dtype | meaning |",
        "|---|---|---|---|",
        *(_row(each) for each in contract["inputs"]),
        *(_row({**each, "name": each["input"]}) for each in contract["memory"]),
        *(_row(each) for each in contract["outputs"]),
        "",
    ]
    return "\n".join(lines)


def _code(value: Any) -> str:
    """Returns a value as code in a cell of a table: it ends neither."""
    return "`" + printable(value).replace("`", "'").replace("|", "\\|") + "`"


def _shown(value: Any) -> str:
    """Returns a value as text in a cell of a table: it begins no markup, no other cell and no line."""
    plain = html.escape(printable(value), quote=False)
    return re.sub(r"([\\`*|\[\]])", r"\\\1", plain)


def _row(entry: dict[str, Any]) -> str:
    shape = ", ".join(["B", *map(str, entry["shape"])])
    return f"| {_code(entry['name'])} | [{shape}] | {entry['dtype']} | {entry['meaning']} |"


def _environment(environment: dict[str, Any]) -> str:
    task = environment["gymnasium"]
    if task is None:
        return _code(called(environment["options"]))
    options = ", ".join(f"{name}={value!r}" for name, value in task["kwargs"].items())
    return _code(f"gymnasium.make({', '.join(filter(None, [repr(task['id']), options]))})")


def _score(evaluation: dict[str, Any] | None, draws: bool) -> str:
    if evaluation is None:
        return "this checkpoint was never evaluated"
    deviation = evaluation.get("episode_return_std")
    how = "actions are drawn" if draws else "actions are the graph's"
    if "best_return" in evaluation:
        text = f"{evaluation['best_return']:,.2f}, the best mean return of the runs trained at once"
    else:
        text = f"{evaluation['episode_return_mean']:,.2f}, the mean return"
        if deviation is not None:
            text += f" (standard deviation {deviation:,.2f})"
    return f"{text} of {evaluation['episodes']} whole episodes in the run's own environment; {how}"
