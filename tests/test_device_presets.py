"""On-device environments by name: presets, overrides, saved configurations, evaluation."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seedbed
from saved import read_back
from seedbed import api, cli
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.config import flags, presets
from seedbed.config.configuration import TrainConfig
from seedbed.config.device_recipes import on_device_ppo
from seedbed.config.resolve import train_config
from seedbed.config.saved import to_json
from seedbed.envs import names
from seedbed.envs.device import changes
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah
from seedbed.envs.device.locomotion.inverted_pendulum import InvertedPendulum
from seedbed.envs.device.probes import PrivilegedProbe
from seedbed.envs.device.randomisation import Offset, Scale, randomise
from seedbed.envs.host import registry
from seedbed.envs.host.contract import is_on_device, made_once
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.envs.host.pickled import is_pickled
from seedbed.policy import TrainedAgent, evaluate_trained, other_environment
from seedbed.run.forms import PlainForms
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.spaces import PRIVILEGED, Mirror, Reflection
from seedbed.types import (
    ArraySpec,
    Box,
    EnvSpec,
    EnvState,
    SeedbedError,
    Timestep,
    UsageError,
    bind,
)
from seedbed.viewer.record import record
from untrained_run import write_run


class Rougher(PrivilegedProbe):
    """The same task for a policy; critics see three numbers, and no mirror is told."""

    @property
    def spec(self):
        return EnvSpec(
            super().spec.observation | {PRIVILEGED: ArraySpec((3,), "float32")}, super().spec.action
        )

    def _show(self, passed, key):
        inner, shown = super()._show(passed, key)
        return inner, shown | {PRIVILEGED: jnp.tile(shown[PRIVILEGED], 3)}


class Blind(gymnasium.Env):
    """The same for a policy, without anything for critics."""

    observation_space = gymnasium.spaces.Dict(
        {"observation": gymnasium.spaces.Box(-np.inf, np.inf, (1,))}
    )
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"observation": np.ones(1, np.float32)}, {}

    def step(self, action):
        return {"observation": np.ones(1, np.float32)}, 1.0, True, False, {}


@dataclasses.dataclass(frozen=True)
class Mine:
    """An environment of the user's own, with options: reach 0."""

    start: float = 1.0
    weights: tuple[float, ...] = (1.0, 0.5)
    model: Any = None  # not an option
    episode_steps: int = 10
    frame_skip: int = 1

    @property
    def spec(self):
        return EnvSpec(ArraySpec((1,), "float32"), Box((1,), (-1.0,), (1.0,)))

    def reset(self, key):
        x = jax.random.uniform(key, (1,), minval=-self.start, maxval=self.start)
        return self._state(x, jnp.float32(0), jnp.bool_(True))

    def step(self, state, action):
        x = state.inner + 0.5 * action
        return self._state(x, -self.weights[0] * jnp.abs(x[0]), jnp.bool_(False))

    def _state(self, x, reward, first):
        no = jnp.bool_(False)
        return EnvState(x, Timestep(x, reward, no, no, first), {})


def host_factory():
    return gymnasium.make("CartPole-v1")


def round_trip(config):
    return read_back(config)


def test_names_are_presets_on_device_environments_and_those_of_the_host():
    ant = train_config("ant")
    assert ant == train_config("ant/ppo") == train_config("ant", "ppo")
    assert isinstance(ant.env, Ant) and isinstance(ant.agent, Ppo)
    assert isinstance(ant.runtime, FusedConfig) and ant.name == "ant/ppo"
    cheetah = train_config("half_cheetah")
    assert isinstance(cheetah.env, HalfCheetah) and isinstance(cheetah.agent, Ppo)
    assert isinstance(cheetah.runtime, FusedConfig) and cheetah.name == "half_cheetah/ppo"
    assert train_config("cartpole").name in presets.PRESETS
    host = train_config("Ant-v5")
    assert host.env == GymEnv("Ant-v5") and isinstance(host.agent, Ppo)
    assert isinstance(host.runtime, CentralConfig)


@pytest.mark.parametrize("name", names.ON_DEVICE)
def test_every_on_device_environment_is_found_and_saved(name):
    env = registry.resolve(name)
    assert is_on_device(env)
    assert registry.resolve(name.replace("_", "-").upper()) == env
    assert name in registry.names()
    config = TrainConfig(env, Ppo(), FusedConfig(), f"{name}/ppo")
    assert round_trip(config) == config


def test_another_agent_in_an_on_device_environment():
    config = train_config("pendulum", "impala")
    assert config.env == Pendulum() and config.name == "pendulum/impala"
    assert isinstance(config.agent, Impala) and isinstance(config.runtime, FusedConfig)
    config = train_config("ant", "impala")
    assert isinstance(config.agent, Impala) and config.env == train_config("ant").env
    assert isinstance(config.runtime, FusedConfig)


def test_an_environment_of_ones_own():
    config = train_config("test_device_presets:Mine")
    assert config.env == Mine() and config.name == "test_device_presets:Mine/ppo"
    assert config.agent == train_config("swimmer").agent == on_device_ppo(Mine()).agent
    assert isinstance(config.runtime, FusedConfig)
    assert round_trip(config) == config
    assert train_config("test_device_presets:host_factory").env == FactoryEnv(
        "test_device_presets:host_factory"
    )
    changed = flags.override(
        config,
        ["--env.start", "2", "--env.weights", "3", "4", "5", "--env.episode-steps", "7"],
        False,
    )
    assert changed.env == Mine(start=2.0, weights=(3.0, 4.0, 5.0), episode_steps=7)
    assert type(changed.env) is Mine and round_trip(changed) == changed


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_saved_and_its_runtime_is_that_of_its_environment(name):
    config = train_config(name)
    assert round_trip(config) == config
    assert is_on_device(config.env) == isinstance(config.runtime, FusedConfig)
    assert ("fused" in to_json(config)) == is_on_device(config.env)
    if is_on_device(config.env):
        parts = len(config.runtime.devices) * config.agent.minibatches
        assert config.agent.experience.batch % parts == 0
        # What is judged is the exact task, whatever a run begins with.
        assert getattr(config.env, "integrator", "xml") == "xml"


def test_wrapped_environments_are_saved_too():
    env = changes.scale_reward(changes.clip_action(Pendulum()), 0.1)
    config = TrainConfig(env, Ppo(), FusedConfig(seeds=3, devices=(1,)), "mine/ppo")
    assert round_trip(config) == config
    env = randomise(Ant(), Scale("body_mass", 0.5, 2), Offset("body_ipos", -0.1, 0.1, of="torso"))
    config = dataclasses.replace(config, env=env)
    assert round_trip(config) == config


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: changes.scale_reward(env, 2.0)])
def test_a_model_of_ones_own_is_refused_before_it_trains(tmp_path, wrap):
    """It is no option: whoever resumes or evaluates the run would have the file's model."""
    heavy = wrap(dataclasses.replace(Ant(), model=Ant().physics_model()))
    with pytest.raises(SeedbedError, match=r"Ant has a model of its own, .* MJCF file .* subclass"):
        seedbed.train(TrainConfig(heavy, Ppo(), FusedConfig()), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_overrides_on_the_command_line():
    base = train_config("ant")
    arguments = shlex.split(
        "--env.integrator euler --agent.learning-rate 1e-3 --seeds 2 --steps 2e6 "
        "--fused.seed 7 --devices 1 --agent.value-sizes 8"
    )
    changed = flags.override(base, arguments, False)
    assert changed.env == dataclasses.replace(base.env, integrator="euler") != base.env
    assert type(changed.env) is Ant
    assert changed.agent == dataclasses.replace(base.agent, learning_rate=1e-3, value_sizes=(8,))
    assert changed.runtime == dataclasses.replace(
        base.runtime, seeds=2, steps=2_000_000, seed=7, devices=(1,)
    )
    assert round_trip(changed) == changed
    assert flags.override(base, [], False) == base


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env.integrator", "rk5"], "integrator"),
        (["--env.model", "x"], "unknown option --env.model"),
        (["--env.integrater", "xml"], "did you mean --env.integrator"),
        (
            ["--envs-per-actor", "3"],
            r"--envs-per-actor is an option of another runtime \(central, paramserver\)",
        ),
        (["--sedes", "3"], "did you mean --seed"),
    ],
)
def test_overrides_that_cannot_be(arguments, words):
    with pytest.raises(UsageError, match=words):
        flags.override(train_config("ant"), arguments, False)


def test_help_shows_the_options_that_there_are(capsys):
    assert cli.main(["train", "ant", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--seeds", "--devices", "--env.integrator", "--agent.clip", "--agent.max-kl"):
        assert option in text
    for word in ("env.model", "total-updates", "agent.spec", "inference-devices"):
        assert word not in text


def test_list_shows_them(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "ant/ppo" in listed["presets"] and listed["presets"]["ant/ppo"].endswith(".")
    assert {"impala", "ppo"} <= set(listed["agents"])
    assert set(names.ON_DEVICE) <= set(listed["environments"])
    assert len(listed["environments"]) == len(set(listed["environments"]))
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert "ant/ppo" in text and "half_cheetah" in text


@pytest.fixture(scope="module")
def cartpole_run(tmp_path_factory):
    """A short run in the on-device CartPole, from the command line."""
    folder = tmp_path_factory.mktemp("cartpole") / "run"
    arguments = shlex.split(
        f"seedbed.envs.device.classic.cartpole:CartPole --steps 40_000 --run {folder} "
        "--agent.unroll 16 --agent.batch 16 --agent.hidden-sizes 16 --agent.value-sizes 16 "
        "--agent.learning-rate 3e-3 --evaluate-episodes 4"
    )
    assert cli.main(["train", *arguments]) == 0
    return folder


@pytest.mark.slow
def test_a_fused_run_is_evaluated_in_its_own_and_in_gymnasiums_task(cartpole_run, capsys):
    own = api.evaluate(cartpole_run, episodes=16, seed=1)
    assert own == api.evaluate(cartpole_run, episodes=16, seed=1)
    assert own["episodes"] == 16 and own["env_steps"] >= 20_000
    assert own["episode_return_mean"] == own["episode_length_mean"] > 40
    assert cli.main(
        ["evaluate", str(cartpole_run), "--env", "CartPole-v1", "--episodes", "16", "--json"]
    ) == 0  # fmt: skip
    theirs = json.loads(capsys.readouterr().out)
    assert theirs["episodes"] == 16
    # The same physics: the policy does about as well there.
    assert 0.6 < theirs["episode_return_mean"] / own["episode_return_mean"] < 1.7
    policy = seedbed.load(cartpole_run)
    assert policy.act(np.array([0.0, 0.1, 0.0, 0.1])) in (0, 1)
    assert policy.act(np.zeros((5, 4))).shape == (5,)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("pendulum", "'pendulum' does not fit the policy .*: its observation is .*, not Arr"),
        ("Acrobot-v1", "'Acrobot-v1' does not fit the policy"),
        ("CartPoel-v1", "did you mean .*CartPole-v1"),
        ("half_chetah", "did you mean half_cheetah"),
    ],
)
def test_environments_that_the_policy_does_not_fit(tmp_path, env, words):
    run = write_run(tmp_path / "run", train_config("cartpole/ppo"))
    with pytest.raises(SeedbedError, match=words):
        api.evaluate(run, episodes=1, env=env)


@pytest.mark.slow
def test_a_task_in_wrappers_is_filmed():
    task = InvertedPendulum(episode_steps=3, integrator="euler")
    env = changes.delay(changes.clip_action(task), action=1)
    agent = bind(Ppo(hidden_sizes=(4,)), env.spec)
    params = jax.jit(agent.init)(jax.random.key(0)).params
    config = TrainConfig(env, agent, FusedConfig())
    trained = TrainedAgent(config, PlainForms(env.spec), agent, params, 0)
    film = record(env, trained, 2, 0, "")
    assert [(len(x.reward), x.qpos.shape, x.env_dt) for x in film.episodes] == [
        (3, (4, 2), 0.04)
    ] * 2


def test_the_gymnasium_task_has_the_observation_options_of_the_run():
    config = train_config("ant")
    env = config.env
    trained = TrainedAgent(config, PlainForms(env.spec), Ppo(), None, 0)
    found = other_environment(trained, "Ant-v5", "r")
    assert found == GymEnv("Ant-v5", kwargs=env.gymnasium_options())
    varied = dataclasses.replace(config, env=randomise(env, Scale("body_mass", 0.5, 2)))
    trained = dataclasses.replace(trained, config=varied)
    assert other_environment(trained, "Ant-v5", "r") == found
    assert set(dict(found.kwargs)) <= {
        "include_cfrc_ext_in_observation",
        "exclude_current_positions_from_observation",
    }


def test_another_environment_stacks_what_the_policy_sees():
    env = GymEnv("CartPole-v1", frame_stack=3)
    config = TrainConfig(env, Ppo(), CentralConfig())
    trained = TrainedAgent(config, made_once(env), Ppo(), None, 0)
    assert other_environment(trained, "CartPole-v0", "r") == GymEnv("CartPole-v0", frame_stack=3)
    found: Any = other_environment(trained, lambda: gymnasium.make("CartPole-v1"), "r")
    assert is_pickled(found) and found.frame_stack == 3
    with pytest.raises(SeedbedError, match="environment '<lambda>' does not fit the policy of r"):
        other_environment(trained, lambda: gymnasium.make("Acrobot-v1"), "r")


@pytest.mark.parametrize("env", [Rougher(length=4), pytest.param(Blind, marks=pytest.mark.slow)])
def test_another_environment_may_show_critics_something_else(env):
    task, flip = PrivilegedProbe(), Reflection((0,), (-1,))
    mirror = Mirror({"observation": flip, PRIVILEGED: flip}, flip)
    spec = dataclasses.replace(task.spec, mirror=mirror)
    agent = bind(Ppo(hidden_sizes=(4,), equivariant=True, normalise_observations=True), spec)
    params = jax.jit(agent.init)(jax.random.key(0)).params
    config = TrainConfig(task, agent, FusedConfig())
    trained = TrainedAgent(config, PlainForms(spec), agent, params, 0)
    result = evaluate_trained(trained, "r", 2, env, 0, lambda text: None)
    assert result["episode_length_mean"] == (1 if env is Blind else 4)
