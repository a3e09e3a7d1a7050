"""Every command that is printed can be pasted: a shell reads back the same paths, and runs nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seedbed import api, cli, compression
from seedbed.central import listening
from seedbed.config import flags, resolve
from seedbed.exporting import extra
from seedbed.paramserver import command as host_command
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.command import Wishes
from seedbed.paramserver.hosting import facts
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.registration import Named
from seedbed.printable import printable
from seedbed.run.options import CentralConfig
from seedbed.run.restoring import restore_newest
from seedbed.run.trust import Untrusted
from seedbed.terminal import LAYOUT
from seedbed.types import SeedbedError
from seedbed.viewer import evaluate, report, video

PATHS = {
    "plain": "runs/pong",
    "spaces": "my  runs/the first",
    "quotes": 'it\'s "mine"',
    "substitution": "$(touch x)`touch y`$HOME",
    "list": "a; touch x & touch y | touch z",
    "lines": "a\ntouch x\r\t",
    "dash": "--help",
    "option": "-rf",
    "unicode": "größe 🦆 日本",
    "invisible": "a\u202eb\x1b[31m\u00a0",
    "no text": os.fsdecode(b"\xff\xfe it's"),
    "pattern": "*?[a-z]{a,b}~!",
    "home": "~root/#x",
    "backslash": "a\\nb\\",
    "redirection": "<a>b",
}
SHELL = """
seedbed() { printf '%s\\0' seedbed "$@"; }
pip() { printf '%s\\0' pip "$@"; }
"""
Said = Callable[[Path, pytest.MonkeyPatch, pytest.CaptureFixture[str]], str]
"""Runs the code that prints a command about a path; returns what it prints."""


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(SeedbedError) as error:
        call()
    return str(error.value)


def trained(interrupted: bool) -> Said:
    def say(run: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> str:
        summary = {"interrupted": interrupted, "run": str(run)}
        patch.setattr(api, "train_settled", lambda *_, **__: summary)
        cli.main(["train", "cartpole/impala"])
        return capture.readouterr().out

    return say


def silence(run: Path, *_: Any) -> str:
    keeper: Any = SimpleNamespace(
        role=SimpleNamespace(name="shard 0"), caller=SimpleNamespace(last_error="")
    )
    cluster: Any = SimpleNamespace(_run=run)
    return Cluster._silence(cluster, keeper, 60.0)


def uncoordinated(run: Path, patch: pytest.MonkeyPatch, *_: Any) -> str:
    def begin(*_: Any) -> Any:
        return SimpleNamespace(
            name="host-1", serve=lambda *_, **__: None, alone=True, stop=None, lost=False
        )

    door = SimpleNamespace(
        register=lambda _: Named("host-1", "127.0.0.1", ""), keep=lambda *_: None, close=list,
        refusal=None,
    )  # fmt: skip
    patch.setattr(host_command, "await_run", lambda *_: True)
    patch.setattr(host_command, "ActorKey", SimpleNamespace(read=lambda _: None))
    patch.setattr(host_command, "Registration", lambda *_: door)
    patch.setattr(host_command, "Role", begin)
    patch.setattr(host_command, "hosting", SimpleNamespace(Hosting=begin))

    class Never:
        def __call__(self) -> bool:
            return False

        def call(self, function: Any) -> None: ...

    stop: Any = Never()
    return raised(
        lambda: host_command.serve(run, Wishes(facts(()), False, 5.0), lambda text: None, stop)
    )


def invitation(run: Path, *_: Any) -> str:
    told: list[str] = []
    hosts: Any = SimpleNamespace(_run=run, _wanted=2, look=list, take_notices=list, _door=None)
    assert not Hosts.await_all(hosts, told.append, lambda: True)
    return told[0]


def announced(number: int) -> Said:
    def say(run: Path, patch: pytest.MonkeyPatch, *_: Any) -> str:
        lines: list[str] = []
        patch.setattr(listening, "advertised", lambda *_: ["[fe80::1]:4711"])
        patch.setattr(listening, "write_json", lambda *_: None)
        folder: Any = SimpleNamespace(
            path=run, listen=run / "listen", term=1, require_claim=lambda: None
        )
        listening._Announcer("", CentralConfig(), folder, lines.append)(4711)
        return lines[number]

    return say


def shown(problem: Exception | None) -> Said:
    """Makes the part of a report with episodes that cannot be shown."""

    def say(run: Path, patch: pytest.MonkeyPatch, *_: Any) -> str:
        def play(*_: Any) -> Any:
            if problem is not None:
                raise problem
            return SimpleNamespace(size=2)

        told: list[str] = []
        patch.setattr(report, "_play", play)
        patch.setattr(report, "_score", lambda run: 0.0)
        group: Any = SimpleNamespace(runs=[SimpleNamespace(path=run, name="run")])
        report._player(group, told.append, 1, 1)
        return told[0]

    return say


def never_saved(run: Path, *_: Any) -> str:
    return raised(lambda: restore_newest(run / "checkpoints", {}, print, part="params"))


ABOUT_A_PATH: dict[str, tuple[Said, list[str]]] = {
    "stopped": (trained(True), ["seedbed", "train", "--resume", "--run", "RUN"]),
    "trained": (trained(False), ["seedbed", "evaluate", "RUN"]),
    "a role is silent": (silence, ["seedbed", "train", "--resume", "--run", "RUN"]),
    "no coordinator": (uncoordinated, ["seedbed", "train", "--resume", "--run", "RUN"]),
    "hosts may come": (invitation, ["seedbed", "host", "RUN"]),
    "actors may come": (announced(1), ["seedbed", "actor", "RUN"]),
    "actors of elsewhere": (
        announced(2),
        ["seedbed", "actor", "[fe80::1]:4711", "--key", "actor.key"],
    ),
    "episodes are too large": (shown(None), ["seedbed", "evaluate", "RUN", "--html", "F.html"]),
    "episodes are not trusted": (
        shown(Untrusted("no")),
        ["seedbed", "evaluate", "RUN", "--trust-run", "--html", "F.html"],
    ),
    "no checkpoint": (never_saved, ["seedbed", "train", "--resume", "--run", "RUN"]),
}


def command_in(text: str) -> str:
    """Returns the command in a message, as a terminal shows it: from its program to the end."""
    said = printable(text, keep=LAYOUT).rstrip("\n")
    assert "\n" not in said
    found = list(re.finditer(r"seedbed (train|evaluate|actor|host) |pip install ", said))
    return said[found[-1].start() :]


def pasted(command: str, folder: Path) -> list[str]:
    """Returns the words that a program gets when a person pastes a command in an empty folder."""
    for options_ in (["-n", "-c", command], ["-c", SHELL + command]):
        ran = subprocess.run(
            ["/bin/bash", "--norc", *options_],
            cwd=folder,
            env={"PATH": "", "HOME": "/nowhere", "LC_ALL": "C"},
            capture_output=True,
            check=True,
        )
        assert not ran.stderr
    assert not list(folder.iterdir())
    return os.fsdecode(ran.stdout).split("\0")[:-1]


@pytest.mark.quick("*-plain", "*-quotes", "*-substitution", "stopped-*")
@pytest.mark.skipif(sys.platform != "linux", reason="bash is at another place")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ABOUT_A_PATH)
def test_a_printed_command_can_be_pasted(
    place: str,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say, wanted = ABOUT_A_PATH[place]
    run = Path(PATHS[path])
    with monkeypatch.context() as patch:
        command = command_in(say(run, patch, capsys))
    words = pasted(command, tmp_path)
    at = wanted.index("RUN") if "RUN" in wanted else None
    if at is not None:
        assert not words[at].startswith("-")
        assert Path(words[at]) == run
        words[at] = "RUN"
    assert words == wanted


@pytest.mark.parametrize("path", PATHS)
def test_our_own_parsers_read_the_paths(path: str, tmp_path: Path) -> None:
    run = Path(PATHS[path])
    _, *resume = pasted(cli.resume_command(run), tmp_path)
    assert flags.split_train_arguments(resume[1:]).request.run == run
    word = pasted(f"seedbed evaluate {cli.pasted(run)}", tmp_path)[2]
    assert cli._parsed("evaluate", evaluate, [word]).run == run


def no_package(*_: Any) -> str:
    return raised(lambda: extra.require("no_such_package"))


def no_ffmpeg(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "imageio_ffmpeg", None)
    return raised(video.find_ffmpeg)


def no_function(*_: Any) -> str:
    return raised(lambda: compression.lz4_address("no_such_function"))


@pytest.mark.parametrize(
    ("say", "wanted"),
    [
        (no_package, ["seedbed[export]"]),
        (no_ffmpeg, ["seedbed[video]"]),
        (no_function, ["--force-reinstall", "lz4"]),
    ],
)
def test_what_installs_a_package_can_be_pasted(
    say: Any, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pasted(command_in(say(monkeypatch)), tmp_path) == ["pip", "install", *wanted]


@pytest.mark.parametrize("sweep", ["learning_rate=1e-3,2e-3", "learning_rate = 1e-3"])
def test_the_command_of_a_run_can_be_pasted(sweep: str, tmp_path: Path) -> None:
    config = resolve.train_config("cartpole/ppo")
    config = replace(config, runtime=replace(config.runtime, sweep=sweep))
    words = pasted(flags.command(config), tmp_path)
    assert words[:3] == ["seedbed", "train", "cartpole/ppo"]
    assert words[words.index("--sweep") + 1] == sweep
