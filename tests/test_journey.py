"""The files that an observation and its gradient run through, from a slot or `env.step` to `apply`.

A reader opens these. They are those of the functions that Python calls meanwhile, tracing included.
docs/architecture.md lists them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import seedbed
from central_runs import counting_env
from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.agents.impala import Impala
from seedbed.central.acting import InferenceLoop
from seedbed.central.inference import Inference, act_output
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.central.updater import LocalUpdater
from seedbed.config import presets
from seedbed.fused.program import Program
from seedbed.fused.rollout import iterate, moves
from seedbed.run.measures import EpisodeStatistics
from seedbed.types import bind

pytestmark = pytest.mark.usefixtures("importable")

PACKAGE = Path(seedbed.__file__).parent
PAGE = PACKAGE.parent.parent / "docs" / "architecture.md"
LEFT_OUT = (
    "ops/",
    "nets/",
    "simd/",
    "physics/",
    "arguments.py",
    "types.py",
    "spaces.py",
    "trees.py",
    "llvm.py",
    "ffi.py",
    "jaxprs.py",
    "cache.py",
    "run/hoisting.py",
    "run/operations.py",
    "actors/local.py",
    "actors/process.py",
    "actors/child.py",
)
"""The mathematics and the leaves, and those who look after actors once a second; llvm.py makes the machine
code of simd and nets, cache.py keeps it, ffi.py lets XLA call it, and jaxprs.py interprets programs for simd;
hoisting.py compiles acting, as jax.jit does, from the operations of operations.py."""


class Journey:
    """The files of the package whose functions are called in the threads that use `watch`."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    def watch(self, call: Callable[[], object]) -> None:
        """Calls a function and notes the files."""
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _note(self, frame, event, argument) -> None:
        if event == "call":
            self._files.add(frame.f_code.co_filename)

    @property
    def files(self) -> list[str]:
        inside = [Path(name) for name in self._files if name.startswith(f"{PACKAGE}/")]
        names = [str(path.relative_to(PACKAGE)) for path in inside]
        return sorted(name for name in names if not name.startswith(LEFT_OUT))


def listed(title: str) -> list[str]:
    """Reads the files that docs/architecture.md lists under a title."""
    text = PAGE.read_text().split(f"**{title}**", 1)[1].split("\n\n", 1)[0]
    return sorted(re.findall(r"`([\w/]+\.py)`", text))


@pytest.mark.slow
def test_central_inference():
    agent = Impala(unroll=4, batch=4, hidden_sizes=(8,), normalise_observations=True)
    journey, stop = Journey(), threading.Event()
    launcher = Launcher(env=counting_env(), envs_per_group=2, groups=2, seed=0)
    with local_pool(launcher, actors=1) as pool:
        spec, size, groups = pool.spec, pool.group_size, pool.num_groups
        agent = bind(agent, spec)
        ids = np.arange(pool.num_envs).reshape(groups, size)
        key = jax.random.key(0)
        inference = Inference(agent, spec, 1, jax.devices()[0], ids, pool.num_envs, key)
        queue = UnrollQueue(4, 2, 100, 0, 100)
        output = act_output(agent, spec, 1, size)
        sink = UnrollSink(queue, agent.experience, spec, 1, output, groups)
        devices = jax.devices()[:1]
        updater = LocalUpdater(agent, jax.jit(agent.init)(key), devices)
        learning = LearnerLoop(Learner(agent, 1, devices, key, updater), [inference], queue)
        acting = InferenceLoop(pool, [inference], sink, EpisodeStatistics(groups, size))

        def learn() -> None:
            learning.run(stop)
            # As a run does: acting may wait for room in the queue.
            queue.close()

        loops = [lambda: acting.run(stop), learn]
        threads = [threading.Thread(target=journey.watch, args=(loop,)) for loop in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert learning.updates > 5 and not any(thread.is_alive() for thread in threads)
    assert journey.files == listed("Central, IMPALA")
    assert len(journey.files) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ant/ppo", "half_cheetah/sac", "cartpole/dqn"])
def test_fused(preset):
    chosen, journey = presets.PRESETS[preset](), Journey()
    program = Program(chosen.env, chosen.agent, dataclasses.replace(chosen.runtime, devices=(0,)))
    carry = program.first()
    iteration = functools.partial(
        iterate, program.agent, moves(program.env, None, np.bool_(False)), program.plan, None
    )
    journey.watch(lambda: jax.eval_shape(iteration, carry, np.float32(0)))
    assert journey.files == listed(f"Fused, {preset}")
    assert len(journey.files) <= 11
