"""What a process does that trains as one learner with others: it leads them, or follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.config.saved import read_config
from seedbed.exit_status import ExitStatus
from seedbed.paramserver.role import end_with
from seedbed.run.folder import CONFIG
from seedbed.run.member import Member
from seedbed.run.options import FusedConfig
from seedbed.run.programs import keep_programs
from seedbed.run.signals import stopping_signals


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
    left = threading.Event()
    with stopping_signals(lambda text: None) as interruption:
        group = Group(member)

        def look() -> bool:
            if interruption.requested() and not left.is_set():
                left.set()
                group.leave()
            return left.is_set()

        group.meet("settled", look=look)
        keep_programs()
        config = read_config(run / CONFIG, trusted)
        env, agent, options = config.env, config.agent, config.runtime
        if isinstance(options, FusedConfig):
            fused.follow(env, agent, options, group, look)  # type: ignore[arg-type]
        else:
            central.follow(env, agent, options, run, group, look, tell)  # type: ignore[arg-type]
    return ExitStatus.STOPPED if interruption.requested() else ExitStatus.FINISHED
