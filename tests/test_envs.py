"""Host environments: Atari's semantics, Gymnasium's spaces, names and errors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.host import registry
from seedbed.envs.host.atari import AtariEnv, games
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.testing.counting import CountingChecker
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, MultiDiscrete, SeedbedError, Timestep


def rollout(host: HostEnv, steps: int, seed: int = 0) -> list[Timestep]:
    """Plays random actions; returns `steps + 1` timesteps."""
    assert isinstance(host.spec.action, Discrete)
    rng = np.random.default_rng(seed)
    timesteps = [host.reset()]
    n = len(timesteps[0].reward)
    for _ in range(steps):
        timesteps.append(host.step(rng.integers(0, host.spec.action.n, n).astype(np.int32)))
    host.close()
    return timesteps


def stack(timesteps: list[Timestep]) -> Timestep:
    """Stacks timesteps into one with leaves `[T, n, ...]`."""
    return Timestep(*(np.stack(leaves) for leaves in zip(*timesteps, strict=True)))


def check_next_step(t: Timestep) -> None:
    """Checks that an end, and nothing else, is followed by an opening with reward 0."""
    assert t.first[0].all()
    np.testing.assert_array_equal(t.first[1:], (t.terminated | t.truncated)[:-1])
    assert not t.reward[t.first].any()
    assert not (t.terminated | t.truncated)[t.first].any()


@pytest.mark.slow
def test_atari_has_the_contract_s_shapes() -> None:
    host = AtariEnv("pong").make(3, 0)
    assert host.spec == EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))
    t = stack(rollout(host, 5))
    assert (t.observation.shape, t.observation.dtype) == ((6, 3, 84, 84), np.uint8)
    kinds = (t.reward.dtype, t.terminated.dtype, t.truncated.dtype, t.first.dtype)
    assert kinds == (np.float32, bool, bool, bool)
    assert AtariEnv("pong", full_action_space=True).make(1, 0).spec.action == Discrete(18)


def test_atari_terminates_then_opens_the_next_episode() -> None:
    t = stack(rollout(AtariEnv("breakout").make(4, 3), 250))
    check_next_step(t)
    assert t.terminated.any()
    assert not t.truncated.any()
    bricks = t.observation[:, :, 25:40]
    rows, envs = np.nonzero(t.terminated[:-1])
    # bricks are missing from the last frame, unless none was hit, and are back in the next
    assert (bricks[rows, envs] != bricks[0, 0]).any()
    assert (bricks[rows + 1, envs] == bricks[0, 0]).all()


@pytest.mark.slow
def test_a_lost_life_ends_an_episode_but_not_the_game() -> None:
    config = AtariEnv("breakout", life_loss=True)
    t = stack(rollout(config.make(4, 3), 400))
    check_next_step(t)
    bricks = t.observation[:, :, 25:40]
    rows, envs = np.nonzero(t.terminated[:-1])
    whole = (bricks[rows + 1, envs] == bricks[0, 0]).all((-1, -2))
    hit = (bricks[rows, envs] != bricks[0, 0]).any((-1, -2))
    assert (hit & ~whole).any(), "bricks stay missing in the next life"
    again = stack(rollout(config.for_evaluation().make(4, 3), 400))
    assert again.terminated.sum() < t.terminated.sum() / 3
    assert config.for_evaluation() == AtariEnv("breakout")


def test_atari_truncates_after_max_frames() -> None:
    t = stack(rollout(AtariEnv("pong", max_frames=80).make(2, 0), 50))
    check_next_step(t)
    assert not t.terminated.any()
    assert np.flatnonzero(t.truncated[:, 0]).tolist() == [20, 41]  # four frames a step
    assert np.flatnonzero(t.first[:, 0]).tolist() == [0, 21, 42]


def test_atari_rewards_are_the_game_s_own() -> None:
    t = stack(rollout(AtariEnv("ms_pacman").make(2, 0), 120))
    assert t.reward.max() >= 10


@pytest.mark.slow
def test_atari_seeds_differ_and_repeat() -> None:
    config = AtariEnv("breakout", stickiness=0.25)
    one, again, other = (stack(rollout(config.make(3, seed), 60)) for seed in (5, 5, 6))
    for leaf, same in zip(one, again, strict=True):
        np.testing.assert_array_equal(leaf, same)
    assert (one.observation != other.observation).any()
    actions_alike = config.make(4, 7)
    frames = [actions_alike.reset().observation]
    for step in range(60):
        frames.append(actions_alike.step(np.full(4, step % 4, np.int32)).observation)
    actions_alike.close()
    movies = {np.stack(frames)[:, env].tobytes() for env in range(4)}
    assert len(movies) == 4


def test_wrong_atari_actions_do_not_hang() -> None:
    host = AtariEnv("pong").make(2, 0)
    host.reset()
    with pytest.raises(SeedbedError, match="not all in 0..5"):
        host.step(np.array([0, 6], np.int32))
    host.close()


def test_missing_roms_and_games_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(SeedbedError, match="unknown Atari game 'pnog'; did you mean pong"):
        AtariEnv("pnog").make(1, 0)
    with pytest.raises(SeedbedError, match="two players"):
        AtariEnv("joust").make(1, 0)
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(SeedbedError, match="ROM of 'pong' is missing"):
        AtariEnv("pong").make(1, 0)


def test_the_counting_environment_counts() -> None:
    host = FactoryEnv("counting_environment:make", kwargs={"length": 3}).make(3, 0)
    timestep, checkers = host.reset(), [CountingChecker(length=3) for _ in range(3)]
    for step in range(60):
        action = np.arange(3, dtype=np.int32) + step
        for i, checker in enumerate(checkers):
            row = (
                timestep.reward[i],
                timestep.terminated[i],
                timestep.truncated[i],
                timestep.first[i],
            )
            checker.arrive(timestep.observation[i], *map(float, row[:1]), *map(bool, row[1:]))
            checker.act(int(action[i]))
        timestep = host.step(action)
    assert all(checker.opened > 8 for checker in checkers)


class SpaceEnv(gymnasium.Env):
    """Returns `value` from `observation_space` whatever happens; records actions."""

    def __init__(self, observation: spaces.Space, action: spaces.Space, value: Any) -> None:
        self.observation_space, self.action_space = observation, action
        self.value, self.actions = value, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.value, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.actions.append(action)
        return self.value, 1, False, False, {}


made: list[Any] = []


def make_made() -> Any:
    """Returns what the test has left in `made`."""
    return made[-1]


def space_host(
    observation: spaces.Space, value: Any, action: spaces.Space | None = None
) -> tuple[HostEnv, SpaceEnv]:
    """Makes a host of one SpaceEnv."""
    env = SpaceEnv(observation, action or spaces.Discrete(2), value)
    made.append(env)
    return FactoryEnv(f"{__name__}:make_made").make(1, 0), env


def test_observation_spaces_become_trees_of_arrays() -> None:
    space = spaces.Dict(
        {
            "wide": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "image": spaces.Box(0, 255, (3, 4, 1), np.uint8),
            "count": spaces.Box(0, 10, (1,), np.int64),
            "pair": spaces.Tuple([spaces.Discrete(4, start=2), spaces.MultiBinary(3)]),
            "multi": spaces.MultiDiscrete([2, 3]),
        }
    )
    value = {
        "wide": np.array([1.5, 2.5]),
        "image": np.full((3, 4, 1), 7, np.uint8),
        "count": np.array([9]),
        "pair": (np.int64(5), np.array([1, 0, 1], np.int8)),
        "multi": np.array([1, 0]),
    }
    host, _ = space_host(space, value)
    assert host.spec.observation == {
        "wide": ArraySpec((2,), "float32"),
        "image": ArraySpec((3, 4, 1), "uint8"),
        "count": ArraySpec((1,), "int32"),
        "pair": (ArraySpec((4,), "float32"), ArraySpec((3,), "float32")),
        "multi": ArraySpec((5,), "float32"),
    }
    got = host.reset().observation
    assert got["wide"].dtype == np.float32
    assert got["wide"].tolist() == [[1.5, 2.5]]
    assert got["image"].sum() == 84
    assert got["count"].tolist() == [[9]]
    assert got["pair"][0].tolist() == [[0, 0, 0, 1]]
    assert got["pair"][1].tolist() == [[1, 0, 1]]
    assert got["multi"].tolist() == [[0, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("space", "spec", "ours", "theirs"),
    [
        (spaces.Discrete(3, start=-1), Discrete(3), np.int32(0), -1),
        (spaces.MultiDiscrete([2, 5]), MultiDiscrete((2, 5)), np.array([1, 4], np.int32), [1, 4]),
        (
            spaces.Box(-2.0, 2.0, (2,), np.float64),
            Box((2,), (-2.0, -2.0), (2.0, 2.0)),
            np.array([0.5, -1.5], np.float32),
            [0.5, -1.5],
        ),
        (spaces.Box(0.0, np.inf, (), np.float32), Box((), (0.0,), (np.inf,)), np.float32(9), 9.0),
        (spaces.MultiBinary((2, 1)), MultiDiscrete((2, 2)), np.array([1, 0], np.int32), [[1], [0]]),
        (spaces.Box(-3, 4, (1,), np.int8), MultiDiscrete((8,)), np.array([7], np.int32), [4]),
    ],
)
def test_actions_reach_the_environment(space: Any, spec: Any, ours: Any, theirs: Any) -> None:
    host, env = space_host(spaces.Box(0, 1, (1,)), np.zeros(1, np.float32), space)
    assert host.spec.action == spec
    host.reset()
    assert host.step(np.asarray(ours)[None]).reward.tolist() == [1.0]
    assert np.asarray(env.actions[0]).tolist() == theirs


def test_spaces_without_an_array_form_are_named() -> None:
    with pytest.raises(SeedbedError, match=r"observation\['t'\] is a Text space"):
        space_host(spaces.Dict({"t": spaces.Text(3)}), {"t": "abc"})
    with pytest.raises(SeedbedError, match="actions of a Text space"):
        space_host(spaces.Discrete(2), 0, spaces.Text(3))


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Box(0, 1, (4,)), np.zeros(1, np.float32), r"has shape \(1,\), expected \(4,\)"),
        (spaces.Box(0, 9, (1,), np.uint8), np.zeros(1), "is float64, expected uint8"),
        (spaces.Box(0, 1, (2,)), np.array([0, np.inf]), "not finite"),
        (spaces.Discrete(3), 3, "lies outside"),
        (spaces.Discrete(3), 0.5, "expected integers"),
        (spaces.Dict({"a": spaces.Discrete(3)}), {"b": 1}, "lacks a part"),
    ],
)
def test_wrong_observations_are_refused(space: Any, value: Any, text: str) -> None:
    host, _ = space_host(space, value)
    with pytest.raises(SeedbedError, match=text):
        host.reset()


def test_a_reward_beyond_float32_is_refused() -> None:
    host, env = space_host(spaces.Discrete(3), 0)
    host.reset()
    env.step = lambda action: (0, 1e39, False, False, {})  # type: ignore[method-assign]
    with pytest.raises(
        SeedbedError, match="index 0, step 1: reward is not finite: 1e\\+39 in float32"
    ):
        host.step(np.zeros(1, np.int32))


def test_a_factory_must_return_an_environment() -> None:
    made.append(3)
    with pytest.raises(SeedbedError, match="returned a int, not a gymnasium.Env"):
        FactoryEnv(f"{__name__}:make_made").make(1, 0)
    made.append(SpaceEnv(spaces.Discrete(2), spaces.Discrete(2), 0))
    with pytest.raises(
        SeedbedError, match="returned one environment twice; make a new one in each"
    ):
        FactoryEnv(f"{__name__}:make_made").make(2, 0)
    with pytest.raises(SeedbedError, match="did you mean make_made"):
        FactoryEnv(f"{__name__}:make_maed").make(1, 0)
    with pytest.raises(SeedbedError, match="module:callable"):
        FactoryEnv("nothing").make(1, 0)


def test_gymnasium_environments_keep_next_step() -> None:
    t = stack(rollout(GymEnv("CartPole-v1", kwargs={"max_episode_steps": 15}).make(4, 0), 80))
    check_next_step(t)
    assert t.terminated.any()
    assert t.truncated.any()
    assert t.observation.dtype == np.float32
    assert len(np.unique(t.observation[0, :, 0])) == 4


def test_names_resolve() -> None:
    assert registry.resolve("pong") == AtariEnv("pong")
    assert registry.resolve("MsPacman") == AtariEnv("ms_pacman")
    sticky = AtariEnv("ms_pacman", stickiness=0.25, noop_max=0, fire_reset=False)
    assert registry.resolve("ALE/MsPacman-v5") == sticky
    assert registry.resolve("CartPole-v1") == GymEnv("CartPole-v1")
    assert registry.resolve("cartpole") == registry.resolve("CART-POLE") == CartPole()
    assert registry.resolve("pkg.module:make") == FactoryEnv("pkg.module:make")
    assert registry.resolve("pkg:Thing-v3") == GymEnv("pkg:Thing-v3")
    for name in registry.names():
        assert registry.resolve(name)
    assert {"pong", "breakout", "cartpole", *games()} <= set(registry.names())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("pog", "pong"),
        ("cartpol", "cartpole"),
        ("CartPol-v1", "CartPole-v1"),
        ("ALE/Pung-v5", "ALE/Pong-v5"),
    ],
)
def test_unknown_names_are_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(SeedbedError, match=f"{name}.*did you mean.*{near}"):
        registry.resolve(name)
    with pytest.raises(SeedbedError, match="did you mean CartPole-v1"):
        GymEnv("CartPol-v1").make(1, 0)


@pytest.mark.parametrize(
    "config",
    [
        AtariEnv("pong", frame_stack=1, stickiness=0.25),
        GymEnv("CartPole-v1", kwargs={"max_episode_steps": 9}),
        FactoryEnv("a:b", frame_stack=2, kwargs=(("x", 1), ("a", "y"))),
    ],
)
def test_configurations_survive_json(config: Any) -> None:
    assert registry.from_json(json.loads(json.dumps(registry.to_json(config)))) == config
    assert hash(config) == hash(dataclasses.replace(config))


def test_unknown_configurations_are_refused() -> None:
    with pytest.raises(SeedbedError, match="no option 'stickyness'; did you mean stickiness"):
        registry.from_json({"kind": "AtariEnv", "game": "pong", "stickyness": 1})
    with pytest.raises(SeedbedError, match="unknown kind"):
        registry.from_json({"kind": "Other"})
    with pytest.raises(SeedbedError, match="cannot be sent"):
        registry.to_json(EnvSpec((), Discrete(1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("frame_stack", [0, True, 1.5, "two"])
@pytest.mark.parametrize(
    "make", [AtariEnv, lambda game, **o: GymEnv(game, **o)], ids=["ale", "gym"]
)
def test_frames_are_stacked_by_a_whole_number(make, frame_stack):
    with pytest.raises(SeedbedError, match="frame_stack is"):
        make("pong", frame_stack=frame_stack)
