"""Pink noise: its distribution, how alike it is from step to step, and where it begins anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.agents.ppo import Ppo
from seedbed.ops.noise import initial_noise, next_noise
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError, bind


def series(steps: int, envs: int, size: int, opens: int = 1) -> np.ndarray:
    """Returns noise `[steps, envs, size]`; an episode begins every `opens` steps."""

    def step(state, t):
        first = jnp.full(envs, t % opens == 0)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), t), envs)
        noise, state = next_noise(state, first, keys, size)
        return state, noise

    return np.asarray(
        jax.lax.scan(step, initial_noise("pink", jnp.arange(envs)), jnp.arange(steps))[1]
    )


def test_a_draw_is_normal_and_elements_and_environments_are_independent():
    noise = series(200, 1500, 3, opens=200)
    last = noise[[0, 5, 199]]
    np.testing.assert_allclose(last.mean(1), 0, atol=0.1)
    np.testing.assert_allclose(last.std(1), 1, atol=0.07)
    np.testing.assert_allclose((last**4).mean((1, 2)), 3, atol=0.4)
    apart = np.corrcoef(np.concatenate([noise[0].T, np.roll(noise[0].T, 1, axis=1)]))
    np.testing.assert_allclose(apart, np.eye(6), atol=0.1)


def test_likeness_falls_with_the_logarithm_of_the_lag_as_power_does_with_frequency():
    noise = series(1024, 200, 2, opens=1024).reshape(1024, -1)
    lags = np.array([1, 4, 16, 64, 256])
    alike = np.array([(noise[lag:] * noise[:-lag]).mean() for lag in lags])
    # Of ten normals, those that are drawn less often than every `lag` steps stay; the rest overlaps in part.
    np.testing.assert_allclose(alike, [0.8, 0.625, 0.425, 0.225, 0.06], atol=0.05)
    power = (np.abs(np.fft.rfft(noise, axis=0)) ** 2).mean(1)
    band = slice(4, 200)
    slope = np.polyfit(np.log(np.arange(len(power))[band]), np.log(power[band]), 1)[0]
    assert -1.25 < slope < -0.75


def test_an_episode_begins_a_noise_of_its_own():
    noise = series(64, 2000, 1, opens=32)[..., 0]
    within, across = (noise[t] * noise[t + 1] for t in (30, 31))
    assert within.mean() == pytest.approx(0.8, abs=0.1)
    assert across.mean() == pytest.approx(0.0, abs=0.1)


def test_a_state_that_is_made_anew_within_an_episode_begins_another_noise():
    ids, keys = jnp.arange(4), jax.random.split(jax.random.key(3), (2, 4))
    no = jnp.zeros(4, bool)
    (one, _), (two, _) = (next_noise(initial_noise("pink", ids), no, each, 2) for each in keys)
    assert (np.asarray(one) != np.asarray(two)).all() and len(np.unique(one)) == 8


def test_choices_have_no_noise():
    spec = EnvSpec(ArraySpec((2,), "float32"), Discrete(3))
    with pytest.raises(SeedbedError, match="Ppo.noise is pink but the environment takes Discrete"):
        bind(Ppo(noise="pink"), spec)
