"""Which of a job's processes this one is, by the variables of SLURM, torchrun, SkyPilot and Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from seedbed.types import SeedbedError

_INDEXED = "JOB_COMPLETION_INDEX"
# Names of the rank, the number of ranks, this machine's number of ranks, and the job, of each launcher that
# has plain variables for them.
_PLAIN = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "", "SKYPILOT_TASK_ID"),
    (_INDEXED, "COMPLETIONS", "", ""),
)
PARENT = "SEEDBED_PARENT"
"""The environment variable that names the process without which a rank must not live."""
# The name that torchrun gives to each job that was given none.
_UNNAMED = "none"


class Rank(NamedTuple):
    """One of the processes that a launcher has started together."""

    number: int  # from 0 on; 0 coordinates
    of: int  # how many there are
    beside: int  # how many of them are on this machine
    cores: float  # that the launcher has given this process; 0 if it says nothing of them
    job: str  # a name for the job, the same after it was requeued; "" if there is none
    start: (
        str  # what tells this start of the job from others; "" if the launcher says nothing of it
    )
    together: int = 0  # cores of all that are on this machine; 0 if the launcher binds none


def cores_of(rank: Rank, usable: float) -> float:
    """Returns how many cores a rank may use; its affinity and quota allow it `usable` ones."""
    if rank.cores:
        # SLURM may tell a task what its job has asked for, and bind it to less.
        return min(rank.cores, usable)
    # With fewer than all ranks here have, this one is bound to its own; else they share what they see.
    return usable if usable < rank.together else usable / rank.beside


def discover(environ: Mapping[str, str], slurm: bool) -> Rank:
    """Returns which process this is; with `slurm` only of a step of SLURM's.

    Raises SeedbedError if the environment does not tell.
    """
    found = _of_slurm(environ) if slurm else _of_others(environ)
    if not 0 <= found.number < found.of:
        raise SeedbedError(
            f"this process has rank {found.number} of {found.of}: ranks are from 0 to one less than their "
            "number"
        )
    return found


def _of_others(environ: Mapping[str, str]) -> Rank:
    """Returns what plain variables say, and else SLURM's: torchrun may be started by srun."""
    for rank, of, beside, job in _PLAIN:
        if rank in environ:
            if of not in environ:
                raise SeedbedError(
                    f"{rank} is set but {of}, the number of processes, is not: set it in the job"
                )
            name = environ.get(job, "")
            if name == _UNNAMED:
                name = ""
            return Rank(
                _count(environ, rank),
                _count(environ, of),
                _count(environ, beside) if beside in environ else 1,
                0.0,
                re.sub(r"[^\w.-]", "_", name),
                "",
            )
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    raise SeedbedError(
        "--cluster ranks, but the environment does not tell this process's rank: start it with srun or "
        f"torchrun, or set RANK and WORLD_SIZE (SKYPILOT_NODE_RANK and {_INDEXED} are read, too)"
    )


def _of_slurm(environ: Mapping[str, str]) -> Rank:
    if "SLURM_JOB_ID" not in environ:
        raise SeedbedError(
            "--cluster slurm, but SLURM_JOB_ID is not set: start it in an allocation, with srun"
        )
    # A batch script has a SLURM_PROCID, too, but no step of its own.
    if "SLURM_STEP_NUM_TASKS" not in environ:
        raise SeedbedError("this process is of no step of its SLURM job: start it with srun")
    node = _count(environ, "SLURM_NODEID")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = environ["SLURM_JOB_ID"]
    return Rank(
        _count(environ, "SLURM_PROCID"),
        _count(environ, "SLURM_STEP_NUM_TASKS"),
        tasks[node] if node < len(tasks) else 1,
        float(environ.get("SLURM_CPUS_PER_TASK", 0)),
        f"{array}_{task}" if array and task else job,
        f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}.{environ.get('SLURM_STEP_ID', '0')}",
        _count(environ, "SLURM_CPUS_ON_NODE") if "SLURM_CPUS_ON_NODE" in environ else 0,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Returns the tasks of each node, of which SLURM writes `2(x3),1`: a split need not be even."""
    found: list[int] = []
    for part in text.split(","):
        known = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if known is None:
            raise SeedbedError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}: it must be as SLURM sets it, as 2(x3),1"
            )
        found += [int(known[1])] * int(known[2] or 1)
    return found


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise SeedbedError(f"{name} is {text!r}: it must be a number, as the launcher sets it")
    return int(text)
