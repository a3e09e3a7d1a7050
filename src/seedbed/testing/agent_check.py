"""The checks of an agent: what the contract asks and shapes do not show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.ops.masks import FORBIDDEN, masked
from seedbed.ops.tracing import naming
from seedbed.spaces import num_choices
from seedbed.testing.comparing import equal, numbers, pairs
from seedbed.testing.probes import Noise
from seedbed.testing.trainers import ReplayTrainer, Trainer, require_priorities
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    Box,
    LearnerState,
    MultiDiscrete,
    OnPolicy,
    Output,
    Replay,
    SeedbedError,
    Trajectory,
    Tree,
)

DOCS = "docs/write-an-agent.md"
LARGEST = 1e9
"""The largest bound of actions: a larger one stands for none."""
_DRAWS = 16  # batches of which one is to have a reset
_UPDATES = 4  # after which a parameter has changed, also where the rate begins at 0


class AgentCheck:
    """The checks of a bound agent with arrays."""

    def __init__(self, agent: Agent, seed: int) -> None:
        assert agent.spec is not None
        self._agent, self._spec, self._seed = agent, agent.spec, seed
        self._name = type(agent).__name__
        self._key = jax.random.key(seed)
        self._act_compiled = jax.jit(agent.act, static_argnames="evaluate")
        self._sees_reward = False  # whether it acts by the reward of the step before

    def run(self) -> None:
        """Runs all checks, each with what those before it made."""
        state = self._init()
        for evaluate in (False, True):
            self._act(state, evaluate)
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

    def _act(self, state: LearnerState, evaluate: bool) -> None:
        """Checks acting in a few environments: purity, independence of the others, actions, memory."""
        agent, size = self._agent, 6
        env = Noise(self._spec, size, self._seed)
        order = np.array([2, 1, 0, 0, 0, 0])  # three of them elsewhere, and with others
        actor_state = self._actor_state(size, order)
        timestep, key = env.reset(), self._key
        given = state.params, actor_state, timestep, jax.random.split(key, size)
        self._require_pure("act", lambda *given: agent.act(*given, evaluate=evaluate), *given)
        for _ in range(8):
            key, one = jax.random.split(key)
            keys = jax.random.split(one, size)
            given = state.params, actor_state, timestep, keys
            found = self._act_compiled(*given, evaluate=evaluate)
            self._finite("act", "action, extras and actor state", found)
            turned = jax.tree.map(lambda x: x[order], (actor_state, timestep, keys))
            others = self._act_compiled(state.params, *turned, evaluate=evaluate)
            self._same(
                "act", "the result for an environment depends on the others or on its place among them",
                jax.tree.map(lambda x: x[order], found), others,
                "compute each row of a batch by itself, with its own key",
            )  # fmt: skip
            action, _, actor_state = found
            self._require_allowed(np.asarray(action), timestep.observation)
            told = timestep._replace(reward=timestep.reward + 9)
            others = self._act_compiled(state.params, *given[1:2], told, keys, evaluate=evaluate)
            self._sees_reward |= not equal(found, others)
            timestep = env.step(np.asarray(action))
        first = timestep._replace(first=np.ones_like(timestep.first))
        fresh = agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)

        def act(core: Tree) -> Tree:
            given = actor_state._replace(core=core), first, jax.random.split(self._key, size)
            return self._act_compiled(state.params, *given, evaluate=evaluate)

        self._same(
            "act", "what it remembers goes on into the next episode",
            act(actor_state.core), act(fresh.core),
            "where `timestep.first` is set, act as with the core of `actor_state`",
        )  # fmt: skip

    def _actor_state(self, size: int, order: Array) -> ActorState:
        """Returns the first actor state of some environments, which is to be that of their ids."""
        ids = jnp.arange(size, 2 * size, dtype=jnp.uint32)
        found, turned = (self._agent.actor_state(each, 2 * size) for each in (ids, ids[order]))
        self._same(
            "actor_state", "what an environment begins with depends on its place in `env_ids`",
            jax.tree.map(lambda x: x[order], found), turned,
            "compute it from the environment's own id",
        )  # fmt: skip
        return found

    def _require_allowed(self, action: Array, observation: Tree) -> None:
        """Raises SeedbedError for an action beyond its bounds, or one that a mask forbids."""
        space, size = self._spec.action, len(action)
        chosen = action.reshape(size, -1)
        if isinstance(space, Box):
            low, high = (np.array(bound, np.float32) for bound in (space.low, space.high))
            rounding = 1e-5 * np.maximum(1, np.abs(chosen))
            allowed = (chosen >= low - rounding) & (chosen <= high + rounding)
            fault, remedy = "beyond the bounds", "squash it"
        else:
            scores = masked(space, jnp.zeros((size, num_choices(space))), observation)
            nvec = space.nvec if isinstance(space, MultiDiscrete) else (space.n,)
            parts = np.split(np.asarray(scores) > FORBIDDEN, np.cumsum(nvec)[:-1], axis=-1)
            within = (chosen >= 0) & (chosen < nvec)
            allowed = within & np.stack(
                [
                    part[np.arange(size), c % n]
                    for part, c, n in zip(parts, chosen.T, nvec, strict=True)
                ],
                -1,
            )
            fault, remedy = (
                "that is no choice, or a forbidden one",
                "take scores from `ops.masks.masked`",
            )
        if not (fine := allowed.all(-1)).all():
            self._refuse("act", f"returned an action {fault} ({action[~fine][0]})", remedy)

    def _trajectory(self) -> Trajectory:
        """Returns a batch of random experience, as a runtime makes it of what the agent did."""
        agent, seed = self._agent, self._seed

        def noise(num_envs: int, seed: int) -> Noise:
            return Noise(self._spec, num_envs, seed)

        def drawn() -> Iterator[Trajectory]:
            if isinstance(experience := agent.experience, OnPolicy):
                trainer, size = Trainer(agent, noise, 0, seed), experience.batch
                actor_state = agent.actor_state(jnp.arange(size, dtype=jnp.uint32), size)
                timestep = trainer.env.reset()
                for number in range(_DRAWS):
                    found, actor_state, timestep = trainer.collect(actor_state, timestep, number)
                    yield found
                return
            # Enough for a few items of each environment.
            steps = 2 * (experience.steps + experience.period) + 8
            collected = ReplayTrainer(agent, noise, steps, 8, seed).train(learning=False)
            for _ in range(_DRAWS):
                yield collected.draw()[1]

        # Of a small batch, one with resets shows what a batch without any hides.
        first: Trajectory | None = None
        for trajectory in drawn():
            size = trajectory.timesteps.first.shape[1] // agent.minibatches
            if trajectory.timesteps.first[1:, :size].any():
                return trajectory
            first = first or trajectory
        assert first is not None
        return first

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
        if isinstance(agent.experience, Replay) and agent.experience.priority_exponent:
            try:
                require_priorities(f"{self._name}.gradients", output.priorities)
            except SeedbedError as error:
                raise SeedbedError(f"{error} (see {DOCS})") from None
        steps = trajectory.timesteps
        size = steps.first.shape[1] // agent.minibatches
        self._require_weight(float(output.weight), ~steps.first[1:, :size])
        reset = steps.first[1:]
        others = self._other_actions(np.asarray(trajectory.action))
        rolled = jax.tree.map(
            lambda x: np.where(_over(reset, x), np.roll(x, 1, (0, 1)), x), trajectory.extras
        )
        action = np.where(_over(reset, others), others, trajectory.action)
        other = trajectory._replace(action=action, extras=rolled)
        if not (self._sees_reward or jax.tree.leaves(trajectory.actor_state.core)):
            # A network that sees the reward, which is 0 there, may act by it.
            reward = np.where(steps.first, 9.0, steps.reward).astype(np.float32)
            other = other._replace(timesteps=steps._replace(reward=reward))
        self._same(
            "gradients", "it learns from rows that are resets", found, compiled(read, other, key),
            "leave out rows that `trajectory_masks` calls invalid",
        )  # fmt: skip
        return grads, output

    def _other_actions(self, action: Array) -> Array:
        """Returns actions `[T, B, ...]` of which none is the given one, and all are allowed by the bounds."""
        space = self._spec.action
        if isinstance(space, Box):
            low, high = (np.reshape(bound, space.shape) for bound in (space.low, space.high))
            # Of one bound, beside it; without any, about 0.
            far = [np.abs(bound) > LARGEST for bound in (low, high)]
            low = np.where(far[0], np.where(far[1], -1.0, high - 2.0), low)
            high = np.where(far[1], low + 2.0, high)
            middle, half = (low + high) / 2, (high - low) / 2
            return np.where(action > middle, middle - half / 2, middle + half / 2).astype(
                np.float32
            )
        nvec = space.nvec if isinstance(space, MultiDiscrete) else space.n
        return ((action + 1) % np.array(nvec)).astype(np.int32)

    def _require_weight(self, weight: float, valid: Array) -> None:
        experience = self._agent.experience
        allowed = {int(valid.sum())}
        if not isinstance(experience, OnPolicy):
            learned = valid[experience.burn_in :]
            # Agents of n steps have a row an item: its opening one.
            allowed = {int(learned.sum()), int(learned[0].sum())}
        if weight not in allowed:
            rows = " or ".join(map(str, sorted(allowed)))
            self._refuse(
                "gradients", f"gave {weight} as Output.weight, but {rows} of {valid.size} rows are valid",
                "give the number of valid rows: devices average gradients with it",
            )  # fmt: skip

    def _apply(self, state: LearnerState, grads: Tree, output: Output) -> None:
        # In the middle of a run, where constants in place of these do not pass.
        updates, progress = 7, 0.5
        state = state._replace(updates=jnp.int32(updates), progress=jnp.float32(progress))
        given = self._agent.clip_gradient(grads), output._replace(priorities=())
        self._require_pure("apply", self._agent.apply, state, *given)
        apply, after = jax.jit(self._agent.apply), state
        for made in range(1, _UPDATES + 1):
            after = apply(after, *given)
            self._finite("apply", "the learner state", after)
            if int(after.updates) != updates + made:
                fault = f"made `updates` {int(after.updates)} of {updates + made - 1}"
                self._refuse("apply", fault, "add one")
            if float(after.progress) != progress:
                self._refuse("apply", "changed `progress`", "leave it: the runtime sets it")
        pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True)
        if all(bool(jnp.array_equal(new, old)) for new, old in pairs):
            fault = f"changed no parameter in {_UPDATES} updates"
            self._refuse("apply", fault, "apply the gradient to `params`")

    def _require_pure(self, method: str, function: Any, *given: Tree) -> None:
        """Raises SeedbedError if tracing a method twice gives two programs."""
        with naming(f"{self._name}.{method}", DOCS):
            # An inner lambda: JAX would not trace the same function again.
            one, other = (jax.make_jaxpr(lambda *given: function(*given))(*given) for _ in range(2))
        texts = [re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr)) for traced in (one, other)]
        pairs = zip(one.consts, other.consts, strict=False)
        same = all(np.array_equal(numbers(a), numbers(b)) for a, b in pairs)
        if texts[0] != texts[1] or not same:
            self._refuse(
                method, "does something else when it is called again with the same arguments",
                "draw all random numbers from the key, and keep nothing between calls",
            )  # fmt: skip

    def _same(self, method: str, fault: str, one: Tree, other: Tree, remedy: str) -> None:
        for path, (a, b) in pairs(one, other):
            a, b = (np.asarray(numbers(x), np.float64) for x in (a, b))
            if not np.allclose(a, b, rtol=1e-3, atol=1e-5 * (1 + np.abs(a).max(initial=0.0))):
                by = f"result{jax.tree_util.keystr(path)} differs by {np.abs(a - b).max():.3g}"
                self._refuse(method, f"went wrong: {fault} ({by})", remedy)

    def _finite(self, method: str, what: str, tree: Tree) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if not np.isfinite(np.asarray(numbers(leaf), np.float64)).all():
                self._refuse(
                    method, f"returned a number that is not finite ({what}{jax.tree_util.keystr(path)})",
                    "mask the input of a log, a root or a quotient, not only its result",
                )  # fmt: skip

    def _refuse(self, method: str, fault: str, remedy: str) -> None:
        raise SeedbedError(f"{self._name}.{method} {fault}; {remedy} (see {DOCS})")


def _over(mask: Array, leaf: Array) -> Array:
    """Returns a mask `[T, B]` with axes of size 1 for the others of a leaf `[T, B, ...]`."""
    return mask.reshape(*mask.shape, *(1,) * (np.ndim(leaf) - 2))
