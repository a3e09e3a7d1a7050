"""What depends on the device: sizes of presets, with a stub in place of a GPU, and the dtype of networks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types

import jax
import pytest

import seedbed
from saved import config_of
from seedbed import cli
from seedbed.config import flags, resolve, scaling
from seedbed.config.configuration import TrainConfig
from seedbed.config.presets import PRESETS
from seedbed.config.settle import settle
from seedbed.fused.program import plan_of
from seedbed.run import devices
from seedbed.run.options import FusedConfig

FUSED = [
    name
    for name in PRESETS
    if isinstance(PRESETS[name]().runtime, FusedConfig)
    and name.rpartition("/")[2] in scaling.FACTORS["gpu"]
]
DEFAULTS = ["pendulum/ppo", "pendulum/sac", "mountain_car/dqn", "mountain_car/r2d2"]


def gradients(config):
    """How many gradients a run makes, and from how many rows each."""
    agent, runtime = config.agent, config.runtime
    plan = plan_of(agent, runtime, 1)
    rows = agent.batch // agent.minibatches
    if hasattr(agent, "unroll"):
        rows *= agent.unroll
    return runtime.steps / (plan.envs * plan.unroll) * plan.updates, rows


@pytest.mark.parametrize("name", FUSED + DEFAULTS)
def test_a_gpu_has_more_environments_and_makes_as_many_gradients(name, gpu):
    plain = resolve.train_config(name)
    config = scaling.for_this_device(plain)
    before, after = (plan_of(each.agent, each.runtime, 1) for each in (plain, config))
    assert after.envs == 8 * before.envs
    (few, rows), (many, more_rows) = gradients(plain), gradients(config)
    assert many == pytest.approx(few)
    assert more_rows == (4 * rows if "ppo" in name else rows)
    if "ppo" not in name:
        assert after.unroll == 1 and config.runtime.steps == plain.runtime.steps
    unchanged = dataclasses.replace(config, agent=plain.agent, runtime=plain.runtime)
    assert unchanged == plain


@pytest.mark.parametrize(
    "name",
    [
        "pong/impala",
        "cartpole/impala",
        "pendulum/impala",
        "CartPole-v1",
        "cartpole/vmpo",
        "half_cheetah/es",
    ],
)
def test_what_does_not_depend_on_the_device(name, gpu):
    plain = resolve.train_config(name)
    assert scaling.for_this_device(plain) == plain
    assert scaling.note(plain, plain) is None


def test_an_agent_of_ones_own_keeps_its_sizes(gpu):
    plain = resolve.train_config("ant", "my_agents:Custom")
    assert scaling.for_this_device(plain) == plain


def test_a_cpu_keeps_what_presets_say():
    plain = resolve.train_config("ant")
    assert scaling.for_this_device(plain) == plain
    assert scaling.note(plain, plain) is None


def test_the_command_line_tells_and_saves_the_sizes(gpu, trained, capsys, tmp_path):
    assert cli.main(["train", "ant", "--run", "r", "--agent.minibatches", "16", "--seed", "3"]) == 0
    (agent, config) = trained[0]
    assert (agent.batch, agent.minibatches, config.steps) == (4096, 16, 34_000_000)
    told = capsys.readouterr().err
    assert (
        "sizes for this GPU: agent.batch 4,096 (on a CPU 512), steps 34,000,000 (on a CPU" in told
    )
    assert "minibatches" not in told
    saved = config_of(tmp_path / "r")
    assert (saved.agent, saved.runtime) == (agent, config)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--agent.batch", "512"],
        ["--agent.batch", "4096"],
        ["--agent.batch", "512", "--agent.minibatches", "4", "--steps", "8.5e6"],
    ],
)
def test_the_command_of_a_run_trains_it_where_it_was_and_on_a_cpu(gpu, monkeypatch, words):
    def settled(words: list[str]) -> TrainConfig:
        given = flags.split_train_arguments(["ant/ppo", *words])
        return settle(given.request, lambda c: flags.override(c, given.rest, False)).config

    for first, other in (("gpu", "cpu"), ("cpu", "gpu")):
        monkeypatch.setattr(scaling, "start_jax", lambda first=first: first)
        config = settled(words)
        command = flags.command(config).split()
        assert command[:3] == ["seedbed", "train", "ant/ppo"]
        assert settled(command[3:]) == config
        monkeypatch.setattr(scaling, "start_jax", lambda other=other: other)
        assert settled(command[3:]) == config


def test_a_run_goes_on_with_its_own_sizes_elsewhere(gpu, trained, capsys, monkeypatch):
    assert cli.main(["train", "half_cheetah/sac", "--run", "r"]) == 0
    assert cli.main(["train", "cartpole/ppo", "--run", "s"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(scaling, "start_jax", lambda: "cpu")
    for run in "rs":
        assert cli.main(["train", "--resume", "--run", run]) == 0
    assert trained[2:] == trained[:2]
    assert trained[2][1].envs == 128 and trained[2][1].unroll == 1 and trained[3][0].batch == 512
    monkeypatch.setattr(scaling, "start_jax", lambda: "gpu")
    assert cli.main(["train", "--resume", "--run", "s", "--agent.batch", "1024"]) == 0
    assert trained[4][0].batch == 1024
    assert "sizes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "capability", "fast"),
    [
        ("gpu", "8.0", True),
        ("gpu", "12.1", True),
        ("gpu", "7.5", False),
        ("gpu", "gfx90a", False),
        ("tpu", None, True),
        ("cpu", "pairs", True),
        ("cpu", None, False),
    ],
)
def test_devices_that_multiply_bfloat16(platform, capability, fast, monkeypatch):
    monkeypatch.setattr(devices, "host_instructions", lambda: capability)
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert devices.multiplies_bfloat16(device) is fast


def test_auto_is_chosen_once_told_and_saved(trained, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(devices, "host_instructions", lambda: "pairs")
    command = ["train", "cartpole/ppo", "--agent.compute-dtype", "auto", "--run"]
    assert cli.main([*command, "r"]) == 0
    assert "compute dtype: bfloat16 (auto: cpu with AVX512-BF16)" in capsys.readouterr().err
    saved = config_of(tmp_path / "r")
    assert saved.agent.compute_dtype == trained[0][0].compute_dtype == "bfloat16"
    monkeypatch.setattr(scaling, "multiplies_bfloat16", lambda device: False)
    monkeypatch.setattr(devices, "host_instructions", lambda: None)
    assert cli.main(["train", "--resume", "--run", "r"]) == 0
    assert "compute dtype" not in capsys.readouterr().err
    asked = dataclasses.replace(saved, agent=dataclasses.replace(saved.agent, compute_dtype="auto"))
    seedbed.train(asked, run="r", resume=True)
    assert "compute dtype: bfloat16 (auto: as the run began)" in capsys.readouterr().err
    assert {agent.compute_dtype for agent, _ in trained} == {"bfloat16"}
    assert cli.main([*command, "s"]) == 0
    assert "compute dtype: float32 (auto: cpu)" in capsys.readouterr().err
    assert trained[-1][0].compute_dtype == "float32"


def test_without_auto_no_dtype_is_chosen(monkeypatch):
    monkeypatch.setattr(scaling, "start_jax", lambda: pytest.fail("JAX was started"))
    for name in ("pong/impala", "half_cheetah/sac"):
        config = resolve.train_config(name)
        assert config.agent.compute_dtype == "float32"
        assert scaling.with_compute_dtype(config, None) == (config, None)
    own = resolve.train_config("ant", "my_agents:Custom")
    assert scaling.with_compute_dtype(own, None) == (own, None)


def test_roles_share_a_gpu_unless_the_user_says_otherwise(monkeypatch):
    name, given = "XLA_PYTHON_CLIENT_PREALLOCATE", {}
    monkeypatch.setattr(devices, "os", types.SimpleNamespace(environ=given))
    devices.share_accelerators()
    assert given == {name: "false"}
    given[name] = "true"
    devices.share_accelerators()
    assert given == {name: "true"}


@pytest.mark.parametrize("role", ["shard", "replay_shard"])
def test_shards_leave_accelerators_alone(role, monkeypatch, tmp_path):
    told = {}
    module = importlib.import_module(f"seedbed.paramserver.{role}")
    monkeypatch.setattr(
        sys, "argv", [role, "--run", str(tmp_path), "--number", "0", "--start", "1"]
    )
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.update({name: value}))
    monkeypatch.setattr(module, "keep_programs", lambda: None)
    monkeypatch.setattr(module, "run_role", lambda make: None)
    module.main()
    assert told["jax_platforms"] == "cpu"
