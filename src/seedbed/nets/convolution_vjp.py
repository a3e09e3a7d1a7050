"""What convolutions share in float32 and bfloat16: the derivative, kernels' names, XLA's convolution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.ffi import register_kernel
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.native.rows import Kind
from seedbed.nets.rescaling import Scaling, rescale

SOURCES: dict[Any, Kind] = {
    jnp.dtype(jnp.uint8): "i8",
    jnp.dtype(jnp.float32): "float",
    jnp.dtype(jnp.bfloat16): "bfloat",
}
"""The dtypes that kernels read, with the types of their numbers in LLVM's words."""
Constants = tuple[jax.Array, ...]
"""Offset and scale of a `Scaling`, or an empty tuple."""


class Passes(NamedTuple):
    """Functions from a layer to each of its passes.

    forward: (x, kernel, bias[, offset, scale]) to y.
    weight_gradient: (x, dy[, y][, offset, scale]) to (dkernel, dbias); with `y` if the layer has a relu.
    input_gradient: (dy[, y], kernel) to dx, before the gradient of the scaling.

    Layers of a residual block, in bfloat16 only: forward of the second takes (x, skip, kernel, bias), where
    `skip` is added to the result, and input_gradient of the first (dy, y, x, skip, kernel), where `skip` is
    the gradient of the block's result and `x` its images.
    """

    forward: Callable[[Convolution], Callable[..., Any]]
    weight_gradient: Callable[[Convolution], Callable[..., Any]]
    input_gradient: Callable[[Convolution], Callable[..., Any]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def convolve(
    passes: Passes,
    layer: Convolution,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    scaling: Constants,
) -> jax.Array:
    """Convolves images [N, H, W, C] to features [N, OH, OW, F]; the derivative is that of the passes."""
    return passes.forward(layer)(x, kernel, bias, *scaling)


def _convolve_fwd(
    passes: Passes,
    layer: Convolution,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    scaling: Constants,
) -> tuple[jax.Array, tuple]:
    y = passes.forward(layer)(x, kernel, bias, *scaling)
    return y, (x, kernel, y if layer.relu else None, scaling)


def _convolve_bwd(
    passes: Passes, layer: Convolution, saved: tuple, dy: jax.Array
) -> tuple[jax.Array | None, jax.Array, jax.Array, None]:
    x, kernel, y, scaling = saved
    outputs = (dy,) if y is None else (dy, y)
    dkernel, dbias = passes.weight_gradient(layer)(x, *outputs, *scaling)
    if layer.source == "i8":
        return None, dkernel, dbias, None
    dx = passes.input_gradient(layer)(*outputs, kernel)
    if scaling:
        (dx,) = jax.vjp(lambda x: rescale(x, Scaling(*scaling)), x)[1](dx)
    return dx, dkernel, dbias, None


convolve.defvjp(_convolve_fwd, _convolve_bwd)


def before_activation(dy: jax.Array, y: jax.Array | None = None) -> jax.Array:
    """Returns the gradient before a relu with the result `y`, or `dy` itself without one."""
    return dy if y is None else jnp.where(y > 0, dy, jnp.zeros_like(dy))


def xla_convolution(layer: Convolution, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves by XLA, in the kernel's dtype, without bias and relu."""
    margin = (layer.padding, layer.padding)
    return lax.conv_general_dilated(
        x.astype(kernel.dtype),
        kernel,
        window_strides=(layer.stride, layer.stride),
        padding=(margin, margin),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@functools.cache
def kernel_target(
    prefix: str,
    emit: Callable[..., str],
    description: tuple,
    arguments: int,
    results: int,
) -> str:
    """Compiles the kernel that `emit` writes of a description, and returns the name of its custom call."""
    return register_kernel(
        prefix,
        emit(*description),
        arguments=arguments,
        results=results,
        chunk_buffer=arguments + results - 1,
    )
