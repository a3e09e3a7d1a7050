"""Public functions x wrong values: each is refused before any work, in one line with name and remedy."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import seedbed
from seedbed import api, physics, simd
from seedbed.agents.dqn import Dqn
from seedbed.agents.ppo import Ppo
from seedbed.config import resolve
from seedbed.config.configuration import TrainConfig
from seedbed.config.settle import Request, settle
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.exporting.command import export
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.types import SeedbedError
from untrained_run import write_run

XML = """<mujoco><worldbody><body><joint name="hinge"/><geom size=".1"/></body></worldbody>
<actuator><motor joint="hinge"/></actuator></mujoco>"""
FUSED = TrainConfig(CartPole(), Ppo(), FusedConfig())


_LOCK = threading.Lock()


class Local(CartPoleEnv):
    """An environment as a user has written it."""


def make_local() -> gymnasium.Env:
    return Local()


class Main(CartPoleEnv):
    """An environment that a script or notebook defines."""


Main.__module__ = "__main__"


def config(**parts: Any) -> TrainConfig:
    """Returns a configuration with other parts, which may be anything."""
    return dataclasses.replace(FUSED, **parts)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What functions need that are called with one wrong value: policies, a run, a model."""
    folder = tmp_path_factory.mktemp("runs")
    fused = write_run(folder / "fused", resolve.train_config(CartPole()))
    central = write_run(folder / "central", resolve.train_config("CartPole-v1"))
    discrete = write_run(folder / "discrete", resolve.train_config("frozenlake"))
    model = physics.load(XML)
    return SimpleNamespace(
        run=fused,
        fused=seedbed.load(fused),
        central=seedbed.load(central),
        discrete=seedbed.load(discrete),
        model=model,
        state=physics.init(model),
        env=seedbed.make_gymnasium("cartpole"),
        squares=simd.vectorize(lambda x: x * x),
    )


Call = Callable[[Any, Any], Any]
"""Calls a function with a wrong value and what `made` has."""
NO_FUNCTION = [3, "print"]
NO_NAME = [3, b"ppo", ["ppo"], Ppo, Ppo()]
NO_FLAG = ["yes", 1, None]
NO_NUMBER = ["many", None, [1], True, 1.5, np.array([1, 2])]
NO_SEED = ["a", None, 1.5, True, -1, 1 << 70]
NO_PATH = [None, 3, b"run", ["run"], 1.5]
NO_ENVIRONMENT = [
    None,
    3,
    b"pong",
    ["pong"],
    {"env": "pong"},
    Path("pong"),
    np.zeros(3),
    object(),
    Ppo(),
]
NO_OBSERVATION = [
    None,
    "left",
    object(),
    {},
    (),
    [[1.0], [1.0, 2.0]],
    np.zeros(3),
    np.zeros((2, 3)),
    np.zeros((0, 4)),
    np.zeros((1, 1, 4)),
    np.full(4, np.nan),
    np.full((2, 4), np.inf),
    np.zeros(4, complex),
    np.zeros(4, "M8[s]"),
]
KWARGS = [lambda: 3, object(), np.zeros(2), {1, 2}, b"x", Path("x")]
STATES = [None, 3, "state", np.zeros(3), (1, 2)]
QPOS = [None, "x", 3.0, [1, 2], np.zeros(2), np.zeros((1, 1)), np.zeros(1, int), np.array(["a"])]

TABLE: dict[str, tuple[str, Call, list[Any]]] = {
    "train: an environment": ("what", lambda v, m: seedbed.train(v), NO_ENVIRONMENT),
    "train: agent": ("agent", lambda v, m: seedbed.train("cartpole", agent=v), NO_NAME),
    "train: agent of a whole configuration": (
        "agent",
        lambda v, m: seedbed.train(FUSED, agent=v),
        ["ppo"],
    ),
    "train: run": ("run", lambda v, m: seedbed.train("cartpole", run=v), NO_PATH[1:]),
    "train: resume": ("resume", lambda v, m: seedbed.train("cartpole", resume=v), NO_FLAG),
    "train: trust": ("trust", lambda v, m: seedbed.train("cartpole", trust=v), NO_FLAG),
    "train: callback": (
        "callback",
        lambda v, m: seedbed.train("cartpole", callback=v),
        NO_FUNCTION,
    ),
    "train: steps": (
        "steps",
        lambda v, m: seedbed.train("cartpole", steps=v),
        [*NO_NUMBER, 0, -1, np.int64(9), float("nan")],
    ),
    "train: seed": ("seed", lambda v, m: seedbed.train("cartpole", seed=v), NO_SEED),
    "train: devices": (
        "devices",
        lambda v, m: seedbed.train(FUSED, devices=v),
        [0, "0", None, ["a"], [0.5], (-1,), ()],
    ),
    "train: seconds": (
        "log_every_s",
        lambda v, m: seedbed.train("cartpole", log_every_s=v),
        ["2", None, True, float("nan"), -1],
    ),
    "train: sweep": (
        "sweep",
        lambda v, m: seedbed.train(FUSED, sweep=v),
        [None, 3, "x", "x="],
    ),
    "train: environment of a configuration": (
        "env",
        lambda v, m: seedbed.train(config(env=v)),
        [None, "pong", 3, CartPole, CartPoleEnv()],
    ),
    "train: agent of a configuration": (
        "agent",
        lambda v, m: seedbed.train(config(agent=v)),
        [None, "ppo", 3, Ppo, CartPole()],
    ),
    "train: runtime of a configuration": (
        "runtime",
        lambda v, m: seedbed.train(config(runtime=v)),
        [None, "fused", FusedConfig, Ppo()],
    ),
    "train: the other runtime": (
        "CartPole",
        lambda v, m: seedbed.train(config(runtime=v)),
        [CentralConfig(), ParamServerConfig()],
    ),
    "train: name of a configuration": (
        "name",
        lambda v, m: seedbed.train(config(name=v)),
        [None, 3],
    ),
    "train: an option of the agent": (
        "learning_rate",
        lambda v, m: seedbed.train(config(agent=Ppo(learning_rate=v))),
        ["fast", None, [1e-3], np.float32(1e-3)],
    ),
    "train: kwargs": (
        "speed",
        lambda v, m: seedbed.train(
            TrainConfig(GymEnv("CartPole-v1", kwargs={"speed": v}), Ppo(), CentralConfig())
        ),
        KWARGS,
    ),
    "GymEnv": ("id", lambda v, m: GymEnv(v), [None, 3, b"x", CartPoleEnv]),
    "GymEnv: kwargs": ("kwargs", lambda v, m: GymEnv("CartPole-v1", kwargs=v), [3, "x", ["x"]]),
    "FactoryEnv": ("factory", lambda v, m: FactoryEnv(v), [None, 3, make_local, Local]),
    "AtariEnv": ("game", lambda v, m: AtariEnv(v), [None, 3, b"pong"]),
    "AtariEnv: stickiness": (
        "stickiness",
        lambda v, m: AtariEnv("pong", stickiness=v),
        ["x", None, True],
    ),
    "load: run": ("run", lambda v, m: seedbed.load(v), NO_PATH),
    "load: seed": ("seed", lambda v, m: seedbed.load(m.run, seed=v), NO_SEED),
    "load: newest": ("newest", lambda v, m: seedbed.load(m.run, newest=v), NO_FLAG),
    "load: trust": ("trust", lambda v, m: seedbed.load(m.run, trust=v), NO_FLAG),
    "restore: warn": ("warn", lambda v, m: api.restore(m.run, v), NO_FUNCTION),
    "evaluate: run": ("run", lambda v, m: api.evaluate(v), NO_PATH),
    "evaluate: episodes": (
        "episodes",
        lambda v, m: api.evaluate(m.run, episodes=v),
        [*NO_NUMBER, 0, -1],
    ),
    "evaluate: env": ("env", lambda v, m: api.evaluate(m.run, env=v), [3, b"x"]),
    "evaluate: seed": ("seed", lambda v, m: api.evaluate(m.run, seed=v), NO_SEED),
    "evaluate: warn": ("warn", lambda v, m: api.evaluate(m.run, warn=v), NO_FUNCTION),
    "make_gymnasium: name": (
        "name",
        lambda v, m: seedbed.make_gymnasium(v),
        [None, 3, b"ant", CartPole(), CartPole],
    ),
    "make_gymnasium: num_envs": (
        "num_envs",
        lambda v, m: seedbed.make_gymnasium("cartpole", v),
        ["two", 0, -1, 1.5, True],
    ),
    "make_gymnasium: seed": (
        "seed",
        lambda v, m: seedbed.make_gymnasium("cartpole", seed=v),
        ["a", 1.5, -1, 1 << 70],
    ),
    "make_gymnasium: an option": (
        "reset_noise_scale",
        lambda v, m: seedbed.make_gymnasium("ant", reset_noise_scale=v),
        ["much", None, [0.1]],
    ),
    "act of a fused run": ("observation", lambda v, m: m.fused.act(v), NO_OBSERVATION),
    "act of a central run": ("observation", lambda v, m: m.central.act(v), NO_OBSERVATION),
    "act of a run with one-hot observations": (
        "observation",
        lambda v, m: m.discrete.act(v),
        [None, "x", 0.5, 16, -1, [[1], [1, 2]], np.zeros(0, int), {}],
    ),
    "act: first": (
        "first",
        lambda v, m: m.fused.act(np.zeros(4), first=v),
        ["yes", 1, 0.5, [True, False], [[True]]],
    ),
    "act: reward": (
        "reward",
        lambda v, m: m.fused.act(np.zeros(4), reward=v),
        ["x", float("nan"), 1e39, [1.0, 2.0], [[1.0], [1.0, 2.0]]],
    ),
    "step of make_gymnasium": (
        "action",
        lambda v, m: (m.env.reset(seed=0), m.env.step(v)),
        ["left", 2, -1, 0.5, [0, 1], [[0], [0, 1]]],
    ),
    "export: run": ("run", lambda v, m: export(v, "there"), NO_PATH),
    "export: folder": ("folder", lambda v, m: export(m.run, v), NO_PATH),
    "export: newest": ("newest", lambda v, m: export(m.run, "there", newest=v), NO_FLAG),
    "physics.load": (
        "path_or_xml",
        lambda v, m: physics.load(v),
        [None, 3, XML.encode(), "", [XML]],
    ),
    "physics.init: model": ("model", lambda v, m: physics.init(v), [None, 3, XML]),
    "physics.init: qpos": ("qpos", lambda v, m: physics.init(m.model, v), QPOS[1:]),
    "physics.init: qvel": ("qvel", lambda v, m: physics.init(m.model, None, v), QPOS[1:]),
    "physics.step: model": (
        "model",
        lambda v, m: physics.step(v, m.state, np.zeros(1)),
        [None, 3, XML],
    ),
    "physics.step: state": ("state", lambda v, m: physics.step(m.model, v, np.zeros(1)), STATES),
    "physics.step: ctrl": ("ctrl", lambda v, m: physics.step(m.model, m.state, v), QPOS),
    "physics.step: a leaf": (
        "qvel",
        lambda v, m: physics.step(m.model, m.state._replace(qvel=v), np.zeros(1)),
        QPOS,
    ),
    "physics.step: diverged": (
        "diverged",
        lambda v, m: physics.step(m.model, m.state._replace(diverged=v), np.zeros(1)),
        [None, "x", np.zeros(2, bool)],
    ),
    "physics.step_data: state": (
        "state",
        lambda v, m: physics.step_data(m.model, v, np.zeros(1)),
        STATES,
    ),
    "physics.forward: state": ("state", lambda v, m: physics.forward(m.model, v), STATES),
    "physics.energy: state": ("state", lambda v, m: physics.energy(m.model, v), STATES),
    "physics.make_data: state": ("state", lambda v, m: physics.make_data(m.model, v), STATES),
    "physics.sensor: data": ("data", lambda v, m: physics.sensor(m.model, v, "a"), STATES),
    "physics.sensor: name": (
        "sensor",
        lambda v, m: physics.sensor(m.model, physics.make_data(m.model, m.state), v),
        [None, 3, "a"],
    ),
    "physics.init: keyframe": (
        "init",
        lambda v, m: physics.init(m.model, keyframe=v),
        ["home", 3, 1.5, b"home"],
    ),
    "Model.replace": (
        "body_mass",
        lambda v, m: m.model.replace(body_mass=v),
        [None, "x", 3.0, [1.0, 2.0], np.zeros(5), np.zeros(2, int)],
    ),
    "simd.vectorize": ("fn", lambda v, m: simd.vectorize(v), [None, 3, "sin", jnp.ones(3)]),
    "simd.vectorize, called": (
        "argument",
        lambda v, m: m.squares(v),
        ["x", 1.0, object(), np.zeros(()), np.zeros(3), np.array(["a"])],
    ),
    "simd.inspect: fn": ("fn", lambda v, m: simd.inspect(v, np.ones(1)), [None, 3, "sin"]),
    "simd.inspect: an argument": (
        "inspect",
        lambda v, m: simd.inspect(jnp.sin, v),
        ["x", 1.0, object()],
    ),
}
CELLS = [
    pytest.param(name, value, id=f"{row}: {type(value).__name__} {i}")
    for row, (name, _, values) in TABLE.items()
    for i, value in enumerate(values)
    for name in [row]
]


def words_of(value: Any) -> list[str]:
    """Returns what a message may call a value: its type, how it is written, or an array's shape and dtype."""
    kind = value if isinstance(value, type) else type(value)
    words = [kind.__name__, kind.__qualname__, str(value), repr(value)]
    if isinstance(value, int):
        words.append(f"{value:,}")
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return words
    if array.dtype.kind != "O":
        words += [
            f"has shape {array.shape}",
            str(array.dtype),
            str(array.dtype).replace("64", "32"),
        ]
    return words


def refusal_of(call: Callable[[], Any]) -> str:
    """Returns the line with which a call is refused; it leaves nothing in the working folder."""
    with pytest.raises(SeedbedError) as refused:
        call()
    assert list(Path().iterdir()) == []
    (line,) = str(refused.value).splitlines()
    return line


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("row", "value"), CELLS)
def test_a_wrong_value_is_refused(row: str, value: Any, made: Any) -> None:
    name, call, _ = TABLE[row]
    line = refusal_of(lambda: call(value, made))
    assert name in line, line
    words = [re.escape(word) for word in words_of(value) if word]
    known = any(re.search(rf"(?<!\w){word}(?!\w)", line) for word in words)
    assert known or "finite" in line or "empty" in line, line


def test_the_table_is_long() -> None:
    assert len(CELLS) >= 100


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        (
            gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), abs),
            "CartPole-v1 is wrapped in TransformReward: give a function that makes it: .*, wrapped",
        ),
        (Local(), "Local was not made by gymnasium.make: give a function that makes it"),
        (
            lambda big=bytes(1_100_000): Local(),
            "holds 1,100,[0-9]* bytes of data: put it into a module",
        ),
        (
            lambda lock=_LOCK: Local(),
            "cannot be sent to actors .*: put it into a module",
        ),
        (CartPole, r"give an instance, CartPole\(\.\.\.\)"),
        (GymEnv, r"give an instance, GymEnv\(\.\.\.\)"),
        (gymnasium.make_vec("CartPole-v1", 2), "give a name such as 'pong'"),
    ],
)
def test_what_to_train_instead_is_said(what: Any, remedy: str) -> None:
    line = refusal_of(lambda: seedbed.train(what))
    assert re.search(remedy, line), line


@pytest.mark.parametrize(
    "call",
    [
        lambda: seedbed.train("__main__:Main"),
        lambda: seedbed.train(FactoryEnv("__main__:Main")),
        lambda: seedbed.train("__main__:Main-v0"),
        lambda: resolve.train_config("__main__:Main", "ppo"),
    ],
)
def test_an_environment_of_the_script_itself_is_told_before_anything_starts(call: Any) -> None:
    line = refusal_of(call)
    assert "actor processes cannot import: put it into a module" in line


def test_an_id_that_only_this_process_knows_is_told_before_anything_starts() -> None:
    gymnasium.register("Mine-v0", entry_point=make_local)  # type: ignore[arg-type]
    try:
        line = refusal_of(lambda: seedbed.train("Mine-v0"))
    finally:
        del gymnasium.registry["Mine-v0"]
    assert "actor processes do not know it: name the module that registers it" in line
    assert "test_wrong_values:Mine-v0" in line


@pytest.mark.parametrize("name", ["MyReg-v0", "Mine/MyReg-v12"])
def test_an_id_of_a_package_is_told_with_its_package(name: str) -> None:
    assert f"name that, too: package:{name}" in refusal_of(lambda: seedbed.train(name))


def test_a_task_that_other_processes_cannot_import_is_told():
    class Car(CartPole):
        pass

    notes = [settle(Request(env), lambda config: config).notes for env in (CartPole(), Car())]
    assert "Car is defined in a script or notebook, or in a function" in notes[1][-1]
    assert not any("is defined in" in note for note in notes[0])


def test_the_configuration_of_an_environment_is_trained_by_its_usual_agent() -> None:
    for env in (CartPole(), GymEnv("CartPole-v1")):
        config = settle(Request(env), lambda config: config).config
        assert config.env == env and isinstance(config.agent, Ppo)


def test_another_agent_may_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(api, "train_settled", lambda _, settled, *__: made.append(settled.config))
    for name in ("dqn", "seedbed.agents.dqn:Dqn"):
        seedbed.train("cartpole", agent={"name": name, "learning_rate": 0.5})
    assert all(isinstance(each.agent, Dqn) and each.agent.learning_rate == 0.5 for each in made)
    assert len(made) == 2 and made[0].name == "cartpole/dqn"


def test_the_values_that_were_right_stay_right(made: Any) -> None:
    assert made.fused.act([0.0, 0.1, 0.2, 0.3]) in (0, 1)
    assert made.fused.act(np.zeros((3, 4)), first=np.ones(3, bool), reward=1).shape == (3,)
    assert physics.load("\ufeff" + XML).nv == 1
    Path("marked.xml").write_text(XML, encoding="utf-8-sig")
    assert physics.load(Path("marked.xml")).nv == physics.load("marked.xml").nv == 1


@pytest.mark.parametrize("content", [None, "", "\0\1\2"], ids=["folder", "empty", "binary"])
def test_what_holds_no_model_is_refused(content: str | None) -> None:
    path = Path("model.xml")
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(SeedbedError, match=r"model\.xml"):
        physics.load(path)
