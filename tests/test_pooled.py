"""EnvPool's environments: against a package that counts, and against EnvPool itself where it is installed."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import numpy as np
import pytest

import fake_envpool
from seedbed import strict_json
from seedbed.config import flags, resolve
from seedbed.envs.host import registry, versions
from seedbed.envs.host.pooled import EnvPoolEnv
from seedbed.testing.counting import ENV, CountingChecker
from seedbed.types import ArraySpec, Box, Discrete, SeedbedError, Timestep

TESTED = [
    "CartPole-v1",
    "Pendulum-v1",
    "FrozenLake-v1",
    "Pong-v5",
    "MiniGrid-MemoryS13-v0",
    "Jumanji/Game2048-v1",
    "WalkerWalk-v1",
    "gfootball/academy_empty_goal_close-v1",
]


@pytest.fixture
def envpool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the package of these tests in EnvPool's place."""
    monkeypatch.setitem(sys.modules, "envpool", fake_envpool)
    return fake_envpool


def rows(timestep: Timestep) -> list[tuple[Any, ...]]:
    return list(zip(*timestep, strict=True))


@pytest.mark.parametrize("fault", ["", "dirty"])
def test_no_step_is_lost_repeated_or_misdirected(envpool: Any, fault: str) -> None:
    host = registry.resolve("envpool:Counting-v0")
    assert isinstance(host, EnvPoolEnv)
    made = EnvPoolEnv(host.id, kwargs={"fault": fault}).make(5, 3)
    checkers, rng = [CountingChecker() for _ in range(5)], np.random.default_rng(0)
    assert made.spec.action == Discrete(1000)
    now = made.reset()
    for turn in range(120):
        for checker, row in zip(checkers, rows(now), strict=True):
            checker.arrive(*row)
        action = rng.integers(0, 1000, 5).astype(np.int32)
        for checker, each in zip(checkers, action, strict=True):
            checker.act(int(each))
        now = made.step(action)
        assert now.reward.dtype == np.float32 and now.first.dtype == bool
        if turn == 60:
            # A life that opens in the middle of episodes.
            now, checkers = made.reset(), [CountingChecker() for _ in range(5)]
    assert min(checker.opened for checker in checkers) >= 5
    made.close()


def test_seeds_are_those_of_the_group_and_random_without_one(envpool: Any) -> None:
    def seeds(seed: int | None) -> list[int]:
        return EnvPoolEnv("Counting-v0").make(4, seed).reset().observation[:, ENV].tolist()

    assert seeds(1) == seeds(1) != seeds(2)
    assert len({*seeds(1), *seeds(2)}) == 8
    assert seeds(None) != seeds(None)


def test_images_get_their_channels_last_and_bounds_of_no_meaning_go(envpool: Any) -> None:
    made = EnvPoolEnv("Image-v0").make(2, 0)
    assert made.spec.observation == ArraySpec((8, 16, 3), "uint8")
    assert made.spec.action == Box((2,), (-np.inf,) * 2, (np.inf,) * 2)
    seen = made.reset().observation
    np.testing.assert_array_equal(seen[1, 2, 3], [35, 163, (256 + 35) % 256])
    image = np.moveaxis(seen, -1, -3)
    np.testing.assert_array_equal(made.encode(image), seen)
    np.testing.assert_array_equal(made.encode(image[0]), seen[0])


def test_parts_of_the_observation_and_of_info_are_chosen(envpool: Any) -> None:
    def seen(env_id: str, *parts: str) -> Any:
        made = EnvPoolEnv(env_id, parts=parts).make(3, 0)
        return made.spec.observation, made.reset().observation

    spec, now = seen("Dict-v0")
    assert spec == {"direction": ArraySpec((4,), "float32"), "image": ArraySpec((7, 7, 3), "uint8")}
    assert now["direction"].tolist() == [[0, 0, 1, 0]] * 3
    spec, now = seen("Dict-v0", "image")
    assert spec == ArraySpec((7, 7, 3), "uint8") and now.shape == (3, 7, 7, 3)
    spec, now = seen("Image-v0", "observation", "HEALTH", "score")
    assert spec["HEALTH"] == ArraySpec((), "float32") and spec["score"] == ArraySpec((2,), "int32")
    assert spec["observation"] == ArraySpec((8, 16, 3), "uint8")
    assert now["HEALTH"].tolist() == [100] * 3 and now["score"].tolist() == [
        [0, 0],
        [1, -1],
        [2, -2],
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such id": (
        {"id": "Countin-v0"},
        "EnvPool has no environment 'Countin-v0'; did you mean Counting-v0",
    ),
    "no such part": (
        {"id": "Dict-v0", "parts": ("imag",)},
        "envpool:Dict-v0 has no part 'imag'; did you mean image",
    ),
    "an option that it lacks": (
        {"id": "Counting-v0", "kwargs": {"size": 3}},
        "EnvPool cannot make 'Counting-v0': raised TypeError: .*size",
    ),
    "an option of ours": (
        {"id": "Counting-v0", "kwargs": {"num_envs": 3}},
        "Counting-v0: seedbed itself sets EnvPool's num_envs",
    ),
    "no threads": ({"id": "Counting-v0", "threads": 0}, "threads is 0: an environment needs 1"),
    "two players": ({"id": "Duel-v0"}, "envpool:Duel-v0 has 2 players, and an agent is one"),
}
FAULTS = {
    "same step": r"step \d+: EnvPool opened episodes in \[1\] and not in \[\], whose last ones",
    "order": r"step 0: EnvPool returned \[1 0\] out of order",
    "reward": "step 1, index 1: reward nan is not finite",
    "raises": "step 1: raised RuntimeError: the game crashed",
    "health": r"step 0: observation\['HEALTH'\] is not finite: inf",
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_made_is_refused_by_name(envpool: Any, case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(SeedbedError, match=message):
        EnvPoolEnv(**options).make(2, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_envpool_must_not_return_ends_with_one_line(envpool: Any, fault: str) -> None:
    parts = ("observation", "HEALTH") if fault == "health" else ()
    with pytest.raises(
        SeedbedError, match=f"environment 'envpool:Counting-v0', {FAULTS[fault]}"
    ) as told:
        made = EnvPoolEnv("Counting-v0", parts=parts, kwargs={"fault": fault}).make(2, 0)
        made.reset()
        for _ in range(20):
            made.step(np.zeros(2, np.int32))
    assert "\n" not in str(told.value)


def test_doom_s_engine_is_started_by_what_ends_it(envpool: Any) -> None:
    made = EnvPoolEnv("Engine-v0").make(1, 0)
    assert made.spec.action == Discrete(1000)


def test_football_has_names_of_its_own() -> None:
    config = registry.resolve("football/academy_corner")
    assert config == EnvPoolEnv("gfootball/academy_corner-v1", frame_stack=4)
    assert "football/5_vs_5" in registry.names()
    with pytest.raises(
        SeedbedError, match="Football has no scenario '5_vs_4'; did you mean 5_vs_5"
    ):
        registry.resolve("football/5_vs_4")


def test_actions_that_are_no_choices_do_not_reach_the_game(envpool: Any) -> None:
    made = EnvPoolEnv("Counting-v0").make(2, 0)
    made.reset()
    for wrong in ([0, 1000], [-1, 0]):
        with pytest.raises(
            SeedbedError, match=re.escape(f"actions {wrong} are not all in Discrete")
        ):
            made.step(np.array(wrong, np.int32))


def test_without_the_package_one_line_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(
        SeedbedError, match=r"lacks a package \(.*\): pip install 'seedbed\[envpool\]'$"
    ):
        EnvPoolEnv("Counting-v0").make(1, 0)


def test_a_configuration_survives_json_and_files_in_it_are_code() -> None:
    config: Any = EnvPoolEnv("A-v1", 4, ("HEALTH",), 2, {"frame_skip": 4, "size": (1, 2)})
    data = strict_json.loads(strict_json.dumps(registry.to_json(config)))
    assert registry.from_json(data) == EnvPoolEnv(
        "A-v1", 4, ("HEALTH",), 2, {"frame_skip": 4, "size": [1, 2]}
    )
    assert config.frame_skip == 4 and EnvPoolEnv("A-v1").frame_skip == 1
    assert registry.code_of(config) == ""
    for options in ({"vzd_path": "+x"}, {"game_args": "+x"}, {"many": [1, {"a": ["+x"]}]}):
        assert registry.code_of(EnvPoolEnv("D1Basic-v1", kwargs=options)) in (
            "envpool:+x",
            "envpool:a",
        )
    name = "cartpole/envpool:Evil"
    assert (
        flags.command(dataclasses.replace(resolve.train_config("cartpole/impala"), name=name)) == ""
    )
    assert set(versions.of(config)) <= {"envpool"}


@pytest.mark.parametrize("env_id", TESTED)
def test_envpool_itself_opens_an_episode_in_the_step_after_an_end(env_id: str) -> None:
    pytest.importorskip("envpool", reason="needs seedbed[envpool]")
    made = EnvPoolEnv(env_id).make(3, 0)
    rng, steps = np.random.default_rng(0), [made.reset()]
    for _ in range(450):
        spec = made.spec.action
        if isinstance(spec, Discrete):
            action = rng.integers(0, spec.n, 3).astype(np.int32)
        else:
            action = rng.uniform(-1, 1, (3, *spec.shape)).astype(np.float32)
        steps.append(made.step(action))
    made.close()
    first = np.stack([each.first for each in steps])
    ended = np.stack([each.terminated | each.truncated for each in steps])
    np.testing.assert_array_equal(first[1:], ended[:-1])
    assert first[0].all()
    assert first[1:].any() or env_id in ("Pong-v5", "WalkerWalk-v1", TESTED[4])
    if env_id == "Pendulum-v1":
        assert np.stack([each.truncated for each in steps])[200].all()
