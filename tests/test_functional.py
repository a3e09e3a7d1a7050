"""Environments of gymnax's form on the device: steps, ends, parameters, names, and whose code they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functional_environments as theirs
import seedbed
from seedbed import simd
from seedbed.config import flags, resolve
from seedbed.config.saved import saved_config
from seedbed.envs.device.functional import Functional
from seedbed.envs.device.wrappers import time_limit, training
from seedbed.envs.host import registry
from seedbed.run.folder import RunFolder
from seedbed.types import ArraySpec, Box, Discrete, SeedbedError
from untrained_run import write_run

WALK = "functional_environments:Walk"


def test_steps_are_those_of_the_package_and_its_limit_truncates() -> None:
    """Every step is replayed with the package's own functions and the adapter's keys."""
    env = Functional(factory=WALK, kwargs={"slip": 0.5}, params={"goal": 2})
    task, own = training(env), theirs.Walk(0.5)
    params = theirs.WalkParams(goal=2)
    assert env.episode_steps == 12 and env.spec.action == Discrete(2)
    assert env.spec.observation == ArraySpec((2,), "float32")
    step, reset = simd.vectorize(task.step), simd.vectorize(task.reset)
    state = reset(jax.random.split(jax.random.key(0), 64))
    rng, ends = np.random.default_rng(0), np.zeros(2, int)
    for _ in range(60):
        action = jnp.asarray(rng.integers(0, 2, 64), jnp.int32)
        inner, ended = state.inner, state.timestep.terminated | state.timestep.truncated
        ((walker, keys, count), _), _ = inner
        after = step(state, action)
        uses = jax.vmap(lambda key: jax.random.split(key)[1])(keys)
        seen, _, reward, done, _ = jax.vmap(own.step_env, (0, 0, 0, None))(
            uses, walker, action, params
        )
        now = after.timestep
        np.testing.assert_array_equal(now.first, ended)
        goes_on = ~np.asarray(ended)
        np.testing.assert_allclose(
            np.asarray(now.observation)[goes_on],
            np.asarray(seen)[goes_on],
            rtol=1e-6,
        )
        np.testing.assert_array_equal(np.asarray(now.reward)[goes_on], np.asarray(reward)[goes_on])
        # An end in the last step that the limit allows is a truncation, whatever else it is.
        within = np.asarray(count + 1 < 12)
        np.testing.assert_array_equal(
            np.asarray(now.terminated)[goes_on], (np.asarray(done) & within)[goes_on]
        )
        assert (np.asarray(now.truncated) == ~within)[goes_on].all()
        ends += np.asarray(now.terminated).sum(), np.asarray(now.truncated).sum()
        state = after
    assert ends.min() > 20


def test_a_limit_of_ones_own_takes_the_place_of_the_package_s() -> None:
    def last(**options: Any) -> tuple[int, bool, bool]:
        env = Functional(factory=WALK, params={"goal": 99}, **options)
        task = training(env)
        state, step = jax.jit(task.reset)(jax.random.key(0)), jax.jit(task.step)
        for count in range(1, 41):
            state = step(state, jnp.int32(1))
            now = state.timestep
            if now.terminated or now.truncated:
                return count, bool(now.terminated), bool(now.truncated)
        return 0, False, False

    assert last() == (12, False, True)
    assert last(limit=20) == (20, False, True)
    assert last(limit=0) == (0, False, False)
    with pytest.raises(SeedbedError, match="20 steps are more than the 12 after which .* limit=20"):
        time_limit(Functional(factory=WALK), 20)
    assert time_limit(Functional(factory=WALK, limit=0), 20).episode_steps == 20


def test_what_lacks_parameters_and_resets_is_taken_as_it_is() -> None:
    env = Functional(factory="functional_environments:bare")
    assert env.episode_steps == 0
    scalar = ArraySpec((), "float32")
    assert env.spec.observation == {
        "x": ArraySpec((3,), "float32"),
        "on": ArraySpec((), "bool"),
        "dot": scalar,
    }
    assert env.spec.action == Box((3,), (-1.0,) * 3, (1.0, 2.0, 3.0))
    opened = env.reset(jax.random.key(0))
    assert opened.timestep.observation["dot"] == np.float32(0.2)
    state = env.step(opened, jnp.array([0.5, 1.0, 2.0]))
    assert state.timestep.reward == 1 and not state.timestep.terminated
    assert state.timestep.observation["x"].tolist() == [0.5, 1.0, 2.0]


def test_an_end_at_ones_own_limit_is_an_end_where_the_package_has_no_limit() -> None:
    task = training(Functional(factory="functional_environments:hurried", limit=3))
    state, step = jax.jit(task.reset)(jax.random.key(0)), jax.jit(task.step)
    for _ in range(3):
        state = step(state, jnp.zeros(3))
    assert state.timestep.terminated


def test_a_class_is_found_by_name_and_trained(tmp_path: Path) -> None:
    config = resolve.train_config(WALK)
    assert config.env == Functional(factory=WALK)
    summary = seedbed.train(WALK, run=tmp_path / "run", steps=2_000, evaluate_every=0)
    assert summary["env_steps"] >= 2_000
    again = saved_config(RunFolder.read(tmp_path / "run"))
    assert again.env == config.env
    assert flags.command(again).split()[:3] == ["seedbed", "train", f"{WALK}/ppo"]


def test_a_folder_of_strangers_imports_no_environment(tmp_path: Path) -> None:
    assert registry.code_of(training(Functional(factory=WALK))) == WALK
    write_run(tmp_path / "run", resolve.train_config(WALK))
    file = tmp_path / "run" / "config.json"
    data = json.loads(file.read_text())
    data["env"]["factory"] = "nowhere_to_be_found:Walk"
    file.write_text(json.dumps(data))
    file.chmod(0o666)
    with pytest.raises(
        SeedbedError, match="names the code nowhere_to_be_found:Walk, which is not imp"
    ):
        saved_config(RunFolder.read(tmp_path / "run"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"factory": "functional_environment:Walk"}, "no module 'functional_environment'"),
    "no such callable": (
        {"factory": "functional_environments:Wlk"},
        "no 'Wlk' in it; did you mean Walk",
    ),
    "no such keyword": (
        {"factory": WALK, "kwargs": {"slips": 1}},
        "raised TypeError: .*unexpected keyword argument 'slips'",
    ),
    "no such parameter": (
        {"factory": WALK, "params": {"gaol": 1}},
        "the parameters of functional_environments:Walk has no option 'gaol'; did you mean goal",
    ),
    "another form": (
        {"factory": "functional_environments:unfinished"},
        r"a object has no reset: it must be of gymnax's form, reset\(key, params\)",
    ),
    "actions of another kind": (
        {"factory": "functional_environments:wordy"},
        "its actions are left or right, a str: give a Discrete or a Box",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused_by_name(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(SeedbedError, match=message):
        _ = Functional(**options).spec
