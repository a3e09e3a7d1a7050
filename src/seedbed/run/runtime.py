"""The contract between a runtime and the session that drives it: what a run gives, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from seedbed.run.metrics import plain_value
from seedbed.types import LearnerState, SeedbedError, Tree


class View(Protocol):
    """A display of progress, for the thread that called `train`.

    Every method returns at once, whatever the terminal does.
    """

    @property
    def report_every_s(self) -> float:
        """Seconds between calls of `update`."""
        ...

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows one line of metrics. The thread that called `train` calls this."""
        ...

    def message(self, text: str) -> None:
        """Shows a message. The thread that called `train` calls this."""
        ...


class SessionOptions(Protocol):
    """The options of a run that the session follows; `run/options.py` explains them to users."""

    @property
    def steps(self) -> int:
        """Transitions to train for."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the run."""
        ...

    @property
    def evaluate_every(self) -> int:
        """Transitions between evaluations; 0 means only the one at the end."""
        ...

    @property
    def evaluate_episodes(self) -> int:
        """Episodes in an evaluation."""
        ...

    @property
    def until_return(self) -> float:
        """The return at which the run ends; infinity is never."""
        ...

    @property
    def until_stale(self) -> int:
        """Transitions without a better evaluation after which the run ends; 0 is never."""
        ...

    @property
    def max_minutes(self) -> float:
        """Minutes of training after which the run ends; infinity is never."""
        ...

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between checkpoints."""
        ...

    @property
    def keep_checkpoints(self) -> int:
        """Checkpoints to keep besides the best one."""
        ...

    @property
    def log_every_s(self) -> float:
        """Seconds between lines of metrics."""
        ...


class Start(NamedTuple):
    """The progress from which a run starts: zeros, or the figures of the checkpoint that it resumes from."""

    env_steps: int = 0  # transitions that count
    wall_s: float = 0.0  # seconds of its sessions
    updates: int = 0  # gradients applied
    trained_s: float = 0.0  # of these, without what comes before training: waiting and compiling

    @classmethod
    def read(cls, metadata: dict[str, Any]) -> Start:
        """Returns the start that a checkpoint's metadata hold; raises SeedbedError if they hold none."""
        try:
            start = metadata["start"]
            steps, wall_s, updates = (start[name] for name in cls._fields[:3])
            # Checkpoints of earlier versions do not tell the two times apart.
            trained_s = start.get("trained_s", wall_s)
            return cls(int(steps), float(wall_s), int(updates), float(trained_s))
        except (KeyError, TypeError, ValueError) as error:
            raise SeedbedError(
                f"the checkpoint does not say where training goes on ({type(error).__name__}: {error}): "
                "remove it, to resume from the one before"
            ) from error


class Progress(NamedTuple):
    """The counts of a run so far."""

    env_steps: (
        int  # transitions that count; of a population, those of the member that has the fewest
    )
    updates: int  # gradients applied, in the same sense
    transitions: int  # of all members together


class Snapshot(NamedTuple):
    """The contents of a checkpoint, without the session's own metadata."""

    step: int  # transitions that count
    arrays: Tree  # a learner state, or what has one as its field `learner`
    metadata: dict[str, Any]  # JSON
    updates: int  # gradients applied

    @property
    def learner(self) -> LearnerState:
        """The learner state."""
        return self.arrays if isinstance(self.arrays, LearnerState) else self.arrays.learner


class Score(NamedTuple):
    """The result of an evaluation."""

    value: float  # by which the best checkpoint is chosen
    text: str  # the result in words, as in "1.5 +- 0.5 (8 episodes)"
    metrics: dict[str, Any]
    metadata: dict[str, Any]  # what the checkpoint keeps besides, as JSON

    @property
    def kept(self) -> dict[str, Any]:
        """All that its checkpoint keeps, as JSON types: a run that was killed has no line that tells it."""
        told = {name: plain_value(value) for name, value in self.metrics.items()}
        return self.metadata | {"evaluation": told}


class Evaluation(Protocol):
    """An evaluation of a snapshot, which may run in a thread of its own or have ended already."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def score(self) -> Score | None:
        """The result; None if it was cancelled or failed. Read it when `done` is true."""
        ...

    @property
    def failure(self) -> Exception | None:
        """The exception that ended it, if any. Read it when `done` is true."""
        ...

    def cancel(self) -> None:
        """Asks it to end soon, without a score; does not wait."""
        ...

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Waits until it ends; cancels it if `give_up`, which is called often, returns True."""
        ...


class Meter(Protocol):
    """Measurements of a runtime over intervals."""

    def read(self, passed_s: float) -> dict[str, Any]:
        """Returns metrics: counts of the run, and rates of the `passed_s` seconds since the last call."""
        ...


class Runtime(Protocol):
    """A run of one runtime, as the session drives it. All methods are for the session's thread."""

    @property
    def options(self) -> SessionOptions:
        """The options of the run."""
        ...

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in a step."""
        ...

    def start(self) -> None:
        """Starts training, for as long as `advance` is called."""
        ...

    def advance(self) -> bool:
        """Trains on for a moment, usually less than a second; returns whether there is more to do."""
        ...

    def stop(self) -> None:
        """Tells all threads of the run to end; does not wait."""
        ...

    def join(self) -> BaseException | None:
        """Waits until all threads have ended; returns the first exception that ended one."""
        ...

    def progress(self) -> Progress:
        """Returns the counts so far."""
        ...

    def recent_episodes(self) -> dict[str, float]:
        """Returns `episodes`, the count so far, and `episode_return_mean` of about the last 100.

        Of a population, the count is that of the member that has the fewest, and the mean that of all.
        """
        ...

    def meter(self) -> Meter:
        """Starts measurements; the first interval begins now."""
        ...

    def request_snapshot(self) -> None:
        """Asks for a snapshot; `take_snapshot` returns it as soon as an update has ended."""
        ...

    def take_snapshot(self) -> Snapshot | None:
        """Returns the newest snapshot that was asked for, once. Its arrays are valid until `advance`."""
        ...

    def last_snapshot(self) -> Snapshot | None:
        """Returns a snapshot after training has ended; None if a failure left the learner state in pieces."""
        ...

    def save_beside(self, step: int, settle: Callable[[], None]) -> None:
        """Saves what the checkpoint of `step` needs besides its arrays, if there is anything.

        `settle` waits until the checkpoint before is written or has failed. Failures of the disk become
        notices. Raises SeedbedError for another failure; the checkpoint is then written first.
        """
        ...

    def evaluate(self, snapshot: Snapshot, seed: int, give_up: Callable[[], bool]) -> Evaluation:
        """Starts an evaluation of a snapshot, or does all of it, unless `give_up` returns True meanwhile."""
        ...

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once."""
        ...

    def pids(self) -> list[int]:
        """Returns the ids of the other processes of the run."""
        ...
