"""Exported policies: the graph against JAX, the folder, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import seedbed
from exporting import Exported, free_running, record, teacher_forced
from own_environments import Choosing
from seedbed import api, cli
from seedbed.config import configuration, resolve
from seedbed.envs.host import registry
from seedbed.envs.host.gym import GymEnv
from seedbed.envs.host.pickled import pickled
from seedbed.exporting import card, command
from seedbed.exporting.check import TOLERANCE, _random_inputs, compare, open_session
from seedbed.exporting.graph import Graph
from seedbed.exporting.translate import MOST_ROUNDS, translate
from seedbed.run.deployed import Policy
from seedbed.run.folder import RunFolder
from seedbed.run.operations import flatten
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError
from small_disk import SmallDisk, on_small_disk
from untrained_run import write_run

GUIDE = Path(__file__).parent.parent / "docs" / "export.md"
CARTPOLE = resolve.train_config("cartpole/impala")
TINY = dataclasses.replace(CARTPOLE.agent, hidden_sizes=(8,))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(
        tmp_path_factory.mktemp("runs") / "run", dataclasses.replace(CARTPOLE, agent=TINY)
    )


@pytest.fixture(scope="module")
def folder(run):
    folder = run.parent / "policy"
    assert cli.main(["export", str(run), "-o", str(folder)]) == 0
    return folder


def policy_of(run: Path) -> Policy:
    trained = api.restore(run)
    stack = getattr(trained.env, "frame_stack", 1)
    return Policy(trained.agent, trained.params, trained.forms.spec, stack)


@pytest.mark.slow
def test_a_folder_has_all_that_a_deployer_needs(run, folder):
    names = ["README.md", "contract.json", "curve.csv", "parameters.safetensors", "policy.onnx"]
    assert sorted(path.name for path in folder.iterdir()) == names
    contract = json.loads((folder / "contract.json").read_text())
    assert [(each["name"], each["shape"], each["dtype"]) for each in contract["inputs"]] == [
        ("observation", [4], "float32")
    ]
    assert [(each["name"], each["shape"], each["dtype"]) for each in contract["outputs"]] == [
        ("action", [], "int32"),
        ("logits", [2], "float32"),
    ]
    assert contract["memory"] == [] and contract["evaluation_draws"]
    assert contract["environment"]["gymnasium"] == {"id": "CartPole-v1", "kwargs": {}}
    model = onnx.load(folder / "policy.onnx")
    assert model.opset_import[0].version == contract["graph"]["opset"] == 18
    assert not [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.DOUBLE
    ]
    card = (folder / "README.md").read_text()
    assert "seedbed train cartpole/impala --agent.hidden-sizes 8" in card
    assert "this checkpoint was never evaluated" in card


def test_code_of_a_script_stays_with_the_run(tmp_path):
    env = pickled(lambda: None, "Walk")
    run = RunFolder.create(tmp_path)
    run.write_config({"env": registry.to_json(env)})
    run.close()
    trained: Any = SimpleNamespace(env=env)
    told = command._environment(tmp_path, trained)
    assert told["gymnasium"] is None and told["options"]["kwargs"] == {"name": "Walk"}
    assert card._environment(told) == "`Walk`"


def test_an_evaluation_stands_once_in_the_curve_with_its_steps():
    first = {"evaluation/env_steps": 3, "evaluation/episode_return_mean": 7.0}
    second = {"evaluation/env_steps": 9, "evaluation/episode_return_mean": 7.0}
    evaluated = ({}, first, first, second, {})
    lines = [{"env_steps": 5 * k, "wall_s": k, **more} for k, more in enumerate(evaluated)]
    assert card.curve(lines).splitlines() == [
        "env_steps,wall_s,return,evaluation,evaluated_at",
        "0,0,,,",
        "5,1,,7.0,3",
        "10,2,,,",
        "15,3,,7.0,9",
        "20,4,,,",
    ]


@pytest.mark.slow
def test_a_folder_is_loaded_as_its_run(run, folder):
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    ours, theirs = seedbed.load(run), seedbed.load(folder)
    np.testing.assert_array_equal(ours.act(observations), theirs.act(observations))
    with pytest.raises(SeedbedError, match="has no newer one"):
        seedbed.load(folder, newest=True)


def test_logits_are_those_of_jax(run, folder):
    recording = record(policy_of(run), CARTPOLE.env, batch=1, steps=20)
    assert max(teacher_forced(folder, recording).values()) <= TOLERANCE
    made = Exported(folder).step(recording.inputs[0])
    np.testing.assert_array_equal(made["action"], made["logits"].argmax(-1))


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """A run whose policy has a memory, frames and real actions."""
    agent = dataclasses.replace(
        resolve.train_config("ant/ppo").agent,
        recurrent=True,
        lstm_size=8,
        hidden_sizes=(8,),
        value_sizes=(),
    )
    config = configuration.TrainConfig(
        GymEnv("Pendulum-v1", frame_stack=3), agent, CARTPOLE.runtime
    )
    run = write_run(tmp_path_factory.mktemp("runs") / "run", config)
    command.export(run, run.parent / "policy")
    return run


@pytest.mark.slow
def test_memory_and_frames_go_on_as_in_a_loaded_policy(remembering):
    folder = remembering.parent / "policy"
    contract = json.loads((folder / "contract.json").read_text())
    assert [(each["input"], each["is_action"]) for each in contract["memory"]] == [
        ("frames", False),
        ("core.lstm.hidden", False),
        ("core.lstm.cell", False),
        ("core.action", True),
    ]
    exported, loaded = Exported(folder, 2), seedbed.load(folder)
    rng = np.random.default_rng(0)
    for step in range(12):
        first = np.array([step in (0, 5), step in (0, 8)])
        observation = rng.normal(size=(2, 3)).astype(np.float32)
        reward = np.where(first, 0, rng.normal(size=2)).astype(np.float32)
        made = exported.step({"observation": observation, "reward": reward, "first": first})
        action = loaded.act(observation, first, reward)
        np.testing.assert_allclose(made["action"], action, rtol=0, atol=1e-5)


def without_jax(code: str, folder: Path) -> str:
    """Runs code beside a folder in a process in which JAX cannot be imported; returns what it prints."""
    blocked = "import sys\nsys.modules['jax'] = sys.modules['jaxlib'] = None\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", blocked + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def guide_code(block: int) -> str:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[block]


def test_the_guide_drives_environments_without_jax(folder, remembering):
    there = str(remembering.parent / "policy")
    first = guide_code(0).replace("exported/ant", folder.name)
    second = guide_code(1).replace("exported/ant", there)
    lived, swung = map(float, without_jax(first + second, folder.parent).split())
    assert lived >= 8
    assert -2000 < swung < 0


@pytest.mark.parametrize("kind", Choosing.SPACES)
def test_choices_are_sent_as_the_environment_counts_them(tmp_path, capsys, kind):
    env = GymEnv("own_environments:Choosing-v0", kwargs={"kind": kind})
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, env=env, agent=TINY))
    command.export(run, tmp_path / "policy")
    for block in (0, 1):
        exec(guide_code(block).replace("exported/ant", str(tmp_path / "policy")), {})
    assert capsys.readouterr().out == "4.0\n4.0\n"
    for seen in (np.zeros(2, np.float32), np.zeros((3, 2), np.float32)):
        ours, theirs = (seedbed.load(each).act(seen) for each in (run, tmp_path / "policy"))
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_the_guide_feeds_the_parts_of_a_dict(tmp_path, capsys):
    env = GymEnv("own_environments:Parted-v0")
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, env=env, agent=TINY))
    command.export(run, tmp_path / "policy")
    exec(guide_code(1).replace("exported/ant", str(tmp_path / "policy")), {})
    assert capsys.readouterr().out == "4.0\n"


FUNCTIONS = {
    "log1p": lambda x: jnp.log1p(jnp.abs(x) * 1e-4),
    "expm1": lambda x: jnp.expm1(x * 1e-4) + jax.nn.elu(x),
    "softplus": lambda x: jax.nn.softplus(20 * x),
    "gelu": lambda x: jax.nn.gelu(x) + jax.nn.silu(x),
    "layer_norm": lambda x: (
        (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1)
    ),
    "log_softmax": lambda x: jax.nn.log_softmax(x),
    "attention": lambda x: jnp.einsum("bij,bkj->bik", x.reshape(-1, 2, 3), x.reshape(-1, 2, 3)),
    "folded": lambda x: jnp.einsum("bij,ijk->bk", x.reshape(-1, 2, 3), jnp.ones((2, 3, 4))),
    "powers": lambda x: x**3 + jnp.abs(x) ** 0.5 + jnp.square(x) - jnp.sign(x) + jnp.round(x),
    "parts": lambda x: jnp.concatenate([x[:, 1:3], x[:, ::-1], jnp.pad(x, ((0, 0), (1, 2)))], -1),
    "stack": lambda x: jnp.stack([x[:, 0], x[:, -1]], -1) + jnp.cumsum(x, -1)[:, :2],
    "logic": lambda x: jnp.where((x > 0) & ~(x > 1) | jnp.isnan(x), x, -x).sum(-1),
    "masks": lambda x: jnp.where(x > 0, (x > 1) ^ (x > 2), x < -1).any(-1) | (x < 9).all(-1),
    "rows": lambda x: x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None],
    "twice": lambda x: jnp.repeat(x, 2, axis=0).reshape(-1, 12) * 2,
    "where": lambda x: jnp.where(jnp.full(x.shape, True), x, 0.0),
    "constants": lambda x: jnp.zeros_like(x) + jnp.linspace(0, 1, 6)[None],
    "one_hot": lambda x: jax.nn.one_hot(x.argmax(-1), 6) + x.argmin(-1)[:, None],
    "scan": lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), x[:, 0], x.T)[1],
    "remat": lambda x: jax.checkpoint(jnp.sin)(x) + jnp.clip(x, -1, 1),
    "strided": lambda x: jax.lax.conv_general_dilated(
        x.reshape(-1, 2, 3, 1),
        jnp.ones((2, 2, 1, 3)),
        (1, 2),
        "SAME",
        rhs_dilation=(1, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    "pool": lambda x: jax.lax.reduce_window(
        x.reshape(-1, 2, 3, 1),
        -jnp.inf,
        jax.lax.max,
        (1, 2, 2, 1),
        (1, 1, 1, 1),
        ((0, 0), (0, 1), (1, 1), (0, 0)),
    ),
    "bytes": lambda x: (jnp.abs(x) * 50).astype(jnp.uint8).astype(jnp.float32) / 255,
}


def test_a_mask_is_checked_in_both_states_and_scores_on_their_own_scale():
    observation = {"action_mask": ArraySpec((3,), "uint8"), "x": ArraySpec((2,), "float32")}
    policy = Policy(TINY, (), EnvSpec(observation, Discrete(3)), 1)
    masks = [given["observation.action_mask"] for given in _random_inputs(policy, 5)]
    assert {0, 1} == {*np.unique(masks)}

    class Session:
        def get_inputs(self):
            return []

        def get_outputs(self):
            return [SimpleNamespace(name="logits")]

        def run(self, names, fed):
            return [np.float32([[2.1, -1e9]])]

    expected = {"logits": np.float32([[2.0, -1e9]])}
    session: Any = Session()
    found = compare(session, lambda memory, given: expected, {}, iter([{}])).relative()
    assert found["logits"] == pytest.approx(0.05, rel=1e-5)


def exported_function(function):
    """Returns a session that computes a function from [B, 6] to a dict of arrays, or to one array."""
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 6), jnp.float32)
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(x)
    read = flatten(closed, "", MOST_ROUNDS)
    graph = Graph(batch)
    given = graph.input("x", read.inputs[0].shape, read.inputs[0].dtype)
    names = sorted(shapes) if isinstance(shapes, dict) else ["y"]
    translate(graph, read, {read.inputs[0]: given}, dict(zip(names, read.outputs, strict=True)))
    return open_session(graph.model({}).SerializeToString())


def test_a_graph_computes_what_jax_does():
    def all_functions(x):
        return {name: function(x) for name, function in FUNCTIONS.items()}

    session = exported_function(all_functions)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = jax.jit(all_functions)(x)
    made = session.run(list(FUNCTIONS), {"x": x})
    for name, array in zip(FUNCTIONS, made, strict=True):
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), name
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (
            lambda x: jnp.sort(x),
            r"sort at \S*test_export.py:\d+.* is not one that Seedbed can write",
        ),
        (
            lambda x: x[:, x.argmax(-1)[0]],
            r"dynamic_slice at \S*test_export.py:\d+.* at a place that is found while it runs",
        ),
        (
            lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x),
            "while at .* a loop whose number of rounds is found while it runs",
        ),
        (
            lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x),
            "cond at .* a branch that is chosen while it runs: use jnp.where",
        ),
        (lambda x: x.astype(jnp.bfloat16) * 2, "it computes in bfloat16"),
        (
            lambda x: jax.lax.scan(lambda c, r: (c + r, c), x.sum(0), jnp.ones((65, 6)))[1],
            "a loop of more than 64 rounds",
        ),
    ],
)
def test_what_has_no_form_is_refused_by_name(function, complaint):
    with pytest.raises(SeedbedError, match=complaint) as error:
        exported_function(function)
    assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class OneByOne(type(TINY)):
    """An agent whose `act` must know how many environments there are."""

    def act(self, params, actor_state, timestep, keys, evaluate):
        # On a GPU, less would round more than the check allows.
        assert jax.config.jax_default_matmul_precision == "highest"
        rows = [timestep.observation[i] for i in range(int(timestep.first.shape[0]))]
        timestep = timestep._replace(observation=jnp.stack(rows) * 2.0)
        return super().act(params, actor_state, timestep, keys, evaluate)


@dataclasses.dataclass(frozen=True)
class Sorting(type(TINY)):
    """An agent whose `act` has no form in ONNX."""

    def act(self, params, actor_state, timestep, keys, evaluate):
        timestep = timestep._replace(observation=jnp.sort(timestep.observation))
        return super().act(params, actor_state, timestep, keys, evaluate)


def test_agents_of_users_are_exported_but_not_imported(tmp_path):
    agent = OneByOne(hidden_sizes=(8,))
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, agent=agent))
    told: list[str] = []
    contract = command.export(run, tmp_path / "policy", warn=told.append)
    assert contract["graph"]["batch"] == 1
    assert "the graph takes one environment at a time" in told[0]
    assert contract["agent"]["class"] == "test_export:OneByOne"
    with pytest.raises(SeedbedError, match="test_export:OneByOne, which is not Seedbed's own"):
        seedbed.load(tmp_path / "policy")


def test_networks_that_were_trained_in_bfloat16_compute_in_float32(tmp_path):
    agent, told = dataclasses.replace(TINY, compute_dtype="bfloat16"), []
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, agent=agent))
    contract = command.export(run, tmp_path / "policy", warn=told.append)
    assert told == [
        "the policy computes in float32, and not in bfloat16 as in training and evaluations"
    ]
    assert contract["agent"]["options"]["compute_dtype"] == "float32"
    assert command.restore(run, print).agent.compute_dtype == "bfloat16"


def test_an_agent_without_a_form_leaves_no_folder(tmp_path, capsys):
    agent = Sorting(hidden_sizes=(8,))
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, agent=agent))
    assert cli.main(["export", str(run), "-o", str(tmp_path / "policy")]) == 1
    assert "sort at" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_errors_have_one_line(run, folder, tmp_path, capsys, monkeypatch):
    def told(*arguments: str) -> str:
        assert cli.main(["export", *arguments]) != 0
        (line,) = capsys.readouterr().err.splitlines()
        return line

    out = str(tmp_path / "policy")
    assert "is not the folder of a run" in told(str(tmp_path), "-o", out)
    assert "is not empty: name a new folder with -o" in told(str(run), "-o", str(folder))
    assert "cannot be written" in told(str(run), "-o", str(run / "config.json"))
    assert "required: -o" in told(str(run))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name)
    )
    assert told(str(run), "-o", out) == (
        "seedbed: an exported policy needs the package onnxruntime: pip install 'seedbed[export]'"
    )
    assert not (tmp_path / "policy").exists()


def test_an_empty_folder_stays_where_it_is(tmp_path, monkeypatch):
    """A shell that is in it would else be in a folder that is gone."""
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    with pytest.raises(SeedbedError, match="the folder . cannot be written"):
        command._write(Path(), {"policy.onnx": b"", "none/contract.json": b""})
    assert not [*tmp_path.iterdir()]
    command._write(Path(), {"policy.onnx": b"", "contract.json": b""})
    assert sorted(map(str, Path().iterdir())) == ["contract.json", "policy.onnx"]
    assert tmp_path.stat().st_ino == before


def changed(path: Path, change) -> None:
    contract = json.loads(path.read_text())
    change(contract)
    path.write_text(json.dumps(contract))


DAMAGES = {
    "no parameters": (lambda f: (f / "parameters.safetensors").unlink(), "No such file"),
    "short": (lambda f: os.truncate(f / "parameters.safetensors", 100), "has 100 bytes instead of"),
    "other bytes": (
        lambda f: (f / "parameters.safetensors").write_bytes(
            bytes((f / "parameters.safetensors").stat().st_size)
        ),
        "its content has changed",
    ),
    "no JSON": (
        lambda f: os.truncate(f / "contract.json", 100),
        "contract.json is missing or damaged",
    ),
    "foreign": (lambda f: (f / "contract.json").write_text("{}"), "is no exported policy"),
    "newer": (
        lambda f: changed(f / "contract.json", lambda c: c.update(version=2)),
        "another version of Seedbed: its format is 2",
    ),
    "class": (
        lambda f: changed(f / "contract.json", lambda c: c["agent"].update(name="os:system")),
        "of the agent 'os:system', which this Seedbed does not have",
    ),
    "nested class": (
        lambda f: changed(
            f / "contract.json",
            lambda c: c["agent"]["options"].update(gamma={"class": "os:system"}),
        ),
        "an option is",
    ),
    "option": (
        lambda f: changed(f / "contract.json", lambda c: c["agent"]["options"].update(gama=1)),
        "has no option 'gama'; did you mean gamma",
    ),
    "other network": (
        lambda f: changed(
            f / "contract.json", lambda c: c["agent"]["options"].update(hidden_sizes=[9])
        ),
        "parameters.safetensors is missing or damaged",
    ),
    "no part": (
        lambda f: changed(f / "contract.json", lambda c: c.pop("action")),
        "contract.json is missing or damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_and_foreign_folders_get_one_line(folder, tmp_path, name):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage, complaint = DAMAGES[name]
    damage(copy)
    with pytest.raises(SeedbedError, match=re.escape(complaint)) as error:
        seedbed.load(copy)
    assert "\n" not in str(error.value)


@on_small_disk
def test_a_full_disk_leaves_no_folder(disk: SmallDisk) -> None:
    folder = disk.path / "policy"
    disk.path.mkdir()
    disk.fill()
    with pytest.raises(SeedbedError, match="policy cannot be written"):
        command._write(folder, {"a": bytes(1000), "b": bytes(1 << 20)})
    assert list(disk.path.iterdir()) == []
    disk.empty()
    command._write(folder, {"a": b"1"})
    assert (folder / "a").read_bytes() == b"1"


def game(tmp_path: Path, name: str) -> Path:
    return write_run(tmp_path / "run", resolve.train_config(name))


def trained(tmp_path: Path, name: str, steps: int) -> Path:
    seedbed.train(name, run=tmp_path / "run", steps=steps)
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ant/ppo", lambda path, name: trained(path, name, 200_000)),
        ("half_cheetah/sac", lambda path, name: trained(path, name, 12_000)),
        ("pong/impala", game),
        ("pong/r2d2", game),
    ],
)
def test_a_thousand_observations(tmp_path, name, make):
    run = make(tmp_path, name)
    policy, folder = policy_of(run), tmp_path / "policy"
    command.export(run, folder)
    env = api.restore(run).env
    if hasattr(env, "gymnasium_id"):
        env = GymEnv(env.gymnasium_id, kwargs=env.gymnasium_options())
    recording = record(policy, env, batch=4, steps=250)
    forced, free = teacher_forced(folder, recording), free_running(folder, recording)
    print(name, "teacher-forced", forced, "free", free)
    assert max(forced.values()) <= 1e-5
    assert max(free.values()) <= 1e-3


DRIVER = """
import gymnasium, json, numpy as np, onnxruntime
contract = json.load(open("policy/contract.json"))
policy = onnxruntime.InferenceSession("policy/policy.onnx")
task = contract["environment"]["gymnasium"]
env = gymnasium.make(task["id"], **task["kwargs"])
returns, seen, done = [], [], []
for episode in range(20):
    observation, _ = env.reset(seed=1000 + episode)
    total, over = 0.0, False
    while not over:
        seen.append(np.float32(observation))
        (action,) = policy.run(["action"], {"observation": seen[-1][None]})
        done.append(action[0])
        observation, reward, terminated, truncated, _ = env.step(action[0])
        total, over = total + reward, terminated or truncated
    returns.append(total)
np.savez("played.npz", returns=returns, seen=seen, done=done)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_onnxruntime_drives_ant_as_evaluations_do(tmp_path):
    run = trained(tmp_path, "ant/ppo", 200_000)
    command.export(run, tmp_path / "policy")
    without_jax(DRIVER, tmp_path)
    played = np.load(tmp_path / "played.npz")
    action = seedbed.load(run).act(played["seen"])
    np.testing.assert_allclose(played["done"], action, rtol=0, atol=1e-5)
    result = api.evaluate(run, env="Ant-v5", episodes=20)
    ours, theirs = played["returns"], result["episode_return_mean"]
    error = np.hypot(ours.std(), result["episode_return_std"]) / np.sqrt(20)
    print("onnxruntime", ours.mean(), "seedbed evaluate", theirs, "standard error", error)
    assert abs(ours.mean() - theirs) <= 3 * error
    assert float(without_jax(guide_code(0).replace("exported/ant", "policy"), tmp_path)) > 0
