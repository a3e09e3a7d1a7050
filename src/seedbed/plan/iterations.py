"""Microbenchmark of the fused runtime: its rollout and its update, each compiled and timed by itself."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.envs.device.wrappers import episode_statistics, training, with_integrator
from seedbed.fused import rollout
from seedbed.fused.carry import Carry, Rows
from seedbed.fused.episodes import whole_episodes
from seedbed.fused.program import Program
from seedbed.plan.costs import FusedCosts
from seedbed.plan.engine import Cost
from seedbed.plan.measuring import cost_of
from seedbed.plan.played import clocks
from seedbed.run.options import FusedConfig
from seedbed.run.update import count_transitions
from seedbed.types import (
    Agent,
    Array,
    Environment,
    learns_from_replay,
    plays_episodes,
)

_WARM = 3
_FEWEST = 6
_OWED = 1 << 28  # transitions for which updates are owed, so that each iteration makes its own


def measure(env: Environment, agent: Agent, config: FusedConfig, seconds: float) -> FusedCosts:
    """Times the two parts of iterations in turns."""
    program = Program(env, agent, config)
    share = config.euler_share
    found = []
    # Two integrators take turns in a run, each for its share of the steps.
    for part, name in ((1.0 - share, ""), (share, "euler")):
        if part:
            own = with_integrator(env, name) if name else env
            found.append((part, _time(program, episode_statistics(training(own)), seconds)))
    parts = [(weight, costs.rollout) for weight, costs in found]
    cpu_s, wall_s = (
        sum(weight * x for weight, x in each)
        for each in ([(w, c.cpu_s) for w, c in parts], [(w, c.cpu_s / c.width) for w, c in parts])
    )
    device_s = sum(weight * cost.device_s for weight, cost in parts)
    rolled = Cost(cpu_s, cpu_s / wall_s, device_s)
    return found[0][1]._replace(rollout=rolled)


def _time(program: Program, env: Environment, seconds: float) -> FusedCosts:
    agent, plan = program.agent, program.plan
    move = rollout.moves(env, None, np.bool_(False))
    gather = whole_episodes if plays_episodes(agent) else rollout.unroll

    @functools.partial(jax.jit, donate_argnums=0)
    def play(carry: Carry) -> tuple[Carry, Rows, Array]:
        after, rows, ended, _ = gather(agent, move, plan, None, carry.key, carry)
        if plays_episodes(agent):
            return after, rows, ended.lengths.astype(jnp.int32)
        firsts = (rows.timesteps.first[1:], after.env.timestep.first)
        return after, rows, sum(count_transitions(first) for first in firsts)  # type: ignore[return-value]

    @functools.partial(jax.jit, donate_argnums=0)
    def learn(carry: Carry, rows: Rows, transitions: Array) -> Carry:
        owed = None if carry.owed is None else jnp.int32(_OWED)
        carry = carry._replace(owed=owed)
        # Which memories an unroll begins with does not change what learning costs.
        args = (agent, plan, None, carry, rows, carry.actor, transitions, carry.key)
        return rollout.learn_from(*args)[0]

    carry, warm = program.place(program.first()), _WARM
    if learns_from_replay(agent):
        experience = agent.experience
        rows = -(-experience.min_size * experience.period // plan.envs)
        warm += -(-(rows + experience.steps) // plan.unroll)
    played, learned, steps = [], [], []
    until = 0.0
    while len(played) < warm + _FEWEST or time.perf_counter() < until:
        begun = clocks()
        carry, rows, transitions = jax.block_until_ready(play(carry))
        between = clocks()
        carry = jax.block_until_ready(learn(carry, rows, transitions))
        played.append(between - begun)
        learned.append(clocks() - between)
        steps.append(int(transitions))
        if len(played) == warm:
            until = time.perf_counter() + seconds
    device = jax.devices()[0]
    rolled, learned = (cost_of(spent[warm:], device) for spent in (played, learned))
    return FusedCosts(rolled, learned, round(float(np.mean(steps[warm:]))))
