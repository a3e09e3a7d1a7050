"""A central run as the session drives it: its threads, snapshots and evaluations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from seedbed.central.evaluation import Evaluation
from seedbed.central.meter import CentralMeter, Setup
from seedbed.run.evaluation import compile_play
from seedbed.run.options import CentralConfig
from seedbed.run.runtime import Progress, Snapshot
from seedbed.types import LearnerState


class CentralRun:
    """The threads of a central run, which act and learn; a `run.runtime.Runtime`.

    For the session's thread only.
    """

    def __init__(self, setup: Setup) -> None:
        """Takes the parts of the run; starts no thread."""
        self._setup = setup
        # Tells the loops to end.
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._play = compile_play(setup.agent)
        self._evaluations: list[Evaluation] = []
        self._past_cpu_seconds = 0.0  # of evaluations that have ended

    @property
    def options(self) -> CentralConfig:
        """The options of the run."""
        return self._setup.config

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in a step."""
        return self._setup.env.frame_skip

    def start(self) -> None:
        """Starts the inference thread, the learner thread and the threads that the source needs."""
        loops = {"inference": self._setup.acting.run, "learner": self._learn}
        loops |= self._setup.source.loops
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    def _learn(self, stop: threading.Event) -> None:
        """Runs the learner loop, and then stops the run: there is nothing more to learn from."""
        group = self._setup.group
        with contextlib.nullcontext() if group is None else group.together():
            self._setup.learning.run(stop)
        self.stop()

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        """Runs a loop. An exception stops the run, and `join` returns it."""
        try:
            loop(self._stop)
        except BaseException as failure:
            self._failures.append(failure)
            self.stop()

    def advance(self) -> bool:
        """Waits a tenth of a second while the threads work; returns False once they are to end."""
        return not self._stop.wait(0.1)

    def stop(self) -> None:
        """Tells the loops to end, and closes the source, so that they stop waiting.

        Any thread may call this.
        """
        self._stop.set()
        self._setup.source.close()

    def join(self) -> BaseException | None:
        """Waits until the threads have ended; returns the first exception that ended one."""
        for thread in self._threads:
            thread.join()
        return self._failures[0] if self._failures else None

    def progress(self) -> Progress:
        """Returns the counts so far."""
        env_steps = self._setup.source.env_steps
        return Progress(env_steps, self._setup.learning.updates, env_steps)

    def recent_episodes(self) -> dict[str, float]:
        """Returns the count of episodes, and means of the last 100."""
        return self._setup.acting.episodes.summary()

    def meter(self) -> CentralMeter:
        """Starts measurements; the first interval begins now."""
        return CentralMeter(self._setup, self._evaluations_cpu)

    def _evaluations_cpu(self) -> float:
        return self._past_cpu_seconds + sum(each.cpu_seconds for each in self._evaluations)

    def request_snapshot(self) -> None:
        """Asks the learner for a copy of its state."""
        self._setup.learning.request_snapshot()

    def take_snapshot(self) -> Snapshot | None:
        """Returns the copy that was asked for, once."""
        taken = self._setup.learning.take_snapshot()
        return None if taken is None else self._snapshot(*taken)

    def last_snapshot(self) -> Snapshot | None:
        """Returns a copy of the state after the threads have ended, or None if an update failed."""
        learning = self._setup.learning
        return self._snapshot(*learning.snapshot()) if learning.intact else None

    def _snapshot(self, state: LearnerState, env_steps: int) -> Snapshot:
        metadata = {"episodes": self._setup.acting.episodes.state()}
        return Snapshot(env_steps, state, metadata, int(state.updates))

    def save_beside(self, step: int, settle: Callable[[], None]) -> None:
        """Saves the replay, if there is one, before its checkpoint."""
        self._setup.source.save(step, settle)

    def evaluate(self, snapshot: Snapshot, seed: int, give_up: Callable[[], bool]) -> Evaluation:
        """Starts an evaluation beside training."""
        del give_up  # the session gives it to `Evaluation.wait`
        self._past_cpu_seconds = self._evaluations_cpu()
        setup = self._setup
        evaluation = Evaluation(
            setup.agent, setup.env, setup.config, self._play, snapshot.arrays.params, seed
        )
        self._evaluations = [evaluation]
        return evaluation

    def take_notices(self) -> list[str]:
        """Returns messages of actors, replay, the gate and evaluations, each once."""
        gate = self._setup.gate
        return [
            *self._setup.pool.take_notices(),
            *self._setup.source.take_notices(),
            *(gate.take_notices() if gate is not None else ()),
            *(
                f"evaluation: {notice}"
                for each in self._evaluations
                for notice in each.take_notices()
            ),
        ]

    def pids(self) -> list[int]:
        """Returns the process ids of the actors of training and evaluation."""
        return [
            *self._setup.pool.pids(),
            *(pid for each in self._evaluations for pid in each.pids),
        ]
