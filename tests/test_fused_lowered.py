"""The fused runtime's programs for NVIDIA GPUs and for TPUs, lowered on a machine without one."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.config import resolve, scaling
from seedbed.config.presets import PRESETS
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.wrappers import episode_statistics, training
from seedbed.fused import playing
from seedbed.fused.program import Program
from seedbed.run.options import FusedConfig
from seedbed.simd import primitive
from seedbed.types import ArraySpec, Discrete, EnvSpec, EnvState

TINY = Ppo(unroll=4, batch=64, epochs=1, minibatches=2, hidden_sizes=(8,))
FUSED = [name for name in PRESETS if isinstance(PRESETS[name]().runtime, FusedConfig)]
KERNEL = "__gpu$xla.gpu.ptx"
"""XLA's custom call that launches PTX."""
SOLVER = {"cusolver_geqrf_ffi", "cusolver_orgqr_ffi"}
"""What orthogonal matrices are drawn by, on a GPU."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Drops what JAX traced in other tests, which may have replaced a lowering, and what was said."""
    jax.clear_caches()
    primitive._say.cache_clear()


def lowered(traced, platform="cuda"):
    return traced.lower(lowering_platforms=(platform,)).as_text()


def iteration(program, platform="cuda"):
    """An iteration, without the carry that it would begin with."""
    return lowered(program.traced(jax.eval_shape(program.first)), platform)


def calls(text):
    """The targets of the custom calls, but for marks of XLA's partitioners, which make no code."""
    found = set(re.findall(r"stablehlo\.custom_call @([\w.$]+)", text))
    return found - {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def kernels(text):
    """The first axis of the results of each kernel: its rows."""
    lines = [line for line in text.splitlines() if f"@{KERNEL}(" in line]
    found = []
    for line in lines:
        results = line.rpartition("->")[2]
        assert set(re.findall(r"grid_x = (\d+)", line)) == {
            str(-(-int(rows) // 32)) for rows in re.findall(r"tensor<(\d+)", results)
        }
        found.append({int(rows) for rows in re.findall(r"tensor<(\d+)", results)})
    return found


@pytest.mark.slow
def test_an_iteration_is_one_program_around_the_kernel():
    text = iteration(Program(CartPole(), TINY, FusedConfig()))
    assert calls(text) == {KERNEL}
    assert kernels(text) == [{64}]


@pytest.mark.slow
def test_each_device_steps_its_share():
    text = iteration(Program(CartPole(), TINY, FusedConfig(devices=(0, 1, 2, 3))))
    assert calls(text) == {KERNEL}
    assert kernels(text) == [{16}]


@pytest.mark.slow
def test_the_first_carry_and_evaluations_are_for_cuda_too():
    program = Program(CartPole(), TINY, FusedConfig())
    first = lowered(jax.jit(program.first).trace())
    assert calls(first) == {KERNEL, *SOLVER}
    assert kernels(first) == [{64}]
    env, key = episode_statistics(training(CartPole())), jax.random.key(0)

    def play(key):
        opened = playing.open_episodes(program.agent, env, 5, key)
        params = program.agent.init(key).params
        return playing.play(program.agent, env, params, key, opened, np.uint32(9))

    text = lowered(jax.jit(play).trace(key))
    assert calls(text) == {KERNEL, *SOLVER}
    assert kernels(text) == [{5}, {5}]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*FUSED, "pendulum/sac", "mountain_car/r2d2"])
def test_every_preset_lowers_with_the_sizes_of_a_gpu(name, gpu):
    config = scaling.for_this_device(resolve.train_config(name))
    program = Program(config.env, config.agent, config.runtime)
    text = iteration(program)
    assert calls(text) == {KERNEL}
    # Another kernel for Euler's integrator, for the openings of a generation, or for derivatives.
    experience = config.agent.experience
    more = [getattr(experience, name, False) for name in ("episodes", "differentiated")]
    two = program.euler_steps > 0 or any(more)
    assert kernels(text) == [{program.plan.envs}] * (2 if two else 1)


IMPALA = Impala(torso="resnet", lstm_size=16, compute_dtype="bfloat16")
R2D2 = R2d2(
    torso="resnet",
    lstm_size=16,
    compute_dtype="bfloat16",
    sequence=8,
    burn_in=4,
    batch=16,
    ratio=8.0,
)


@dataclasses.dataclass(frozen=True)
class Camera:
    """An environment whose observations are images."""

    episode_steps: int = 10
    frame_skip: int = 1

    @property
    def spec(self):
        return EnvSpec(ArraySpec((36, 36, 1), "float32"), Discrete(2))

    def reset(self, key):
        return EnvState.opening(jnp.float32(0), self._seen(jnp.float32(0)))

    def step(self, state, action):
        moved = state.inner + action
        no = jnp.bool_(False)
        return EnvState.after(moved, self._seen(moved), jnp.float32(1), no)

    def _seen(self, moved):
        return jnp.broadcast_to(moved, (36, 36, 1))


@pytest.mark.slow
@pytest.mark.parametrize("torso", ["nature", "resnet"])
def test_convolutions_are_those_of_xla(torso):
    agent = dataclasses.replace(TINY, torso=torso, normalise_observations=True)
    text = iteration(Program(Camera(), agent, FusedConfig()))
    assert calls(text) == {KERNEL}
    assert "stablehlo.convolution" in text


@pytest.mark.slow
@pytest.mark.parametrize("agent", [IMPALA, R2D2])
def test_images_and_memories_lower_for_tpu(agent):
    """Acting, replay and gradients need nothing that is written for another device."""
    with pytest.warns(RuntimeWarning, match="not for tpu"):
        text = iteration(Program(Camera(), agent, FusedConfig()), "tpu")
    assert calls(text) == set()
    assert "stablehlo.convolution" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ant_lowers_for_tpu_and_says_how_large_its_step_is():
    config = resolve.train_config("ant/ppo")
    with pytest.warns(RuntimeWarning, match=r"not for tpu.* has \d+ equations: XLA may compile"):
        text = iteration(Program(config.env, config.agent, config.runtime), "tpu")
    assert calls(text) == set()
