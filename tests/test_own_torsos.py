"""A flax module of a user as torso: in every network, through a run's whole life, and refused before it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import own_torsos
import seedbed
from own_torsos import Wide
from seedbed import cli
from seedbed.agents.dqn import Dqn
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.config.presets import PRESETS
from seedbed.config.saved import from_json, to_json
from seedbed.envs.device.probes import PrivilegedProbe
from seedbed.nets.own import name_of
from seedbed.nets.torsos import Torso
from seedbed.run.trust import Trust, Untrusted
from seedbed.spaces import ArraySpec, Discrete, EnvSpec
from seedbed.types import SeedbedError, bind
from untrained_run import write_run

CARTPOLE = PRESETS["cartpole/impala"]()
VECTORS = EnvSpec(ArraySpec((4,), "float32"), Discrete(2))
TREE = EnvSpec({"a": ArraySpec((2, 3), "int32"), "b": ArraySpec((5,), "uint8")}, Discrete(2))


@pytest.mark.parametrize("spec", [VECTORS, TREE], ids=["vectors", "tree"])
@pytest.mark.parametrize(
    "agent", [Ppo(recurrent=True), Ppo(value_sizes=(8,)), Dqn(), R2d2()], ids=lambda x: x._name
)
def test_networks_have_the_users_parameters(agent, spec):
    agent = bind(dataclasses.replace(agent, torso="own_torsos:Wide(units=5)"), spec)
    state = agent.init(jax.random.key(0))
    kernels = {
        jax.tree_util.keystr(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params.weights)
        if "Wide_0" in jax.tree_util.keystr(path) and leaf.ndim == 2
    }
    size = 4 if spec is VECTORS else 11
    assert set(kernels.values()) == {(size, 5)}
    assert len(kernels) == (2 if getattr(agent, "value_sizes", ()) else 1)


def test_only_the_values_torso_sees_what_is_privileged():
    spec = PrivilegedProbe().spec
    agent = bind(Ppo(torso="own_torsos:Wide"), spec)
    layers = agent.init(jax.random.key(0)).params.weights["params"]
    sizes = [layers[f"Torso_{i}"]["Wide_0"]["Dense_0"]["kernel"].shape[0] for i in range(2)]
    assert sizes[1] - sizes[0] == spec.observation["privileged"].shape[0]


def test_a_torso_sees_scaled_floats_and_bytes_as_they_are():
    """Bytes become floats only where the agent normalises them."""
    seen = {}

    class Spy(nn.Module):
        def __call__(self, observation):
            seen.update(observation)
            return jnp.zeros((2, 1))

    own_torsos.spy = Spy()
    try:
        torso = Torso("own_torsos:spy", (8,))
        shown = {"a": jnp.full((2, 3), 4, jnp.int32), "b": jnp.full((2, 2), 7, jnp.uint8)}
        torso.init(jax.random.key(0), shown)
        assert (seen["a"].dtype, seen["b"].dtype) == (jnp.float32, jnp.uint8)
        scale = Ppo(normalise_observations=True)
        spec = EnvSpec({"a": ArraySpec((3,), "int32"), "b": ArraySpec((2,), "uint8")}, Discrete(2))
        agent = bind(dataclasses.replace(scale, torso="own_torsos:spy"), spec)
        stats = agent._initial_seen()
        stats = stats._replace(mean=jax.tree.map(lambda x: x + 1.0, stats.mean))
        torso.init(jax.random.key(0), shown, agent._scaling(stats))
        np.testing.assert_allclose(seen["a"], 3.0)
        assert (seen["b"] != 7).all()
        assert seen["b"].dtype == jnp.float32
    finally:
        del own_torsos.spy


@pytest.mark.slow
def test_a_torso_of_ones_own_lives_as_long_as_the_run(tmp_path, monkeypatch):
    """It is in config.json, resumes, plays in another process, and the graph of its export has no code."""
    run, policy = tmp_path / "run", tmp_path / "policy"
    options = {"torso": Wide(units=6), "batch": 16, "unroll": 8, "minibatches": 1}
    sizes = {"agent": options, "evaluate_episodes": 2, "run": run}
    seedbed.train("pendulum/ppo", steps=256, **sizes)
    written = json.loads((run / "config.json").read_text())["agent"]["torso"]
    assert written == "own_torsos:Wide(units=6)"
    assert cli.main(["train", "--run", str(run), "--resume", "--steps", "512"]) == 0
    tests = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    command = [sys.executable, "-m", "seedbed", "evaluate", str(run), "--episodes", "1"]
    done = subprocess.run(command, **tests)
    assert done.returncode == 0, done.stderr
    assert "importing own_torsos:Wide(units=6)" in done.stderr
    assert cli.main(["export", str(run), "-o", str(policy)]) == 0
    # A stranger's folder imports no code of whoever loads it; the graph needs none.
    with pytest.raises(SeedbedError, match="the torso own_torsos:Wide.*play its policy.onnx"):
        seedbed.load(policy)
    assert onnxruntime.InferenceSession(policy / "policy.onnx").get_outputs()


def test_the_torso_of_a_strangers_run_is_not_imported(tmp_path, monkeypatch):
    config = dataclasses.replace(CARTPOLE, agent=Ppo(torso="stranger:Net", batch=1, minibatches=1))
    run = write_run(tmp_path / "run", CARTPOLE)
    run.chmod(0o777)
    _, trust = Trust.reading(run, run / "config.json")
    with pytest.raises(Untrusted, match="the code stranger:Net, which is not imported"):
        from_json(to_json(config), trust)
    assert "stranger" not in sys.modules


@pytest.mark.parametrize(
    ("torso", "words"),
    [
        ("resnett", r"Ppo.torso is 'resnett'; give auto, .* or module:Name"),
        ("no such:Thing", "give module:Name, or"),
        ("own_torsos:Wide(8)", "give module:Name, or"),
        ("own_torsos:Wide(units=print)", "give module:Name, or"),
        ("own_torsos:Wide(units", "give module:Name, or"),
        ("own_torsos:Wide(units=3)(units=4)", "give module:Name, or"),
        ("own_torsos:Wide(units=3).clone(units=4)", "give module:Name, or"),
        ("own_torsos:Wide(units=3, units=4)", "give module:Name, or"),
        ("own_torsos:Wide(**{'units': 4})", "give module:Name, or"),
        ("own_torsos:Wide(name='x')", "give module:Name, or"),
        (Wide, "torso is <class .*; give a name, or an instance of a flax module"),
        (3, "torso is 3; give a name, or an instance of a flax module"),
        ("no_such_module:Thing", "no module 'no_such_module'; install it"),
        ("own_torsos:Wode", "own_torsos has no 'Wode'; did you mean"),
        ("own_torsos:number", "is a int: give a class derived from flax.linen.Module"),
        ("own_torsos:wide(units=3)", "without fields in brackets"),
        ("own_torsos:Wide(size=3)", "unexpected keyword argument 'size'"),
        ("own_torsos:Flat", r"returns \[2\] for 2 observations: it must return features \[2, D\]"),
        ("own_torsos:Half", "returns float16: it must return float32"),
        ("own_torsos:Averaging", "has variables 'batch_stats', and only parameters are trained"),
        ("own_torsos:Failing", "fails with this environment's observations: ValueError: no 2 axes"),
    ],
)
def test_what_cannot_be_a_torso_is_refused_before_training(torso, words):
    with pytest.raises(SeedbedError, match=words):
        bind(Ppo(torso=torso), VECTORS)


def test_a_module_has_a_name_or_is_refused():
    class Local(nn.Module):
        pass

    assert name_of(Wide()) == "own_torsos:Wide"
    assert name_of(Wide(units=3)) == "own_torsos:Wide(units=3)"
    with pytest.raises(SeedbedError, match=r"Wide whose field activation is .* cannot be saved"):
        Ppo(torso=Wide(activation=nn.tanh))
    with pytest.raises(SeedbedError, match="Local that other processes cannot import"):
        Ppo(torso=Local())
    other = dataclasses.dataclass(type("Wide", (nn.Module,), {"__module__": "own_torsos"}))
    with pytest.raises(SeedbedError, match="that is not, or no longer, own_torsos:Wide"):
        Ppo(torso=other())


def test_a_torso_is_made_anew_in_every_network():
    """Not one of the first network that asked for it, nor one of a module's earlier text."""
    for torso in ("own_torsos:Wide(units=3)", "own_torsos:wide"):
        for _ in range(2):
            Torso(torso, (8,)).init(jax.random.key(0), jnp.zeros((2, 4)))
    assert own_torsos.wide.name is None


def test_the_torso_of_a_strangers_job_is_not_imported(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    tmp_path.chmod(0o777)
    _, trust = Trust.reading(tmp_path, tmp_path / "job.json")
    with pytest.raises(Untrusted, match="the code stranger:Net"):
        trust.require_agent({"class": "seedbed.agents.ppo:Ppo", "torso": "stranger:Net"})
    trust.require_agent({"class": "seedbed.agents.ppo:Ppo", "torso": "nature"})
