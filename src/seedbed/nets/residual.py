"""The residual block of two convolutions, whose relu and sum are in their kernels where these allow it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.llvm import host_vector_unit
from seedbed.nets.bfloat16 import passes_by
from seedbed.nets.convolution import conv2d
from seedbed.nets.native.bfloat16.instructions import UNITS, Name, host_instructions
from seedbed.nets.native.call import same_axes
from seedbed.nets.native.convolution import Convolution

Weights = tuple[jax.Array, jax.Array]
"""A kernel [K, K, C, C], with K odd, and a bias [C], float32."""


def residual_block(x: jax.Array, first: Weights, second: Weights) -> jax.Array:
    """Computes `x + second(relu(first(relu(x))))`, two convolutions that keep the size of images.

    In bfloat16, on a CPU that is faster with it, no array is made of the first relu and none of the second
    convolution without the sum, which is rounded once. Kernels have no second derivative.

    Args:
        x: images [N, H, W, C], float32 or bfloat16, in which convolutions are computed.
        first: the weights of the first convolution.
        second: the weights of the second.

    Returns:
        Images [N, H, W, C] of the dtype of x.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    _check(x, first, second)
    unit = host_instructions() if x.dtype == jnp.bfloat16 else None
    if unit is not None:
        x, *weights = same_axes(x, *first, *second)
        return _block(unit, x, *weights)
    options: dict[str, Any] = {"stride": 1, "padding": first[0].shape[0] // 2, "dtype": x.dtype}
    y = conv2d(jax.nn.relu(x), *first, activation="relu", **options)
    return x + conv2d(y, *second, **options)


def _check(x: jax.Array, *layers: Weights) -> None:
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {x.shape}; pass [N, H, W, C] with no empty axis but N")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; convert it to float32 or bfloat16")
    channels = x.shape[3]
    for kernel, bias in layers:
        size = next(iter(layers[0][0].shape), 0)
        if kernel.shape != (size, size, channels, channels) or size % 2 == 0:
            raise ValueError(
                f"a kernel has shape {kernel.shape}; pass [K, K, {channels}, {channels}] with K odd, "
                "the same for both"
            )
        if bias.shape != (channels,):
            raise ValueError(f"a bias has shape {bias.shape}; pass [{channels}]")
        if not kernel.dtype == bias.dtype == jnp.float32:
            raise TypeError(f"weights are {kernel.dtype} and {bias.dtype}; convert them to float32")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(
    unit: Name, x: jax.Array, k1: jax.Array, b1: jax.Array, k2: jax.Array, b2: jax.Array
) -> jax.Array:
    return _block_fwd(unit, x, k1, b1, k2, b2)[0]


def _block_fwd(unit: Name, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, tuple]:
    passes, (first, second) = passes_by(UNITS[unit]), _layers(x, weights[0])
    k1, b1, k2, b2 = weights
    h = passes.forward(first)(x, k1, b1)
    return passes.forward(second)(h, x, k2, b2), (x, h, k1, k2)


def _block_bwd(unit: Name, saved: tuple, dy: jax.Array) -> tuple[jax.Array, ...]:
    x, h, k1, k2 = saved
    passes, (first, second) = passes_by(UNITS[unit]), _layers(x, k1)
    dk2, db2 = passes.weight_gradient(second)(h, dy)
    dh = passes.input_gradient(second)(dy, k2)
    dk1, db1 = passes.weight_gradient(first)(x, dh, h)
    dx = passes.input_gradient(first)(dh, h, x, dy, k1)
    return dx, dk1, db1, dk2, db2


_block.defvjp(_block_fwd, _block_bwd)


def _layers(x: jax.Array, kernel: jax.Array) -> tuple[Convolution, Convolution]:
    _, height, width, channels = x.shape
    make = functools.partial(
        Convolution,
        height=height,
        width=width,
        channels=channels,
        kernel_height=kernel.shape[0],
        kernel_width=kernel.shape[1],
        features=channels,
        stride=1,
        padding=kernel.shape[0] // 2,
        source="bfloat",
        unit=host_vector_unit(),
    )
    return make(relu=True, block="first"), make(relu=False, block="second")
