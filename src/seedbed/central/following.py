"""A process that acts and learns with others and does not lead: it decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seedbed.central.run import CentralRun
from seedbed.central.train import actors_of, first, set_up
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.exit_status import StoppedEarly
from seedbed.run.devices import dispatch_in_place
from seedbed.run.folder import RunFolder
from seedbed.run.group import Group
from seedbed.run.options import CentralConfig
from seedbed.types import Agent


def follow(
    env: HostEnvConfig,
    agent: Agent,
    config: CentralConfig,
    path: Path,
    group: Group,
    left: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:
    """Acts and learns with the others until the leader ends it.

    `path` is the run's folder, and `left` returns whether a signal has come. Raises PeerLost if another
    process is gone, and SeedbedError if the actors fail for good.
    """
    dispatch_in_place()
    run = RunFolder(path)
    with actors_of(env, agent, config, run) as pool:
        if pool.wait_spec(left) is None:
            raise StoppedEarly
        begun = first(env, agent, config, pool)
        setup = set_up(env, config, pool, run, begun)
        step = setup.source.env_steps
        if (found := setup.source.restore(step)) and step:
            tell(found)
        central = CentralRun(setup)
        central.start()
        try:
            while central.advance():
                group.look()
                for notice in central.take_notices():
                    tell(notice)
        finally:
            central.stop()
        if (failure := central.join()) is not None:
            raise failure
