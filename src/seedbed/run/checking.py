"""Checks of an agent against the contract, `types.Agent`, before anything is compiled.

Each method is traced once with arrays of the right shapes. A mistake is told by the name of the method, what
it returned and what is needed, in the same words in every runtime.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from seedbed import trees
from seedbed.ops.tracing import naming
from seedbed.types import (
    ActorState,
    Agent,
    AgentT,
    Array,
    DifferentiatingAgent,
    EnvSpec,
    LearnerState,
    OnPolicy,
    Output,
    Replay,
    ReplayAgent,
    SeedbedError,
    Timestep,
    Trajectory,
    Tree,
    action_array,
    bind,
    differentiates,
    learns_from_replay,
)

_GUIDE = "docs/write-an-agent.md"
# The names of a run's own figures, or their first parts: an agent's would take their place in a line.
_FIGURES = frozenset(
    ("wall_s", "env_steps", "frames", "env_steps_per_s", "frames_per_s", "learner_steps", "rss_mb")
    + ("episodes", "episode_return_mean", "episode_length_mean", "bottleneck", "actor_restarts")
    + ("episode_success_mean",)
    + ("inference_rows_mean", "inference_behind_share", "inference_blocked_share", "lag_mean")
    + ("learner_program_ms", "learner_waiting_share", "queued_unrolls", "lag_max")
    + ("time/", "env/", "evaluation/", "replay/", "streams/", "cluster/")
)


def checked(agent: AgentT, spec: EnvSpec) -> AgentT:
    """Binds an agent for environments of this spec; raises SeedbedError if it breaks the contract.

    The agents of this package are not traced for it, which would take half a second of each run; a test
    checks them. An error that the agent raises itself as SeedbedError passes as it is.
    """
    if not type(agent).__module__.startswith("seedbed."):
        # A copy, because an agent may keep arrays, and those of tracing are of no use afterwards.
        check_agent(bind(agent, spec))
    return bind(agent, spec)


def check_agent(agent: Agent) -> Tree:
    """Traces every method of a bound agent, and returns the shapes of its gradient.

    Raises SeedbedError if a method breaks the contract.
    """
    return _Check(agent).run()


class _Check:
    """Calls the methods in the order of a run, each with what those before it returned."""

    def __init__(self, agent: Agent) -> None:
        assert agent.spec is not None
        self._agent, self._name = agent, type(agent).__name__
        self._observation, self._action = agent.spec.observation, agent.spec.action
        experience = agent.experience
        self._batch = experience.batch
        self._rows = experience.unroll if isinstance(experience, OnPolicy) else experience.steps - 1

    def run(self) -> Tree:
        """Returns the shapes of the gradient; raises SeedbedError where the agent breaks the contract."""
        # First with values: what functions of the agent keep for later must not be of tracing.
        with naming(f"{self._name}.init", _GUIDE):
            self._agent.init(jax.random.key(0))
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = self._call("init", self._agent.init, key)
        self._expect("init", state, LearnerState)
        self._same("init", "updates", state.updates, _struct((), "int32"))
        self._same("init", "progress", state.progress, _struct((), "float32"))
        actor_state = self._actor_state(self._batch)
        action, extras = self._act(state.params, actor_state, self._batch)
        agent, replayed = self._agent, False
        if learns_from_replay(agent):
            replayed = True
            self._priorities(agent, extras)
        version = _struct((self._rows, self._batch), "int32")
        trajectory = Trajectory(
            self._timesteps(self._rows + 1),
            _repeated(action, self._rows),
            _repeated(extras, self._rows),
            actor_state._replace(per_env=()) if replayed else actor_state,
            () if replayed else version,
            _struct((self._batch,), "float32") if replayed else (),
        )
        if (differentiating := differentiates(agent)) is not None:
            self._climb(differentiating, state, trajectory)
        gradient = self._learn(state, trajectory, key)
        # Acting goes on in other numbers of environments than a batch has.
        self._act(state.params, self._actor_state(self._batch + 1), self._batch + 1)
        return gradient

    def _actor_state(self, size: int) -> ActorState:
        agent = self._agent
        ids = _struct((size,), "uint32")
        found = self._call("actor_state", lambda ids: agent.actor_state(ids, size), ids)
        self._expect("actor_state", found, ActorState)
        self._leading("actor_state", "leaves", found, (size,))
        # As while a run goes on, when peers come and go.
        traced = self._call("actor_state", agent.actor_state, ids, _struct((), "uint32"))
        self._same("actor_state", "the state for a traced num_envs, ", traced, found)
        return found

    def _act(self, params: Tree, actor_state: ActorState, size: int) -> tuple[Tree, Tree]:
        """Traces `act` both ways, for `size` environments; returns action and extras of training."""
        agent, action, extras = self._agent, (), ()
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
        timestep = jax.tree.map(
            lambda leaf: _struct((size, *leaf.shape[2:]), leaf.dtype), self._timesteps(1)
        )
        wanted = action_array(self._action)
        for evaluate in (True, False):

            def act(*given: Tree, evaluate: bool = evaluate) -> Tree:
                return agent.act(*given, evaluate=evaluate)

            found = self._call("act", act, params, actor_state, timestep, keys)
            if not (isinstance(found, tuple) and len(found) == 3):
                self._refuse("act", _shown(found), "a tuple of action, extras and actor state")
            action, extras, after = found
            self._same("act", "action", action, _struct((size, *wanted.shape), wanted.dtype))
            self._leading("act", "extras", extras, (size,))
            self._same("act", "actor state", after, actor_state)
        return action, extras

    def _priorities(self, agent: ReplayAgent, extras: Tree) -> None:
        timesteps = self._timesteps(self._rows + 1)._replace(observation=())
        given = timesteps, _repeated(extras, self._rows + 1)
        found = self._call("initial_priorities", agent.initial_priorities, *given)
        wanted = _struct((self._batch,), "float32")
        self._same("initial_priorities", "priorities", found, wanted)

    def _climb(
        self, agent: DifferentiatingAgent, state: LearnerState, trajectory: Trajectory
    ) -> None:
        """Traces `slope`, for an unroll that does not depend on the parameters, and `ascend`."""

        def slope(state: LearnerState, trajectory: Trajectory) -> Tree:
            return agent.slope(state, lambda params: (trajectory, ()))

        found = self._call("slope", slope, state._replace(optimizer_state=()), trajectory)
        if not (isinstance(found, tuple) and len(found) == 2):
            self._refuse("slope", _shown(found), "a tuple of a gradient and what `play` kept")
        found = self._call("ascend", agent.ascend, state, found[0])
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            self._refuse("ascend", _shown(found), "a tuple of learner state and a dict of metrics")
        self._names("ascend", found[1])
        self._same("ascend", "learner state", found[0], state)

    def _learn(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Tree:
        agent, read = self._agent, state._replace(optimizer_state=())
        batch = self._call("prepare", agent.prepare, read, trajectory, key)
        part = self._part(batch)
        found = self._call("gradients", agent.gradients, read, part, key)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Output)):
            self._refuse("gradients", _shown(found), "a tuple of gradients and Output")
        grads, output = found
        self._same("gradients", "Output.weight", output.weight, _struct((), "float32"))
        if not isinstance(output.metrics, dict):
            self._refuse("gradients", f"{_shown(output.metrics)} as metrics", "a dict of scalars")
        self._names("gradients", output.metrics)
        for name, metric in output.metrics.items():
            if not isinstance(metric, jax.ShapeDtypeStruct) or metric.shape:
                self._refuse("gradients", f"{_shown(metric)} as metric {name!r}", "a scalar")
        if isinstance(agent.experience, Replay) and agent.experience.priority_exponent:
            wanted = _struct((self._batch,), "float32")
            self._same("gradients", "Output.priorities", output.priorities, wanted)
        clipped = self._call("clip_gradient", agent.clip_gradient, grads)
        self._same("clip_gradient", "gradients", clipped, grads)
        given = state, clipped, output._replace(priorities=())
        after = self._call("apply", agent.apply, *given)
        self._expect("apply", after, LearnerState)
        self._same("apply", "learner state", after, state)
        return clipped

    def _names(self, method: str, metrics: dict[str, Any]) -> None:
        for name in metrics:
            if "".join(name.partition("/")[:2]) in _FIGURES:
                self._refuse(method, f"the metric {name!r}, which a run has itself", "another name")

    def _part(self, batch: Tree) -> Tree:
        """Returns a minibatch of what `prepare` returned, whose leaves divide along axis 1."""
        parts = self._agent.minibatches
        if not jax.tree.leaves(batch):
            self._refuse("prepare", _shown(batch), "a tree of arrays")
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if len(leaf.shape) < 2 or leaf.shape[1] % parts:
                name = f"batch{jax.tree_util.keystr(path)}"
                needed = f"axis 1 of a size that {parts} minibatches share evenly"
                self._refuse("prepare", f"{_shown(leaf)} as {name}", needed)
        return jax.tree.map(
            lambda leaf: _struct(
                (leaf.shape[0], leaf.shape[1] // parts, *leaf.shape[2:]), leaf.dtype
            ),
            batch,
        )

    def _timesteps(self, rows: int) -> Timestep:
        begin = rows, self._batch
        flag = _struct(begin, "bool")
        observation = trees.map(
            lambda leaf: _struct((*begin, *leaf.shape), leaf.dtype), self._observation
        )
        return Timestep(observation, _struct(begin, "float32"), flag, flag, flag)

    def _call(self, method: str, function: Any, *given: Tree) -> Any:
        """Traces a method; raises SeedbedError with its name and the line where it fails."""
        with naming(f"{self._name}.{method}", _GUIDE):
            return jax.eval_shape(function, *given)

    def _expect(self, method: str, found: Any, kind: type) -> None:
        if not isinstance(found, kind):
            self._refuse(method, _shown(found), f"a {kind.__name__} of seedbed.types")

    def _same(self, method: str, part: str, found: Tree, wanted: Tree) -> None:
        """Raises SeedbedError unless two trees have leaves of the same names, shapes and dtypes."""
        ours, theirs = _leaves(found), _leaves(wanted)
        for path in [*theirs, *ours]:
            given, needed = (leaves.get(path, "nothing") for leaves in (ours, theirs))
            if given != needed:
                self._refuse(method, f"{given} as {part}{path}", needed)
        structures = [
            str(jax.tree.structure(tree)).removeprefix("PyTreeDef") for tree in (found, wanted)
        ]
        if structures[0] != structures[1]:
            self._refuse(method, f"{part} of the structure {structures[0]}", structures[1])

    def _leading(self, method: str, part: str, tree: Tree, axes: tuple[int | None, ...]) -> None:
        """Raises SeedbedError unless the leaves' shapes begin with these axes; None is any size."""
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            begin = leaf.shape[: len(axes)]
            if len(begin) < len(axes) or any(
                axis not in (None, size) for axis, size in zip(axes, begin, strict=True)
            ):
                sizes = ", ".join("..." if axis is None else str(axis) for axis in axes)
                name = f"{part}{jax.tree_util.keystr(path)}"
                what = "the number of environments" if len(axes) == 1 else "the batch"
                needed = f"a shape [{sizes}, ...], in which {axes[-1]} is {what}"
                self._refuse(method, f"{_shown(leaf)} as {name}", needed)

    def _refuse(self, method: str, found: str, wanted: str) -> NoReturn:
        raise SeedbedError(
            f"{self._name}.{method} returned {found}; needed is {wanted} (see {_GUIDE})"
        )


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    # A key's dtype is none of numpy's.
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype) if isinstance(dtype, str) else dtype)


def _repeated(tree: Tree, rows: int) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), tree)


def _leaves(tree: Tree) -> dict[str, str]:
    """Returns each leaf, as it is shown to people, by its path."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): _shown(leaf) for path, leaf in flat}


def _shown(value: Any) -> str:
    """Returns a short text: an array as `float32[3,4]`, a tuple by its elements, else its type."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value))})"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"
