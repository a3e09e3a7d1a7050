"""Physics for GPUs without one: results of the kernel on this CPU, and what NVIDIA's assembler says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import _ptxas as ptxas
import composer as fuzz
import mujoco_states as oracle
from control_flow import PROGRAMS
from gpu_host import assert_same_bits, host_vectorize
from kinds_of_task import TASKS
from mujoco_states import states
from seedbed import physics
from seedbed.envs.device.locomotion.inverted_pendulum import InvertedPendulum
from seedbed.envs.device.wrappers import auto_reset, episode_statistics, time_limit
from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu.compiler import compile_program
from seedbed.simd.vectorize import trace_example

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
ROWS = 21  # more than a tile of the CPU's, and no whole number of them


def some_fast(names: Any, fast: Any) -> list[Any]:
    """The names as parameters of a test; all but the fast ones are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def task_name(kind: Any) -> str:
    return kind.__name__


# Results


@pytest.mark.slow
@pytest.mark.parametrize("name", some_fast(oracle.MODELS, ["inverted_pendulum"]))
def test_a_step_is_that_of_the_cpu(name):
    model = physics.load(oracle.path(name))
    cases = oracle.cases(oracle.path(name), ROWS)

    def step(state, ctrl):
        return physics.step(model, state, ctrl)

    begun = states(model, cases.qpos, cases.qvel)
    warm = jnp.asarray(cases.qacc_warmstart, jnp.float32)
    arguments = begun._replace(qacc_warmstart=warm), jnp.asarray(cases.ctrl, jnp.float32)
    assert_same_bits(host_vectorize(step)(*arguments), vectorize(step)(*arguments))


def short_episodes(kind: Any) -> Any:
    """An environment whose episodes are truncated after five steps, and begin anew by themselves."""
    return auto_reset(time_limit(episode_statistics(kind()), 5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_fast(TASKS, [InvertedPendulum]), ids=task_name)
def test_whole_environment_steps_are_those_of_the_cpu(kind):
    env = short_episodes(kind)
    keys = jax.random.split(jax.random.key(7), ROWS)
    state, rng = jax.jit(vectorize(env.reset))(keys), np.random.default_rng(0)
    assert_same_bits(host_vectorize(env.reset)(keys), state)
    step, on_host, firsts = jax.jit(vectorize(env.step)), host_vectorize(env.step), []
    action = env.spec.action
    for _ in range(13):
        drawn = rng.uniform(action.low, action.high, (ROWS, *action.shape)).astype(np.float32)
        before, state = state, step(state, drawn)
        assert_same_bits(on_host(before, jnp.asarray(drawn)), state)
        firsts.append(np.asarray(state.timestep.first))
    assert np.any(firsts), "no episode has begun anew"
    assert not np.all(firsts)


# PTX


@pytest.fixture(scope="module")
def assembler() -> Path:
    found = ptxas.find("ptxas")
    if found is None:
        pytest.skip(f"there is no ptxas: pip install {ptxas.PACKAGES['ptxas']}")
    return found


def ptx_of(fn: Any, *one: Any) -> str:
    closed = trace_example(fn, "fn", (one, {})).closed
    return compile_program(trace(closed, [False] * len(closed.in_avals)))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", some_fast(ARCHITECTURES, ["sm_75", "sm_100"]))
def test_the_assembler_takes_programs(assembler, architecture):
    x, n = np.ones(3, np.float32), np.int32(3)
    for function in PROGRAMS:
        ptxas.assemble(assembler, ptx_of(function, x, n), architecture)


def test_the_assembler_takes_programs_composed_at_random(assembler):
    for seed in range(max(3, fuzz.EXAMPLES // 4)):
        tape = np.random.default_rng(seed).bytes(300)

        def program(x, n, shared, tape=tape):
            return fuzz.Composer(tape).program(x, n, shared)

        text = ptx_of(program, np.ones(3, np.int32), np.int32(1), np.int32(2))
        ptxas.assemble(assembler, text, "sm_75")


def test_the_assembler_refuses_what_is_not_ptx(assembler):
    with pytest.raises(RuntimeError, match="sm_90"):
        ptxas.assemble(
            assembler, ".version 6.3\n.target sm_75\n.address_size 64\nnonsense", "sm_90"
        )


@pytest.mark.slow
def test_spilled_registers_are_part_of_the_frame(assembler):
    disassembler = ptxas.find("nvdisasm")
    if disassembler is None:
        pytest.skip(f"there is no nvdisasm: pip install {ptxas.PACKAGES['nvdisasm']}")

    def program(x):
        return lax.fori_loop(0, 7, lambda i, y: y[::-1] * 0.5 + x, x)

    text = ptx_of(program, np.ones(300, np.float32))
    assert ".local" not in text
    usage = ptxas.assemble(assembler, text, "sm_90")
    assert usage.frame > 0
    # Other options, so perhaps some other registers.
    moved = sum(block.spilled for block in ptxas.blocks(assembler, disassembler, text, "sm_90"))
    assert moved == pytest.approx(usage.spill_stores + usage.spill_loads, rel=0.05)


FRAMES = {"hopper": 2 << 10, "ant": 7 << 10, "humanoid": 16 << 10}
"""The most bytes of memory that a thread may take for a step of a model, or of its whole environment: arrays
and spilled registers."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS, ids=task_name)
def test_the_assembler_takes_environments(assembler, kind):
    env = short_episodes(kind)
    opened = jax.eval_shape(env.reset, jax.random.key(0))
    action = jax.ShapeDtypeStruct(env.spec.action.shape, jnp.float32)
    text = ptx_of(env.step, opened, action)
    for architecture in ARCHITECTURES:
        usage = ptxas.assemble(assembler, text, architecture)
        assert usage.registers <= 255
        # the hardware's own limit where we set none
        assert usage.frame <= FRAMES.get(kind.__name__.lower(), 512 << 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMES)
def test_the_memory_of_a_thread(assembler, name):
    model = physics.load(oracle.path(name))

    def step(state, ctrl):
        return physics.step(model, state, ctrl)

    one = physics.init(model), jnp.zeros(model.nu, jnp.float32)
    text = ptx_of(step, *one)
    for architecture in ARCHITECTURES:
        assert ptxas.assemble(assembler, text, architecture).frame <= FRAMES[name]
