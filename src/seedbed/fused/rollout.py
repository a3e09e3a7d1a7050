"""The fused program: environments and learner share the devices; an iteration is one computation.

All functions are pure and are called while JAX traces the program. With several devices, each runs the
program on its share of the environments; `axis` then names the mapped axis, and is None otherwise.

Sources of this design: Hessel et al. (2021), "Podracer architectures for scalable reinforcement
learning" (Anakin), and Freeman et al. (2021), "Brax".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from seedbed import simd
from seedbed.fused.carry import Carry, EpisodeSums, Iteration, Move, Plan, Rows, StageTimes
from seedbed.fused.episodes import whole_episodes
from seedbed.ops.clock import passed, stamp
from seedbed.ops.collectives import mean_over_devices
from seedbed.ops.keys import environment_keys, later
from seedbed.ops.tracing import naming
from seedbed.replay import device
from seedbed.replay.device import ReplayState
from seedbed.run.update import count_transitions, learn
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    DifferentiatingAgent,
    Environment,
    EnvState,
    LearnerState,
    ReplayAgent,
    Timestep,
    Trajectory,
    Tree,
    differentiates,
    learns_from_replay,
    plays_episodes,
)

Played: TypeAlias = tuple[Carry, Rows, EpisodeSums, Array]
"""What acting for an unroll returns: carry, rows, episodes that ended, the environments' microseconds."""


def first_carry(agent: Agent, env: Environment, plan: Plan, key: Array) -> Carry:
    """Makes the carry of a new run: a learner, environments in their first episodes and an empty replay.

    `env` resets itself. Consumes the key. Raises SeedbedError if replay's `min_size` is not in 1 to
    `capacity`.
    """
    init_key, reset_key, run_key = jax.random.split(key, 3)
    env_ids = jnp.arange(plan.envs, dtype=jnp.uint32)
    keys = jax.vmap(lambda i: jax.random.fold_in(reset_key, i))(env_ids)
    carry = Carry(
        learner=agent.init(init_key),
        env=simd.vectorize(env.reset)(keys),
        actor=agent.actor_state(env_ids, plan.envs),
        steps=jnp.zeros(2, jnp.uint32),
        key=run_key,
    )
    if not learns_from_replay(agent):
        return carry
    move = simd.vectorize(env.step)
    _, rows, _, _ = jax.eval_shape(functools.partial(unroll, agent, move, plan, None, key), carry)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), device.Record(*rows)
    )
    return carry._replace(
        replay=device.initial(agent.experience, template, plan.envs),
        # No update is owed for the first `min_size` items.
        owed=jnp.int32(-agent.experience.min_size * agent.experience.period),
    )


def moves(env: Environment, euler_env: Environment | None, use_euler: Array) -> Move:
    """Returns a function that steps `euler_env` if it is given and `use_euler` is true, else `env`.

    `use_euler` is one bool scalar for all environments, so that only one of the two steps is computed.
    """
    own = simd.vectorize(env.step)
    if euler_env is None:
        return own
    return functools.partial(jax.lax.cond, use_euler, simd.vectorize(euler_env.step), own)


def iterate(
    agent: Agent, move: Move, plan: Plan, axis: str | None, carry: Carry, progress: Array
) -> tuple[Carry, Iteration]:
    """Acts for an unroll or an episode in every environment, then learns; returns the carry and a report.

    An on-policy agent learns from the unroll. With replay, the unroll is added to replay, and the agent
    learns from replay if updates are due. `move` steps environments that reset themselves and whose
    outermost wrapper is `episode_statistics`. `progress`, a float32 scalar, becomes `LearnerState.progress`.
    """
    act_key, learn_key = jax.random.split(carry.key)
    first, begun = stamp(carry.env.timestep.first)
    opened = carry.env._replace(timestep=carry.env.timestep._replace(first=first))
    learner, actor = carry.learner._replace(progress=progress), carry.actor
    whole = plays_episodes(agent)
    gather = whole_episodes if whole else unroll
    play = functools.partial(gather, agent, move, plan, axis, act_key)
    carry, climbed = carry._replace(env=opened, learner=learner), {}
    if (differentiating := differentiates(agent)) is None:
        carry, rows, ended, environment = play(carry)
    else:
        (carry, rows, ended, environment), climbed = _climb(differentiating, axis, carry, play)
    # What the last step of acting returned.
    reward, acted = stamp(carry.env.timestep.reward if whole else rows.timesteps.reward)
    if whole:
        carry = carry._replace(
            env=carry.env._replace(timestep=carry.env.timestep._replace(reward=reward))
        )
        transitions = ended.lengths.astype(jnp.int32)
    else:
        rows = rows._replace(timesteps=rows.timesteps._replace(reward=reward))
        arrived = (rows.timesteps.first[1:], carry.env.timestep.first)
        transitions = sum(count_transitions(first) for first in arrived)
    carry, metrics = learn_from(agent, plan, axis, carry, rows, actor, transitions, learn_key)
    metrics = {name: jnp.asarray(x, jnp.float32) for name, x in (metrics | climbed).items()}
    _, learned = stamp(jax.tree.leaves(carry.learner.params)[0])
    if axis is not None:
        learned = jax.lax.pcast(learned, axis, to="varying")
    inference = passed(environment, passed(begun[0], acted[0]))
    busy = StageTimes(environment, inference, passed(acted[0], learned[0]))
    env_metrics = jax.tree.map(jnp.mean, carry.env.metrics)
    steps = (rows.timesteps, carry.env.timestep)
    seen = jax.tree.leaves([(each.observation, each.reward) for each in steps])
    finite = functools.reduce(jnp.logical_and, (jnp.isfinite(x).all() for x in seen))
    if axis is not None:
        ended, transitions = jax.tree.map(lambda x: jax.lax.psum(x, axis), (ended, transitions))
        env_metrics = jax.tree.map(lambda x: jax.lax.pmean(x, axis), env_metrics)
        busy = jax.tree.map(lambda x: jax.lax.pmax(x, axis), busy)
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis) > 0
    return carry, Iteration(
        transitions=transitions,
        updates=carry.learner.updates,
        metrics=metrics,
        env_metrics=env_metrics,
        episodes=ended.episodes,
        returns=ended.returns,
        lengths=ended.lengths,
        finite=finite,
        valid=jnp.bool_(True) if carry.replay is None else device.all_valid(carry.replay),
        busy=busy,
    )


def _climb(
    agent: DifferentiatingAgent, axis: str | None, carry: Carry, play: Callable[[Carry], Played]
) -> tuple[Played, dict[str, Array]]:
    """Lets an agent differentiate an unroll and apply the gradient, the mean over all devices.

    `carry` is that before the unroll, which `play` acts. Returns what was played, with the new learner state,
    and metrics.
    """
    learner = carry.learner

    def rollout(params: Tree) -> tuple[Trajectory, Played]:
        played = play(carry._replace(learner=learner._replace(params=params)))
        last, rows = played[0].env.timestep, played[1]
        return _trajectory(rows, last, carry.actor, learner.updates), played

    local = learner._replace(optimizer_state=())
    if axis is not None:
        local = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis, to="varying"), local)
    with naming(f"{type(agent).__name__}.slope", "docs/agents/apg.md"):
        slope, (after, *played) = agent.slope(local, rollout)
    learner, metrics = agent.ascend(learner, mean_over_devices(slope))
    return (after._replace(learner=learner), *played), metrics


def learn_from(
    agent: Agent,
    plan: Plan,
    axis: str | None,
    carry: Carry,
    rows: Rows,
    actor: ActorState,
    transitions: Array,
    key: Array,
) -> tuple[Carry, dict[str, Array]]:
    """Learns from an unroll, or adds it to replay and makes the updates that are due.

    `actor` is the actor state before the unroll, and `transitions`, int32, counts the unroll's transitions.
    The key is folded, not consumed. Returns the new carry and the agent's metrics.
    """
    learner = carry.learner
    if carry.replay is None or carry.owed is None or not learns_from_replay(agent):
        trajectory = _trajectory(rows, carry.env.timestep, actor, learner.updates)
        update = learn(agent, learner, trajectory, jax.random.fold_in(key, learner.updates), axis)
        return carry._replace(learner=update.state), update.metrics
    experience, cost = agent.experience, plan.envs * plan.unroll
    record = device.Record(rows.timesteps, rows.action, rows.extras, rows.core)
    replay = device.add(experience, carry.replay, record, agent.initial_priorities)
    owed = carry.owed + transitions
    due = (owed >= cost) & device.ready(experience, replay)
    learner, replay, metrics = learn_from_replay(agent, plan.updates, learner, replay, due, key)
    owed = jnp.where(due, owed - cost, owed)
    return carry._replace(learner=learner, replay=replay, owed=owed), metrics


def learn_from_replay(
    agent: ReplayAgent,
    updates: int,
    state: LearnerState,
    replay: ReplayState,
    due: Array,
    key: Array,
) -> tuple[LearnerState, ReplayState, dict[str, Array]]:
    """Learns from `updates` batches of replay if `due`, a bool scalar, is true. For one device only.

    Returns the new state, the replay with new priorities, and metrics: means over the updates, or 0 if `due`
    is false. The key is folded with the count of updates, not consumed.
    """
    experience = agent.experience

    def step(
        now: tuple[LearnerState, Tree], _: None
    ) -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        state, sums = now
        held = replay._replace(sums=sums)
        update_key = jax.random.fold_in(key, state.updates)
        draw_key, update_key = jax.random.split(update_key)
        drawn, items = device.sample(experience, held, draw_key)
        trajectory = Trajectory(
            timesteps=drawn.timesteps,
            action=drawn.action,
            extras=drawn.extras,
            actor_state=ActorState(drawn.core, ()),
            params_version=(),
            importance=drawn.importance,
        )
        update = learn(agent, state, trajectory, update_key, None)
        held = device.update(experience, held, items, update.priorities)
        return (update.state, held.sums), update.metrics

    def learn_all() -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        now, metrics = jax.lax.scan(step, (state, replay.sums), None, length=updates)
        return now, jax.tree.map(jnp.mean, metrics)

    def wait() -> tuple[tuple[LearnerState, Tree], dict[str, Array]]:
        metrics = jax.eval_shape(learn_all)[1]
        return (state, replay.sums), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

    # Only the parts that learning changes pass through `cond`, which would copy the replay's records.
    (state, sums), metrics = jax.lax.cond(due, learn_all, wait)
    return state, replay._replace(sums=sums), metrics


def unroll(
    agent: Agent, move: Move, plan: Plan, axis: str | None, key: Array, carry: Carry
) -> tuple[Carry, Rows, EpisodeSums, Array]:
    """Acts in every environment for the plan's unroll; does not learn. The key is folded, not consumed.

    Returns the new carry, the rows, sums over the episodes that ended on this device, and the microseconds
    that the environments took, a uint32 scalar.
    """
    batch = carry.env.timestep.first.shape[0]
    begin = 0 if axis is None else jax.lax.axis_index(axis) * batch
    env_ids = jnp.arange(batch, dtype=jnp.uint32) + jnp.uint32(begin)
    params = carry.learner.params
    replaying = learns_from_replay(agent)

    def step(
        now: tuple[EnvState, ActorState, EpisodeSums, Array], keys: Array
    ) -> tuple[tuple[EnvState, ActorState, EpisodeSums, Array], Rows]:
        state, actor, ended, busy = now
        core = actor.core if replaying else ()
        action, extras, actor = agent.act(params, actor, state.timestep, keys, evaluate=False)
        action, begun = stamp(action)
        moved = move(state, action)
        reward, ready = stamp(moved.timestep.reward)
        moved = moved._replace(timestep=moved.timestep._replace(reward=reward))
        now = (moved, actor, _add(ended, moved), busy + passed(begun[0], ready[0]))
        return now, Rows(state.timestep, action, extras, core)

    nothing, no_time = EpisodeSums(jnp.int32(0), jnp.float32(0), jnp.float32(0)), jnp.uint32(0)
    if axis is not None:
        nothing, no_time = jax.tree.map(
            lambda x: jax.lax.pcast(x, axis, to="varying"), (nothing, no_time)
        )
    # All keys at once: within the scan, each step would pay for a dozen small operations.
    counts = later(carry.steps, jnp.arange(plan.unroll, dtype=jnp.uint32))
    keys = jax.vmap(environment_keys, (None, None, 0))(key, env_ids, counts)
    (state, actor, ended, busy), rows = jax.lax.scan(
        step, (carry.env, carry.actor, nothing, no_time), keys
    )
    steps = later(carry.steps, plan.unroll)
    return carry._replace(env=state, actor=actor, steps=steps), rows, ended, busy


def _trajectory(rows: Rows, last: Timestep, actor: ActorState, updates: Array) -> Trajectory:
    """Returns an on-policy agent's unroll: its rows, the timestep `last` after them, `actor` before them.

    `updates` is the version of the parameters that acted.
    """
    timesteps = jax.tree.map(
        lambda leaf, end: jnp.concatenate([leaf, end[None]]), rows.timesteps, last
    )
    version = jnp.broadcast_to(updates, rows.timesteps.first.shape)
    return Trajectory(timesteps, rows.action, rows.extras, actor, version)


def _add(ended: EpisodeSums, moved: EnvState) -> EpisodeSums:
    over = jnp.logical_or(moved.timestep.terminated, moved.timestep.truncated)
    total, length = moved.metrics["episode_return"], moved.metrics["episode_length"]
    return EpisodeSums(
        ended.episodes + over.sum(dtype=jnp.int32),
        ended.returns + jnp.where(over, total, 0.0).sum(),
        ended.lengths + jnp.where(over, length, 0.0).sum(),
    )
