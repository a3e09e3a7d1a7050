"""What a process does that trains as one learner with others: it leads them, or follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flags
from seedbed.config.saved import read_config
from seedbed.exit_status import ExitStatus, PeerLost, StoppedEarly
from seedbed.paramserver.role import end_with
from seedbed.run.folder import CONFIG
from seedbed.run.member import Member
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.programs import keep_programs
from seedbed.run.signals import stopping_signals
from seedbed.types import SeedbedError


def sizes_for(config: CentralConfig, given: Sequence[str]) -> list[str]:
    """Returns options that let sizes be chosen anew where a run goes on with another number of learners."""
    learners = flags.given(given, "--learners")
    if learners in ("", str(config.learners)):
        return []
    anew = {
        "--listen": [""],
        "--advertise": [],
        "--stream-groups": [str(CentralConfig.stream_groups)],
        "--actors": ["0"],
        "--envs-per-actor": ["0"],
    }
    return [word for name, value in anew.items() if name not in given for word in (name, *value)]


def lead(member: Member, run: Path, begin: Callable[[bool], tuple[int, dict[str, Any]]]) -> int:
    """Trains as the member that leads the others; returns the exit status.

    `begin` gets whether to go on with a run, and returns the exit status and the summary. Raises PeerLost if
    another process is gone. Call from the main thread, before JAX starts.
    """
    from seedbed.run.group import Group

    end_with(member.parent)
    Group(member)
    return begin((run / CONFIG).exists())[0]


def follow(member: Member, run: Path, trusted: bool, tell: Callable[[str], None]) -> int:
    """Trains as a member that another one leads; returns the exit status.

    Raises PeerLost if another process is gone. Call from the main thread, before JAX starts.
    """
    from seedbed.central import following as central
    from seedbed.fused import following as fused
    from seedbed.run.group import Group

    end_with(member.parent)
    with stopping_signals(lambda text: None) as interruption:
        group = Group(member)

        def left() -> bool:
            if interruption.requested():
                group.leave()
            return interruption.requested()

        group.look = left
        try:
            group.meet("settled")
            keep_programs()
            config = read_config(run / CONFIG, trusted)
            env, agent, options = config.env, config.agent, config.runtime
            if isinstance(options, FusedConfig):
                fused.follow(env, agent, options, group)  # type: ignore[arg-type]
            else:
                central.follow(env, agent, options, run, group, left, tell)  # type: ignore[arg-type]
        except PeerLost:
            raise
        except (SeedbedError, StoppedEarly) as failure:
            # The leader saves, says why, and ends the job; without that it would only miss this process.
            if not interruption.requested():
                group.fail(str(failure))
            raise
    return ExitStatus.STOPPED if interruption.requested() else ExitStatus.FINISHED
