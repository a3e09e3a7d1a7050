"""Options by name: of what makes an environment, of agents in Python, and what a configuration is made of."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import seedbed
from seedbed import cli
from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.agents.dqn import Dqn
from seedbed.agents.ppo import Ppo
from seedbed.config import defaults, env_options, flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.env_options import Words, with_env_options
from seedbed.config.saved import saved_config, to_json
from seedbed.config.settle import Request, settle, with_options
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.host import registry
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.envs.host.pickled import MAKE
from seedbed.envs.host.pooled import EnvPoolEnv
from seedbed.run.folder import RunFolder
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.streams.supervisor import same_modules
from seedbed.types import Box, Discrete, SeedbedError
from waiting import wait_for

HERE = "test_env_options"


def make(speed: float, wind: bool = False, table: list[int] | None = None) -> gymnasium.Env:
    """Makes an environment with options of several kinds."""
    assert (speed, wind, table) == (3.0, True, [1, 2])
    return gymnasium.make("Pendulum-v1")


def make_cartpole(reward: float = 1.0) -> gymnasium.Env:
    """Makes a CartPole whose steps pay another reward."""
    return gymnasium.wrappers.TransformReward(
        gymnasium.make("CartPole-v1"), lambda r: reward * float(r)
    )


def configured(*words: str) -> Any:
    given = flags.split_train_arguments(words)
    return settle(given.request, lambda config: flags.override(config, given.rest, False)).config


def test_the_command_line_reaches_the_arguments_of_a_factory_and_of_a_gymnasium_id() -> None:
    words = ("--env.speed", "3", "--env.wind", "--env.table", "[1, 2]", "--env.frame-stack", "2")
    config = configured(f"{HERE}:make", *words, "--steps", "1e3")
    assert config.env == FactoryEnv(
        f"{HERE}:make", 2, {"speed": 3.0, "wind": True, "table": [1, 2]}
    )
    assert config.runtime.steps == 1000 and isinstance(config.agent, Ppo)
    config = configured("Pendulum-v1", "--env.g=5", "--env.max-episode-steps", "50")
    assert dict(config.env.kwargs) == {"g": 5.0, "max_episode_steps": 50}
    assert config.env.make(1, 0).spec.action == Box((1,), (-2.0,), (2.0,))


def test_options_that_change_the_task_choose_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is there before the agent is chosen, by what the environment shows and takes."""
    module = types.ModuleType("two_worlds")
    module.make = lambda real=False: gymnasium.make(  # type: ignore[attr-defined]
        "MountainCarContinuous-v0" if real else "FrozenLake-v1"
    )
    monkeypatch.setitem(__import__("sys").modules, "two_worlds", module)
    discrete = configured("two_worlds:make", "--env.no-real")
    real = configured("two_worlds:make", "--env.real", "true", "--agent", "sac")
    assert type(discrete.agent).__name__ == "Ppo" and type(real.agent).__name__ == "Sac"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ((f"{HERE}:make", "--env.sped", "3"), "takes no option 'sped'; did you mean speed"),
        ((f"{HERE}:make", "--env.speed", "fast"), "--env.speed is 'fast': give a number"),
        ((f"{HERE}:make", "--env.speed"), "--env.speed needs a value"),
        (
            (f"{HERE}:make", "--env.table", "1", "2"),
            "--env.table takes one value, not 1 2: write a",
        ),
        ((f"{HERE}:make_annotated", "--env.big", "2.5"), "--env.big is '2.5': give a whole number"),
        ((f"{HERE}:make", "--env.speed", "--steps", "3"), "--env.speed needs a value"),
        ((f"{HERE}:make", "--env.wind", "maybe"), "--env.wind is 'maybe': give true or false"),
        (("Pendulum-v1", "--env.gg", "5"), "Pendulum-v1 takes no option 'gg'; did you mean g"),
        (("ant", "--env.gg", "5"), "unknown option --env.gg"),
        (("ant", "--env.ctrl-cost", "1"), "did you mean --env.ctrl-cost-weight"),
    ],
)
def test_wrong_options_of_environments_get_one_line(
    words: tuple[str, ...], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words]) in (1, 2)
    told = capsys.readouterr().err
    assert refusal in told and told.count("\n") == 1


def test_python_names_options_of_agents_and_environments() -> None:
    request = Request("ant", env={"ctrl_cost_weight": 0.1})
    config = settle(
        request, lambda c: with_options(c, {"steps": 10}, {"learning_rate": 1e-3})
    ).config
    assert isinstance(config.env, Ant) and config.env.ctrl_cost_weight == 0.1
    assert config.agent.learning_rate == 1e-3 and config.agent.unroll == 16, "the preset's"  # type: ignore[attr-defined]
    with pytest.raises(
        SeedbedError, match="Ppo has no option 'lerning_rate'; did you mean learning"
    ):
        seedbed.train("ant", agent={"lerning_rate": 1e-3})
    with pytest.raises(
        SeedbedError, match="Ant has no option 'ctrl_cost'; did you mean ctrl_cost_w"
    ):
        seedbed.train("ant", env={"ctrl_cost": 1e-3})
    with pytest.raises(SeedbedError, match=r"of Ppo: give agent=\{'learning_rate': \.\.\.\}"):
        seedbed.train("ant", learning_rate=1e-3)
    with pytest.raises(SeedbedError, match=r"of Ant: give env=\{'ctrl_cost_weight': \.\.\.\}"):
        seedbed.train("ant", ctrl_cost_weight=1e-3)
    with pytest.raises(SeedbedError, match="no option 'speed_of_light'; it has steps, seed, "):
        seedbed.train("ant", speed_of_light=1)
    with pytest.raises(SeedbedError, match="learning_rate is x; give more than 0"):
        seedbed.train("ant", agent={"learning_rate": "x"})
    whole = {"until_stale": 2e6, "evaluate_every": 5e5}
    found = settle(Request("ant"), lambda c: with_options(c, whole, {"unroll": 8.0})).config
    assert vars(found.runtime) | whole == vars(found.runtime)
    assert {type(getattr(found.runtime, name)) for name in whole} == {int}
    assert type(found.agent.unroll) is int  # type: ignore[attr-defined]
    wide = settle(Request("ant"), lambda c: with_options(c, {}, {"hidden_sizes": [8, 8]})).config
    assert wide.agent.hidden_sizes == (8, 8)  # type: ignore[attr-defined]
    with pytest.raises(SeedbedError, match="takes no option 'gg'"):
        seedbed.train("Pendulum-v1", env={"gg": 1})
    assert dict(with_env_options(EnvPoolEnv("Pong-v5"), {"x": 1}).kwargs) == {"x": 1}


def test_words_are_read_as_an_argument_takes_them() -> None:
    known = env_options.arguments_of(FactoryEnv(f"{HERE}:make"))
    assert known is not None and list(known) == ["speed", "wind", "table"]
    env = with_env_options(FactoryEnv(f"{HERE}:make_cartpole"), {"reward": Words(("-1e-2",))})
    assert dict(env.kwargs) == {"reward": -0.01}
    assert "--env.reward (default: 1.0)" in env_options.told(env)


def make_any(
    size=8, big: int = 1, flag: bool | None = None, name: str = "", other=None, odd: no.such = 1,  # type: ignore[name-defined]  # noqa: F821
) -> gymnasium.Env:  # fmt: skip
    """Makes an environment with arguments of every kind, one with an annotation that nobody can read."""
    return gymnasium.make("Pendulum-v1")


def options_of(*words: str) -> dict[str, Any]:
    return dict(
        with_env_options(FactoryEnv(f"{HERE}:make_any"), env_options.words_of(words)).kwargs
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--env.size", "8"), 8),
        (("--env.size", "2.5"), 2.5),
        (("--env.other", "False"), False),
        (("--env.other", "[1, 2]"), [1, 2]),
        (("--env.other", ""), ""),
        (("--env.other", "x y"), "x y"),
        (("--env.other", "-3"), -3),
        (("--env.no-other",), False),
    ],
)
def test_a_value_without_annotation_is_what_it_looks_like(
    words: tuple[str, ...], value: Any
) -> None:
    (found,) = options_of(*words).values()
    assert found == value and type(found) is type(value)


def make_annotated(
    big: int = 1, flag: bool | None = None, name: str = "", share: float = 0.5
) -> gymnasium.Env:
    """Makes an environment with annotated arguments."""
    return gymnasium.make("Pendulum-v1")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--env.big", "9007199254740993"), 9007199254740993),
        (("--env.big", "1e3"), 1000),
        (("--env.flag",), True),
        (("--env.flag", "None"), None),
        (("--env.flag", "False"), False),
        (("--env.name", "5"), "5"),
        (("--env.name", ""), ""),
        (("--env.share", "1"), 1.0),
    ],
)
def test_a_value_is_read_by_its_annotation_and_written_as_it_is_read(
    words: tuple[str, ...], value: Any
) -> None:
    plain = FactoryEnv(f"{HERE}:make_annotated")
    env = with_env_options(plain, env_options.words_of(words))
    (found,) = dict(env.kwargs).values()
    assert found == value and type(found) is type(value)
    again = with_env_options(plain, env_options.words_of(env_options.written(dict(env.kwargs))))
    assert again == env


def test_the_command_of_a_run_has_the_options_of_its_environment() -> None:
    words = ("--env.speed", "3.0", "--env.table", "[1, 2]", "--env.wind", "true")
    config = configured(f"{HERE}:make", *words)
    command = flags.command(config)
    assert command.endswith("--env.speed 3.0 --env.table '[1, 2]' --env.wind true")
    assert configured(*shlex.split(command)[2:]).env == config.env


def test_a_function_an_environment_and_a_class_say_what_to_train() -> None:
    made = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=7)
    assert registry.configured(made) == GymEnv(
        "FrozenLake-v1",
        kwargs={**made.spec.kwargs, "max_episode_steps": 7},  # type: ignore[union-attr]
    )
    assert registry.configured(gymnasium.make("CartPole-v1")) == GymEnv("CartPole-v1")
    assert registry.configured(make) == FactoryEnv(f"{HERE}:make")
    local: Any = registry.configured(lambda: gymnasium.make("CartPole-v1"))
    assert local.factory == MAKE
    with pytest.raises(SeedbedError, match="takes no option 'speed'"):
        with_env_options(local, {"speed": 1})
    decorated = functools.wraps(make)(lambda: gymnasium.make("CartPole-v1"))
    assert registry.configured(decorated).factory == MAKE, "its name is another function's"  # type: ignore[union-attr]
    endless = gymnasium.make("CartPole-v1", max_episode_steps=-1)
    assert dict(registry.configured(endless).kwargs) == {"max_episode_steps": -1}  # type: ignore[union-attr]
    with pytest.raises(SeedbedError, match="other machines cannot import: put it into a module"):
        seedbed.train(lambda: gymnasium.make("CartPole-v1"), agent="impala", listen="127.0.0.1:0")


def test_actors_make_what_a_function_of_a_script_makes() -> None:
    """They are other processes, which get the function by value."""
    factor = 2.0
    env = with_env_options(
        registry.configured(lambda reward=1.0: make_cartpole(factor * reward / 2)), {"reward": 2.0}
    )
    assert env.make(1, 0).spec.action == Discrete(2)
    with local_pool(Launcher(env=env, envs_per_group=2, groups=1, seed=0), actors=1) as pool:
        for first in (True, False):
            wait_for(lambda: pool.poll(0.1) == [0])
            timestep = pool.slots[0].timestep
            assert timestep.first.tolist() == [first] * 2
            pool.slots[0].action[...] = 0
            pool.reply(0)
    assert timestep.reward.tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_function_of_a_script_trains_and_its_run_plays(tmp_path: Path) -> None:
    """Actors are other processes, which get the function by value, and so does who plays it later."""
    factor = 2.0
    summary = seedbed.train(
        lambda reward=1.0: make_cartpole(factor * reward / 2), env={"reward": 2.0},
        run=tmp_path / "run", steps=500, actors=1, envs_per_actor=2, evaluate_episodes=2,
        agent={"unroll": 16, "batch": 2, "minibatches": 1, "epochs": 1},
    )  # fmt: skip
    assert summary["evaluation/episode_return_mean"] == pytest.approx(
        2 * summary["evaluation/episode_length_mean"]
    )


def saved(run: Path, request: Request, options: dict[str, Any], agent: dict[str, Any]) -> Any:
    """Saves the configuration of a run that has not begun."""
    config = settle(request, lambda found: with_options(found, options, agent)).config
    folder = RunFolder.create(run)
    folder.write_config(to_json(config))
    folder.close()
    return config


def test_a_run_goes_on_with_its_options_and_a_mended_function(tmp_path: Path) -> None:
    run, factor = tmp_path / "run", 2.0
    begun = saved(
        run,
        Request(lambda reward=1.0: make_cartpole(reward), env={"reward": 2.0}),
        {"steps": 500, "seed": 7},
        {"learning_rate": 1e-5},
    )
    mended = Request(lambda reward=1.0: make_cartpole(factor * reward), run=run, resume=True)
    again = settle(mended, lambda found: with_options(found, {"steps": 900}, {})).config
    assert again.runtime.steps == 900 and again.runtime.seed == 7 and again.agent == begun.agent
    kwargs, former = dict(again.env.kwargs), dict(begun.env.kwargs)  # type: ignore[union-attr]
    assert kwargs["options"] == former["options"] == {"reward": 2.0}
    assert kwargs["pickled"] != former["pickled"]
    other = Request(None, run=run, resume=True, env={"reward": Words(("3",))})
    changed = settle(other, lambda found: flags.override(found, ["--env.reward", "3"], False))
    assert dict(changed.config.env.kwargs)["options"] == {"reward": 3}  # type: ignore[union-attr]
    with pytest.raises(SeedbedError, match="the run trains .*, not Pendulum-v1"):
        settle(mended._replace(what=GymEnv("Pendulum-v1")), lambda found: found)


@pytest.mark.parametrize(
    "kinds", [(CentralConfig, ParamServerConfig), (ParamServerConfig, CentralConfig)]
)
def test_a_configuration_keeps_the_runs_runtime(tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    run, (own, other) = tmp_path / "run", kinds
    config = TrainConfig(GymEnv("CartPole-v1"), Dqn(), own(envs_per_actor=8))
    saved(run, Request(config), {}, {})
    again = Request(config, run=run, resume=True)
    assert isinstance(settle(again, lambda found: found).config.runtime, own)
    moved = again._replace(what=TrainConfig(config.env, config.agent, other(envs_per_actor=8)))
    text = f"a run keeps its runtime, which is {own.runtime}: let .* be a {own.__name__}, not"
    with pytest.raises(SeedbedError, match=text):
        settle(moved, lambda found: found)


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    for option, own in (("envs", "batch"), ("unroll", "unroll")):
        with pytest.raises(
            SeedbedError, match=f"{option} is 64, .* give --agent.{own}, and leave {option}"
        ):
            configured("cartpole/ppo", f"--{option}", "64")
    assert configured("half_cheetah/sac", "--envs", "64", "--unroll", "2").runtime.envs == 64
    saved(tmp_path / "run", Request("cartpole/ppo"), {"seed": 3}, {})
    again = ("--resume", "--run", str(tmp_path / "run"))
    assert configured(*again).runtime.seed == 3
    with pytest.raises(SeedbedError, match="seed is 5: .* began with, of seed 3; give"):
        configured(*again, "--seed", "5")
    own = configured(*again)
    other = dataclasses.replace(own, runtime=dataclasses.replace(own.runtime, seed=5))
    with pytest.raises(SeedbedError, match="seed is 5: .* of seed 3; give that one"):
        settle(Request(other, run=tmp_path / "run", resume=True), lambda found: found)
    for options in ({"seed": 1 << 32}, {"seed": (1 << 32) - 2, "seeds": 3}):
        with pytest.raises(SeedbedError, match="seeds are below 4,294,967,296"):
            FusedConfig(**options)


def test_a_configuration_is_shown_with_where_each_value_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["Pendulum-v1", "--env.g", "5", "--agent.learning-rate", "1e-2", "--steps", "1e4"]
    assert cli.main(["config", *words]) == 0
    told = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert told["--env.g"] == ["5.0", "this", "command", "line"]
    assert told["--agent.learning-rate"] == ["0.01", "this", "command", "line"]
    assert told["--agent.unroll"][:3] == ["128", "a", "default"]
    assert told["--actors"][1:] == ["chosen", "for", "this", "machine"]
    assert told["--agent.gamma"] == ["0.99"], "the class's own"
    assert cli.main(["config", "ant"]) == 0
    assert "--agent.reward-scale                              0.1          the preset ant/ppo" in (
        capsys.readouterr().out
    )


def test_options_of_a_robots_file_are_shown_as_this_command_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    robot = Path(__file__).parents[1] / "examples" / "dog.xml"
    assert cli.main(["config", str(robot), "--env.kp", "30", "--env.action-scale", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line.split()[1:] for line in lines}
    assert told["--env.kp"] == ["30.0", "this", "command", "line"]
    assert told["--env.action-scale"] == ["0.5", "this", "command", "line"]
    assert told["--env.scales.tracking-lin-vel"][1:] == []


def test_a_run_that_goes_on_is_shown_with_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    saved(run, Request("cartpole/ppo"), {"steps": 700}, {"gamma": 0.5})
    for name in ([], ["cartpole/ppo"]):
        words = [*name, "--resume", "--run", str(run), "--agent.gamma", "0.6", "--log-every-s", "9"]
        assert cli.main(["config", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        told = {line.split()[0]: " ".join(line.split()[2:]) for line in lines}
        assert told["--steps"] == told["--agent.batch"] == "the run"
        assert told["--agent.gamma"] == told["--log-every-s"] == "this command line"


def test_a_configuration_in_a_file_is_a_run(
    tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cartpole/ppo", "--steps", "640", "--agent.hidden-sizes", "8"]
    assert cli.main(["config", "--json", *words]) == 0
    file = tmp_path / "mine.json"
    file.write_text(capsys.readouterr().out)
    run = tmp_path / "run"
    assert cli.main(["train", "--config", str(file), "--run", str(run), "--seed", "3"]) == 0
    capsys.readouterr()
    config = saved_config(RunFolder.read(run))
    assert config.agent.hidden_sizes == (8,) and config.runtime.seed == 3  # type: ignore[attr-defined]
    assert config.name == "cartpole/ppo"
    assert [(agent.hidden_sizes, runtime) for agent, runtime in trained] == [((8,), config.runtime)]
    data = json.loads(file.read_text())
    assert cli.main(["config", "--config", str(file), "--agent.gamma", "0.5"]) == 0
    told = {line.split()[0]: line.split()[2:] for line in capsys.readouterr().out.splitlines()}
    assert told["--agent.hidden-sizes"] == ["the", "file"]
    assert told["--agent.gamma"] == ["this", "command", "line"]
    for change, refusal in (
        ({"agnt": {}}, "has no option 'agnt'; did you mean agent"),
        ({"agent": {**data["agent"], "lr": 1}}, "Ppo has no option 'lr'"),
        ({"fused": {"steeps": 1}}, "FusedConfig has no option 'steeps'; did you mean steps"),
    ):
        file.write_text(json.dumps(data | change))
        assert cli.main(["train", "--config", str(file)]) == 1
        assert refusal in capsys.readouterr().err
    file.write_text("[")
    assert cli.main(["train", "--config", str(file)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["train", "ant", "--config", str(file)]) == 2
    assert "leave out the name" in capsys.readouterr().err


def test_a_name_that_means_another_environment_now_is_no_command():
    """`cartpole` was Gymnasium's task of the host."""
    assert flags.command(defaults.configure(GymEnv("CartPole-v1"), "r2d2", "cartpole")) == ""


def test_an_id_of_atari_is_known_in_a_process_that_has_not_asked_for_it() -> None:
    code = (
        "from seedbed.envs.host.gym import require_id\n"
        "require_id('ALE/Pong-v5')\n"
        "import gymnasium; gymnasium.spec('ALE/Pong-v5')"
    )
    environment = {**os.environ, **same_modules()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
