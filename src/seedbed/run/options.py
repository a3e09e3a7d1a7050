"""The options of the runtimes. `seedbed train PRESET --help` shows the docstring of every field."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, Self

from seedbed.arguments import at_least, require_fields, require_seed
from seedbed.machine import require_linux, usable_cores
from seedbed.run import sizes
from seedbed.streams.addresses import LOOPBACK, listening_address, listening_ports, split_address
from seedbed.types import Agent, SeedbedError, on_policy

GROUPS = 2
"""Groups of environments in an actor of a run: one steps while the other waits for actions."""
# The default for agents that learn while acting goes on.
_USUAL_ENVS = 32


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """The options that every runtime has."""

    steps: int = 10_000_000
    """Transitions to train for: agent steps, not counting steps that only reset an environment."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    evaluate_every: int = 1_000_000
    """Transitions between evaluations. One more is at the end of the run; 0 means only that one."""
    evaluate_episodes: int = 8
    """Number of episodes in an evaluation."""
    until_return: float = math.inf
    """End when the mean return of the last 100 episodes, and then an evaluation, have reached this."""
    until_stale: int = 0
    """End when evaluations over this many transitions were no better than the best; 0 is never."""
    max_minutes: float = math.inf
    """End after this many minutes of training, those before --resume among them."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep besides the best one."""
    log_every_s: float = 10.0
    """Seconds between lines of metrics in the log."""

    runtime: ClassVar[str] = ""
    """The name of the runtime, that of its package."""
    on_device: ClassVar[bool] = False
    """Whether the environments of this runtime are on the device; else they are in processes of the host."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        require_fields(self)
        for field in ("steps", "evaluate_episodes", "keep_checkpoints"):
            at_least(field, getattr(self, field), 1)
        require_seed(self.seed)
        for field in ("until_return", "max_minutes"):
            if math.isnan(getattr(self, field)):
                raise SeedbedError(f"{field} is nan: give a number, or leave it out")
        for field in ("evaluate_every", "until_stale", "max_minutes"):
            at_least(field, getattr(self, field), 0)
        if self.until_stale and not 0 < self.evaluate_every <= self.until_stale:
            raise SeedbedError(
                f"until_stale is {self.until_stale} and evaluate_every {self.evaluate_every}: evaluations "
                "tell what is stale; let evaluate_every be smaller, and not 0"
            )
        for field in ("checkpoint_every_s", "log_every_s"):
            at_least(field, getattr(self, field), 0.1)

    def fitted(self, agent: Agent) -> Self:
        """Returns a copy in which sizes that were 0 have been chosen for the agent.

        Raises SeedbedError if the agent cannot learn in this runtime, or if sizes do not fit one another or
        the agent; it names the option to change.
        """
        sizes.require_sizes(agent)
        return self

    def require_platform(self) -> None:
        """Raises SeedbedError if this runtime needs another system than this one."""


@dataclasses.dataclass(frozen=True)
class _HostConfig(RuntimeConfig):
    """The options of runtimes whose environments are in actor processes."""

    actor_timeout_s: float = 120.0
    """Seconds after which a silent actor is replaced, or the run fails if no actor has started at all."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        super().__post_init__()
        at_least("actor_timeout_s", self.actor_timeout_s, 1)

    def require_platform(self) -> None:
        """Raises SeedbedError unless this is Linux, which shared memory and doorbells of actors need."""
        require_linux(
            f"the {self.runtime} runtime",
            "train an environment of the device here, in the fused runtime (see `seedbed list`), or this "
            "one on Linux",
        )


@dataclasses.dataclass(frozen=True)
class CentralConfig(_HostConfig):
    """The options of the central runtime, which are the same for every agent and environment."""

    actors: int | Literal["auto"] = 0
    """Actor processes; 0: one a core (PPO, V-MPO, replay: as batch, steps allow); auto: as a plan finds."""
    envs_per_actor: int = 0
    """Environments of an actor, an even number (two groups); 0: 32, or as a batch of PPO or V-MPO needs."""
    listen: str = ""
    """HOST:PORT at which actors of other machines may join (port 0: any); then only --actors N are local."""
    advertise: tuple[str, ...] = ()
    """Addresses (HOST or HOST:PORT) at which these actors shall look for the learner; by default its own."""
    stream_groups: int = 64
    """With --listen, the most groups of environments of other machines; a group is half an actor's."""
    insecure: bool = False
    """With --listen on a loopback address, whether streams are plaintext; for debugging."""
    inference_devices: tuple[int, ...] = (0,)
    """Indices of the devices that choose actions."""
    learner_devices: tuple[int, ...] = (0,)
    """Indices of the devices that learn. A batch is divided among them."""
    save_replay: bool = True
    """Whether to keep replay in files of the run's folder, so that a resumed run need not fill it again."""
    learners: int = 1
    """Processes of a job (--cluster ranks, ray or slurm) that learn as one, each with actors of its own."""

    runtime: ClassVar[str] = "central"

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        super().__post_init__()
        for field in ("stream_groups", "learners"):
            at_least(field, getattr(self, field), 1)
        if self.listen and self.learners > 1:
            raise SeedbedError(
                f"learners is {self.learners}, each with own actors: leave out --listen"
            )
        at_least("envs_per_actor", self.envs_per_actor, 0)
        at_least("actors", 0 if self.actors == sizes.AUTO else self.actors, 0)
        for field in ("inference_devices", "learner_devices"):
            _different_devices(field, getattr(self, field))
        address = listening_address(self.listen) if self.listen else None
        if self.insecure and (address is None or address[0] not in LOOPBACK):
            raise SeedbedError(
                f"insecure is for --listen at a loopback address, such as 127.0.0.1:0, not {self.listen!r}"
            )
        if not self.listen and (self.advertise or self.stream_groups != type(self).stream_groups):
            raise SeedbedError(
                f"advertise {self.advertise}, stream_groups {self.stream_groups}: name --listen, or () and 64"
            )
        for address in self.advertise:
            split_address(address)

    @property
    def groups(self) -> int:
        """The groups of environments that a fitted run may have, those of other machines among them."""
        return self.local_actors * GROUPS + (self.stream_groups if self.listen else 0)

    @property
    def local_actors(self) -> int:
        """The actor processes of a fitted run on this machine."""
        assert self.actors != sizes.AUTO, "it is chosen before the run begins"
        return self.actors

    def fitted(self, agent: Agent) -> Self:
        """Returns a copy in which sizes that were 0 have been chosen; auto stays, for `plan/sizing.py`."""
        if self.actors == sizes.AUTO:
            sizes.require_plannable(agent, self.learners == 1 and not self.listen)
            fitted = dataclasses.replace(self, actors=0).fitted(agent)
            return dataclasses.replace(fitted, actors=sizes.AUTO)
        sizes.require_sizes(agent)
        sizes.require_unrolls(agent)
        experience = on_policy(agent)
        synchronous = experience is not None and experience.synchronous
        if self.listen:
            sizes.require_listenable(agent)
        part = experience.batch // self.learners if experience else 0
        envs = self.envs_per_actor or math.gcd(_USUAL_ENVS, GROUPS * part * (self.learners > 1))
        cores, each = 0 if self.listen else _cores(), self.steps // (envs * self.learners)
        actors = self.actors or sizes.usual_actors(agent, each, cores)
        if synchronous:
            actors, envs = _fitting(part, self.actors, self.envs_per_actor)
        _require_groups(envs)
        config = dataclasses.replace(self, actors=actors, envs_per_actor=envs)
        devices = len(self.learner_devices)
        sizes.require_batch(agent, envs // GROUPS, config.groups, devices, self.learners)
        if config.groups < len(self.inference_devices):
            raise SeedbedError(
                f"{len(self.inference_devices)} inference devices for the {config.groups} groups of "
                f"{actors} actors: name fewer with --inference-devices, or raise --actors"
            )
        return config


@dataclasses.dataclass(frozen=True)
class FusedConfig(RuntimeConfig):
    """The options of the fused runtime, which are the same for every agent and environment."""

    steps: int = 10_000_000
    """Transitions to train each seed for: agent steps, not counting steps that only reset an environment."""
    evaluate_every: int = 0
    """Transitions of each seed between evaluations. One more is at the end of the run; 0 means only that."""
    evaluate_episodes: int = 16
    """Number of episodes in an evaluation, all played at once."""
    checkpoint_every_s: float = 60.0
    log_every_s: float = 2.0
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
    """Indices of the devices. Environments are divided among them, or the members of a population."""

    runtime: ClassVar[str] = "fused"
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        super().__post_init__()
        for field in ("seeds", "envs", "unroll"):
            at_least(field, getattr(self, field), 1)
        if not 0 <= self.euler_share <= 1:
            raise SeedbedError(f"euler_share is {self.euler_share}: it must be from 0 to 1")
        _different_devices("devices", self.devices)
        # Reading this raises SeedbedError if `sweep` has a wrong form.
        self.variations  # noqa: B018

    def fitted(self, agent: Agent) -> Self:
        """Returns itself; raises SeedbedError if sizes do not fit, or are of no use to the agent."""
        sizes.require_sizes(agent)
        sizes.require_divergence(agent)
        sizes.require_of_use(agent, FusedConfig, envs=self.envs, unroll=self.unroll)
        return self

    @property
    def variations(self) -> tuple[dict[str, float], ...]:
        """For each member of the population, the agent's options (name: value) that `sweep` sets.

        Has a member for every value and seed, the seeds of the first value first. Raises SeedbedError if
        `sweep` has a wrong form.
        """
        sizes.require_seeds(self.seed, self.seeds)
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


@dataclasses.dataclass(frozen=True)
class ParamServerConfig(_HostConfig):
    """The options of the parameter-server runtime, which are the same for every agent and environment."""

    steps: int = 10_000_000
    """Transitions of all learners to train for: agent steps, not counting steps that only reset."""
    learners: int = 2
    """Learner processes, each with actors of its own."""
    parameter_shards: int = 2
    """Processes that divide the parameters among them, and apply gradients."""
    replay_shards: int = 2
    """Processes that divide the replay among them; agents that learn without replay have none."""
    replay: Literal["global", "bundled"] = "global"
    """Whether learners draw from all replay shards, or each from one that gets its own steps only."""
    hosts: int = 0
    """How many other machines run a part of the roles; `seedbed host RUN`, started there, lets one join."""
    listen: str = ""
    """Where roles listen for those machines: 0.0.0.0, or 0.0.0.0:47000-47099 to have ports of a range."""
    actors: int = 1
    """Actor processes of a learner."""
    envs_per_actor: int = 32
    """Environments of an actor, an even number (two groups)."""
    most_lag: int = 100
    """A shard discards a gradient if it has applied more than this many since its parameters were pulled."""
    outlier_deviations: float = 0.0
    """A learner discards a gradient whose loss is so many deviations above the mean; 0 discards none."""

    runtime: ClassVar[str] = "paramserver"

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        super().__post_init__()
        for field in ("learners", "parameter_shards", "replay_shards", "actors", "envs_per_actor"):
            at_least(field, getattr(self, field), 1)
        for field in ("hosts", "most_lag", "outlier_deviations"):
            at_least(field, getattr(self, field), 0)
        _require_groups(self.envs_per_actor)
        if self.hosts and not self.listen:
            raise SeedbedError(
                f"hosts is {self.hosts}: name with --listen where they find this machine, such as 0.0.0.0"
            )
        listening_ports(self.listen)
        if self.replay_shards > self.learners * self.groups:
            raise SeedbedError(
                f"replay_shards is {self.replay_shards}, but {self.learners} learners have only "
                f"{self.learners * self.groups} groups of environments, and each goes to one shard: lower "
                "--replay-shards, or raise --learners or --actors"
            )
        if self.replay == "bundled" and self.replay_shards != self.learners:
            raise SeedbedError(
                f"replay is bundled: each of the {self.learners} learners has a shard of its own, but "
                f"replay_shards is {self.replay_shards}; give as many"
            )

    @property
    def group_size(self) -> int:
        """The number of environments of a group."""
        return self.envs_per_actor // GROUPS

    @property
    def groups(self) -> int:
        """The number of groups of a learner."""
        return self.actors * GROUPS

    def fitted(self, agent: Agent) -> Self:
        """Returns itself; raises SeedbedError if the agent cannot learn here, or sizes do not fit."""
        sizes.require_sizes(agent)
        sizes.require_unrolls(agent)
        unrolls = on_policy(agent)
        if unrolls is not None and unrolls.synchronous and not sizes.once(agent):
            raise SeedbedError(
                f"{type(agent).__name__} learns from what its newest parameters have done, which several "
                "learners change here: train it with --runtime central, or take impala, dqn, r2d2, sac or awr"
            )
        if unrolls is not None and agent.epochs * agent.minibatches > 1:
            raise SeedbedError(
                f"{type(agent).__name__} makes {agent.epochs} x {agent.minibatches} updates of a batch, and "
                "pushes of several learners would mix: give --agent.epochs 1 --agent.minibatches 1, or train "
                "it with --runtime central"
            )
        sizes.require_batch(agent, self.group_size, self.groups, 1)
        return self


def _require_groups(envs: int) -> None:
    if envs % GROUPS:
        raise SeedbedError(
            f"envs_per_actor is {envs}: an actor has {GROUPS} groups; give an even --envs-per-actor"
        )


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
