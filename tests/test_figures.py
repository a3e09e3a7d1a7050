"""Each figure of README and docs/benchmarks.md is what a committed file says, and commits of pages exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import figures as reading
from figures import ROOT, figures, numbers, pages, wrong

STRICT = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
HEAD = "| task | measured | command |\n|---|---|---|\n"
ANT = "<!-- from fused.json rows.preset=ant/ppo.learning: summary.gymnasium -->"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_figures_are_what_their_files_say(page):
    assert not list(filter(None, map(wrong, figures(page, strict=page in STRICT))))


def test_tables_of_measurements_are_found():
    least = {"README.md": 30, "benchmarks.md": 200}
    for page in STRICT:
        found = list(figures(page, strict=True))
        assert (
            len([one for one in found if one.file.endswith((".json", ".csv", ".md"))])
            > least[page.name]
        )
    assert not [one for one in figures(STRICT[0], strict=True) if one.file == "no data"]


def test_every_other_last_digit_is_wrong():
    found = [one for page in pages() for one in figures(page, strict=page in STRICT)]
    checked = [one for one in found if one.file not in ("protocol", "no data")]
    assert len(checked) > 700
    for one in checked:
        digits, e, exponent = one.shown.replace(",", "").partition("e")
        decimals = len(digits.partition(".")[2])
        step = (
            float(re.findall(r" to ([\d.]+)$", one.source)[0])
            if " to " in one.source
            else 10.0**-decimals
        )
        for more in (-2 * step, 2 * step):
            assert wrong(one._replace(shown=f"{float(digits) + more:.{decimals}f}{e}{exponent}")), (
                one
            )


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts two small files in the place of the measured ones."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [
        {"preset": "ant/ppo", "learning": {"summary": {"gymnasium": 5140.08}}},
        {"preset": "hopper/ppo", "learning": {"summary": {"gymnasium": 3171.0}}},
    ]
    (folder / "fused.json").write_text(json.dumps({"rows": rows}))
    table = (
        "| seed | mean return (last 100) >= 18 | evaluation | wall-clock |\n|---|---|---|---|\n"
        "| 0 | 10.6 min, 3,850,388 frames | 19.02 ± 1.19 | 10.6 min |\n"
        "| 1 | 12.8 min, 4,761,116 frames | 18.82 ± 1.51 | 12.8 min |\n"
    )
    (folder / "pong.md").write_text(table)
    monkeypatch.setattr(reading, "FOLDERS", (str(folder),))
    reading.read.cache_clear()
    yield
    reading.read.cache_clear()


def complaints(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    try:
        return list(filter(None, map(wrong, figures(page, strict=True))))
    except ValueError as error:
        return [str(error)]


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        (f"**5,140**{ANT}", ""),
        (f"5,140.1{ANT}", ""),
        (f"**5,141**{ANT}", "page.md:3: 5,141 is 5,140.08 in fused.json"),
        (f"5,140.2{ANT}", "5,140.2 is 5,140.08"),
        ("5,140", "5,140 has no source"),
        (f"5,140{ANT} in 56 s", "56 has no source"),
        (f"5,140 in 56 s{ANT}", "1 sources for the numbers 5,140, 56"),
        ("5,140<!-- from fuse.json rows: a -->", "0 files fuse.json"),
        ("5,140<!-- from fused.json rows.preset=ant/ppo: gymnasium -->", "0 values"),
        ("5,140<!-- from fused.json rows: 5,140 -->", "a source must name a key"),
        ("5,140<!-- from fused.json rows.learning.summary: gymnasium -->", "2 values"),
        ("5,100<!-- from fused.json rows.preset=ant/ppo: learning.summary.gymnasium to 100 -->", ""),
        ("5,200<!-- from fused.json rows.preset=ant/ppo: learning.summary.gymnasium to 100 -->", "is"),
        ("10.6 min<!-- from pong.md seed=0: wall-clock -->", ""),
        ("636 s<!-- from pong.md seed=0: wall-clock * 60 -->", ""),
        ("3 and 2<!-- from pong.md: min seed + 3, count seed -->", ""),
        ("3.9 and 1.19<!-- from pong.md: seed=0.mean*18.1 / 1e6; pong.md: "
         "seed=0.evaluation.1 -->", ""),
        ("40 games<!-- protocol: 40 -->", ""),
        ("40 games<!-- protocol: 41 -->", "40 is called 41"),
        ("1.2 GB<!-- no data: 1.2 -->", "no reader is told"),
        ("1.2 GB: no data of this is committed<!-- no data: 1.2 -->", ""),
        ("[Ant-v5](ant-2.md), `4 x`, version 2.1.1, commit 4309a49 on AVX512-BF16", ""),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("data")
def test_wrong_figures_are_found(tmp_path, cell, complaint):
    found = complaints(tmp_path, f"{HEAD}| Ant | {cell} | `--steps 7` |\n")
    assert [one for one in found if complaint not in one] == []
    assert bool(found) == bool(complaint)


@pytest.mark.usefixtures("data")
def test_other_tables_and_paragraphs_need_no_source(tmp_path):
    assert (
        complaints(tmp_path, "| machine | cores |\n|---|---|\n| A | 2 |\n\nAlone, 3 of 4.\n") == []
    )
    wrong_one = f"One seed of 5 has a return of\n5,139{ANT}\nafter 9 s.\n"
    assert ["5,139" in one for one in complaints(tmp_path, wrong_one)] == [True]
    assert complaints(tmp_path, wrong_one.replace("5,139", "5,140")) == []


def test_numbers_are_those_that_a_reader_sees():
    text = (
        "**-128** and (1.5e-3), 10,000x, 1:2, [3](4.md#5), <td width=6>, x7 8% 9<!-- 10 --> 11.\n"
    )
    assert numbers(text) == ["-128", "1.5e-3", "1", "2", "3", "8", "9", "11"]


def test_commits_that_pages_name_exist():
    """A shallow clone has only some, and an archive none."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if not (ROOT / ".git").exists() or shallow.stdout.strip() != "false":
        pytest.skip("the history is not here")
    texts = [
        page.read_text() for page in [*pages(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    ]
    word = r"(?<![\w.])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}(?![\w.])|(?<=commit )\d{7}\b"
    named = sorted({each for text in texts for each in re.findall(word, text)})
    assert len(named) > 20
    # Of this history: an amended commit is still found where it was made, and nowhere else.
    asked = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True)
    commits = asked.stdout.split()
    missing = [each for each in named if not any(one.startswith(each) for one in commits)]
    assert not missing, missing
