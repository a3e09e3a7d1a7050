"""The clock inside compiled programs."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from seedbed.ops.clock import stamp


def now() -> int:
    return (time.monotonic_ns() // 1000) % 2**32


def between(before: int, at, after: int) -> bool:
    """Whether a stamp lies between two readings, which wrap around as it does."""
    return (int(at) - before) % 2**32 <= (after - before) % 2**32


def test_the_value_comes_back_with_the_time_at_which_it_was_there():
    value = jnp.arange(6.0).reshape(2, 3)
    before = now()
    same, at = jax.block_until_ready(jax.jit(stamp)(value))
    assert between(before, at[0], now())
    assert at.dtype == jnp.uint32
    np.testing.assert_array_equal(same, value)


def test_work_between_two_stamps_is_between_them():
    @jax.jit
    def work(x, turns):
        x, begun = stamp(x)
        x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x) + 1.0, x)
        x, done = stamp(x)
        return x, done - begun

    x = jnp.ones(4096)
    work(x, 1)
    few, many = work(x, 1)[1][0], work(x, 20_000)[1][0]
    assert 0 <= few < many


def test_scalars_flags_and_whole_numbers_pass():
    for value in (jnp.float32(2), jnp.bool_(True), jnp.arange(3), jnp.zeros((2, 0))):
        same, _ = jax.jit(stamp)(value)
        np.testing.assert_array_equal(same, value)
        assert same.dtype == value.dtype


def test_a_mapped_program_reads_the_clock_once():
    value = jnp.arange(8.0).reshape(4, 2)
    same, at = jax.jit(jax.vmap(stamp, out_axes=(0, None)))(value)
    assert at.shape == (1,)
    np.testing.assert_array_equal(same, value)


def test_every_device_reads_its_own():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    mapped = jax.shard_map(stamp, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P("d")))
    before = now()
    same, at = jax.block_until_ready(jax.jit(mapped)(jnp.arange(8.0)))
    after = now()
    assert at.shape == (4,)
    assert all(between(before, each, after) for each in at)
    np.testing.assert_array_equal(same, jnp.arange(8.0))
