"""The report on runs: one page, what it plots, and what it says where something is missing."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, needs_browser, wait_until
from saved import roll
from seedbed import cli
from seedbed.envs.host.pickled import MAKE
from seedbed.run.folder import RunFolder
from seedbed.types import SeedbedError
from seedbed.viewer import curves, report
from seedbed.viewer.curves import band_of, evaluations, thinned
from seedbed.viewer.html import describe
from seedbed.viewer.runs import read_run
from seedbed.viewer.tables import speed

CONFIG = {
    "name": "ant/ppo",
    "env": {"class": "seedbed.envs.device.locomotion.ant:Ant", "episode_steps": 1000},
    "agent": {"class": "seedbed.agents.ppo:Ppo", "learning_rate": 0.001, "hidden_sizes": [64, 64]},
    "fused": {"steps": 4000, "seed": 0, "seeds": 1, "sweep": "", "evaluate_episodes": 16},
}
STINT = {
    "term": 1,
    "env_steps": 0,
    "begun": 1795530023.0,
    "ended": 1795530030.0,
    "outcome": "finished",
    "machine": {"cpu": "AMD EPYC", "cores": 2.0, "memory_bytes": 25e9, "devices": {"H100": 1}},
    "versions": {"jax": "0.10.2"},
}


def curve(seed: int, steps: int = 4000, evaluated: bool = True) -> list[dict[str, Any]]:
    """Makes the metrics of a run whose numbers are all different."""
    lines = []
    for at in range(1, 41):
        env_steps = at * steps // 40 + seed
        line: dict[str, Any] = {
            "wall_s": 1.5 * at + seed,
            "env_steps": env_steps,
            "episode_return_mean": 100.0 * math.log(at) + 7.0 * seed if at > 2 else None,
            "env_steps_per_s": 1000.0 + at,
            "rss_mb": 500.0 + 2.0 * at,
            "time/environment": 0.5,
            "time/inference": 0.25,
            "time/learning": 0.2,
            "time/waiting": 0.05,
        }
        if evaluated and at >= 10:
            line["evaluation/env_steps"] = at // 10 * 10 * steps // 40 + seed
            line["evaluation/episode_return_mean"] = 90.0 * (at // 10) + seed
            line["evaluation/episode_return_std"] = 1.0
            line["evaluation/episodes"] = 16
        lines.append(line)
    return lines


def write_run(
    path: Path, lines: list[dict[str, Any]], seed: int = 0, **parts: dict[str, Any]
) -> Path:
    """Writes a run's folder; `parts` replace options of `env`, `agent` or the runtime."""
    config = copy.deepcopy(CONFIG)
    config["fused"]["seed"] = seed
    for part, options in parts.items():
        if part in config:
            config[part] |= options
        else:
            del config["fused"]
            config[part] = {"steps": 4000, "seed": seed, **options}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "history.json").write_text(json.dumps([STINT]))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def play(monkeypatch):
    """Replaces the playing of episodes, which takes JAX, by a recording of random controls."""
    played = []

    def play(run, episodes):
        played.append((run.name, episodes))
        replay = describe(roll("reacher", 20, episodes, title=f"<b>{run.name}</b>"))
        return report.Player('<div data-player="{number}"></div>', replay)

    monkeypatch.setattr(report, "_play", play)
    return played


def make(runs: list[Path], path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Writes a report; returns the page without its scripts, the data in it, and what was told."""
    told: list[str] = []
    report.write_report(runs, path, told.append)
    page = path.read_text()
    data = re.search(r'<script id="report" type="application/json">(.*?)</script>', page)
    assert data is not None
    markup = re.sub(r"<script\b[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    return markup, json.loads(data[1]), told


def traces(group: dict[str, Any], title: str, x: str) -> list[dict[str, Any]]:
    (found,) = (c for c in group["charts"] if (c["title"], c["x"]) == (title, x))
    return found["traces"]


def test_plotted_values_are_those_of_the_metrics(tmp_path, play):
    lines = curve(3)
    run = write_run(tmp_path / "run", lines, 3)
    _, data, _ = make([run], tmp_path / "out.html")
    (group,) = data["groups"]
    for title, x, name in (
        ("Return in training", "env_steps", "episode_return_mean"),
        ("Return in training", "wall_s", "episode_return_mean"),
        ("Speed", "wall_s", "env_steps_per_s"),
        ("Memory", "wall_s", "rss_mb"),
    ):
        (trace,) = traces(group, title, x)
        have = [line for line in lines if line[name] is not None]
        np.testing.assert_allclose(trace["x"], [line[x] for line in have], rtol=1e-6)
        np.testing.assert_allclose(trace["y"], [line[name] for line in have], rtol=1e-6)
    (trace,) = traces(group, "Return in evaluation", "env_steps")
    assert (trace["x"], trace["y"]) == ([1003, 2003, 3003, 4003], [93, 183, 273, 363])
    (trace,) = traces(group, "Return in evaluation", "wall_s")
    assert trace["x"] == [1.5 * at + 3 for at in (10, 20, 30, 40)]
    assert play == [("run", 3)]


def test_the_task_s_metrics_have_charts_and_a_foreign_name_does_no_harm(tmp_path, play):
    names = ["env/speed", "env/<b>\x1b[1m" + "x" * 10_000]
    lines = [line | dict.fromkeys(names, 3.0 + line["wall_s"]) for line in curve(0)]
    markup, data, _ = make([write_run(tmp_path / "run", lines)], tmp_path / "out.html")
    (trace,) = traces(data["groups"][0], "env/speed", "env_steps")
    np.testing.assert_allclose(trace["y"], [line["env/speed"] for line in lines], rtol=1e-6)
    assert "env/&lt;b&gt;" in markup and "<b>x" not in markup and "x" * 100 not in markup


def test_runs_that_differ_by_their_seed_have_a_median_and_a_band(tmp_path, play):
    runs = [write_run(tmp_path / f"run-{seed}", curve(seed), seed) for seed in (0, 1, 2, 3, 4)]
    markup, data, _ = make(runs, tmp_path / "out.html")
    (group,) = data["groups"]
    assert group["series"] == ["ppo"]
    drawn = traces(group, "Return in training", "env_steps")
    assert [trace["kind"] for trace in drawn] == ["seed"] * 5 + ["median"]
    median = drawn[-1]
    assert median["x"][0] == 304 and median["x"][-1] == 4000  # where all five are
    at = median["x"].index(2002.0)
    values = [np.interp(2002.0, trace["x"], trace["y"]) for trace in drawn[:-1]]
    expected = [np.median(values), min(values), max(values)]
    np.testing.assert_allclose([median[k][at] for k in ("y", "low", "high")], expected, rtol=1e-6)
    drawn = traces(group, "Return in evaluation", "env_steps")[-1]
    assert (drawn["x"], drawn["y"]) == ([1002, 2002, 3002, 4002], [92, 182, 272, 362])
    assert (drawn["low"][0], drawn["high"][0]) == (90, 94)
    assert "median of 5 seeds (360.0 to 364.0)" in markup and ">362.0<" in markup
    assert "The 5 runs differ by their seed only." in markup
    assert play == [("run-4", 3)]  # the best


def test_options_that_differ_are_named_and_told_apart(tmp_path, play):
    runs = [
        write_run(tmp_path / f"{name}-{seed}", curve(seed), seed, agent={"learning_rate": rate})
        for name, rate in (("slow", 1e-4), ("fast", 1e-2))
        for seed in (0, 1)
    ]
    markup, data, _ = make(runs, tmp_path / "out.html")
    assert data["groups"][0]["series"] == ["ppo, learning_rate 0.0001", "ppo, learning_rate 0.01"]
    assert re.search(
        r"<th>agent.learning_rate</th><td>0.0001</td><td>0.01</td></tr></tbody>", markup
    )
    assert "Configuration that all of them share" in markup
    assert "<th>agent.hidden_sizes</th><td>64 64</td>" in markup
    numbers = {trace["series"] for trace in traces(data["groups"][0], "Memory", "wall_s")}
    assert numbers == {0, 1}


def test_functions_are_told_apart_and_their_code_is_no_option(tmp_path):
    def of(number: int, name: str = "", **env: Any) -> Any:
        path = write_run(tmp_path / str(number), curve(number), seed=number)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"name": name, "env": env}))
        return read_run(path)

    by_value = [
        of(seed, factory=MAKE, kwargs={"name": "Walk", "pickled": f"{seed}"}) for seed in (0, 1)
    ]
    modules = [of(2, "walk:make/ppo", factory="walk:make"), of(3, factory="grasp:make")]
    groups = curves.group_runs([*by_value, *modules])
    assert [group.name for group in groups] == ["Walk", "walk:make", "grasp:make"]
    assert [len(group.series) for group in groups] == [1, 1, 1]


def test_runs_with_another_start_or_robot_are_no_seeds_of_one(tmp_path):
    def of(name: str, seed: int, xml_file: str = "", **keys: Any) -> Any:
        path = write_run(tmp_path / name, curve(seed), seed=seed, env={"xml_file": xml_file})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | keys))
        return read_run(path)

    def differing(*runs: Any) -> dict[str, list[Any]]:
        (group,) = curves.group_runs(runs)
        found = curves.differing(runs)
        assert len(group.series) == (len(runs) if found else 1)
        return found

    begun = {"run": "runs/pre", "optimizer": False, "partial": False}
    plain, pre = of("plain", 0), of("pre", 1, start=begun)
    assert differing(plain, pre) == {"from": [None, "runs/pre"]}
    kept = of("kept", 2, start=begun | {"optimizer": True})
    assert differing(pre, kept) == {"from_optimizer": [None, True]}
    old, new = (of(x, 0, "/dog.xml", scene=f"scenes/{x}/dog.xml") for x in ("old", "new"))
    assert differing(old, new) == {"env.xml_file": ["scenes/old/dog.xml", "scenes/new/dog.xml"]}
    resumed = of("resumed", 1, "/runs/resumed/scenes/old/dog.xml", scene="scenes/old/dog.xml")
    assert not differing(old, resumed)
    foreign = of("foreign", 1, start={"run": [1], "optimizer": "x", "more": 1}, scene={"a": 1})
    assert not differing(plain, foreign)


def test_environments_have_groups_of_their_own(tmp_path, play):
    ant, pong = tmp_path / "ant", tmp_path / "pong"
    write_run(ant, curve(0))
    lagging = [{**line, "lag_mean": 1.5, "lag_max": 7} for line in curve(0)]
    write_run(pong, lagging, central={"evaluate_episodes": 8})
    config = json.loads((pong / "config.json").read_text())
    config |= {"name": "pong/impala", "env": {"kind": "AtariEnv", "game": "pong"}}
    (pong / "config.json").write_text(json.dumps(config))
    markup, data, _ = make([ant, pong], tmp_path / "out.html")
    assert [group["series"] for group in data["groups"]] == [["ppo"], ["impala"]]
    assert '<a href="#g0">ant</a><a href="#g1">pong</a>' in markup
    assert [chart["title"] for chart in data["groups"][0]["charts"]].count("Lag") == 0
    assert traces(data["groups"][1], "Lag", "env_steps")[0]["y"] == [1.5] * 40
    assert "updates between acting and learning, largest 7" in markup
    assert play == [("ant", 1), ("pong", 1)] and len(data["players"]) == 2


def test_members_of_populations_and_of_sweeps(tmp_path, play):
    lines = curve(0)
    for line in lines:
        if "evaluation/env_steps" in line:
            base = line["evaluation/episode_return_mean"]
            line["evaluation/seeds"] = [base + 1, base + 3, base + 100, base + 200]
    several = write_run(tmp_path / "several", lines, fused={"seeds": 4})
    markup, data, _ = make([several], tmp_path / "out.html")
    drawn = traces(data["groups"][0], "Return in evaluation", "env_steps")
    assert [trace["kind"] for trace in drawn] == ["seed"] * 4 + ["median"]
    assert drawn[-1]["y"][0] == 90 + (3 + 100) / 2
    assert [trace["kind"] for trace in traces(data["groups"][0], "Memory", "wall_s")] == ["line"]
    assert "only the mean over the members of a population" in markup

    sweep = {"seeds": 2, "sweep": "learning_rate=1e-3,2e-3"}
    swept = write_run(tmp_path / "swept", lines, fused=sweep)
    markup, data, _ = make([swept], tmp_path / "out.html")
    assert "median of 4 members (" in markup and markup.count("median of 2 seeds (") == 2
    assert re.search(r'ppo, all values <span class="quiet">4 members<', markup)
    assert "differ by their seed and by learning_rate=1e-3,2e-3." in markup
    assert data["groups"][0]["series"] == [
        "ppo, all values",
        "ppo, learning_rate 0.001",
        "ppo, learning_rate 0.002",
    ]
    drawn = traces(data["groups"][0], "Return in evaluation", "env_steps")
    medians = {trace["series"]: trace["y"][0] for trace in drawn if trace["kind"] == "median"}
    assert medians == {1: 92, 2: 240}


def test_a_run_of_several_learners(tmp_path, play):
    lines = [{**line, "cluster/staleness_mean": 2.0, "cluster/learners": 2} for line in curve(0)]
    run = write_run(tmp_path / "run", lines, paramserver={"learners": 2})
    markup, data, _ = make([run], tmp_path / "out.html")
    assert traces(data["groups"][0], "Lag", "env_steps")[0]["y"] == [2.0] * 40
    assert "between pulling parameters and applying the gradient" in markup


def test_resumed_and_torn_metrics(tmp_path, play):
    lines = curve(0)
    run = write_run(tmp_path / "run", [*lines[:30], *lines[10:]])
    stints = [
        {**STINT, "outcome": "interrupted"},
        {**STINT, "env_steps": 1000, "machine": {"cpu": "B"}},
    ]
    (run / "history.json").write_text(json.dumps(stints))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 40')
    markup, data, _ = make([run], tmp_path / "out.html")
    (trace,) = traces(data["groups"][0], "Memory", "wall_s")
    assert trace["x"] == [line["wall_s"] for line in lines]
    assert "Machine 1: AMD EPYC, 2 cores, 25 GB, 1 x H100" in markup and "Machine 2: B" in markup
    assert markup.count("2026-11-24 14:20") == 4


def test_a_run_under_way_without_evaluations_or_anything(tmp_path, play):
    young = write_run(tmp_path / "young", curve(0, evaluated=False))
    (young / "history.json").write_text(json.dumps([{**STINT, "outcome": None, "ended": None}]))
    running = RunFolder.resume(young)
    markup, data, _ = make([young], tmp_path / "out.html")
    titles = [chart["title"] for chart in data["groups"][0]["charts"]]
    assert "Return in training" in titles and "Return in evaluation" not in titles
    assert 'class="state running">running' in markup
    assert running.is_training()
    running.close()
    assert 'class="state interrupted"' in make([young], tmp_path / "out.html")[0]

    empty = write_run(tmp_path / "empty", [])
    (empty / "history.json").unlink()
    markup, data, _ = make([empty], tmp_path / "out.html")
    assert data["groups"][0]["charts"] == []
    assert "There are no metrics yet." in markup and "no episode has ended yet" in markup
    assert "not recorded" in markup


def test_what_a_run_may_have_is_no_damage(tmp_path, play, monkeypatch):
    rare = write_run(tmp_path / "rare", curve(0), fused={"checkpoint_every_s": "Infinity"})
    auto = write_run(tmp_path / "auto", curve(0), central={"actors": "auto"})
    bad = [
        write_run(tmp_path / f"{name}-{value}", curve(0), fused={name: value})
        for name, value in (("steps", None), ("seeds", None), ("steps", "Infinity"))
    ]
    _, _, told = make([rare, auto, *bad], tmp_path / "out.html")
    wrong = [f"{name} instead" for name in ("steps is 'None'", "seeds is 'None'", "steps is 'inf'")]
    assert len(told) == 3
    assert all(said in line for said, line in zip(wrong, told, strict=True))
    read = report.read_run
    monkeypatch.setattr(report, "read_run", lambda path: read(path) if path == rare else 1 // 0)
    told = make([auto, rare], tmp_path / "out.html")[2]
    assert told == [f"left out: {auto} cannot be read: integer division or modulo by zero"]


def test_what_cannot_be_played_is_told(tmp_path, monkeypatch):
    def refuse(run, episodes):
        raise SeedbedError(f"{run.name} has <no> checkpoint\nand more")

    monkeypatch.setattr(report, "_play", refuse)
    markup, _, told = make([write_run(tmp_path / "run", curve(0))], tmp_path / "out.html")
    assert told == ["no episodes of run are shown: run has <no> checkpoint"]
    assert "No episodes of run are shown: run has &lt;no&gt; checkpoint" in markup


def test_a_page_stays_below_its_limit(tmp_path, play, monkeypatch):
    run = write_run(tmp_path / "run", curve(0))
    monkeypatch.setattr(report, "MOST_BYTES", 1 << 20)
    markup, data, told = make([run], tmp_path / "out.html")
    assert data["players"] == [] and "as the page would be too large" in told[0]
    assert play == []  # there is no room, whatever it would have shown
    assert f"seedbed evaluate {run} --html" in markup
    long = np.arange(1e5), np.sin(np.arange(1e5))
    x, y = thinned(long, 600)
    assert len(x) <= 602 and (x[0], x[-1]) == (0, 99_999) and y.max() == long[1].max()


def test_all_curves_of_a_page_share_its_room(tmp_path, play, monkeypatch):
    """Those of evaluations and of bands, too, in all charts of all environments."""
    runs = [
        write_run(tmp_path / f"{name}-{seed}", curve(seed), seed=seed, env={"class": f"m:{name}"})
        for name in ("A", "B")
        for seed in (0, 1)
    ]
    for run in runs:
        config = json.loads((run / "config.json").read_text()) | {"name": ""}
        (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(curves, "MOST_POINTS", 600)
    groups = make(runs, tmp_path / "out.html")[1]["groups"]
    drawn = [t for group in groups for chart in group["charts"] for t in chart["traces"]]
    assert len(groups) == 2 and 300 < sum(len(trace["x"]) for trace in drawn) <= 600
    (band,) = (t for t in traces(groups[0], "Speed", "wall_s") if t["kind"] == "median")
    assert len({len(band[name]) for name in ("x", "y", "low", "high")}) == 1
    assert traces(groups[0], "Speed", "wall_s")[0]["y"][-1] == 1040.0


def test_bands_of_runs_that_never_meet():
    early, late = (np.array([0.0, 1.0]), np.ones(2)), (np.array([2.0, 3.0]), np.ones(2))
    assert band_of([early, late]) is None


def test_the_page_is_one_file_that_fetches_nothing(tmp_path, play):
    run = write_run(tmp_path / "a<b>&{{data}}", curve(0))
    path = tmp_path / "out" / "page.html"
    path.parent.mkdir()
    markup, _, _ = make([run], path)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_size < 5_000_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', markup)
    assert policy is not None and "default-src 'none'" in policy[1] and "http" not in policy[1]
    assert not re.search(r"https?:|//\w|@import|<(iframe|object|embed)", markup)
    assert re.findall(r'(?:src|href)="([^"]*)"', markup) == ["data:,"]
    assert "{{" not in re.sub(r"a&lt;b&gt;&amp;{{data}}", "", markup) and "<b>&{{" not in markup
    page = path.read_text()
    assert page.count("<script") == page.count("</script>") == 3


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("none", 1, "none is not the folder of a run: there is no such folder; check the path"),
        ("empty", 1, "empty is not the folder of a run: it has no config.json; check the path"),
        ("other", 1, "its config.json names no environment, agent and runtime; check the path"),
        ("torn", 1, "config.json cannot be read"),
        ("run run", 2, "run is named twice: name every run once"),
        ("run -o none/page.html", 1, "cannot write none/page.html: there is no folder none"),
        ("run -o page.txt", 1, "cannot write page.txt: its name must end in .html"),
        ("run -o empty", 1, "its name must end in .html"),
        ("", 2, "the following arguments are required: RUN; see seedbed report --help"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, play, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", curve(0))
    for name, content in (("empty", None), ("other", "{}"), ("torn", "{")):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "config.json").write_text(content)
    assert cli.main(["report", *arguments.split()]) == status
    error = capsys.readouterr().err
    assert message in error and error.startswith("seedbed: ") and error.count("\n") == 1
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob(".*partial*"))


def test_the_command(tmp_path, monkeypatch, capsys, play):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", curve(0))
    assert cli.main(["report", "run"]) == 0
    assert re.match(r"report.html \(\d\.\d MB\): 1 run\n", capsys.readouterr().out)
    assert cli.main(["report", "--help"]) == 0
    told = capsys.readouterr().out
    assert "RUN [RUN ...]" in told and "-o F.html" in told and "default: report.html" in told


@needs_browser
def test_a_browser_shows_the_report(tmp_path, play):
    runs = [write_run(tmp_path / f"run-{seed}", curve(seed), seed) for seed in (0, 1, 2)]
    runs.append(write_run(tmp_path / "fast", curve(5), 5, agent={"learning_rate": 0.1}))
    path = tmp_path / "out.html"
    make(runs, path)
    browser = Browser(path.as_uri(), tmp_path / "profile")
    try:
        ready = "document.documentElement.dataset.state === 'ready'"
        wait_until(lambda: browser.evaluate(ready), "the page is ready")
        assert browser.evaluate("document.querySelectorAll('figure .uplot canvas').length") == 6
        # The pointer in the middle of the first chart: a box tells the values there.
        browser.evaluate("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        place = "JSON.stringify(document.querySelector('.u-over').getBoundingClientRect())"
        box = json.loads(browser.evaluate(place))
        for at in (0.49, 0.5):
            x, y = box["x"] + at * box["width"], box["y"] + box["height"] / 2
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        shown = "document.querySelector('.tip:not([hidden])')?.innerText ?? ''"
        wait_until(lambda: browser.evaluate(shown), "the box is shown")
        told = browser.evaluate(shown)
        assert re.search(r"2,00\d steps", told) and "ppo, learning_rate 0.1" in told
        assert re.search(r"306\.\d \(299\.\d to 313\.\d\)", told)
        # A click on the legend hides a series.
        browser.evaluate("document.querySelector('button.entry').click()")
        assert browser.evaluate("document.querySelector('button.entry').ariaPressed") == "false"
        browser.evaluate("document.querySelector('[data-player]').scrollIntoView()")
        wait_until(lambda: browser.evaluate("document.querySelector('iframe')?.title"), "a player")
        assert browser.evaluate("document.querySelector('iframe').title") == "<b>fast</b>"
        assert browser.evaluate("document.documentElement.scrollWidth") == 800
        assert browser.complaints() == []
        browser.evaluate("console.error('heard')")
        assert len(browser.complaints()) == 1
    finally:
        browser.close()


def test_a_step_that_was_evaluated_again_has_the_last_result(tmp_path):
    """A finished run that goes on with more episodes evaluates its last step once more."""
    lines = curve(0)
    again = {**lines[-1], "evaluation/episode_return_mean": 1.0, "evaluation/episodes": 200}
    last = [{**again, "wall_s": 70.0 + k, "env_steps_per_s": 5.0} for k in range(2)]
    found = evaluations(read_run(write_run(tmp_path / "run", lines + last)))
    assert [line["evaluation/env_steps"] for line in found] == [1000, 2000, 3000, 4000]
    assert (found[-1]["evaluation/episodes"], found[-1]["wall_s"]) == (200, 70.0)
    assert found[0]["wall_s"] == lines[9]["wall_s"]


def test_the_speed_of_a_population_counts_all_members(tmp_path):
    alone, eight = (
        read_run(write_run(tmp_path / str(seeds), curve(0), fused={"seeds": seeds}))
        for seeds in (1, 8)
    )
    assert speed(eight) == 8 * speed(alone) > 0
