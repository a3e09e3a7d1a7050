"""Doom's scenarios: rewards, ends, buttons and seeds; and that no engine and no file is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from seedbed.envs.host import doom, registry
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.doom import DoomEnv
from seedbed.types import ArraySpec, Discrete, SeedbedError, Timestep

pytest.importorskip("vizdoom", reason="needs seedbed[doom]")
GATHERING = "doom/health_gathering_supreme"


def play(host: HostEnv, actions: np.ndarray) -> list[Timestep]:
    """Opens episodes and takes actions `[T, n]`, or `[T, n, heads]`."""
    return [host.reset(), *(host.step(action) for action in actions)]


def engines() -> list[psutil.Process]:
    """Returns the engines that this process has started."""
    return [each for each in psutil.Process().children(True) if "vizdoom" in each.name()]


def test_health_kits_and_living_pay_and_death_is_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = registry.resolve(GATHERING)
    assert config == DoomEnv("health_gathering_supreme")
    host: Any = config.make(2, 6)
    assert host.spec.observation == ArraySpec((72, 128, 3), "uint8")
    assert host.spec.action == Discrete(5)
    actions = np.random.default_rng(0).choice([1, 3], (220, 2), p=[0.2, 0.8]).astype(np.int32)
    steps = play(host, actions)
    first, ended, cut, reward = (
        np.stack([getattr(each, name) for each in steps])
        for name in ("first", "terminated", "truncated", "reward")
    )
    # 92 of 100 points at the first observation; 8 are lost every 8 steps, and kits give some back.
    assert ended.any(0).all() and not cut.any()
    np.testing.assert_array_equal(first[1:], ended[:-1])
    usual = np.isclose(reward, 0.04)
    kits = np.isclose(reward, 1.04)
    assert (usual | kits | first | ended).all() and kits.sum() >= 2
    assert np.std(steps[3].observation) > 10
    assert len(engines()) == 2
    host.close()
    assert not engines() and not list(tmp_path.iterdir())


def test_the_time_limit_truncates_with_an_observation_of_its_own() -> None:
    host = DoomEnv("my_way_home", frame_skip=35).make(1, 0)
    steps = play(host, np.tile(np.array([[[1, 0]]], np.int32), (61, 1, 1)))
    ends = [t for t, each in enumerate(steps) if each.truncated[0]]
    assert ends == [60] and not steps[60].terminated[0] and steps[61].first[0]
    assert (steps[60].observation != steps[59].observation).any()
    assert sum(float(each.reward[0]) for each in steps[:61]) == pytest.approx(-0.21, abs=0.01)
    host.close()


def test_each_choice_presses_one_button_of_its_head() -> None:
    """Turning left and right by the same number of tics shows the first picture again."""
    host = DoomEnv("my_way_home").make(1, 1)
    # After a rest, as a turn is slow at first.
    turns = np.array([[[1, 0]]] * 5 + [[[0, 0]]] + [[[2, 0]]] * 5, np.int32)
    steps = play(host, turns)
    seen = [each.observation[0].astype(int) for each in steps]
    apart = [np.abs(each - seen[0]).mean() for each in seen]
    assert max(apart[2:8]) > 5 > 4 * apart[11]
    host.close()


def test_equal_seeds_play_equal_games() -> None:
    actions = np.random.default_rng(1).integers(0, 5, (40, 2)).astype(np.int32)

    def seen(seed: int) -> np.ndarray:
        host = DoomEnv("health_gathering_supreme").make(2, seed)
        steps = play(host, actions)
        host.close()
        return np.stack([each.observation for each in steps])

    once, again, other = seen(3), seen(3), seen(4)
    np.testing.assert_array_equal(once, again)
    assert (once != other).any() and (once[:, 0] != once[:, 1]).any()


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    """The actor is killed, and can tell nobody."""
    script = (
        "import time; from seedbed.envs.host.doom import DoomEnv; "
        "h = DoomEnv('my_way_home').make(1, 0); h.reset(); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        watcher, engine = psutil.Process(process.pid).children(True)
        words = engine.cmdline()
        game = words[words.index("+viz_instance_id") + 1]
        shared = list(Path("/dev/shm").glob(f"ViZDoom*{game}"))
        assert len(shared) == 3
        os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([watcher, engine], timeout=20)
    assert not alive and not any(path.exists() for path in shared)


WRONG = {
    "helth_gathering": "Doom has no scenario 'helth_gathering'; did you mean health_gathering",
    "sokoban": "Doom has no scenario 'sokoban'; known are battle, deadly_corridor,",
}


@pytest.mark.parametrize("name", WRONG)
def test_another_scenario_is_refused_by_name(name: str) -> None:
    with pytest.raises(SeedbedError, match=WRONG[name]):
        registry.resolve(f"doom/{name}")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SeedbedError, match="frame_skip is 0: a step needs 1 tic or more"):
        DoomEnv("my_way_home", frame_skip=0)
    monkeypatch.setattr(doom.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(
        SeedbedError, match="no D3_battle.cfg, and EnvPool's assets have: pip install"
    ):
        DoomEnv("battle").make(1, 0)
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(
        SeedbedError, match=r"lacks a package \(.*\): pip install 'seedbed\[doom\]'"
    ):
        DoomEnv("my_way_home").make(1, 0)


def test_a_configuration_survives_json() -> None:
    config = DoomEnv("battle", frame_skip=2)
    assert registry.from_json(registry.to_json(config)) == config and registry.code_of(config) == ""
    assert GATHERING in registry.names()
