"""Agents and tasks that break the contract: told by method, what it returned and what is needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from counting_agent import CountingAgent
from described import SECTIONS
from saved import read_back
from seedbed.config import presets
from seedbed.config.resolve import train_config
from seedbed.envs.device import wrappers
from seedbed.envs.host import registry
from seedbed.envs.host.contract import is_on_device
from seedbed.envs.specs import spec_of
from seedbed.run.checking import _Check, check_agent, checked
from seedbed.run.sizes import require_sizes
from seedbed.run.stacking import stacked_spec
from seedbed.types import (
    ActorState,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    EnvState,
    Replay,
    SeedbedError,
    bind,
)

SPEC = EnvSpec(ArraySpec((3,), "float32"), Discrete(7))


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_the_agents_of_presets_keep_the_contract(preset):
    chosen = presets.PRESETS[preset]()
    if is_on_device(chosen.env):
        spec = chosen.env.spec
    else:
        env = chosen.env.make(1, 0)
        spec = stacked_spec(env.spec, chosen.env.frame_stack)
        env.close()
    require_sizes(chosen.agent)
    check_agent(bind(chosen.agent, spec))


@dataclasses.dataclass(frozen=True)
class Wrong(CountingAgent):
    """Breaks the contract in one place."""

    fault: str = ""
    minibatches: int = 2

    def init(self, key):
        state = super().init(key)
        if self.fault == "none":
            state = state._replace(auxiliary=())
        return {"params": state.params} if self.fault == "init" else state

    def actor_state(self, env_ids, num_envs):
        if self.fault == "traced number":
            env_ids = env_ids // max(num_envs - 1, 1)
        state = super().actor_state(env_ids, num_envs)
        if self.fault == "batch only":
            return ActorState(jnp.zeros(self.batch, jnp.int32), env_ids.astype(jnp.int32))
        return state._replace(core=jnp.zeros(9)) if self.fault == "actor_state" else state

    def act(self, params, actor_state, timestep, keys, evaluate):
        if self.fault == "branch" and timestep.reward[0] > 0:
            return None
        if self.fault == "only evaluate" and evaluate:
            raise KeyError("greedy")
        action, extras, after = super().act(params, actor_state, timestep, keys, evaluate)
        return {
            "two": (action, after),
            "float": (action.astype(jnp.float32), extras, after),
            "wide": (action[:, None], extras, after),
            "no state": (action, extras, tuple(after)),
            "extras": (action, {"size": jnp.float32(2)}, after),
            "memory": (action, extras, after._replace(core=after.core.astype(jnp.float32))),
        }.get(self.fault, (action, extras, after))

    def prepare(self, state, trajectory, key):
        batch = super().prepare(state, trajectory, key)
        if self.fault == "prepare":
            batch["mean"] = batch["reward"].mean(0)
        if self.fault == "numpy":
            batch["reward"] = np.asarray(batch["reward"])
        return batch

    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        wide = output._replace(metrics={"loss/total": jnp.zeros(3)})
        nested = output._replace(metrics={"loss": {"total": jnp.zeros(())}})
        absent = output._replace(metrics=None)
        own = output._replace(metrics={"env_steps": jnp.zeros(())})
        whole = output._replace(weight=jnp.int32(1))
        return {
            "gradients": grads,
            "metric": (grads, wide),
            "weight": (grads, whole),
            "nested": (grads, nested),
            "own": (grads, own),
            "absent": (grads, absent),
        }.get(self.fault, (grads, output))

    def clip_gradient(self, grads):
        return grads["mean"] if self.fault == "clip" else grads

    def apply(self, state, grads, output):
        after = super().apply(state, grads, output)
        half = after._replace(params=jax.tree.map(jnp.float16, after.params))
        none = after._replace(auxiliary=None)
        return {"apply": after.params, "half": half, "none": none}.get(self.fault, after)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("init", r"Wrong.init returned a dict; needed is a LearnerState"),
        ("traced number", r"Wrong.actor_state failed at test_checking.py:\d+: TracerBool.*use jnp"),
        (
            "actor_state",
            r"actor_state returned float32\[9\] as leaves.core; needed is .*\[4, ...\]",
        ),
        ("branch", r"Wrong.act failed at test_checking.py:\d+: TracerBool.*use jnp.where"),
        ("only evaluate", r"Wrong.act failed at test_checking.py:\d+: KeyError: 'greedy'"),
        ("two", r"act returned \(int32\[4\], an ActorState\); needed is a tuple of action, extras"),
        ("float", r"act returned float32\[4\] as action; needed is int32\[4\]"),
        ("wide", r"act returned int32\[4,1\] as action; needed is int32\[4\]"),
        ("extras", r"act returned float32\[\] as extras\['size'\]; needed is a shape \[4, ...\]"),
        ("memory", r"act returned float32\[4\] as actor state.core; needed is int32\[4\]"),
        (
            "prepare",
            r"prepare returned float32\[4\] as batch\['mean'\]; needed is axis 1 of a size that 2",
        ),
        ("numpy", r"Wrong.prepare failed at test_checking.py:\d+: TracerArray.*jnp, not np"),
        ("gradients", r"gradients returned a dict; needed is a tuple of gradients and Output"),
        ("metric", r"gradients returned float32\[3\] as metric 'loss/total'; needed is a scalar"),
        ("weight", r"gradients returned int32\[\] as Output.weight; needed is float32\[\]"),
        ("clip", r"clip_gradient returned nothing as gradients\['mean'\]; needed is float32\[\]"),
        ("apply", r"apply returned a dict; needed is a LearnerState"),
        ("no state", r"act returned nothing as actor state.core; needed is int32"),
        ("batch only", r"actor_state returned int32\[4\] as leaves.core; needed is .*\[5, ...\]"),
        (
            "own",
            r"gradients returned the metric 'env_steps', which a run has itself; needed is ano",
        ),
        ("nested", r"gradients returned a dict as metric 'loss'; needed is a scalar"),
        ("absent", r"gradients returned None as metrics; needed is a dict of scalars"),
        ("none", r"apply returned learner state of the structure .*None.*; needed is"),
        (
            "half",
            r"apply returned float16\[\] as learner state.params\['mean'\]; needed is float32",
        ),
    ],
)
def test_what_an_agent_gets_wrong_is_named(fault, text):
    checked(Wrong(), SPEC)
    with pytest.raises(SeedbedError, match=text):
        checked(Wrong(fault=fault), SPEC)


def test_the_figures_of_a_run_are_no_names_for_an_agents():
    agent = _Check(bind(CountingAgent(), SPEC))
    for title, _, described in SECTIONS:
        if title == "Agents":
            agent._names("gradients", described)
            continue
        for name in described:
            with pytest.raises(SeedbedError, match="which a run has itself"):
                agent._names("gradients", {name: 0.0})


@functools.lru_cache
def grid():
    return jnp.linspace(0.0, 1.0, 4)


@dataclasses.dataclass(frozen=True)
class Keeping(CountingAgent):
    """Right, but it keeps arrays, and has keys in its batch."""

    @functools.cached_property
    def weights(self):
        return jnp.ones(4)

    def init(self, key):
        state = super().init(key)
        return state._replace(auxiliary=self.weights + grid())

    def prepare(self, state, trajectory, key):
        batch = super().prepare(state, trajectory, key)
        batch["key"] = jax.random.split(key, batch["reward"].shape)
        batch["reward"] = batch["reward"] + 0 * (self.weights + grid())[None]
        return batch


def test_what_an_agent_keeps_is_not_of_tracing():
    grid.cache_clear()
    agent = checked(Keeping(), SPEC)
    assert agent.weights.tolist() == [1.0] * 4 and grid().shape == (4,)
    assert jax.jit(agent.init)(jax.random.key(0)).auxiliary.shape == (4,)


class Sharing(CountingAgent):
    """Right: rates of whole numbers, and a batch of its own width."""

    def actor_state(self, env_ids, num_envs):
        state = super().actor_state(env_ids, num_envs)
        return state._replace(
            per_env=(env_ids * 4 // jnp.maximum(num_envs, 1)) + env_ids % num_envs
        )

    def prepare(self, state, trajectory, key):
        batch = super().prepare(state, trajectory, key)
        return jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)


def test_what_the_contract_leaves_open_is_taken():
    checked(Sharing(), SPEC)


class Started(CountingAgent):
    """Begins with a wrong part."""

    part = ""

    def init(self, key):
        state = super().init(key)
        wrong = {"updates": jnp.zeros(1, jnp.int32), "progress": jnp.int32(0)}
        return state._replace(**{self.part: wrong[self.part]})


@pytest.mark.parametrize("part", ["updates", "progress"])
def test_counters_of_a_wrong_kind_are_named(part, monkeypatch):
    monkeypatch.setattr(Started, "part", part)
    with pytest.raises(SeedbedError, match=f"Started.init returned int32.* as {part}; needed is"):
        checked(Started(), SPEC)


def test_where_a_library_fails_the_users_line_is_named():
    class Library(CountingAgent):
        def apply(self, state, grads, output):
            optax.adam(1e-3).update({"other": jnp.zeros(2)}, optax.adam(1e-3).init(grads))
            return state

    with pytest.raises(SeedbedError, match=r"Library.apply failed at test_checking.py:\d+"):
        check_agent(bind(Library(), SPEC))


class Drawn(CountingAgent):
    """Learns from replay, with priorities of a wrong shape."""

    @property
    def experience(self):
        return Replay(4, 1, 1, 100, 10, 1.0, priority_exponent=0.5)

    def initial_priorities(self, timesteps, extras):
        return jnp.ones(timesteps.first.shape)


def test_priorities_are_one_for_each_item():
    with pytest.raises(
        SeedbedError, match=r"initial_priorities returned float32\[2,4\].*float32\[4\]"
    ):
        checked(Drawn(), SPEC)


@pytest.mark.parametrize("size", ["batch", "unroll", "epochs", "minibatches"])
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_below_1_are_refused(size, value):
    with pytest.raises(SeedbedError, match=f"CountingAgent: {size} is {value}; give at least 1"):
        require_sizes(CountingAgent(**{size: value}))


@dataclasses.dataclass(frozen=True)
class NoDefault(CountingAgent):
    beta: float = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Raises(CountingAgent):
    def __post_init__(self):
        raise ValueError("too large for me")


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (
            "test_checking:NoDefault",
            "agent 'test_checking:NoDefault': its field 'beta' has no default",
        ),
        ("test_checking:Raises", "cannot be made with its defaults: ValueError: too large for me"),
        (CountingAgent(), r"agent is CountingAgent\(.*; give its name"),
    ],
)
def test_agents_that_cannot_be_made_are_named(agent, text):
    with pytest.raises(SeedbedError, match=text):
        train_config("seedbed.envs.device.probes:DelayProbe", agent)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with a fault."""

    fault: str = ""
    episode_steps: int = 3
    frame_skip: int = 1

    @property
    def spec(self):
        if self.fault == "bytes":
            return EnvSpec(ArraySpec((24, 24, 3), "uint8"), Discrete(2))
        return EnvSpec(ArraySpec((2,), "float32"), Box((1,), (-1.0,), (1.0,)))

    def reset(self, key):
        x = jax.random.normal(key, (3,) if self.fault == "reset" else (2,))
        return EnvState.opening(x, x)

    def step(self, state, action):
        if self.fault == "plain":
            return state.inner, 1.0, False
        if self.fault == "raises":
            return state.inner @ jnp.zeros((3, 3))
        if self.fault in ("text", "metrics"):
            inner = {"x": state.inner, "mode": "a"} if self.fault == "text" else state.inner
            return EnvState.after(inner, state.inner, 1.0, False, {"a": None})
        if self.fault == "carried":
            arrived = state.timestep._replace(first=np.bool_(False))
            return state._replace(timestep=arrived, metrics={**state.metrics})
        # Numbers and flags of Python are converted.
        return EnvState.after(state.inner, state.inner, 1.0, False)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("bytes", r"Task.spec: the observation has uint8\[24,24,3\]; on the device give float32"),
        ("reset", r"Task.reset: the observation is float32\[3\], not float32\[2\]"),
        ("plain", r"Task.step returned a tuple; return EnvState.opening"),
        ("raises", r"Task.step failed at test_checking.py:\d+: TypeError"),
        ("text", r"Task.step: `inner` holds 'a', a str; keep arrays there"),
        ("metrics", r"Task.step: the metric 'a' is a NoneType; return a float32 scalar"),
    ],
)
def test_what_a_task_gets_wrong_is_named(fault, text):
    def episode(task):
        env = wrappers.training(task)
        return jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(1)), jax.random.key(0))

    assert episode(Task()).timestep.reward.dtype == np.float32
    # A task may also change its state in parts; it finds no metrics but its own there.
    assert episode(Task(fault="carried")).timestep.reward.dtype == np.float32
    with pytest.raises(SeedbedError, match=text):
        episode(Task(fault=fault))


class Pair(NamedTuple):
    x: jax.Array
    t: jax.Array


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@dataclasses.dataclass(frozen=True)
class Kept(Task):
    def reset(self, key):
        x = jnp.zeros(2)
        return EnvState.opening(Node(x) if self.fault == "" else Pair(x, x), x)

    def step(self, state, action):
        inner = state.inner if self.fault == "" else tuple(state.inner)
        return EnvState.after(inner, jnp.zeros(2), 1.0, False)


def test_any_tree_may_be_a_tasks_state_if_it_stays_one():
    def episode(task):
        env = wrappers.training(task)
        return jax.eval_shape(lambda key: env.step(env.reset(key), jnp.zeros(1)), jax.random.key(0))

    episode(Kept())
    with pytest.raises(SeedbedError, match="Kept: `inner` after reset is .*Pair.*, after step"):
        episode(Kept(fault="tuple"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (lambda: EnvSpec(ArraySpec([3], "float32"), Discrete(2)), r"give the shape as a tuple"),
        (lambda: EnvSpec(ArraySpec((3), "float32"), Discrete(2)), r"give the shape as a tuple"),
        (lambda: EnvSpec(ArraySpec((3,), jnp.float32), Discrete(2)), r"on the device give float32"),
        (lambda: EnvSpec(ArraySpec((3,), "float32"), Discrete(0)), r"give at least 1 choice"),
        (lambda: EnvSpec(ArraySpec((3,), "float32"), 3), r"the action is 3, not a Discrete"),
        (lambda: (1, 2), r"Given.spec is a tuple: give an EnvSpec"),
        (lambda: 1 / 0, r"Given.spec failed: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_in_a_spec_is_named(spec, text):
    class Given:
        spec = property(lambda self: made())

    made = spec
    with pytest.raises(SeedbedError, match=text):
        spec_of(Given())


def test_a_spec_that_is_no_property_is_named():
    class Method:
        def spec(self):
            return SPEC

    with pytest.raises(SeedbedError, match="Method.spec is a method; write @property"):
        spec_of(Method())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epochs": 2}, "learns from replay: epochs is 2 and minibatches 1; give 1 and 1"),
        ({"minibatches": 2}, "epochs is 1 and minibatches 2"),
        ({"epochs": 1.0}, "epochs is 1.0; give at least 1, a whole number"),
    ],
)
def test_sizes_of_replay_that_cannot_be_are_refused(changes, text):
    class Replayed(CountingAgent):
        experience = Replay(4, 1, 1, 100, 10, 1.0)

    with pytest.raises(SeedbedError, match=text):
        require_sizes(Replayed(**changes))


@dataclasses.dataclass(frozen=True)
class NoLimit:
    frame_skip: int = 1
    spec: EnvSpec = SPEC

    def reset(self, key):
        raise NotImplementedError

    def step(self, state, action):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Massive(Task):
    mass: float = dataclasses.field(kw_only=True)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("NoLimit", "the task test_checking:NoLimit has no 'episode_steps'"),
        ("Massive", "the task test_checking:Massive: its field 'mass' has no default"),
    ],
)
def test_tasks_that_cannot_be_made_are_named(task, text):
    with pytest.raises(SeedbedError, match=text):
        registry.resolve(f"test_checking:{task}")
    with pytest.raises(SeedbedError, match=text):
        train_config(f"test_checking:{task}/ppo")


@dataclasses.dataclass(frozen=True)
class Computed(Task):
    """Right: what depends on the options is made after them, and is no option."""

    size: int = 2
    half: int = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "half", self.size // 2)


def test_fields_that_are_no_options_are_not_saved():
    config = train_config("test_checking:Computed")
    assert read_back(config) == config


@pytest.mark.parametrize("bounds", [-1.0, (-1.0,), [-1.0]])
def test_a_box_has_bounds_for_each_element(bounds):
    with pytest.raises(
        SeedbedError, match=r"Box of shape \(2,\): low is .*; give a tuple of 2 numbers"
    ):
        Box((2,), bounds, (1.0, 1.0))


@pytest.mark.parametrize("bounds", [((1.0,), (-1.0,)), ((float("nan"),), (1.0,)), (("a",), (1.0,))])
def test_a_box_is_a_range(bounds):
    with pytest.raises(SeedbedError, match="is no range of numbers"):
        Box((1,), *bounds)
    with pytest.raises(SeedbedError, match=r"shape is 1; give a tuple"):
        Box(1, (-1.0,), (1.0,))
