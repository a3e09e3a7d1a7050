"""A process that trains as one learner with others and does not lead: it decides nothing."""

from __future__ import annotations

import jax
import numpy as np

from seedbed.fused.program import Program
from seedbed.run.group import Group, whole
from seedbed.run.options import FusedConfig
from seedbed.types import Agent, Environment


def follow(env: Environment, agent: Agent, config: FusedConfig, group: Group) -> None:
    """Trains with the others until the leader ends it; raises PeerLost if another process is gone."""
    program = Program(env, agent, config)
    template = (jax.eval_shape(program.first), np.zeros(program.members, np.int64))
    carry, transitions = group.spread(template)
    carry, done = program.place(carry), transitions.tolist()
    program.compile(carry)
    group.meet("compiled")
    for command in group.commands():
        with group.together():
            if command.what == "show":
                whole(carry)
                continue
            carry, report = program.run(carry, done)
        made = np.ravel(report.transitions).tolist()
        done = [sum(each) for each in zip(done, made, strict=True)]
