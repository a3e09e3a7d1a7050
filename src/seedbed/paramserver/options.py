"""The options of the parameter-server runtime."""

from __future__ import annotations

import dataclasses
from typing import Literal

from seedbed.arguments import require_fields
from seedbed.run.options import GROUPS, at_least, require_seed, require_sizes, split_address
from seedbed.types import Agent, SeedbedError, on_policy


@dataclasses.dataclass(frozen=True)
class ParamServerConfig:
    """The options of the parameter-server runtime, which are the same for every agent and environment."""

    steps: int = 10_000_000
    """Transitions of all learners to train for: agent steps, not counting steps that only reset."""
    seed: int = 0
    """Seed of parameters, actions and environments."""
    learners: int = 2
    """Learner processes, each with actors of its own."""
    parameter_shards: int = 2
    """Processes that divide the parameters among them, and apply gradients."""
    replay_shards: int = 2
    """Processes that divide the replay among them; agents that learn without replay have none."""
    replay: Literal["global", "bundled"] = "global"
    """Whether learners draw from all replay shards, or each from one that gets its own steps only."""
    remote_learners: int = 0
    """How many of the learners are on other machines, where `seedbed learner RUN` starts them."""
    listen: str = ""
    """Address of this machine at which roles listen for those learners, such as 0.0.0.0 for all it has."""
    actors: int = 1
    """Actor processes of a learner."""
    envs_per_actor: int = 32
    """Environments of an actor, an even number (two groups)."""
    most_lag: int = 100
    """A shard discards a gradient if it has applied more than this many since its parameters were pulled."""
    outlier_deviations: float = 0.0
    """A learner discards a gradient whose loss is so many deviations above the mean; 0 discards none."""
    actor_timeout_s: float = 120.0
    """Seconds after which a silent actor is replaced, or the run fails if no actor has started at all."""
    evaluate_every: int = 1_000_000
    """Transitions between evaluations. One more is at the end of the run; 0 means only that one."""
    evaluate_episodes: int = 8
    """Number of episodes in an evaluation."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep besides the best one."""
    log_every_s: float = 10.0
    """Seconds between lines of metrics in the log."""

    def __post_init__(self) -> None:
        """Checks the types and ranges of all options; raises SeedbedError."""
        require_fields(self)
        require_seed(self.seed)
        counts = ("steps", "learners", "parameter_shards", "replay_shards", "actors")
        for field in (*counts, "envs_per_actor", "evaluate_episodes", "keep_checkpoints"):
            at_least(field, getattr(self, field), 1)
        for field in (
            "remote_learners",
            "most_lag",
            "outlier_deviations",
            "evaluate_every",
        ):
            at_least(field, getattr(self, field), 0)
        for field in ("checkpoint_every_s", "log_every_s"):
            at_least(field, getattr(self, field), 0.1)
        at_least("actor_timeout_s", self.actor_timeout_s, 1)
        if self.envs_per_actor % GROUPS:
            raise SeedbedError(
                f"envs_per_actor is {self.envs_per_actor}: an actor steps its environments in {GROUPS} "
                "groups; give an even number with --envs-per-actor"
            )
        if self.remote_learners > self.learners or (self.remote_learners and not self.listen):
            raise SeedbedError(
                f"{self.remote_learners} of {self.learners} learners cannot be on other machines: raise "
                "--learners, or name with --listen where they find this one"
            )
        if split_address(self.listen)[1] is not None:
            raise SeedbedError(
                f"listen is {self.listen!r}: give an address without a port, as each role has its own"
            )
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

    def require_fit(self, agent: Agent) -> None:
        """Raises SeedbedError if the agent cannot learn in this runtime, or sizes do not fit."""
        require_sizes(agent)
        unrolls = on_policy(agent)
        if unrolls is not None and unrolls.synchronous:
            raise SeedbedError(
                f"{type(agent).__name__} learns from what its newest parameters have done, which several "
                "learners change here: train it with --runtime central, or take impala, dqn, r2d2 or sac"
            )
        if unrolls is not None and unrolls.batch % self.group_size:
            raise SeedbedError(
                f"agent.batch is {unrolls.batch} unrolls: it must be a multiple of the {self.group_size} "
                "environments of a group, half of those of an actor; change --agent.batch or "
                "--envs-per-actor"
            )
        if unrolls is not None and unrolls.batch > 2 * self.groups * self.group_size:
            raise SeedbedError(
                f"agent.batch is {unrolls.batch} unrolls, but a learner has only "
                f"{self.groups * self.group_size} environments: lower --agent.batch, or raise --actors or "
                "--envs-per-actor"
            )
        if agent.experience.batch % agent.minibatches:
            raise SeedbedError(
                f"agent.batch is {agent.experience.batch}: it must divide by {agent.minibatches} "
                "minibatches; change --agent.batch"
            )
