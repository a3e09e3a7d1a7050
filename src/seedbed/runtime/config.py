"""Options of the runtimes."""

from __future__ import annotations

import dataclasses

from seedbed.runtime.metrics import usable_cores
from seedbed.types import SeedbedError


@dataclasses.dataclass(frozen=True)
class CentralConfig:
    """How the central runtime trains, whatever the agent and the environment."""

    steps: int = 10_000_000
    """Agent steps to train for."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    actors: int = 0
    """Actor processes; 0 takes one for each CPU core that this machine or its container lets us use."""
    envs_per_actor: int = 32
    """Environments of an actor, stepped in two groups."""
    actor_timeout_s: float = 120.0
    """Seconds without a sign of an actor, at its start or in a step, after which it is replaced."""
    inference_devices: tuple[int, ...] = (0,)
    """Indices of the devices that choose actions."""
    learner_devices: tuple[int, ...] = (0,)
    """Indices of the devices that learn; a batch is divided among them."""
    evaluate_every: int = 1_000_000
    """Agent steps between evaluations; 0 evaluates only at the end."""
    evaluate_episodes: int = 8
    """Episodes of an evaluation."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints to keep besides the best."""
    save_replay: bool = True
    """Whether replay is kept in files of the run, so that a resumed run does not fill it again."""
    log_every_s: float = 10.0
    """Seconds between lines of metrics."""

    def __post_init__(self) -> None:
        """Checks ranges; raises SeedbedError."""
        for field in ("steps", "envs_per_actor", "evaluate_episodes", "keep_checkpoints"):
            _at_least(field, getattr(self, field), 1)
        for field in ("seed", "actors", "evaluate_every"):
            _at_least(field, getattr(self, field), 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            _at_least(field, getattr(self, field), 0.1)
        _at_least("actor_timeout_s", self.actor_timeout_s, 1)
        for field in ("inference_devices", "learner_devices"):
            _different_devices(field, getattr(self, field))

    @property
    def num_actors(self) -> int:
        """Actor processes to start."""
        return self.actors or max(1, int(usable_cores()))


@dataclasses.dataclass(frozen=True)
class FusedConfig:
    """How the fused runtime trains, whatever the agent and the environment."""

    steps: int = 10_000_000
    """Agent steps to train for, of each seed."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    seeds: int = 1
    """Independent runs to train at once, with the seeds `seed`, `seed` + 1, ..."""
    sweep: str = ""
    """Values of a number of the agent to train at once, each with every seed: learning_rate=1e-3,2e-3."""
    envs: int = 16
    """Environments of an agent that learns from replay; others have as many as an update has unrolls."""
    unroll: int = 8
    """Steps of each of these between updates; other agents say so themselves."""
    devices: tuple[int, ...] = (0,)
    """Indices of the devices among which the environments are divided."""
    evaluate_every: int = 0
    """Agent steps between evaluations; 0 evaluates only at the end."""
    evaluate_episodes: int = 16
    """Episodes of an evaluation, played at once."""
    checkpoint_every_s: float = 60.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints to keep besides the best."""
    log_every_s: float = 2.0
    """Seconds between lines of metrics."""

    def __post_init__(self) -> None:
        """Checks ranges; raises SeedbedError."""
        counts = ("steps", "seeds", "envs", "unroll", "evaluate_episodes", "keep_checkpoints")
        for field in counts:
            _at_least(field, getattr(self, field), 1)
        for field in ("seed", "evaluate_every"):
            _at_least(field, getattr(self, field), 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            _at_least(field, getattr(self, field), 0.1)
        _different_devices("devices", self.devices)
        self.variations  # noqa: B018  raises

    @property
    def variations(self) -> tuple[dict[str, float], ...]:
        """The agent's options of each member of the population, other than its seed."""
        if not self.sweep:
            return ({},) * self.seeds
        name, equals, values = self.sweep.partition("=")
        try:
            numbers = [float(value) for value in values.split(",")]
        except ValueError:
            numbers = []
        if not (equals and name.strip() and numbers):
            raise SeedbedError(
                f"sweep is {self.sweep!r}: write an option of the agent and its values, such as "
                "learning_rate=1e-3,2e-3"
            )
        field = name.strip().replace("-", "_")
        return tuple({field: number} for number in numbers for _ in range(self.seeds))

    @property
    def member_seeds(self) -> tuple[int, ...]:
        """The seed of each member of the population."""
        return tuple(self.seed + i % self.seeds for i in range(len(self.variations)))


def _different_devices(field: str, devices: tuple[int, ...]) -> None:
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise SeedbedError(f"{field} is {devices}: name one or more different device indices")


def _at_least(field: str, value: float, least: float) -> None:
    if not value >= least:
        raise SeedbedError(f"{field} is {value}: it must be {least} or more")
