"""Behaviour cloning: what is read, what agents learn from it, and how a run goes on."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seedbed
from seedbed import cli
from seedbed.agents.awr import Awr
from seedbed.agents.es import Es
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.sac import Sac
from seedbed.agents.vmpo import Vmpo
from seedbed.cloning import command
from seedbed.cloning.learn import CloningOptions, Look, _seen, _Sequences, imitate
from seedbed.cloning.recorded import Recorded, read
from seedbed.config.resolve import resolve_env
from seedbed.envs.host.gym import GymHost
from seedbed.policy import forms_of
from seedbed.run.bucket import run_path
from seedbed.run.forms import PlainForms
from seedbed.run.restoring import restore
from seedbed.run.stacking import stacked_spec
from seedbed.types import (
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    SeedbedError,
    Timestep,
    bind,
)
from waiting import wait_for

VECTOR = ArraySpec((3,), "float32")
ONE = Box((1,), (-1.0,), (1.0,))
BOX = Box((2,), (-2.0, 0.0), (2.0, 1.0))
SMALL: dict[str, Any] = {"hidden_sizes": (32,)}
AGENTS = {
    "ppo": (Ppo(normalise_observations=True, **SMALL), BOX),
    "ppo, clipped": (Ppo(squash="clip", **SMALL), BOX),
    "ppo, two sets": (Ppo(**SMALL), MultiDiscrete((2, 2))),
    "vmpo": (Vmpo(**SMALL), Discrete(2)),
    "awr": (Awr(**SMALL), Discrete(2)),
    "sac": (Sac(**SMALL), BOX),
    "es": (Es(hidden_sizes=(32,)), BOX),
    "es, choices": (Es(hidden_sizes=(32,)), Discrete(2)),
}


def teacher(action: Any, observation: np.ndarray) -> np.ndarray:
    """Returns what a teacher does: it looks at the signs of two numbers, or at the numbers."""
    signs = (observation[..., :2] > 100).astype(np.int32)
    if isinstance(action, Discrete):
        return signs[..., 0]
    if isinstance(action, MultiDiscrete):
        return signs
    scaled = np.tanh((observation[..., :2] - 100) / 10)
    return (np.array([0.0, 0.5]) + np.array([2.0, 0.5]) * scaled).astype(np.float32)


def recorded_of(action: Any, steps: int = 4000) -> Recorded:
    # Far from 0 and wide, as statistics of observations must see.
    observation = np.random.default_rng(0).normal(100, 10, (steps, 3)).astype(np.float32)
    return Recorded(observation, teacher(action, observation), np.arange(steps) % 50 == 0)


@pytest.mark.quick("ppo")
@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_with_a_policy_learns_what_a_teacher_does(name):
    agent, action = AGENTS[name]
    agent = bind(agent, EnvSpec(VECTOR, action))
    looks: list[Look] = []
    options = CloningOptions(updates=600, batch=256, learning_rate=3e-3)
    data = recorded_of(action)
    if not getattr(agent, "normalise_observations", False):
        data = dataclasses.replace(data, observation=(data.observation - 100) / 10)
    state = imitate(agent, data, 1, options, looks.append)
    assert len(looks) == 10 and looks[-1].updates == 600
    assert looks[-1].held_out < 0.25 * looks[0].loss + 0.02
    observation, wanted = data.observation[-400:], data.action[-400:]
    no = np.zeros(400, bool)
    now = Timestep(observation, np.zeros(400, np.float32), no, no, ~no)
    before = agent.actor_state(jnp.arange(400), 400)
    keys = jax.random.split(jax.random.key(0), 400)
    got, _, _ = agent.greedy().act(state.params, before, now, keys, evaluate=True)
    if isinstance(action, Box):
        assert np.abs(got - wanted).mean() < 0.12
    else:
        assert (np.asarray(got) == wanted).mean() > 0.93


MEMORY = Impala(recurrent=True, lstm_size=16, **SMALL)
FLAG = EnvSpec(ArraySpec((1,), "float32"), Discrete(2))


def remembered(steps: int = 3000) -> Recorded:
    """Records a teacher that does what the last reward was, which only a memory is shown."""
    rng = np.random.default_rng(0)
    reward, first = rng.integers(0, 2, steps).astype(np.float32), np.arange(steps) % 50 == 0
    action = np.where(first, 0, np.roll(reward, 1)).astype(np.int32)
    return Recorded(np.arange(steps, dtype=np.float32)[:, None] % 2, action, first, reward)


@pytest.mark.slow
def test_an_agent_with_a_memory_is_shown_the_rewards_that_it_sees_in_play():
    data, looks = remembered(), list[Look]()
    agent = bind(MEMORY, FLAG).greedy()
    state = imitate(agent, data, 1, CloningOptions(300, 512, 1e-2), looks.append)
    act, before = jax.jit(agent.act, static_argnums=4), agent.actor_state(jnp.arange(1), 1)
    got, no = [], np.zeros(1, bool)
    for t in range(40):
        last = data.reward[t - 1 : t] if t else np.zeros(1, np.float32)  # type: ignore[index]
        now = Timestep(data.observation[None, t], last, no, no, no | (t == 0))
        keys = jax.random.split(jax.random.key(t), 1)
        action, _, before = act(state.params, before, now, keys, True)
        got.append(int(action[0]))
    np.testing.assert_array_equal(got, data.action[:40])


def test_a_memory_needs_rewards():
    data = dataclasses.replace(remembered(9), reward=None)
    with pytest.raises(SeedbedError, match="no rewards, which the memory of Impala sees: add"):
        _Sequences(bind(MEMORY, FLAG), data, 1)


@pytest.mark.parametrize("steps", [1, 5, 300, 3000])
def test_no_step_that_is_held_out_is_learned_from(steps):
    data = remembered(steps)
    data = dataclasses.replace(data, observation=np.arange(steps, dtype=np.float32)[:, None])
    sequences = _Sequences(bind(MEMORY, FLAG), data, 1)
    options = CloningOptions(updates=20, batch=10_000)
    rows = sequences.minibatches(np.random.default_rng(0), options)
    learned = {int(x) for steps, _ in rows for x in np.ravel(steps.observation)}
    held = {int(x) for x in np.ravel(sequences.held_out(10**6)[0].observation)}
    assert not learned & held or steps == 1
    assert learned | held == set(range(steps)) and len(held) == max(1, steps // 10)


def test_statistics_of_what_only_critics_see_stay_as_they_began():
    parts = {"at": VECTOR, "privileged": ArraySpec((2,), "float32")}
    agent = bind(Ppo(normalise_observations=True, **SMALL), EnvSpec(parts, Discrete(2)))
    data = recorded_of(Discrete(2), 200)
    data = dataclasses.replace(data, observation={"at": data.observation})
    params = jax.jit(agent.init)(jax.random.key(0)).params
    seen = _seen(agent, params, _Sequences(agent, data, 1)).seen
    np.testing.assert_allclose(seen.mean["at"], data.observation["at"].mean(0), rtol=1e-4)
    np.testing.assert_array_equal(seen.mean["privileged"], np.zeros(2))
    np.testing.assert_array_equal(seen.variance["privileged"], np.ones(2))
    # Of so few rows that those of training soon count for more.
    assert seen.weight <= 100 < len(data.action)


def test_a_small_spread_far_from_zero_is_seen():
    agent = bind(Ppo(normalise_observations=True, **SMALL), EnvSpec(VECTOR, Discrete(2)))
    observation = np.random.default_rng(0).normal(1000, 0.1, (9000, *VECTOR.shape))
    data = recorded_of(Discrete(2), 9000)
    data = dataclasses.replace(data, observation=observation.astype(np.float32))
    params = jax.jit(agent.init)(jax.random.key(0)).params
    seen = _seen(agent, params, _Sequences(agent, data, 1)).seen
    np.testing.assert_allclose(np.sqrt(seen.variance), observation.std(0), rtol=0.01)


@pytest.mark.slow
def test_frames_are_stacked_within_episodes():
    spec = EnvSpec(ArraySpec((1,), "float32"), Discrete(2))
    agent = bind(Ppo(hidden_sizes=(32,)), stacked_spec(spec, 3))
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 2, 3000).astype(np.float32)
    first = np.arange(3000) % 10 == 0
    # Two steps ago, or 0 where that was in the episode before.
    ago = np.where(np.arange(3000) % 10 < 2, 0, np.roll(shown, 2)).astype(np.int32)
    looks: list[Look] = []
    imitate(agent, Recorded(shown[:, None], ago, first), 3, CloningOptions(800), looks.append)
    assert looks[-1].held_out < 0.05


def npz(path: Path, **changed: Any) -> Path:
    arrays = {
        "observations": np.zeros((4, 4), np.float32),
        "actions": np.array([0, 1, 1, 0]),
        "terminations": np.array([False, True, False, False]),
        "truncations": np.array([False, False, False, True]),
    }
    arrays |= changed
    file = path / "data.npz"
    np.savez(file, **{k: v for k, v in arrays.items() if v is not None})  # type: ignore[arg-type]
    return file


CARTPOLE = forms_of(resolve_env("CartPole-v1"))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"actions": None}, "lacks actions; it has observations"),
        ({"observations": None}, "lacks observations"),
        (
            {"actions": np.zeros(3, int)},
            r"data.npz has arrays actions \(3,\), observations \(4, 4\)",
        ),
        ({"actions": np.array(1)}, r"arrays actions \(\), .* must have one row a step"),
        ({"terminations": np.zeros(3, bool)}, r"arrays .*terminations \(3,\)"),
        (
            {"terminations": np.zeros((4, 1))},
            r"terminations has the shape \(4, 1\), expected \(4,\)",
        ),
        ({"rewards": np.zeros((4, 1))}, r"rewards has the shape \(4, 1\), expected \(4,\)"),
        ({"rewards": np.full(4, np.inf)}, "a reward that is not finite"),
        ({"rewards": np.array(["a"] * 4)}, "data.npz is no npz file of arrays: could not convert"),
        ({"actions": np.array([0, 1, 2, 0])}, "an action is outside 0 to 1"),
        ({"actions": np.zeros(4)}, "actions are float64"),
        ({"observations": np.zeros((4, 3), np.float32)}, "does not fit the environment: .*shape"),
        ({"observations": np.full((4, 4), np.nan, np.float32)}, "not finite"),
        (
            {"actions": None, "actions/x": np.zeros(4), "actions/y": np.zeros(4)},
            "has actions/x, actions/y: only observations have parts; let actions be one array",
        ),
        ({"actions": np.array([object()] * 4, object)}, "is no npz file of arrays"),
    ],
)
def test_data_that_does_not_fit_is_one_line(tmp_path, changed, complaint):
    with pytest.raises(SeedbedError, match=complaint) as error:
        read(npz(tmp_path, **changed), CARTPOLE)
    assert "\n" not in str(error.value)


def test_actions_of_another_size_are_one_line(tmp_path):
    for actions in (np.zeros((4, 2)), np.array(["left"] * 4)):
        with pytest.raises(SeedbedError, match=r"actions are .*, expected numbers \('N', 1\)"):
            read(
                npz(tmp_path, actions=actions), PlainForms(EnvSpec(ArraySpec((4,), "float32"), ONE))
            )


@pytest.mark.parametrize("damage", ["cut", "npy", "empty"])
def test_a_damaged_file_is_one_line(tmp_path, damage):
    file = npz(tmp_path)
    np.save(array := io.BytesIO(), np.zeros((4, 4)))
    content = {"cut": file.read_bytes()[:300], "npy": array.getvalue(), "empty": b""}
    file.write_bytes(content[damage])
    with pytest.raises(SeedbedError, match="data.npz is no npz file of arrays: ") as error:
        read(file, CARTPOLE)
    assert "\n" not in str(error.value)


def test_data_is_read_in_the_forms_of_the_environment(tmp_path):
    found = read(npz(tmp_path, rewards=np.arange(4)), CARTPOLE)
    np.testing.assert_array_equal(found.reward, np.arange(4, dtype=np.float32))  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.first, [True, False, True, False])
    assert found.action.dtype == np.int32

    class Odd(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            {"at": gymnasium.spaces.Discrete(3), "goal": gymnasium.spaces.Box(-1, 1, (2,))}
        )
        action_space = gymnasium.spaces.Box(-3, 3, (2, 2), np.int8)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

    host = GymHost(Odd, "odd", 1, 0)
    changed = {
        "observations": None,
        "observations/at": np.array([0, 1, 2, 0]),
        "observations/goal": np.zeros((4, 2), np.float32),
        "actions": np.full((4, 2, 2), -3),
    }
    found = read(npz(tmp_path, **changed), host)
    np.testing.assert_array_equal(found.observation["at"], np.eye(3)[[0, 1, 2, 0]])
    assert found.action.shape == (4, 4) and not found.action.any()


def test_a_dataset_of_minari_is_read_without_its_last_observations(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "data").mkdir()
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "w") as file:
        for number, steps in ((10, 2), (9, 3)):
            group = file.create_group(f"episode_{number}")
            group["observations"] = np.full((steps + 1, 4), number, np.float32)
            group["actions"] = np.ones(steps, int)
            group["rewards"] = np.full(steps, number, float)
            group["infos/x"] = np.zeros(steps)
    found = read(tmp_path, CARTPOLE)
    np.testing.assert_array_equal(found.observation[:, 0], [9, 9, 9, 10, 10])
    np.testing.assert_array_equal(found.reward, [9, 9, 9, 10, 10])
    np.testing.assert_array_equal(found.first, [True, False, False, True, False])
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        file["actions"] = file["observations"] = np.zeros((3, 4))
    with pytest.raises(SeedbedError, match="d4rl.hdf5 has actions, observations, and no episode_0"):
        read(tmp_path / "d4rl.hdf5", CARTPOLE)


def balance(path: Path) -> Path:
    """Records a controller that keeps the pole up."""
    env, columns = gymnasium.make("CartPole-v1"), {k: [] for k in ("o", "a", "te", "tr")}
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            action = int(observation @ np.array([0.02, 0.3, 1.0, 1.0]) > 0)
            following, _, terminated, truncated, _ = env.step(action)
            for column, value in zip(
                columns.values(), (observation, action, terminated, truncated), strict=True
            ):
                column.append(value)
            observation, over = following, terminated or truncated
    names = ("observations", "actions", "terminations", "truncations")
    return npz(path, **{n: np.array(v) for n, v in zip(names, columns.values(), strict=True)})


@pytest.mark.parametrize(
    "words",
    [
        ["cartpole/ppo", "--run", "runs/clone", "data.npz"],
        ["cartpole", "--agent", "ppo", "data.npz"],
        ["--seed", "1", "cartpole/ppo", "data.npz"],
    ],
)
def test_the_value_of_an_option_is_not_taken_for_the_data(words, capsys):
    assert cli.main(["clone", *words]) == 2
    assert "NAME and DATA come first: seedbed clone NAME DATA" in capsys.readouterr().err


def test_a_clone_is_kept_in_its_bucket_and_cannot_be_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    where = f"file://{tmp_path}/bucket/run"
    words = ["clone", "cartpole/ppo", str(npz(tmp_path)), "--run", where, "--updates", "2e3"]
    played = {"episode_return_mean": 9.0, "episodes": 1}
    monkeypatch.setattr(command, "imitate", lambda *given: {"weights": np.zeros(2)})
    monkeypatch.setattr(command, "evaluate", lambda *given, **more: played)
    assert cli.main(words) == 0
    assert f"--from {where}" in capsys.readouterr().out
    sent = {path.name for path in (tmp_path / "bucket").rglob("*")}
    assert {"config.json", "history.json", "000000000000"} <= sent
    with pytest.raises(SeedbedError, match="is a clone, which has not trained: .* NAME --from"):
        restore(run_path(where) / "checkpoints", {})


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "impala"])
def test_a_run_goes_on_from_a_clone(tmp_path, agent, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["clone", "cartpole", str(balance(tmp_path)), "--agent", agent, "--run", "clone"]
    assert cli.main([*words, "--updates", "1500", "--evaluate-episodes", "4"]) == 0
    said = capsys.readouterr().out
    assert "of 6 episodes" in said and "--from clone" in said
    assert seedbed.evaluate("clone", episodes=4, greedy=True)["episode_return_mean"] > 300
    summary = seedbed.train("cartpole", agent=agent, start="clone", steps=3000, run="next")
    assert summary["learner_steps"] > 0
    assert json.loads((tmp_path / "next" / "history.json").read_text())[0]["from"]["run"]
    (stint,) = json.loads((tmp_path / "clone" / "history.json").read_text())
    assert stint["outcome"] == "finished" and stint["from"]["data"].endswith("data.npz")
    assert cli.main(words) == 1 and "is not empty" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "--run", "clone"]) == 1
    assert "clone is a clone, which has not trained" in capsys.readouterr().err
    assert cli.main([*words[:3], "--agent", "dqn"]) == 1
    assert "no policy to clone into" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clone", "data.npz", "next"]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_clone_that_is_stopped_leaves_nothing(tmp_path, sent):
    words = ["clone", "cartpole/ppo", str(balance(tmp_path)), "--run", "clone"]
    process = subprocess.Popen(
        [sys.executable, "-m", "seedbed", *words, "--updates", "1000000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for((tmp_path / "clone" / "config.json").exists, process)
    process.send_signal(sent)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "interrupted" in said
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]
