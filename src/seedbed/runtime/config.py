"""Options of the runtimes."""

from __future__ import annotations

import dataclasses

from seedbed.runtime.metrics import usable_cores
from seedbed.types import Agent, OnPolicy, SeedbedError

_GROUPS = 2  # of an actor: one steps while the other waits for actions
_ENVS_PER_ACTOR = 32  # where acting goes on while the agent learns


@dataclasses.dataclass(frozen=True)
class CentralConfig:
    """How the central runtime trains, whatever the agent and the environment."""

    steps: int = 10_000_000
    """Transitions to train for: agent steps, without those that only reset an environment."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    actors: int = 0
    """Actor processes; 0 takes one for each CPU core that may be used, or as many as fit the agent."""
    envs_per_actor: int = 0
    """Environments of an actor, stepped in two groups; 0 takes 32, or as many as the batch of an agent needs
    that acts, stops and learns."""
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
        for field in ("steps", "evaluate_episodes", "keep_checkpoints"):
            _at_least(field, getattr(self, field), 1)
        for field in ("seed", "actors", "envs_per_actor", "evaluate_every"):
            _at_least(field, getattr(self, field), 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            _at_least(field, getattr(self, field), 0.1)
        _at_least("actor_timeout_s", self.actor_timeout_s, 1)
        for field in ("inference_devices", "learner_devices"):
            _different_devices(field, getattr(self, field))

    def resolved(self, agent: Agent) -> CentralConfig:
        """Returns these options with `actors` and `envs_per_actor` chosen where they are 0.

        Raises SeedbedError, which names what to change, where sizes do not fit one another and the agent.
        """
        experience = agent.experience
        if isinstance(experience, OnPolicy) and experience.synchronous:
            actors, envs = _fitting(experience.batch, self.actors, self.envs_per_actor)
        else:
            actors, envs = self.actors or _cores(), self.envs_per_actor or _ENVS_PER_ACTOR
        if envs % _GROUPS:
            raise SeedbedError(
                f"envs_per_actor is {envs}: an actor steps its environments in {_GROUPS} groups; give an "
                "even number with --envs-per-actor"
            )
        config = dataclasses.replace(self, actors=actors, envs_per_actor=envs)
        config._require_shares(agent)
        return config

    def _require_shares(self, agent: Agent) -> None:
        """Raises SeedbedError where a batch does not divide among groups, devices and minibatches."""
        experience, learners = agent.experience, len(self.learner_devices)
        batch, group = experience.batch, self.envs_per_actor // _GROUPS
        if isinstance(experience, OnPolicy) and batch % group:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls: it must be a multiple of the {group} environments of a "
                "group, half of those of an actor; change --agent.batch or --envs-per-actor"
            )
        many = isinstance(experience, OnPolicy) and not experience.synchronous
        if many and batch > 2 * self.actors * self.envs_per_actor:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls, but there are only {self.actors * self.envs_per_actor} "
                "environments: lower --agent.batch, or raise --actors or --envs-per-actor"
            )
        if batch % (learners * agent.minibatches):
            raise SeedbedError(
                f"agent.batch is {batch}: it must divide by {learners} learner devices x "
                f"{agent.minibatches} minibatches; change --agent.batch or --learner-devices"
            )
        if self.actors * _GROUPS < len(self.inference_devices):
            raise SeedbedError(
                f"{len(self.inference_devices)} inference devices for the {self.actors * _GROUPS} groups of "
                f"{self.actors} actors: name fewer with --inference-devices, or raise --actors"
            )


@dataclasses.dataclass(frozen=True)
class FusedConfig:
    """How the fused runtime trains, whatever the agent and the environment."""

    steps: int = 10_000_000
    """Transitions to train for, of each seed: agent steps, without those that only reset an environment."""
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
    euler_share: float = 0.0
    """Share of the steps, from the first, that train with Euler's integrator, which is faster; the rest
    train with the environment's own, and evaluations always use that."""
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
        if not 0 <= self.euler_share <= 1:
            raise SeedbedError(f"euler_share is {self.euler_share}: it must be from 0 to 1")
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

    @property
    def member_names(self) -> tuple[str, ...]:
        """What tells the members of the population apart, such as `seed 3, learning_rate 0.001`."""
        members = zip(self.member_seeds, self.variations, strict=True)
        return tuple(
            ", ".join([f"seed {seed}", *(f"{name} {value:g}" for name, value in varied.items())])
            for seed, varied in members
        )


def _cores() -> int:
    return max(1, int(usable_cores()))


def _fitting(batch: int, actors: int, envs: int) -> tuple[int, int]:
    """Chooses actors, and environments of each, for a batch of whole unrolls of every environment.

    What is not 0 is given. As many actors as there are cores is best, and one unroll of each environment.
    """
    for count in [actors] if actors else range(_cores(), 0, -1):
        each = envs or max(_GROUPS, batch // count)
        if batch % (count * each) == 0 and each % _GROUPS == 0:
            return count, each
    given = f"{actors} actors" if actors else "actors"
    each = f"{envs} environments" if envs else f"environments in {_GROUPS} groups"
    raise SeedbedError(
        f"agent.batch is {batch} unrolls, and the agent acts, stops and learns: {given} with {each} each "
        "cannot make it up of equally many unrolls of every environment; change --agent.batch, --actors or "
        "--envs-per-actor"
    )


def _different_devices(field: str, devices: tuple[int, ...]) -> None:
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise SeedbedError(f"{field} is {devices}: name one or more different device indices")


def _at_least(field: str, value: float, least: float) -> None:
    if not value >= least:
        raise SeedbedError(f"{field} is {value}: it must be {least} or more")
