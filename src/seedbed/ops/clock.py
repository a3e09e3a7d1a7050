"""Reads the clock inside a compiled program, to measure the time of its parts."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.ffi import register_kernel, varying_like

# The number of the monotonic clock is 1 on Linux, and 6 on macOS.
_TASK = f"""
declare i32 @clock_gettime(i32, ptr)
define internal void @task(ptr %data, ptr %dims, i64 %chunk, i64 %chunks) {{
  %now = alloca [2 x i64]
  %failed = call i32 @clock_gettime(i32 {int(time.CLOCK_MONOTONIC)}, ptr %now)
  %s = load i64, ptr %now
  %pns = getelementptr i64, ptr %now, i64 1
  %ns = load i64, ptr %pns
  %us = sdiv i64 %ns, 1000
  %whole = mul i64 %s, 1000000
  %time = add i64 %whole, %us
  %low = trunc i64 %time to i32
  %place = getelementptr ptr, ptr %data, i64 1
  %result = load ptr, ptr %place
  store i32 %low, ptr %result
  ret void
}}
"""


def stamp(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the value, and the time when it was ready: uint32 [1], microseconds, modulo 2^32.

    The clock is monotonic. Any computation that uses the returned value runs after that time. Under vmap the
    whole batch has one time. On other devices than CPU the time is 0. Gradients flow through the value.
    """
    same, now = _stamp(lax.stop_gradient(value))
    return _tied(value, same), now


@jax.custom_jvp
def _tied(value: jax.Array, same: jax.Array) -> jax.Array:
    """Returns `same`, a copy of the value that was passed around JAX's derivatives."""
    del value
    return same


@_tied.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


@jax.custom_batching.custom_vmap
def _stamp(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.platform_dependent(value, cpu=_read, default=_zero)


@_stamp.def_vmap
def _(size: int, mapped: list[bool], value: jax.Array) -> tuple[tuple, tuple]:
    del size, mapped
    return _stamp(value), (True, False)


def _read(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    results = (
        varying_like(jax.ShapeDtypeStruct((1,), jnp.uint32), value),
        varying_like(jax.ShapeDtypeStruct(value.shape, value.dtype), value),
    )
    # The value passes through the call, in place: this keeps XLA from moving its users before the call.
    call = jax.ffi.ffi_call(_target(), results, input_output_aliases={0: 1})
    now, same = call(value)
    return same, now


def _zero(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    axes = tuple(jax.typeof(value).manual_axis_type.varying)
    zero = jnp.zeros(1, jnp.uint32)
    return value, lax.pcast(zero, axes, to="varying") if axes else zero


@functools.cache
def _target() -> str:
    return register_kernel("clock", _TASK, arguments=1, results=2, chunk_buffer=1)


def passed(begun: jax.Array, ended: jax.Array) -> jax.Array:
    """Returns the microseconds between two times; 0 if the second came before the first.

    XLA may compute what does not depend on the first value before it.
    """
    return jnp.maximum((ended - begun).astype(jnp.int32), 0).astype(jnp.uint32)
