"""Checks of an agent or a task of one's own: what the contract asks and shapes do not show.

Each check raises SeedbedError, which names the method, what it did, and what to do about it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import simd
from seedbed.envs.choices import random_choices
from seedbed.envs.device.wrappers import auto_reset, innermost, limited
from seedbed.ops.tracing import naming
from seedbed.run import checking
from seedbed.testing.probes import Noise
from seedbed.testing.trainers import ReplayTrainer, Trainer
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    Box,
    Environment,
    EnvSpec,
    LearnerState,
    OnPolicy,
    Output,
    Replay,
    SeedbedError,
    Timestep,
    Trajectory,
    Tree,
    bind,
)

_AGENTS, _TASKS = "docs/write-an-agent.md", "docs/write-a-task.md"
_ENVS = 16  # that a task is stepped in
_LARGEST = 1e9  # of a bound of actions; a larger one stands for none


def check_agent(agent: Agent, spec: EnvSpec | None = None, seed: int = 0) -> None:
    """Checks an agent for environments of a spec, by default its own; raises SeedbedError.

    First each method is traced, and the shapes are compared with `seedbed.types.Agent`. Then the agent acts
    on random observations in episodes of both kinds of end, makes one update, and is checked for: initial
    states that are finite and share no buffer; methods whose results depend on their arguments alone; acting
    that is one environment's own affair and forgets its memory at `first`; a gradient that is finite, to
    which rows of resets add nothing, with the number of valid rows as its weight; priorities above 0; and an
    update that counts itself, leaves `progress` alone and changes a parameter.

    It costs some seconds, most of them compiling. For a large agent, give a copy with a small batch.
    """
    if spec is None and agent.spec is None:
        raise SeedbedError(f"{type(agent).__name__}.spec is None; give check_agent a spec")
    agent = bind(agent, spec or agent.spec)  # type: ignore[arg-type]
    checking.check_agent(agent)
    _AgentCheck(agent, seed).run()


class _AgentCheck:
    """The checks of a bound agent with arrays."""

    def __init__(self, agent: Agent, seed: int) -> None:
        assert agent.spec is not None
        self._agent, self._spec, self._seed = agent, agent.spec, seed
        self._name = type(agent).__name__
        self._key = jax.random.key(seed)
        self._act_compiled = jax.jit(agent.act, static_argnames="evaluate")

    def run(self) -> None:
        """Runs all checks, each with what those before it made."""
        state = self._init()
        self._act(state)
        trajectory = self._trajectory()
        grads, output = self._gradient(state, trajectory)
        self._apply(state, grads, output)

    def _init(self) -> LearnerState:
        self._require_pure("init", self._agent.init, self._key)
        state = self._agent.init(self._key)
        self._finite("init", "the learner state", state)
        buffers: dict[int, str] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            where = leaf.unsafe_buffer_pointer() if isinstance(leaf, jax.Array) else id(leaf)
            name = jax.tree_util.keystr(path)
            if leaf.size and where in buffers:
                self._refuse(
                    "init", f"gave {buffers[where]} and {name} one buffer",
                    "copy one of them with jnp.copy: runtimes write over what they are given",
                )  # fmt: skip
            buffers[where] = name
        return state

    def _act(self, state: LearnerState) -> None:
        """Checks acting in a few environments: purity, independence of the others, memory."""
        agent, size = self._agent, 6
        env = Noise(self._spec, size, self._seed)
        actor_state = agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)
        timestep = env.reset()
        key = self._key
        order = np.array([2, 1, 0, 0, 0, 0])  # three of them elsewhere, and with others
        given = state.params, actor_state, timestep, jax.random.split(key, size)
        self._require_pure("act", lambda *given: agent.act(*given, evaluate=False), *given)
        for _ in range(8):
            key, one = jax.random.split(key)
            keys = jax.random.split(one, size)
            given = state.params, actor_state, timestep, keys
            found = self._act_compiled(*given, evaluate=False)
            self._finite("act", "action, extras and actor state", found)
            turned = jax.tree.map(lambda x: x[order], (actor_state, timestep, keys))
            others = self._act_compiled(state.params, *turned, evaluate=False)
            self._same(
                "act", "the result for an environment depends on the others or on its place among them",
                jax.tree.map(lambda x: x[order], found), others,
                "compute each row of a batch by itself, with its own key",
            )  # fmt: skip
            action, _, actor_state = found
            timestep = env.step(np.asarray(action))
        self._forget(state, actor_state, timestep)

    def _forget(self, state: LearnerState, actor_state: ActorState, timestep: Timestep) -> None:
        size = len(timestep.first)
        first = timestep._replace(first=np.ones_like(timestep.first))
        fresh = self._agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)

        def act(core: Tree) -> Tree:
            given = actor_state._replace(core=core), first, jax.random.split(self._key, size)
            return self._act_compiled(state.params, *given, evaluate=False)

        self._same(
            "act", "what it remembers goes on into the next episode",
            act(actor_state.core), act(fresh.core),
            "where `timestep.first` is set, act as with the core of `actor_state`",
        )  # fmt: skip

    def _trajectory(self) -> Trajectory:
        """Returns a batch of random experience, as a runtime makes it of what the agent did."""
        agent, seed = self._agent, self._seed

        def noise(num_envs: int, seed: int) -> Noise:
            return Noise(self._spec, num_envs, seed)

        if isinstance(agent.experience, OnPolicy):
            trainer = Trainer(agent, noise, 0, seed)
            size = agent.experience.batch
            actor_state = agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)
            return trainer.collect(actor_state, trainer.env.reset(), 0)[0]
        experience = agent.experience
        # Enough for a few items of each environment.
        steps = 2 * (experience.steps + experience.period) + 8
        return ReplayTrainer(agent, noise, steps, 8, seed).train(learning=False).draw()[1]

    def _gradient(self, state: LearnerState, trajectory: Trajectory) -> tuple[Tree, Output]:
        agent, key = self._agent, self._key

        def gradient(
            state: LearnerState, trajectory: Trajectory, key: Array
        ) -> tuple[Tree, Output]:
            batch = agent.prepare(state, trajectory, key)
            parts = agent.minibatches
            part = jax.tree.map(lambda x: x[:, : x.shape[1] // parts], batch)
            return agent.gradients(state, part, key)

        read = state._replace(optimizer_state=())
        self._require_pure("gradients", gradient, read, trajectory, key)
        compiled = jax.jit(gradient)
        grads, output = found = compiled(read, trajectory, key)
        self._finite("gradients", "the gradient and its metrics", (grads, output.metrics))
        steps = trajectory.timesteps
        size = steps.first.shape[1] // agent.minibatches
        self._require_weight(float(output.weight), ~steps.first[1:, :size])
        reset = steps.first[1:]
        rolled = jax.tree.map(
            lambda x: np.where(_over(reset, x), np.roll(x, 1, (0, 1)), x),
            (trajectory.action, trajectory.extras),
        )
        other = trajectory._replace(action=rolled[0], extras=rolled[1])
        if not jax.tree.leaves(trajectory.actor_state.core):
            # A network with a memory may see the reward, which is 0 there.
            reward = np.where(steps.first, 9.0, steps.reward).astype(np.float32)
            other = other._replace(timesteps=steps._replace(reward=reward))
        self._same(
            "gradients", "it learns from rows that are resets", found, compiled(read, other, key),
            "leave out rows that `trajectory_masks` calls invalid",
        )  # fmt: skip
        if isinstance(agent.experience, Replay) and agent.experience.priority_exponent:
            least = float(jnp.min(output.priorities))
            if not least > 0:
                remedy = "give numbers above 0, if need be by adding a small one"
                self._refuse("gradients", f"gave the priority {least}", remedy)
        return grads, output

    def _require_weight(self, weight: float, valid: Array) -> None:
        experience = self._agent.experience
        learned = valid
        if not isinstance(experience, OnPolicy):
            learned = valid[experience.burn_in :]
        # Agents of n steps have a row an item: its opening one.
        allowed = {int(valid.sum()), int(learned.sum()), int(learned[0].sum())}
        if weight not in allowed:
            rows = " or ".join(map(str, sorted(allowed)))
            self._refuse(
                "gradients", f"gave {weight} as Output.weight, but {rows} of {valid.size} rows are valid",
                "give the number of valid rows: devices average gradients with it",
            )  # fmt: skip

    def _apply(self, state: LearnerState, grads: Tree, output: Output) -> None:
        given = self._agent.clip_gradient(grads), output._replace(priorities=())
        self._require_pure("apply", self._agent.apply, state, *given)
        after = jax.jit(self._agent.apply)(state, *given)
        self._finite("apply", "the learner state", after)
        if int(after.updates) != int(state.updates) + 1:
            self._refuse("apply", f"made `updates` {int(after.updates)} of 0", "add one")
        if float(after.progress) != float(state.progress):
            self._refuse("apply", "changed `progress`", "leave it: the runtime sets it")
        pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True)
        if all(bool(jnp.array_equal(new, old)) for new, old in pairs):
            self._refuse("apply", "changed no parameter", "apply the gradient to `params`")

    def _require_pure(self, method: str, function: Any, *given: Tree) -> None:
        """Raises SeedbedError if tracing a method twice gives two programs."""
        with naming(f"{self._name}.{method}", _AGENTS):
            # An inner lambda: JAX would not trace the same function again.
            one, other = (jax.make_jaxpr(lambda *given: function(*given))(*given) for _ in range(2))
        texts = [re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr)) for traced in (one, other)]
        pairs = zip(one.consts, other.consts, strict=False)
        same = all(np.array_equal(_numbers(a), _numbers(b)) for a, b in pairs)
        if texts[0] != texts[1] or not same:
            self._refuse(
                method, "does something else when it is called again with the same arguments",
                "draw all random numbers from the key, and keep nothing between calls",
            )  # fmt: skip

    def _same(self, method: str, fault: str, one: Tree, other: Tree, remedy: str) -> None:
        for path, (a, b) in _pairs(one, other):
            a, b = (np.asarray(_numbers(x), np.float64) for x in (a, b))
            if not np.allclose(a, b, rtol=1e-3, atol=1e-5 * (1 + np.abs(a).max(initial=0.0))):
                by = f"result{jax.tree_util.keystr(path)} differs by {np.abs(a - b).max():.3g}"
                self._refuse(method, f"went wrong: {fault} ({by})", remedy)

    def _finite(self, method: str, what: str, tree: Tree) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if not np.isfinite(np.asarray(_numbers(leaf), np.float64)).all():
                self._refuse(
                    method, f"returned a number that is not finite ({what}{jax.tree_util.keystr(path)})",
                    "mask the input of a log, a root or a quotient, not only its result",
                )  # fmt: skip

    def _refuse(self, method: str, fault: str, remedy: str) -> None:
        raise SeedbedError(f"{self._name}.{method} {fault}; {remedy} (see {_AGENTS})")


def check_task(task: Environment, steps: int = 1000, seed: int = 0) -> None:
    """Steps a task on the device with random actions; raises SeedbedError if it breaks the contract.

    Sixteen environments take `steps` steps, with actions also beyond the bounds of a Box, in one kernel if
    the task has one (`simd.vectorize` warns if not). Checked are what `spec`, `reset` and `step` say of
    shapes and dtypes; that both depend on their arguments alone; that rewards, observations and metrics are
    finite; that an episode opens with reward 0, and ends some time; and that the task can be an option: it
    is hashable, and all its fields have defaults (of a task in wrappers, its own).
    """
    name = type(task).__name__
    inner = innermost(task)
    for field in dataclasses.fields(inner):  # type: ignore[arg-type]
        if field.default is field.default_factory is dataclasses.MISSING:
            raise SeedbedError(
                f"{type(inner).__name__}.{field.name} has no default; give one, for `seedbed train` "
                f"makes the task without arguments (see {_TASKS})"
            )
    with naming(f"{name}.__hash__", _TASKS):
        hash(task)
    env = auto_reset(limited(task))
    keys = jax.random.split(jax.random.key(seed), _ENVS)
    with naming(f"{name}.reset", _TASKS):
        # Inner lambdas: JAX would not trace the same function again.
        one, other = (jax.jit(simd.vectorize(lambda key: env.reset(key)))(keys) for _ in range(2))
    _require_equal(name, "reset", one, other)
    opened = one.timestep
    if (
        np.any(opened.reward)
        or np.any(opened.terminated | opened.truncated)
        or not np.all(opened.first)
    ):
        raise SeedbedError(
            f"{name}.reset opens an episode with a reward, at its end, or without `first`; return "
            f"EnvState.opening(...) (see {_TASKS})"
        )
    rng = np.random.default_rng(seed)
    step = jax.jit(simd.vectorize(env.step))
    state, ends = one, 0
    for t in range(steps):
        _require_finite(name, t, state.timestep, state.metrics)
        state = step(state, _random_actions(task.spec, rng, state.timestep.observation))
        ends += int(np.sum(state.timestep.terminated | state.timestep.truncated))
        if t == 0:
            action = _random_actions(task.spec, rng, state.timestep.observation)
            again = jax.jit(simd.vectorize(lambda *given: env.step(*given)))
            _require_equal(name, "step", step(state, action), again(state, action))
    if not ends and not task.episode_steps:
        raise SeedbedError(
            f"{name}: no episode ended in {steps:,} steps of {_ENVS} environments, and there is no time "
            f"limit; set episode_steps (see {_TASKS})"
        )


def _random_actions(spec: EnvSpec, rng: np.random.Generator, observation: Tree) -> Array:
    """Draws actions for observations `[_ENVS, ...]`: a Box beyond its bounds, and no forbidden choice."""
    action = spec.action
    if isinstance(action, Box):
        low, high = (np.array(bound, np.float64) for bound in (action.low, action.high))
        low = np.where(low > -_LARGEST, low, np.where(high < _LARGEST, high, 2) - 4)
        high = np.where(high < _LARGEST, high, low + 4)
        middle, half = (low + high) / 2, (high - low) / 2
        drawn = middle + 1.5 * half * rng.uniform(-1, 1, (_ENVS, len(low)))
        return drawn.reshape(_ENVS, *action.shape).astype(np.float32)
    return random_choices(action, observation, _ENVS, rng)


def _require_finite(name: str, t: int, timestep: Timestep, metrics: dict[str, Array]) -> None:
    given = {"observation": timestep.observation, "reward": timestep.reward, "metrics": metrics}
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        if not np.isfinite(np.asarray(leaf, np.float64)).all():
            place = "".join(str(getattr(part, "key", part)) + " " for part in path).strip()
            raise SeedbedError(
                f"{name}: {place} is not finite after {t} steps of random actions; bound what can grow, or "
                f"terminate the episode before (see {_TASKS})"
            )


def _require_equal(name: str, method: str, one: Tree, other: Tree) -> None:
    for path, (a, b) in _pairs(one, other):
        a, b = _numbers(a), _numbers(b)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            raise SeedbedError(
                f"{name}.{method} is not a function of its arguments: two calls with the same gave different "
                f"{jax.tree_util.keystr(path)[1:]}; draw all random numbers from the key (see {_TASKS})"
            )


def _pairs(one: Tree, other: Tree) -> Any:
    flat = jax.tree_util.tree_flatten_with_path(one)[0]
    others = jax.tree.leaves(other)
    return [(path, (leaf, twin)) for (path, leaf), twin in zip(flat, others, strict=True)]


def _numbers(leaf: Array) -> Array:
    """Returns an array as numpy has it; a key as the numbers that it is made of."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _over(mask: Array, leaf: Array) -> Array:
    """Returns a mask `[T, B]` with axes of size 1 for the others of a leaf `[T, B, ...]`."""
    return mask.reshape(*mask.shape, *(1,) * (np.ndim(leaf) - 2))
