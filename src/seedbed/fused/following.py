"""A process that trains as one learner with others and does not lead: it decides nothing."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from seedbed.fused.program import Program
from seedbed.run.group import Group, whole
from seedbed.run.options import FusedConfig
from seedbed.run.programs import keep_programs
from seedbed.types import Agent, Environment


def follow(
    settled: Callable[[], tuple[Environment, Agent, FusedConfig]],
    group: Group,
    look: Callable[[], None],
) -> None:
    """Trains with the others until the leader ends it.

    `settled` returns what is trained, once the leader has written it. `look` is called about once a second,
    between iterations and while the leader evaluates or saves. Raises PeerLost if another process is gone.
    """
    group.meet("settled", look=look)
    env, agent, config = settled()
    keep_programs()
    program = Program(env, agent, config)
    template = (jax.eval_shape(program.first), np.zeros(program.members, np.int64))
    carry, transitions = group.spread(template)
    carry, done = program.place(carry), transitions.tolist()
    program.compile(carry)
    group.meet("compiled", look=look)
    for command in group.commands(look):
        with group.together():
            if command == "show":
                whole(carry)
                continue
            carry, report = program.run(carry, done)
        made = np.ravel(report.transitions).tolist()
        done = [sum(each) for each in zip(done, made, strict=True)]
