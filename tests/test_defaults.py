"""The table of defaults: every kind of task has agents that fit it, with settings that suit it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kinds_of_task import KINDS, example, shown
from saved import read_back
from seedbed import trees
from seedbed.config import defaults
from seedbed.config.defaults import ROWS, Task, configure, task_of
from seedbed.config.resolve import train_config
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import GymEnv
from seedbed.run.options import FusedConfig
from seedbed.run.stacking import stacked_spec
from seedbed.types import ActorState, OnPolicy, SeedbedError, Timestep, Trajectory, action_array


@pytest.mark.parametrize("task", KINDS, ids="-".join)
def test_every_kind_of_task_is_found_and_in_one_row(task):
    env = example(task)
    assert task_of(env) == task
    (row,) = (row for row in ROWS if row.takes(task))
    assert configure(env).name == next(iter(row.agents))
    for agent in row.agents:
        config = configure(env, agent, "x")
        assert config.name == f"x/{agent}"
        if (task.environment, agent) == ("Atari", "r2d2"):
            assert config.env == dataclasses.replace(env, frame_stack=1)  # it has a memory
        else:
            assert config.env == env
        assert isinstance(config.runtime, FusedConfig) == (task.environment == "device")
        assert read_back(config) == config
        assert getattr(config.agent, "reward_clip", 0.0) == 0 or task.environment == "Atari"


def test_no_row_is_for_nothing():
    assert all(any(row.takes(task) for task in KINDS) for row in ROWS)
    assert sum(len(row.actions) for row in ROWS) == len(KINDS)


def trace(agent, spec):
    """Traces acting, evaluating and an update, without compiling; returns what an action looks like."""
    n, key = 2, jax.random.key(0)
    keys, ids = jax.random.split(key, n), jnp.arange(n)
    experience = agent.experience
    rows = experience.unroll if isinstance(experience, OnPolicy) else experience.steps - 1

    def filled(tree, *lead):
        return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)

    def steps(*lead):
        no = jnp.zeros(lead, bool)
        observation = trees.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), spec.observation)
        return Timestep(observation, jnp.zeros(lead), no, no, no)

    def whole(key):
        state = agent.init(key)
        before: ActorState = agent.actor_state(ids, n)
        action, extras, after = agent.act(state.params, before, steps(n), keys, evaluate=False)
        agent.act(state.params, before, steps(n), keys, evaluate=True)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
        trajectory = Trajectory(
            timesteps=steps(rows + 1, n),
            action=filled(action, rows),
            extras=filled(extras, rows),
            actor_state=before,
            params_version=jnp.zeros((rows, n), jnp.int32),
            importance=jnp.ones(n),
        )
        batch = agent.prepare(state, trajectory, key)
        grads, output = agent.gradients(state, batch, key)
        return agent.apply(state, agent.clip_gradient(grads), output), state, action

    after, state, action = jax.eval_shape(whole, key)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (after)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    return action


@pytest.mark.quick(
    "host-vectors-Discrete-*", "*-sac", "host-images-Discrete-impala", "host-vectors-unbounded*"
)
@pytest.mark.parametrize(
    ("task", "agent"),
    [
        (task, agent)
        for task in KINDS
        for agent in next(row.agents for row in ROWS if row.takes(task))
        if task.environment == "host"
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_an_agent_of_the_table_acts_and_learns_in_its_tasks(task, agent):
    config = configure(shown(task.observation, task.action), agent)
    spec = stacked_spec(config.env.make(1, 0).spec, 2)
    action = trace(dataclasses.replace(config.agent, spec=spec), spec)
    wanted = action_array(spec.action)
    assert (action.shape, str(action.dtype)) == ((2, *wanted.shape), wanted.dtype)


@pytest.mark.parametrize(
    ("name", "agent", "kind"),
    [
        ("Pendulum-v1", None, "Ppo"),
        ("Acrobot-v1", None, "Ppo"),
        ("CartPole-v1", "dqn", "Dqn"),
        ("Pendulum-v1", "sac", "Sac"),
        ("FrozenLake-v1", None, "Ppo"),
        ("Blackjack-v1", None, "Ppo"),
        ("ALE/Pong-v5", None, "Impala"),
        ("Ant-v5", None, "Ppo"),
        ("swimmer", None, "Ppo"),
        ("cartpole", "r2d2", "R2d2"),
        ("ant", "sac", "Sac"),
    ],
)
def test_what_a_name_begins_with(name, agent, kind):
    config = train_config(name, agent)
    assert type(config.agent).__name__ == kind
    assert config.name == f"{name}/{agent or kind.lower()}"
    assert getattr(config.agent, "reward_clip", 0.0) == (1.0 if "ALE" in name else 0.0)


def test_a_replay_of_vectors_begins_soon_and_fits_in_memory():
    agent = train_config("CartPole-v1", "dqn").agent
    assert agent.min_size <= 1_000 and agent.capacity <= 100_000


def test_a_preset_goes_before_the_table():
    assert train_config("cartpole").name == "cartpole/ppo"
    assert train_config("cartpole", "ppo").env == CartPole()
    assert task_of(Pendulum()) == Task("device", "vectors", "bounded Box")


@pytest.mark.parametrize(
    ("env", "agent", "words"),
    [
        (
            shown("vectors", "Discrete"),
            "sac",
            "sac does not fit .* takes Discrete actions from vectors",
        ),
        (
            shown("vectors", "unbounded Box"),
            "sac",
            "unbounded Box .*choose ppo or impala or vmpo or awr .sac takes",
        ),
        (shown("images", "bounded Box"), "sac", "from images: choose ppo or impala"),
        (
            GymEnv("Pendulum-v1"),
            "dqn",
            "choose ppo or sac or impala or vmpo or awr .dqn takes Discrete actions",
        ),
        (
            shown("vectors", "MultiDiscrete"),
            "r2d2",
            "choose ppo or impala or vmpo or awr .r2d2 takes Discrete",
        ),
        (
            GymEnv("CartPole-v1"),
            "es",
            "or awr .es takes .*; only of tasks on the device, see `seedbed",
        ),
        (AtariEnv("pong"), "sac", "choose impala or ppo or dqn or r2d2 or vmpo"),
        (GymEnv("Pendulum-v1", kwargs={"wrong": 1}), None, "raised TypeError"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_what_can(env, agent, words):
    with pytest.raises(SeedbedError, match=words) as caught:
        configure(env, agent)
    assert "\n" not in str(caught.value)


def test_the_docs_print_the_table():
    lines = [f"| {' | '.join(cells)} |" for cells in (defaults.COLUMNS, *(r.cells() for r in ROWS))]
    lines.insert(1, "|---" * len(defaults.COLUMNS) + "|")
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    assert "\n".join(lines) in text, "docs/environments.md lacks this table:\n" + "\n".join(lines)
