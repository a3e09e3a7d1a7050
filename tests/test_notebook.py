"""Notebooks: the view that is drawn in place, and the one in examples/."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = ("quickstart", "brax")
VIEW = """
from seedbed.viewer.background import BackgroundView
from seedbed.viewer.live import make_view

with BackgroundView(make_view(1000, "ant/ppo", "runs/a"), patience_s=60) as view:
    for steps in (100, 500, 1000):
        view.update({"env_steps": steps, "wall_s": steps / 100.0})
        view.message(f"at <{steps}>")
    print("said by other code")
"""


def run(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes a notebook in a folder; raises if a cell fails."""
    tools = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    # Tests have eight devices; a notebook has what the machine has.
    monkeypatch.delenv("XLA_FLAGS")
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=280, resources=resources).execute()


@pytest.mark.slow
def test_a_run_is_one_output_that_is_drawn_anew(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell(VIEW)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    run(notebook, tmp_path, monkeypatch)
    drawn = [each for each in cell.outputs if each.output_type == "display_data"]
    assert len(drawn) == 1
    page = drawn[0].data["text/html"]
    assert "1,000 of 1,000 steps" in page and "at &lt;1000&gt;" in page and "100%" in page
    printed = [each.text for each in cell.outputs if each.output_type == "stream"]
    assert "".join(printed).strip() == "said by other code"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_keeps_no_outputs(name):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_runs(tmp_path, monkeypatch):
    """With a tenth of the steps."""
    made = made_by("quickstart", 'train("ant"', 1_000_000, tmp_path, monkeypatch)
    assert float(made[-1].data["text/plain"]) > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_brax_s_arm_runs(tmp_path, monkeypatch):
    made_by("brax", "train(name", 500_000, tmp_path, monkeypatch)


def made_by(
    name: str, call: str, steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[nbformat.NotebookNode]:
    """Runs a notebook with fewer steps; returns what its cells show, with a picture and a page among it."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(f"{call})", f"{call}, steps={steps})")
    run(notebook, folder, monkeypatch)
    made = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in made)
    assert any("<iframe srcdoc" in output.get("data", {}).get("text/html", "") for output in made)
    return made
