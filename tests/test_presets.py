from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from my_agents import Custom, Inner
from saved import TRUSTED, read_back
from seedbed.config import presets, resolve
from seedbed.config.configuration import TrainConfig
from seedbed.config.presets import PRESETS
from seedbed.config.resolve import resolve_env, train_config
from seedbed.config.saved import from_json, to_json
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.run import trust
from seedbed.run.options import CentralConfig
from seedbed.types import SeedbedError


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets(name):
    config = train_config(name)
    env = name.rpartition("/")[0]
    first = next(preset for preset in presets.PRESETS if preset.startswith(f"{env}/"))
    assert train_config(env) == train_config(first)
    assert config.name == name
    assert presets.description(name).endswith(".")
    assert read_back(config) == config


@pytest.mark.parametrize("name", presets.PRESETS)
def test_rewards_are_clipped_on_atari_only(name):
    """R2D2 rescales values instead, as published; nothing else is known to be of Atari's sizes."""
    config = train_config(name)
    clips = isinstance(config.env, AtariEnv) and "r2d2" not in name
    assert getattr(config.agent, "reward_clip", 0.0) == float(clips)


@pytest.mark.parametrize("agent", trust.AGENTS)
def test_no_agent_clips_rewards_by_itself(agent):
    assert getattr(resolve.load_agent_class(agent)(), "reward_clip", 0.0) == 0.0


@pytest.mark.parametrize("agent", ["impala", "ppo", "dqn", "r2d2"])
@pytest.mark.parametrize("game", ["breakout", "seaquest", "ALE/Qbert-v5"])
def test_any_game_has_the_agents_settings_for_a_workstation(game, agent):
    config, pong = train_config(game, agent), train_config("pong", agent)
    assert config.agent == pong.agent and config.name == f"{game}/{agent}"
    assert getattr(config.agent, "reward_clip", 0.0) == float(agent != "r2d2")
    assert config.env.frame_stack == pong.env.frame_stack
    assert config.env.game == game.rpartition("/")[2].partition("-")[0].lower()
    assert config.env.stickiness == (0.25 if game.startswith("ALE/") else 0.0)


@pytest.mark.parametrize(
    ("name", "target", "agent"), [("pong/dqn", "pong", "dqn"), ("ant/sac", "ant", "sac")]
)
def test_an_agent_may_follow_the_environments_name(name, target, agent):
    assert resolve.train_config(name) == resolve.train_config(target, agent)


def test_preset_free_environments():
    config = train_config("ALE/MsPacman-v5", "impala")
    assert config.env == AtariEnv("ms_pacman", stickiness=0.25, noop_max=0, fire_reset=False)
    assert config.name == "ALE/MsPacman-v5/impala"
    assert config.agent == train_config("pong").agent
    assert isinstance(train_config("Acrobot-v1").env, GymEnv)
    assert resolve_env("my_pkg:make_env") == FactoryEnv("my_pkg:make_env")
    with pytest.raises(SeedbedError, match="no module 'my_pkg'; install it or start in its folder"):
        train_config("my_pkg:make_env")


def test_an_agent_of_ones_own():
    config = train_config("pong", "my_agents:Custom")
    assert config.agent == Custom()
    assert config.env == train_config("pong").env
    assert config.name == "pong/my_agents:Custom"


def test_configurations_round_trip_without_what_bind_fills():
    agent = Custom(spec=object(), inner=Inner((0.5,)), name="x")
    config = TrainConfig(
        GymEnv("CartPole-v1", kwargs=(("render_mode", None),)),
        agent,
        CentralConfig(steps=5, learner_devices=(0, 1)),
        "cartpole/custom",
    )
    again = read_back(config)
    assert again == dataclasses.replace(config, agent=dataclasses.replace(agent, spec=None))


@pytest.mark.parametrize(
    ("target", "agent", "message"),
    [
        ("pnog", None, "'pnog'; did you mean pong"),
        ("cartpoel/impala", None, "did you mean cartpole/impala"),
        ("brekout", None, "did you mean breakout"),
        ("CartPoel-v1", None, "did you mean .*CartPole-v1"),
        ("ALE/Pogn-v5", None, "did you mean ALE/Pong-v5"),
        ("zzzzqqqq", None, "unknown environment 'zzzzqqqq'; see `seedbed list`"),
        ("pong", "impalla", "unknown agent 'impalla'; did you mean impala"),
        ("pong", "no_such_module:Agent", "no module 'no_such_module'"),
        ("pong", "my_agents:Costum", "has no 'Costum'; did you mean Custom"),
        ("pong", "my_agents:helper", "is not a dataclass"),
        ("pong", "seedbed.types:Discrete", "has no 'spec'"),
        ("pong/impala", "my_agents:Custom", "has an agent of its own"),
    ],
)
def test_unknown_names(target, agent, message):
    with pytest.raises(SeedbedError, match=message):
        train_config(target, agent)


@pytest.mark.parametrize(
    "target", ["pong", "CartPole-v1", "seedbed.envs.device.classic.pendulum:Pendulum"]
)
def test_an_agent_of_ones_own_trains_for_as_long_as_the_usual_one(target):
    own, usual = train_config(target, "my_agents:Custom"), train_config(target)
    assert (own.env, own.runtime.steps) == (usual.env, usual.runtime.steps)
    assert type(own.runtime) is type(usual.runtime)
    assert own.runtime.evaluate_every == usual.runtime.evaluate_every


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("env"), "config.json is damaged or incomplete"),
        (
            lambda data: data["central"].update(stepz=1),
            "has no option 'stepz'; did you mean steps",
        ),
        (
            lambda data: data["agent"].update({"class": "gone:Agent"}),
            "gone:Agent cannot be imported",
        ),
        (
            lambda data: data.update(env={"class": "seedbed.envs.classic.cartpole:CartPole"}),
            "CartPole cannot be imported .*: go on with the version of seedbed that began the run",
        ),
        (lambda data: data["agent"].update(szes=1), "Custom has no option 'szes'.*sizes"),
    ],
)
def test_damaged_configurations(change, message):
    data = to_json(TrainConfig(GymEnv("CartPole-v1"), Custom(), CentralConfig()))
    data["agent"]["class"] = "my_agents:Custom"
    change(data)
    with pytest.raises(SeedbedError, match=message):
        from_json(data, TRUSTED)


def test_what_cannot_be_saved_is_refused():
    config = TrainConfig(GymEnv("CartPole-v1"), Custom(inner=print), CentralConfig())
    with pytest.raises(SeedbedError, match="cannot be saved with the run"):
        to_json(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_page_of_results(preset):
    page = Path(__file__).parents[1] / "docs" / "results" / f"{preset.replace('/', '-')}.md"
    assert f"seedbed train {preset} --seed 0" in page.read_text()
