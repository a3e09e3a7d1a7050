"""`seedbed train --cluster`: the processes of one job are one run. Rank 0 coordinates, the others are hosts.

Whoever has started the job (SLURM, torchrun, SkyPilot, Kubernetes) places the processes, which find one
another in the run's folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.actors.waiting import StopSignals
from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.flags import TrainArguments
from seedbed.config.saved import read_config
from seedbed.config.settle import Request
from seedbed.envs.host.registry import code_of
from seedbed.exit_status import ExitStatus, StoppedEarly, TemporaryError, status_of
from seedbed.launch import as_one, joining, members, ranks, together
from seedbed.launch.job import JOB, Job, folder_of, options_for, require_idle, settled
from seedbed.launch.ranks import Rank
from seedbed.launch.together import Supervisor
from seedbed.machine import usable_cores
from seedbed.paramserver.role import end_with
from seedbed.printable import printable
from seedbed.run.folder import CONFIG
from seedbed.run.member import Member
from seedbed.run.options import CentralConfig
from seedbed.run.signals import stop_early
from seedbed.scheduler import NOTICE
from seedbed.terminal import tell
from seedbed.types import SeedbedError, UsageError

Change = Callable[[TrainConfig], TrainConfig]

CHOICES = ("slurm", "ranks")
"""The values of `--cluster` that this module takes; that of `ray_cluster` is ray."""
# How often a run is queued again without a step more than before.
_MOST_REQUEUES = 3
_LOOK_S = 1.0
# Seconds in which rank 0 must have written what this start of a run is.
_SETTLE_S = 60.0
# Seconds for which a host looks for a coordinator that is gone.
_PATIENCE_S = 300.0
_LAST_WORD_S = 30.0  # in which a coordinator that has let its hosts go says how it has ended


def train(
    given: TrainArguments, run: Callable[[Request, Change], tuple[int, dict[str, Any]]]
) -> int:
    """Trains as one of the processes of a job; returns the exit status.

    `run` trains what a request asks for, with options changed, and returns the exit status and the summary.
    Call from the main thread, after `obey_scheduler`. Raises UsageError if `--cluster` has another value than
    `CHOICES`, and SeedbedError if the environment does not tell which process this is.
    """
    request, rest = given.request, given.rest
    if given.cluster not in CHOICES:
        raise UsageError(f"--cluster {given.cluster}: take {', '.join(CHOICES)} or ray")
    member = Member.of_environment(os.environ)
    if member is not None and request.run is not None:
        # Who has started the job is its supervisor's business.
        rank = Rank(member.rank, member.of, 1, 0.0, "", "")
    else:
        rank = ranks.discover(os.environ, given.cluster == "slurm")
    folder = folder_of(request.run, rank)
    if member is not None and member.number:
        return members.follow(member, folder, request.trust, say)
    if member is None and rank.of > 1:
        config = settled(folder)
        if as_one.learn_as_one(config, rank, flags.given(rest, "--learners")):
            interface = as_one.interface_of(rank, given.interface)
            return supervise(rank, folder, interface, as_one.parts_of(config))
    if rank.number:
        # The same command has been given to all ranks.
        file = request.file and read_config(request.file, request.trust)
        mine = (code_of(file.env) if file else str(request.what or "")).partition(":")
        return host(rank, folder, request.trust, say, (mine[0],) if mine[1] else ())

    def change(config: TrainConfig) -> TrainConfig:
        more = options_for(config, rest, 1 if member else rank.of)
        goes_on = member is not None and (folder / CONFIG).exists()
        if goes_on and isinstance(config.runtime, CentralConfig):
            more = members.sizes_for(config.runtime, rest)
        return flags.override(config, [*rest, *more], False)

    def begin(resume: bool) -> tuple[int, dict[str, Any]]:
        # A run that goes on keeps what it has been, which the command of its first start names.
        own = dict.fromkeys(("runtime", "start", "file")) if resume else {}
        return run(request._replace(run=folder, resume=resume, **own), change)

    if member is not None:
        return members.lead(member, folder, begin)
    return coordinate(rank, folder, begin, say)


def supervise(
    rank: Rank,
    run: Path,
    interface: tuple[str, str],
    parts: as_one.Parts,
    settle_s: float = together.SETTLE_S,
) -> int:
    """Starts this rank's member again and again, until the run ends; returns the exit status.

    `interface` is a result of `as_one.interface_of`; rank 0 waits `settle_s` for the others, and begins with
    those that are there. Call from the main thread, after `obey_scheduler`.
    """
    if rank.number:
        if parent := os.environ.get(ranks.PARENT):
            end_with(int(parent))
        ended, former = list[Job](), Job.read(run)
        threading.Thread(target=_watch, args=(rank, run, former, ended), daemon=True).start()

        def token() -> str:
            job = Job.read(run)
            now = job is not None and job.start == rank.start and not job.ended
            return job.token if job is not None and now else ""

        try:
            with contextlib.closing(Supervisor(rank, run, interface, say)) as supervisor:
                supervisor.follow(token, lambda: bool(ended))
        except TemporaryError:
            if _is_over(run, former):
                return ExitStatus.FINISHED
            raise
        say(f"rank {rank.number} ended: {ended[0].ended if ended else 'stopped'}")
        return ended[0].status if ended else ExitStatus.STOPPED

    def lead(resume: bool) -> tuple[int, dict[str, Any]]:
        del resume  # a member sees by itself whether there is a run
        job = Job.read(run)
        if job is None:
            raise SeedbedError(f"{printable(run / JOB)} has been removed: start the job again")
        with contextlib.closing(Supervisor(rank, run, interface, say)) as supervisor:
            status = supervisor.lead(job.token, parts, settle_s)
        return status, {"env_steps": together.step_of(run)}

    return coordinate(rank, run, lead, say)


def coordinate(
    rank: Rank,
    run: Path,
    train: Callable[[bool], tuple[int, dict[str, Any]]],
    tell: Callable[[str], None],
) -> int:
    """Trains as rank 0, and queues the job again if its time ends before the run; returns the exit status.

    `train` gets whether to go on with a run, and returns the exit status and the run's summary. Call from the
    main thread, after `obey_scheduler`. Raises TemporaryError if another process trains into the folder.
    """
    require_idle(run)
    # Whoever is refused must not tell the other ranks of a start of its own.
    with together.only(run, 0) or contextlib.nullcontext():
        return _coordinate(rank, run, train, tell)


def _coordinate(
    rank: Rank,
    run: Path,
    train: Callable[[bool], tuple[int, dict[str, Any]]],
    tell: Callable[[str], None],
) -> int:
    soon, former = threading.Event(), Job.read(run)
    token = secrets.token_hex(8)
    job = (
        Job(rank.start, token, step=former.step, requeues=former.requeues)
        if former
        else Job(rank.start, token)
    )
    job.write(run)
    stop_early()
    threading.Thread(target=_await_end, args=(soon, tell), daemon=True).start()
    how, status = "rank 0 has failed", int(ExitStatus.FAILED)
    try:
        step = job.step
        try:
            status, summary = train((run / CONFIG).exists())
            how = "the run has ended" if status == ExitStatus.FINISHED else "the run was stopped"
            step = int(summary.get("env_steps", step))
        except StoppedEarly:
            how, status = "the run was stopped", ExitStatus.STOPPED
        if status == ExitStatus.STOPPED and soon.is_set():
            job = job._replace(step=step, requeues=job.requeues + 1 if step <= job.step else 0)
            how, status = _requeue(run, job, tell)
        return status
    except BaseException as error:
        status = status_of(error)
        raise
    finally:
        now = Job.read(run)
        if now is not None and now.token == token:
            with contextlib.suppress(SeedbedError):
                job._replace(ended=how, status=int(status)).write(run)


def _await_end(soon: threading.Event, tell: Callable[[str], None]) -> None:
    """Stops the run when the scheduler says that the time ends."""
    signal.sigwait([NOTICE])
    soon.set()
    tell("the job's time is nearly over (SIGUSR2): saving, to be queued again")
    os.kill(os.getpid(), signal.SIGTERM)


def _requeue(run: Path, job: Job, tell: Callable[[str], None]) -> tuple[str, int]:
    """Has SLURM queue this job again; returns how that ended, and the exit status.

    Without SLURM, or if it refuses, the status says to try again: the script that has started this may do so.
    """
    if job.requeues > _MOST_REQUEUES:
        tell(
            f"the job was queued again {_MOST_REQUEUES} times without a step more than {job.step:,}: not "
            f"again; give it more time (what it has is in {printable(run)})"
        )
        return "the job was queued again too often", ExitStatus.FAILED
    # What SLURM sends to the job that it queues again is expected, and it may kill this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Ranks that look meanwhile end with this. `srun` returns the greatest status, which the script must know.
    again = "the job is to be started again", ExitStatus.TRY_AGAIN
    job._replace(ended=again[0], status=int(again[1])).write(run)
    number = os.environ.get("SLURM_JOB_ID", "")
    scontrol = shutil.which("scontrol")
    if number and scontrol is not None:
        asked = subprocess.run(
            [scontrol, "requeue", number], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            tell(f"job {number} is queued again; it goes on from step {max(0, job.step):,}")
            return "the job is queued again", ExitStatus.STOPPED
        tell(f"scontrol requeue {number}: {asked.stderr.strip() or asked.stdout.strip()}")
    tell(f"start the job again: status {int(ExitStatus.TRY_AGAIN)} tells the script to")
    return again


def host(
    rank: Rank,
    run: Path,
    trusted: bool,
    tell: Callable[[str], None],
    allow: tuple[str, ...] = (),
) -> int:
    """Serves the run as another rank until it ends or rank 0 does; returns the exit status.

    `allow` are modules whose environments actors may make. The status is rank 0's, once it has ended. Call
    from the main thread, after `obey_scheduler`. Raises TemporaryError if rank 0 does not come, or is gone.
    """
    stop, ended, former = StopSignals(), list[Job](), Job.read(run)
    threading.Thread(target=_watch, args=(rank, run, former, ended), daemon=True).start()
    cores = ranks.cores_of(rank, usable_cores())
    options = joining.Options(str(run), cores, trusted, _PATIENCE_S, allow=allow)
    until_s, how = time.monotonic() + _SETTLE_S, None
    while not stop():
        try:
            how = joining.serve(options, lambda text: tell(f"rank {rank.number}: {text}"), stop)
            break
        except TemporaryError:
            if _is_over(run, former):
                return ExitStatus.FINISHED
            raise
        except SeedbedError:
            # Rank 0 may not have written yet what this start of the run is.
            if time.monotonic() > until_s:
                raise
            time.sleep(_LOOK_S)
    # A coordinator lets its hosts end before it tells whether the run is over or only stopped.
    until_s = time.monotonic() + _LAST_WORD_S
    while how is not None and not (ended or stop()) and time.monotonic() < until_s:
        time.sleep(_LOOK_S / 4)
    how = None if stop() else how
    tell(f"rank {rank.number} ended: {ended[0].ended if ended else how or 'stopped'}")
    if ended:
        return ended[0].status
    return ExitStatus.STOPPED if how is None else ExitStatus.TRY_AGAIN


def _is_over(run: Path, former: Job | None) -> bool:
    """Returns whether the run has finished already, as `former` says, which was there before this process."""
    if former is None or not former.ended:
        return False
    return former.status == ExitStatus.FINISHED and Job.read(run) == former


def _watch(rank: Rank, run: Path, former: Job | None, ended: list[Job]) -> None:
    """Ends this process, with all that it runs, when rank 0 of the same start of the job has ended.

    What `former` says is of an earlier start, if that has ended and the launcher does not tell starts apart.
    """
    while True:
        job = Job.read(run)
        stale = former is not None and former.ended and job == former and not rank.start
        if job is not None and job.start == rank.start and job.ended and not stale:
            ended.append(job)
            # A host learns of a run's end by itself; the coordinator has ended its roles.
            time.sleep(_LOOK_S)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(_LOOK_S)


def say(text: str) -> None:
    """Writes a line for the user, and all of it at once: several ranks share one output."""
    tell(text, sys.stderr)
