"""Calibrates a plan: microbenchmarks of this machine for one configuration, which are kept on the disk."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from seedbed import strict_json
from seedbed.cache import directory, prepared
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import to_json as config_to_json
from seedbed.envs.host import versions
from seedbed.envs.host.contract import is_on_device, made_once
from seedbed.files import load_json, write_json
from seedbed.machine import cpu_name, usable_cores
from seedbed.plan import iterations, messages, replay_trips, round_trips, stepping
from seedbed.plan.acting import Sizes
from seedbed.plan.costs import (
    ActingCosts,
    Calibration,
    ShardCosts,
    StreamCosts,
    from_json,
    median_of,
    to_json,
)
from seedbed.plan.engine import Cost
from seedbed.plan.fused import Iteration
from seedbed.plan.hosts import HostKind, machines_of
from seedbed.plan.measuring import Bench, bench
from seedbed.plan.predict import Subject
from seedbed.plan.stepping import Stepping
from seedbed.run import devices
from seedbed.run.checking import check_agent
from seedbed.run.devices import kind_of_device
from seedbed.run.options import GROUPS, CentralConfig, FusedConfig, ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.simd.store.sources import fingerprint
from seedbed.types import (
    Agent,
    Environment,
    EnvSpec,
    SeedbedError,
    bind,
    differentiates,
    learns_from_replay,
)
from seedbed.version import __version__

FORM = 4
"""The number of what is measured and how: another one, and nothing that was kept is used."""
_SHARDS = (1, 3)  # with which round trips are measured
# How often each part of a learner is measured, in turn: what one measurement says is off by a fifth at times.
_ROUNDS = 3
Tell = Callable[[str], None]


def subject_of(config: TrainConfig, kinds: Sequence[HostKind] | None = None) -> Subject:
    """Returns a settled configuration in numbers, on this machine or on others.

    Starts JAX, and makes an environment of the host. Raises SeedbedError for runs of which there is no model.
    """
    runtime, env, agent = config.runtime, config.env, config.agent
    updates = agent.epochs * agent.minibatches
    if isinstance(runtime, FusedConfig):
        assert is_on_device(env)
        return _fused(runtime, env, agent, len(machines_of(kinds or [])))
    assert isinstance(runtime, CentralConfig | ParamServerConfig) and not is_on_device(env)
    if isinstance(runtime, CentralConfig) and runtime.learners > 1:
        raise SeedbedError(
            f"learners is {runtime.learners}: a plan knows one learner of the central runtime; leave out "
            "--learners"
        )
    for name in ("inference_devices", "learner_devices"):
        if len(named := getattr(runtime, name, ())) > 1:
            raise SeedbedError(
                f"{name} is {named}: a plan knows one of each; give one with --{name.replace('_', '-')}"
            )
    if isinstance(runtime, ParamServerConfig) and runtime.replay == "bundled":
        raise SeedbedError(
            "replay is bundled: a plan knows shards that all learners share; leave out --replay"
        )
    policy = devices.policy_of(jax.devices()[0])
    if kinds is not None and kinds[0].accelerators:
        policy = devices.ACCELERATOR
    sizes = Sizes(
        group_size=runtime.envs_per_actor // GROUPS,
        experience=agent.experience,
        updates=updates,
        pads=policy.pads,
        deadline_s=policy.deadline_s,
        calls=policy.calls,
    )
    if isinstance(runtime, CentralConfig):
        return Subject(runtime, env.frame_skip, sizes)
    spec = made_once(env).spec
    bound = bind(agent, stacked_spec(spec, env.frame_stack))
    parts = round_trips.traffic(env, bound, spec, runtime)
    return Subject(runtime, env.frame_skip, sizes, traffic=parts)


def _fused(runtime: FusedConfig, env: Environment, agent: Agent, machines: int) -> Subject:
    from seedbed.fused.program import Program, plan_of

    program = Program(env, agent, runtime)
    if program.members > 1 or differentiates(agent) is not None:
        raise SeedbedError(
            "a plan knows one run of an agent that acts and then learns: leave out --seeds and --sweep, and "
            "take another agent than apg"
        )
    devices = len(runtime.devices)
    if machines > 1:
        plan_of(agent, runtime, machines * devices)  # all as devices of one program
    shapes = jax.tree.leaves(check_agent(program.agent))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    return Subject(
        runtime, env.frame_skip, iteration=Iteration(program.plan.updates, size, devices)
    )


def key_of(config: TrainConfig, far: bool) -> dict[str, Any]:
    """Returns what a calibration depends on, as JSON types; `far` is whether shards are on other machines.

    Files of the user's own are in it by their digests: of modules that have the environment or the agent, and
    those that their options name.
    """
    data, runtime = config_to_json(config), config.runtime
    sizes: dict[str, Any] = {"runtime": runtime.runtime}
    if isinstance(runtime, FusedConfig):
        sizes |= {name: getattr(runtime, name) for name in ("envs", "unroll", "euler_share")}
        sizes |= {"devices": len(runtime.devices)}
    else:
        assert isinstance(runtime, CentralConfig | ParamServerConfig)
        sizes |= {"group_size": runtime.envs_per_actor // GROUPS}
        central = isinstance(runtime, CentralConfig)
        sizes |= {"streams": bool(runtime.listen)} if central else {"far": far}
    return {
        "form": FORM,
        "sources": fingerprint((".",)),
        "libraries": [
            version(name) for name in ("jaxlib", "numpy", "gymnasium", "mujoco") if _there(name)
        ],
        "machine": cpu_name(),
        "cores": usable_cores(),
        "device": kind_of_device(jax.devices()[0]),
        "env": data["env"],
        "agent": data["agent"],
        "own": _own(config),
        **sizes,
    }


def _own(config: TrainConfig) -> dict[str, str]:
    env, agent = config.env, config.agent
    found = {} if is_on_device(env) else versions.of(env)
    for made in (env, agent):
        module = type(made).__module__.partition(".")[0]
        found |= {} if module == "seedbed" else versions.of_module(module)
        for value in vars(made).values():
            if isinstance(value, str) and Path(value).is_file():
                found[f"file {value}"] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return found


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def path_of(key: dict[str, Any]) -> Path:
    """Returns the file of a calibration, in a folder that is made."""
    digest = hashlib.sha256(strict_json.dumps(key, sort=True).encode()).hexdigest()
    return prepared(directory("plans")) / f"{digest[:32]}.json"


def calibrated(
    config: TrainConfig, far: bool, fresh: bool, tell: Tell, seconds: float = 1.0
) -> Calibration:
    """Returns what was measured of this machine for a settled configuration, or measures it.

    `tell` gets a line for each part, or round of parts; a part takes about `seconds` in all. Raises
    SeedbedError if one cannot be measured.
    """
    key, kept = key_of(config, far), None
    try:
        path = path_of(key)
        kept = None if fresh or not path.exists() else from_json(load_json(path))
    except (OSError, RuntimeError, KeyError, TypeError, ValueError):
        pass  # it is damaged, or others may write there
    if kept is not None:
        return kept
    found = _measure(config, far, tell, seconds)
    try:
        write_json(path_of(key), to_json(found))
    except (OSError, RuntimeError, SeedbedError) as error:
        text = f"what a plan has measured is not kept for the next one: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found


def _measure(config: TrainConfig, far: bool, tell: Tell, seconds: float) -> Calibration:
    env, runtime, device = config.env, config.runtime, jax.devices()[0]
    begun = Calibration(
        machine=cpu_name(),
        cores=usable_cores(),
        device=kind_of_device(device),
        platform=device.platform,
        version=__version__,
    )
    if isinstance(runtime, FusedConfig):
        assert is_on_device(env)
        tell("rollouts and updates")
        costs = iterations.measure(env, config.agent, runtime, 2 * _ROUNDS * seconds)
        return _replaced(begun, fused=costs)
    assert isinstance(runtime, CentralConfig | ParamServerConfig) and not is_on_device(env)
    size, sharded = runtime.envs_per_actor // GROUPS, isinstance(runtime, ParamServerConfig)
    tell("steps of environments")
    alone = stepping.measure(env, size, 1, seconds)
    crowd = stepping.measure(env, size, max(1, int(usable_cores())), seconds)
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(env, config.agent, size, Path(folder), seconds / _ROUNDS) as parts,
    ):
        layout, streams = parts.pool.layout, isinstance(runtime, CentralConfig) and runtime.listen
        rounds: list[tuple[ActingCosts, StreamCosts | None]] = []
        for number in range(_ROUNDS):
            tell(f"inference, learning{', streams' * bool(streams)} ({number + 1} of {_ROUNDS})")
            acting = _acting(parts, alone, crowd, sharded)
            stream = None
            if streams:
                assert layout is not None
                stream = messages.measure(layout, parts.pool.peer.steps, seconds / _ROUNDS)
            rounds.append((acting, stream))
        acting, stream = median_of(rounds)
        spec, timesteps = parts.pool.spec, parts.pool.played()
    if not sharded:
        return _replaced(begun, acting=acting, stream=stream)
    tell("parameter shards")
    found: dict[str, Any] = {"shards": _shard_costs(config, spec, far, seconds)}
    agent = bind(config.agent, stacked_spec(spec, env.frame_stack))
    if learns_from_replay(agent):
        tell("replay shards")
        for name, tls in (("replay", False), ("far_replay", True)):
            # Without other machines nothing is measured of them.
            found[name] = found.get("replay")
            if far or not tls:
                trips = env, agent, spec, timesteps, seconds
                found[name] = replay_trips.measure(*trips, tls=tls)
    return _replaced(begun, acting=acting, **found)


def _acting(parts: Bench, alone: Stepping, crowd: Stepping, sharded: bool) -> ActingCosts:
    """Measures all parts of a learner once; steps were measured before, of one process and of several."""
    calls = tuple(parts.calls())
    update, priorities = parts.update(parts.batch(), sharded)
    return ActingCosts(
        step=Cost(alone.rested),
        # While they rest, they do not crowd.
        crowding=max(0.0, crowd.at_once / alone.at_once - 1.0),
        wake_s=alone.wake,
        calls=calls,
        update=update,
        seal=parts.seal(),
        draw=parts.draw(priorities),
        company=parts.company(),
    )


def _replaced(begun: Calibration, **parts: Any) -> Calibration:
    return Calibration(**{**vars(begun), **parts})


def _shard_costs(config: TrainConfig, spec: EnvSpec, far: bool, seconds: float) -> ShardCosts:
    env: Any = config.env
    agent = bind(config.agent, stacked_spec(spec, env.frame_stack))

    def lines(tls: bool) -> tuple[Any, Any]:
        found = []
        for shards in _SHARDS:
            with round_trips.serving(env, agent, spec, tls, shards) as server:
                found.append(round_trips.measure(server, seconds))
        return round_trips.fit(found)

    near = lines(tls=False)
    return ShardCosts(*near, *(lines(tls=True) if far else near))
