"""Calibrates a plan: microbenchmarks of this machine for one configuration, which are kept on the disk."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seedbed import strict_json
from seedbed.cache import directory, prepared
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import to_json as config_to_json
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.files import load_json, write_json
from seedbed.machine import cpu_name, usable_cores
from seedbed.plan import iterations, messages, round_trips, stepping
from seedbed.plan.acting import Sizes
from seedbed.plan.costs import ActingCosts, Calibration, ShardCosts, from_json, to_json
from seedbed.plan.engine import NOTHING, Cost
from seedbed.plan.fused import Iteration
from seedbed.plan.measuring import bench
from seedbed.plan.predict import Subject
from seedbed.run import devices
from seedbed.run.checking import check_agent
from seedbed.run.devices import kind_of_device
from seedbed.run.options import GROUPS, CentralConfig, FusedConfig, ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.types import EnvSpec, bind
from seedbed.version import __version__

FORM = 2
"""The number of what is measured and how: another one, and nothing that was kept is used."""
_SHARDS = (1, 3)  # with which round trips are measured
Tell = Callable[[str], None]


def subject_of(config: TrainConfig) -> Subject:
    """Returns a settled configuration in numbers. Starts JAX, and makes an environment of the host."""
    runtime, env, agent = config.runtime, config.env, config.agent
    updates = agent.epochs * agent.minibatches
    if isinstance(runtime, FusedConfig):
        from seedbed.fused.program import Program

        assert is_on_device(env)
        program = Program(env, agent, runtime)
        shapes = jax.tree.leaves(check_agent(program.agent))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
        return Subject(runtime, env.frame_skip, iteration=Iteration(program.plan.updates, size))
    assert isinstance(runtime, CentralConfig | ParamServerConfig) and not is_on_device(env)
    policy = devices.policy_of(jax.devices()[0])
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
    spec = _spec(env)
    bound = bind(agent, stacked_spec(spec, env.frame_stack))
    parts = round_trips.traffic(env, bound, spec, runtime)
    return Subject(runtime, env.frame_skip, sizes, traffic=parts)


def _spec(env: HostEnvConfig) -> EnvSpec:
    host = env.make(1, 0)
    try:
        return host.spec
    finally:
        host.close()


def key_of(config: TrainConfig, far: bool) -> dict[str, Any]:
    """Returns what a calibration depends on, as JSON types; `far` is whether shards are on other machines."""
    data, runtime = config_to_json(config), config.runtime
    sizes: dict[str, Any] = {"runtime": runtime.runtime}
    if isinstance(runtime, FusedConfig):
        sizes |= {"envs": runtime.envs, "unroll": runtime.unroll, "euler": runtime.euler_share}
    else:
        assert isinstance(runtime, CentralConfig | ParamServerConfig)
        sizes |= {"group_size": runtime.envs_per_actor // GROUPS}
        central = isinstance(runtime, CentralConfig)
        sizes |= {"streams": bool(runtime.listen)} if central else {"far": far}
    return {
        "form": FORM,
        "version": __version__,
        "machine": cpu_name(),
        "cores": usable_cores(),
        "device": kind_of_device(jax.devices()[0]),
        "env": data["env"],
        "agent": data["agent"],
        **sizes,
    }


def path_of(key: dict[str, Any]) -> Path:
    """Returns the file of a calibration, in a folder that is made."""
    digest = hashlib.sha256(strict_json.dumps(key, sort=True).encode()).hexdigest()
    return prepared(directory("plans")) / f"{digest[:32]}.json"


def calibrated(
    config: TrainConfig, far: bool, fresh: bool, tell: Tell, seconds: float = 1.0
) -> Calibration:
    """Returns what was measured of this machine for a settled configuration, or measures it.

    `tell` gets a line for each part that is measured, which takes about `seconds`. Raises SeedbedError if a
    part cannot be measured.
    """
    path = path_of(key_of(config, far))
    if not fresh and path.exists():
        try:
            return from_json(load_json(path))
        except (OSError, KeyError, TypeError, ValueError):
            pass  # it is damaged, and is written anew
    found = _measure(config, far, tell, seconds)
    write_json(path, to_json(found))
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
        costs = iterations.measure(env, config.agent, runtime, 2 * seconds)
        return _replaced(begun, fused=costs)
    assert isinstance(runtime, CentralConfig | ParamServerConfig) and not is_on_device(env)
    size, sharded = runtime.envs_per_actor // GROUPS, isinstance(runtime, ParamServerConfig)
    tell("steps of environments")
    alone, wake_s = stepping.measure(env, size, 1, seconds)
    crowded, _ = stepping.measure(env, size, max(1, int(usable_cores())), seconds)
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(env, config.agent, size, Path(folder), seconds) as parts,
    ):
        tell("inference")
        calls = tuple(parts.calls())
        tell("learning")
        batch = parts.batch()
        update, priorities = parts.update(batch, sharded)
        acting = ActingCosts(
            step=Cost(alone),
            crowding=max(0.0, crowded / alone - 1.0),
            wake_s=wake_s,
            calls=calls,
            update=NOTHING if sharded else update,
            company=parts.company(),
            seal=parts.seal(),
            draw=parts.draw(priorities),
        )
        stream = None
        if isinstance(runtime, CentralConfig) and runtime.listen:
            tell("streams")
            layout = parts.pool.layout
            assert layout is not None
            stream = messages.measure(layout, parts.pool.peer.steps, seconds)
        spec = parts.pool.spec
    shards = None
    if sharded:
        tell("parameter shards")
        shards = _shard_costs(config, spec, update, far, seconds)
    return _replaced(begun, acting=acting, stream=stream, shards=shards)


def _replaced(begun: Calibration, **parts: Any) -> Calibration:
    return Calibration(**{**vars(begun), **parts})


def _shard_costs(
    config: TrainConfig, spec: EnvSpec, gradient: Cost, far: bool, seconds: float
) -> ShardCosts:
    env: Any = config.env
    agent = bind(config.agent, stacked_spec(spec, env.frame_stack))

    def lines(tls: bool) -> tuple[Any, Any]:
        found = []
        for shards in _SHARDS:
            with round_trips.serving(env, agent, spec, tls, shards) as server:
                found.append(round_trips.measure(server, seconds))
        return round_trips.fit(found)

    near = lines(tls=False)
    return ShardCosts(gradient, *near, *(lines(tls=True) if far else near))
