"""Actors of this machine: how they are kept going, and which of their faults end a run."""

from __future__ import annotations

from seedbed.actors.child import start_again
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.machine import raise_descriptor_limit
from seedbed.streams.supervisor import Supervisor, quoted
from seedbed.types import SeedbedError

SETTLED_STEPS = 100
"""A death is early if no group of the actor has published this many timesteps."""
TIMEOUT_S = 120.0
"""Seconds of silence after which an actor that owes a step is replaced."""
# Descriptors of a process besides two for each actor and each group, and one for a group's stream elsewhere.
_OTHER_DESCRIPTORS = 200
# The share of the timeout after which a silent actor is reported in a notice.
_NOTICE = 0.25


def local_pool(
    launcher: Launcher, *, actors: int, timeout_s: float = TIMEOUT_S, others: int = 0
) -> ActorPool:
    """Starts actor processes, and returns the pool of their groups, which ends them when it is closed.

    Behind their groups, the pool has `others` that anybody else may serve.

    An actor that dies is started again, with new memory and without a seed. One that owes a step, and gives
    no sign for `timeout_s` seconds, is killed and started again. The pool raises SeedbedError if an actor
    reports an error, has another spec than the first, or dies early too often, or if the first does not
    say hello within `timeout_s` of its start. Raises SeedbedError if processes cannot be started, or if the
    numbers do not fit.
    """
    if actors < 1 and not others:
        raise SeedbedError(f"{actors} actors do not work; take at least one")
    own = actors * launcher.groups
    groups = own + others
    _require_descriptors(2 * (actors + groups) + own + _OTHER_DESCRIPTORS, groups)
    pool = ActorPool(num_groups=groups, group_size=launcher.envs_per_group, timeout_s=timeout_s)
    try:
        for number in range(actors):
            LocalActor(pool, launcher, number)
    except BaseException:
        pool.close()
        raise
    return pool


def _require_descriptors(wanted: int, groups: int) -> None:
    if wanted > (allowed := raise_descriptor_limit()):
        raise SeedbedError(
            f"{groups} groups need {wanted} descriptors, and this process may have {allowed}: raise the "
            "limit (ulimit -Hn), or take fewer actors or --stream-groups"
        )


class LocalActor:
    """An actor through all its processes: the `peers.Policy` of each of them.

    The constructor starts the first process. The pool calls the rest, from its thread only.
    """

    def __init__(self, pool: ActorPool, launcher: Launcher, number: int) -> None:
        self._pool, self._launcher, self._number = pool, launcher, number
        self._supervisor = Supervisor(f"actor {number}", f"before its step {SETTLED_STEPS}")
        self._suspected = False  # a notice has told of its silence
        self._start()

    def _start(self) -> None:
        """Starts a process that begins new lives of the actor's groups."""
        lives = self._pool.assign_lives(self._launcher.groups_of(self._number))
        self._process = self._launcher.start(self._number, lives)
        self._suspected = False
        self._supervisor.begin()
        self._pool.attach(self._process, self)

    def silent(self, silent_s: float) -> None:
        """Notes a long silence, and kills the process after a longer one, or fails if no actor has answered.

        Call from the pool's thread only.
        """
        process, timeout_s = self._process, self._pool.timeout_s
        if silent_s < _NOTICE * timeout_s:
            self._suspected = False
        elif silent_s >= timeout_s and self._pool.layout is None:
            words = process.last_words()
            raise SeedbedError(
                f"no actor answered within {timeout_s:g} s of its start (where making "
                f"environments takes longer, raise --actor-timeout-s){quoted(words)}"
            )
        elif silent_s >= timeout_s:
            self._supervisor.hung(timeout_s, "--actor-timeout-s")
            process.kill()
        elif not self._suspected:
            self._suspected = True
            self._pool.note(
                f"actor {self._number} has given no sign for {silent_s:.0f} s; it is replaced after "
                f"{timeout_s:g} s (--actor-timeout-s)"
            )

    def ended(self, how: str) -> None:
        """Starts the actor again; raises SeedbedError if that would not help.

        Call from the pool's thread only.
        """
        process = self._process
        if process.fault is not None:
            raise process.fault
        steps = max((slot.step for slot in process.slots), default=0)
        words = process.last_words()
        process.close()
        after, early = f" after {steps} steps", steps < SETTLED_STEPS
        self._pool.note(self._supervisor.end(how, words, early, after))
        start_again(self._start, self._supervisor, self._pool.note)
