"""The sizes of an agent's experience, checked before anything is made of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from seedbed.types import (
    Agent,
    OnPolicy,
    Replay,
    SeedbedError,
    differentiates,
    learns_from_replay,
    on_policy,
    plays_episodes,
)

MOST_SEEDS = 10_000
"""The most seeds of a population."""
AUTO: Literal["auto"] = "auto"
"""The number of actors that `plan/sizing.py` chooses."""
_LEAST_STEPS = 5_000


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


def usual_actors(agent: Agent, steps: int, cores: int) -> int:
    """Returns the actors of a run that names none; environments of a single one would make `steps` each.

    Actors share the steps. Replay fills with openings of episodes if environments make few steps each.
    """
    return min(cores, max(1, steps // _LEAST_STEPS)) if learns_from_replay(agent) else cores


def require_unrolls(agent: Agent) -> None:
    """Raises SeedbedError if an agent needs more than unrolls, for runtimes that have nothing else."""
    if plays_episodes(agent):
        needs = "learns from whole episodes, which only the fused runtime plays"
    elif differentiates(agent):
        needs = "differentiates through its environments, which only the fused runtime can do"
    else:
        return
    raise SeedbedError(
        f"{type(agent).__name__} {needs}: take an on-device environment (`seedbed list`), or another agent, "
        "such as ppo"
    )


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


def require_of_use(agent: Agent, options: type, **sizes: int) -> None:
    """Raises SeedbedError if an agent without replay has sizes of replay unlike those of `options`."""
    for name, given in sizes.items():
        if given != getattr(options, name) and on_policy(agent) is not None:
            own = "batch" if name == "envs" else name
            raise SeedbedError(
                f"{name} is {given}, which is for agents that learn from replay: {type(agent).__name__} has "
                f"one environment for each unroll of a batch; give --agent.{own}, and leave {name} at "
                f"{getattr(options, name)}"
            )


def require_divergence(agent: Agent) -> None:
    """Raises SeedbedError if an agent that bounds its divergence always learns as the policy that acted."""
    if getattr(agent, "bounds_divergence", False) and agent.epochs * agent.minibatches == 1:
        raise SeedbedError(
            f"{type(agent).__name__} makes 1 update of a batch, and in the fused runtime the policy that "
            "learns is then the one that acted: its divergence is always 0, and nothing bounds it; give 2 "
            "epochs or minibatches"
        )


def require_seeds(seed: int, seeds: int) -> None:
    """Raises SeedbedError if a population cannot have so many seeds, or if its programs cannot hold them."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise SeedbedError(f"seeds is {seeds}: it must be 1 to {MOST_SEEDS:,}")
    if seed + seeds > 1 << 32:
        raise SeedbedError(
            f"seed is {seed} and seeds {seeds}: in the fused runtime, seeds are below {1 << 32:,}"
        )


def once(agent: Agent) -> str:
    """Returns the options with which a synchronous agent learns while it acts; "" if there are none."""
    fields = dataclasses.fields(agent) if dataclasses.is_dataclass(agent) else ()
    if not {"epochs", "minibatches"} <= {field.name for field in fields if field.init}:
        return ""
    try:
        unrolls = on_policy(dataclasses.replace(agent, epochs=1, minibatches=1))  # type: ignore[type-var, call-arg]
    except SeedbedError:  # its other options want several updates
        return ""
    return (
        "" if unrolls is None or unrolls.synchronous else "--agent.epochs 1 --agent.minibatches 1"
    )


def require_listenable(agent: Agent) -> None:
    """Raises SeedbedError if an agent cannot learn from actors of other machines."""
    experience = on_policy(agent)
    if experience is not None and experience.synchronous:
        options = once(agent)
        raise SeedbedError(
            f"{type(agent).__name__} acts, stops and learns with a fixed set of environments: --listen "
            "is for agents that learn while others act, such as impala"
            + (f", and takes this one with {options}" if options else "")
            + "; ranks take --learners"
        )


def require_plannable(agent: Agent, alone: bool) -> None:
    """Raises SeedbedError unless a model can choose the number of actors, as `auto` asks for.

    `alone` is whether there is one learner, and nobody joins it.
    """
    if not alone:
        raise SeedbedError(
            "actors is auto, which is for one learner whose actors are all of its machine: name a number "
            "with --actors"
        )
    experience = on_policy(agent)
    if experience is not None and experience.synchronous:
        options = once(agent)
        raise SeedbedError(
            f"actors is auto, and {type(agent).__name__} acts, stops and learns: leave --actors out, and as "
            "many actors divide its batch as there are cores"
            + (f"; or give {options}" if options else "")
        )


def require_number(runtime: object, why: str) -> None:
    """Raises SeedbedError if the options of a runtime leave the number of actors to a model."""
    if getattr(runtime, "actors", 0) == AUTO:
        raise SeedbedError(f"actors is auto, and {why}: name a number with --actors")


def require_batch(agent: Agent, group: int, groups: int, devices: int, learners: int = 1) -> None:
    """Raises SeedbedError unless a batch divides evenly among learners, groups, devices and minibatches.

    Each learner has an equal part of it, and `groups` groups of `group` environments, which must be enough
    for that of an on-policy batch.
    """
    unrolls, whole = on_policy(agent), agent.experience.batch
    if whole % learners:
        raise SeedbedError(
            f"agent.batch is {whole}: it must divide by {learners} learners; change --agent.batch or "
            "--learners"
        )
    batch = whole // learners
    each = f", {batch} of each learner" * (learners > 1)
    if unrolls is not None and batch % group:
        raise SeedbedError(
            f"agent.batch is {whole} unrolls{each}: it must be a multiple of the {group} environments of a "
            "group, half of those of an actor; change --agent.batch or --envs-per-actor"
        )
    many = unrolls is not None and not unrolls.synchronous
    if many and batch > 2 * groups * group:
        raise SeedbedError(
            f"agent.batch is {whole} unrolls{each}, but a learner has only {groups * group} environments: "
            "lower --agent.batch, or raise --actors, --envs-per-actor or --stream-groups (with --listen)"
        )
    if batch % (devices * agent.minibatches):
        raise SeedbedError(
            f"agent.batch is {whole}{each}: it must divide by {devices} learner devices x "
            f"{agent.minibatches} minibatches; change --agent.batch or --learner-devices"
        )
