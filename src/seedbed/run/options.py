"""The options of the runtimes. `seedbed train PRESET --help` shows the docstring of every field."""

from __future__ import annotations

import dataclasses

from seedbed.arguments import require_fields
from seedbed.machine import usable_cores
from seedbed.types import Agent, OnPolicy, Replay, SeedbedError, on_policy

GROUPS = 2
"""Groups of environments in an actor of a run: one steps while the other waits for actions."""
# The default for agents that learn while acting goes on.
_ENVS_PER_ACTOR = 32
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines cannot reach."""


@dataclasses.dataclass(frozen=True)
class CentralConfig:
    """The options of the central runtime, which are the same for every agent and environment."""

    steps: int = 10_000_000
    """Transitions to train for: agent steps, not counting steps that only reset an environment."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    actors: int = 0
    """Actor processes; 0 is one for each usable CPU core, or with PPO as many as divide its batch."""
    envs_per_actor: int = 0
    """Environments of an actor, an even number (two groups); 0 is 32, or with PPO what its batch needs."""
    listen: str = ""
    """HOST:PORT at which actors of other machines may join (port 0: any); then only --actors N are local."""
    advertise: tuple[str, ...] = ()
    """Addresses (HOST or HOST:PORT) at which these actors shall look for the learner; by default its own."""
    stream_groups: int = 64
    """With --listen, the most groups of environments of other machines; a group is half an actor's."""
    insecure: bool = False
    """With --listen on a loopback address, whether streams are plaintext; for debugging."""
    actor_timeout_s: float = 120.0
    """Seconds after which a silent actor is replaced, or the run fails if no actor has started at all."""
    inference_devices: tuple[int, ...] = (0,)
    """Indices of the devices that choose actions."""
    learner_devices: tuple[int, ...] = (0,)
    """Indices of the devices that learn. A batch is divided among them."""
    evaluate_every: int = 1_000_000
    """Transitions between evaluations. One more is at the end of the run; 0 means only that one."""
    evaluate_episodes: int = 8
    """Number of episodes in an evaluation."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep besides the best one."""
    save_replay: bool = True
    """Whether to keep replay in files of the run's folder, so that a resumed run need not fill it again."""
    log_every_s: float = 10.0
    """Seconds between lines of metrics in the log."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        require_fields(self)
        for field in ("steps", "evaluate_episodes", "keep_checkpoints", "stream_groups"):
            at_least(field, getattr(self, field), 1)
        require_seed(self.seed)
        for field in ("actors", "envs_per_actor", "evaluate_every"):
            at_least(field, getattr(self, field), 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            at_least(field, getattr(self, field), 0.1)
        at_least("actor_timeout_s", self.actor_timeout_s, 1)
        for field in ("inference_devices", "learner_devices"):
            _different_devices(field, getattr(self, field))
        address = listening_address(self.listen) if self.listen else None
        if self.insecure and (address is None or address[0] not in LOOPBACK):
            raise SeedbedError(
                f"insecure is for --listen at a loopback address, such as 127.0.0.1:0, not {self.listen!r}"
            )
        for address in self.advertise:
            split_address(address)

    @property
    def groups(self) -> int:
        """The groups of environments that a resolved run may have, those of other machines among them."""
        return self.actors * GROUPS + (self.stream_groups if self.listen else 0)

    def resolved(self, agent: Agent) -> CentralConfig:
        """Returns a copy in which `actors` and `envs_per_actor` have been chosen if they were 0.

        Raises SeedbedError if sizes do not fit one another or the agent; it names the option to change.
        """
        require_sizes(agent)
        experience = on_policy(agent)
        synchronous = experience is not None and experience.synchronous
        if synchronous and self.listen:
            raise SeedbedError(
                f"{type(agent).__name__} acts, stops and learns with a fixed set of environments: --listen "
                "is for agents that learn while others act, such as impala, r2d2 and dqn"
            )
        if synchronous:
            assert experience is not None
            actors, envs = _fitting(experience.batch, self.actors, self.envs_per_actor)
        else:
            actors = self.actors or (0 if self.listen else _cores())
            envs = self.envs_per_actor or _ENVS_PER_ACTOR
        if envs % GROUPS:
            raise SeedbedError(
                f"envs_per_actor is {envs}: an actor steps its environments in {GROUPS} groups; give an "
                "even number with --envs-per-actor"
            )
        config = dataclasses.replace(self, actors=actors, envs_per_actor=envs)
        config._require_shares(agent)
        return config

    def _require_shares(self, agent: Agent) -> None:
        """Raises SeedbedError if sizes do not fit: call it when `actors` and `envs_per_actor` are chosen.

        A batch must divide evenly among groups, devices and minibatches. There must be enough environments
        for an on-policy batch, and a group for every inference device.
        """
        unrolls, learners = on_policy(agent), len(self.learner_devices)
        batch, group = agent.experience.batch, self.envs_per_actor // GROUPS
        if unrolls is not None and batch % group:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls: it must be a multiple of the {group} environments of a "
                "group, half of those of an actor; change --agent.batch or --envs-per-actor"
            )
        many = unrolls is not None and not unrolls.synchronous
        if many and batch > 2 * self.groups * group:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls, but there are only {self.groups * group} "
                "environments: lower --agent.batch, or raise --actors, --envs-per-actor or, with --listen, "
                "--stream-groups"
            )
        if batch % (learners * agent.minibatches):
            raise SeedbedError(
                f"agent.batch is {batch}: it must divide by {learners} learner devices x "
                f"{agent.minibatches} minibatches; change --agent.batch or --learner-devices"
            )
        if self.groups < len(self.inference_devices):
            raise SeedbedError(
                f"{len(self.inference_devices)} inference devices for the {self.groups} groups of "
                f"{self.actors} actors: name fewer with --inference-devices, or raise --actors"
            )


MOST_SEEDS = 10_000
"""The most seeds of a population."""


@dataclasses.dataclass(frozen=True)
class FusedConfig:
    """The options of the fused runtime, which are the same for every agent and environment."""

    steps: int = 10_000_000
    """Transitions to train each seed for: agent steps, not counting steps that only reset an environment."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    seeds: int = 1
    """Number of independent runs to train at once, with the seeds `seed`, `seed` + 1, ..."""
    sweep: str = ""
    """Values of a float option of the agent to train at once, with every seed: learning_rate=1e-3,2e-3."""
    envs: int = 16
    """Environments of an agent that learns from replay; others have one for each unroll of a batch."""
    unroll: int = 8
    """Steps of each environment between updates of an agent that learns from replay."""
    euler_share: float = 0.0
    """First share of the steps that trains with Euler's integrator (faster); the rest use the task's own."""
    devices: tuple[int, ...] = (0,)
    """Indices of the devices. The environments are divided among them."""
    evaluate_every: int = 0
    """Transitions of each seed between evaluations. One more is at the end of the run; 0 means only that."""
    evaluate_episodes: int = 16
    """Number of episodes in an evaluation, all played at once."""
    checkpoint_every_s: float = 60.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep besides the best one."""
    log_every_s: float = 2.0
    """Seconds between lines of metrics in the log."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        require_fields(self)
        counts = ("steps", "seeds", "envs", "unroll", "evaluate_episodes", "keep_checkpoints")
        for field in counts:
            at_least(field, getattr(self, field), 1)
        require_seed(self.seed)
        at_least("evaluate_every", self.evaluate_every, 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            at_least(field, getattr(self, field), 0.1)
        if not 0 <= self.euler_share <= 1:
            raise SeedbedError(f"euler_share is {self.euler_share}: it must be from 0 to 1")
        _different_devices("devices", self.devices)
        # Reading this raises SeedbedError if `sweep` has a wrong form.
        self.variations  # noqa: B018

    @property
    def variations(self) -> tuple[dict[str, float], ...]:
        """For each member of the population, the agent's options (name: value) that `sweep` sets.

        Has a member for every value and seed, the seeds of the first value first. Raises SeedbedError if
        `sweep` has a wrong form.
        """
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise SeedbedError(f"seeds is {self.seeds}: it must be 1 to {MOST_SEEDS:,}")
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
        """The name of each member of the population, such as `seed 3, learning_rate 0.001`."""
        members = zip(self.member_seeds, self.variations, strict=True)
        return tuple(
            ", ".join([f"seed {seed}", *(f"{name} {value:g}" for name, value in varied.items())])
            for seed, varied in members
        )


def require_sizes(agent: Agent) -> None:
    """Raises SeedbedError if an agent, bound or not, has an experience whose sizes cannot be."""
    name, experience = type(agent).__name__, _experience(agent)
    if not isinstance(experience, OnPolicy | Replay):
        raise SeedbedError(
            f"{name}.experience is {experience!r}: return an OnPolicy or a Replay of seedbed.types"
        )
    sizes = {"epochs": agent.epochs, "minibatches": agent.minibatches, "batch": experience.batch}
    if isinstance(experience, OnPolicy):
        sizes["unroll"] = experience.unroll
    else:
        names = ("sequence", "period", "capacity", "min_size")
        sizes.update({size: getattr(experience, size) for size in names})
    for size, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise SeedbedError(f"{name}: {size} is {value!r}; give at least 1, a whole number")
    if isinstance(experience, Replay) and (agent.epochs, agent.minibatches) != (1, 1):
        raise SeedbedError(
            f"{name} learns from replay: epochs is {agent.epochs} and minibatches {agent.minibatches}; "
            "give 1 and 1, and draw more with ratio"
        )
    if isinstance(experience, Replay) and not experience.burn_in >= 0:
        raise SeedbedError(f"{name}: burn_in is {experience.burn_in}; give 0 or more")
    if isinstance(experience, Replay) and not experience.ratio > 0:
        raise SeedbedError(f"{name}: ratio is {experience.ratio}; give more than 0")


def _experience(agent: Agent) -> OnPolicy | Replay:
    """Reads an agent's experience; raises SeedbedError if that fails."""
    try:
        return agent.experience
    except SeedbedError:
        raise
    except Exception as error:
        raise SeedbedError(
            f"{type(agent).__name__}.experience failed: {type(error).__name__}: {error}; it is read before "
            "`spec` is filled in"
        ) from error


def listening_address(text: str) -> tuple[str, int]:
    """Splits HOST:PORT of `--listen`; the host is "" for every address. Raises SeedbedError."""
    host, port = split_address(text)
    if port is None:
        raise SeedbedError(
            f"listen is {text!r}: give HOST:PORT, such as 0.0.0.0:4711, or :0 for any port"
        )
    return host, port


def split_address(text: str) -> tuple[str, int | None]:
    """Splits HOST or HOST:PORT, where the host may be [an IPv6 address]; raises SeedbedError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if (colon and port and not (port.isdigit() and int(port) < 1 << 16)) or " " in text:
        raise SeedbedError(f"{text!r} is no address: give HOST:PORT, with a port from 0 to 65535")
    return host, int(port) if port else None


def _cores() -> int:
    return max(1, int(usable_cores()))


def _fitting(batch: int, actors: int, envs: int) -> tuple[int, int]:
    """Chooses the number of actors, and of environments in each, for an agent that acts, stops and learns.

    The batch must contain equally many unrolls of every environment. A number that is not 0 is given and
    stays. Prefers as many actors as cores, and one unroll of each environment. Raises SeedbedError if
    nothing fits.
    """
    for count in [actors] if actors else range(_cores(), 0, -1):
        each = envs or max(GROUPS, batch // count)
        if batch % (count * each) == 0 and each % GROUPS == 0:
            return count, each
    given = f"{actors} actors" if actors else "actors"
    each = f"{envs} environments" if envs else f"environments in {GROUPS} groups"
    raise SeedbedError(
        f"agent.batch is {batch} unrolls, and the agent acts, stops and learns: {given} with {each} each "
        "cannot make it up of equally many unrolls of every environment; change --agent.batch, --actors or "
        "--envs-per-actor"
    )


def _different_devices(field: str, devices: tuple[int, ...]) -> None:
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise SeedbedError(f"{field} is {devices}: name one or more different device indices")


def at_least(field: str, value: float, least: float) -> None:
    """Raises SeedbedError if an option is less than `least`, or not a number."""
    if not value >= least:
        raise SeedbedError(f"{field} is {value}: it must be {least} or more")


def require_seed(seed: int) -> None:
    """Raises SeedbedError unless a seed is from 0 to 2**63 - 1, as JAX's keys take it."""
    if not 0 <= seed < 1 << 63:
        raise SeedbedError(f"seed is {seed}: it must be from 0 to {(1 << 63) - 1:,}")
