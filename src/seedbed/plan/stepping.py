"""A process that steps environments as an actor does, alone or beside others; it imports no JAX.

    python -m seedbed.plan.stepping < JOB

JOB is a line of JSON: an environment, how many, and for how many seconds. It prints a line when it is ready,
waits for another line, and prints the cost of a step of the group. Then it echoes lines until stdin ends.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from seedbed import strict_json, trees
from seedbed.actors.slots import Slot, slot_layout
from seedbed.envs.choices import random_choices
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnv, HostEnvConfig
from seedbed.streams.supervisor import own_output, start_module
from seedbed.types import Box, EnvSpec, SeedbedError, Tree

_ECHOES = 300
_WARM_S = 0.2
REST_S = 0.0005
"""Seconds of rest before what waits for others in a run: caches and cores are cold after a wait."""


def random_actions(
    spec: EnvSpec, observation: Tree, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns actions `[size, ...]` that are allowed after observations `[size, ...]`.

    Numbers without a bound are from -1 to 1, or within 1 of the other bound.
    """
    action = spec.action
    if not isinstance(action, Box):
        return random_choices(action, observation, size, rng)
    low, high = (
        np.reshape(np.array(x, np.float64), action.shape) for x in (action.low, action.high)
    )
    least = np.where(np.isfinite(low), low, np.minimum(-1.0, high - 1.0))
    most = np.where(np.isfinite(high), high, np.maximum(1.0, low + 1.0))
    return rng.uniform(least, most, (size, *action.shape)).astype(np.float32)


class Stepping(NamedTuple):
    """CPU seconds of a step of a group, and of what wakes its process."""

    rested: float  # after a rest, as in a run
    at_once: float  # after the one before
    wake: float


def steps(
    host: HostEnv, slot: Slot, bell: int, seconds: float, rest_s: float = 0.0
) -> list[tuple[float, float]]:
    """Steps and publishes for a while, each time after a rest; returns the CPU and wall seconds of each."""
    rng, size, spent = np.random.default_rng(0), slot.layout.num_envs, list[tuple[float, float]]()
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until or not spent:
        slot.action[...] = random_actions(host.spec, slot.timestep.observation, size, rng)
        if rest_s:
            time.sleep(rest_s)
        begun, used = time.perf_counter(), time.process_time()
        leaves = trees.leaves(host.step(slot.action.copy()))
        assert slot.fits(leaves)
        slot.publish(leaves)
        os.eventfd_write(bell, 1)
        spent.append((time.process_time() - used, time.perf_counter() - begun))
    return spent


def main() -> None:
    """Serves the process that has started it."""
    answers, job = own_output(), strict_json.loads(sys.stdin.readline())
    host = registry.from_json(job["env"]).make(job["num_envs"], 0)
    layout = slot_layout(host.spec, job["num_envs"])
    slot, bell = Slot(layout, bytearray(layout.size)), os.eventfd(0)
    slot.publish(trees.leaves(host.reset()))
    steps(host, slot, bell, _WARM_S)
    print(file=answers, flush=True)
    sys.stdin.readline()
    found = {
        name: statistics.fmean(
            cpu_s for cpu_s, _ in steps(host, slot, bell, job["seconds"], rest_s)
        )
        for name, rest_s in (("at_once", 0.0), ("rested", REST_S))
    }
    print(strict_json.dumps(found), file=answers, flush=True)
    host.close()
    for line in sys.stdin:
        print(line, end="", file=answers, flush=True)


def measure(env: HostEnvConfig, size: int, count: int, seconds: float) -> Stepping:
    """Measures a step of a group while `count` processes step, each way for half of the time.

    A wake-up is half of what an echo between two processes takes. Raises SeedbedError if a process fails.
    """
    pipe = subprocess.PIPE
    # What the terminal sends comes to this process only, which ends them.
    started = [
        start_module("seedbed.plan.stepping", stdin=pipe, stdout=pipe, start_new_session=True)
        for _ in range(count)
    ]
    try:
        job = {"env": registry.to_json(env), "num_envs": size, "seconds": seconds / 2}
        for process in started:
            _say(process, strict_json.dumps(job))
        for process in started:
            _hear(process)
        for process in started:
            _say(process, "")
        found = [strict_json.loads(_hear(process)) for process in started]
        at_once, rested = (
            statistics.fmean(each[name] for each in found) for name in ("at_once", "rested")
        )
        return Stepping(rested, at_once, _echo(started[0]) / 2)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _echo(process: subprocess.Popen[bytes]) -> float:
    spent: list[float] = []
    for _ in range(_ECHOES):
        begun = time.perf_counter()
        _say(process, "")
        _hear(process)
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def _say(process: Any, line: str) -> None:
    try:
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
    except BrokenPipeError as error:
        raise SeedbedError("a process that steps environments has ended: see above") from error


def _hear(process: Any) -> str:
    if not (line := process.stdout.readline()):
        raise SeedbedError("a process that steps environments has ended: see what it said above")
    return line.decode()


if __name__ == "__main__":
    main()
