"""Convolution in bfloat16: by our kernels on a CPU that is made for it, and by XLA elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.nets.convolution_vjp import (
    Constants,
    Passes,
    before_activation,
    kernel_target,
    xla_convolution,
)
from seedbed.nets.native.bfloat16 import correlation, weights
from seedbed.nets.native.bfloat16.correlation import Correlation
from seedbed.nets.native.bfloat16.product import Instructions
from seedbed.nets.native.call import batched, call_kernel, count_chunks, same_axes, sum_chunks
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.rescaling import Scaling, rescale


def xla_convolve(
    layer: Convolution, x: jax.Array, kernel: jax.Array, bias: jax.Array, scaling: Constants
) -> jax.Array:
    """Convolves images [N, H, W, C] to bfloat16 features [N, OH, OW, F] by XLA, with its derivative."""
    y = xla_convolution(layer, _narrow(layer, x, scaling), kernel.astype(jnp.bfloat16))
    # in float32, so that the bias's gradient is summed in float32
    y = (y.astype(jnp.float32) + bias[None, None, None]).astype(jnp.bfloat16)
    return jax.nn.relu(y) if layer.relu else y


@functools.cache
def _forward(unit: Instructions, layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (x[, skip], kernel, bias[, offset, scale]) to y, with a rule for vmap."""
    sums, images = correlation.forward(layer, unit), 1 + (layer.block == "second")

    def native(*arrays: jax.Array) -> jax.Array:
        x, (kernel, bias, *scaling) = arrays[0], arrays[images:]
        beyond = sums.panels * 16 - layer.features
        weights = (_pack(sums, kernel), jnp.pad(bias, (0, beyond)))
        arrays = (*arrays[:images], *weights, *scaling)
        shape = (x.shape[0], *layer.output, layer.features)
        results = [shape, (count_chunks(x), sums.scratch_size)]
        return call_kernel(
            kernel_target(
                "seedbed_bfloat16_forward", correlation.forward_ir, (layer, unit), len(arrays), 2
            ),
            arrays,
            results,
            jnp.bfloat16,
        )[0]

    def fallback(*arrays: jax.Array) -> Any:
        x, (kernel, bias, *scaling) = arrays[0], arrays[images:]
        y = xla_convolve(layer, x, kernel, bias, tuple(scaling))
        return sum(arrays[1:images], start=y)

    return batched(native, fallback, images=images)


@functools.cache
def _weight_gradient(unit: Instructions, layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (x, dy[, y][, offset, scale]) to (dkernel, dbias), float32."""
    gradient = weights.weight_gradient(layer, unit)
    shape = (layer.kernel_height, layer.kernel_width, layer.channels, layer.features)

    def native(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = count_chunks(arrays[0])
        results = [
            (chunks, *gradient.sum_shape),
            (chunks, layer.features),
            (chunks, gradient.places[-1]),
        ]
        target = kernel_target(
            "seedbed_bfloat16_weight_gradient",
            weights.weight_gradient_ir,
            (layer, unit),
            len(arrays),
            3,
        )
        sums, dbias, _ = call_kernel(target, arrays, results)
        sums = sum_chunks(sums)[: layer.features, :, : gradient.segment]
        sums = sums.reshape(layer.features, layer.kernel_height, layer.kernel_width, -1)
        return sums.transpose(1, 2, 3, 0)[:, :, : layer.channels], sum_chunks(dbias)

    def fallback(x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = 2 if layer.relu else 1
        dy, x = before_activation(*arrays[:outputs]), _narrow(layer, x, arrays[outputs:])
        x, dy, zeros = same_axes(x, dy, jnp.zeros(shape, jnp.bfloat16))
        (dkernel,) = jax.vjp(lambda kernel: xla_convolution(layer, x, kernel), zeros)[1](dy)
        return dkernel.astype(jnp.float32), dy.astype(jnp.float32).sum((0, 1, 2))

    return batched(native, fallback, images=0)


@functools.cache
def _input_gradient(unit: Instructions, layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (dy[, y][, x, skip], kernel) to dx, before the gradient of the scaling."""
    images = 1 + layer.relu + 2 * (layer.block == "first")
    image = (layer.height, layer.width, layer.channels)
    sums = correlation.input_gradient(layer, unit)
    dtype = jnp.float32 if sums.target.kind == "float" else jnp.bfloat16

    def native(*arrays: jax.Array) -> jax.Array:
        *given, kernel = arrays
        results = [
            (given[0].shape[0], *image),
            (count_chunks(given[0]), sums.scratch_size),
        ]
        arrays = (*given, _pack(sums, _turned(sums, kernel)))
        return call_kernel(
            kernel_target(
                "seedbed_bfloat16_input_gradient",
                correlation.input_gradient_ir,
                (layer, unit),
                len(arrays),
                2,
            ),
            arrays,
            results,
            dtype,
        )[0]

    def fallback(*arrays: jax.Array) -> jax.Array:
        *given, kernel = arrays
        outputs, skips = given[: 1 + layer.relu], given[1 + layer.relu :]
        dy = before_activation(*outputs)
        dy, zeros = same_axes(dy, jnp.zeros((dy.shape[0], *image), jnp.bfloat16))
        kernel = kernel.astype(jnp.bfloat16)
        (dx,) = jax.vjp(lambda x: xla_convolution(layer, x, kernel), zeros)[1](dy)
        if skips:
            x, skip = skips
            dx = skip + before_activation(dx, x)
        return dx.astype(dtype)

    return batched(native, fallback, images=images)


def _pack(sums: Correlation, kernel: jax.Array) -> jax.Array:
    """Returns kernels [KH, KW, C, F] as `sums` reads them, of `sums.packed_shape`, bfloat16."""
    panels, rows, chunks, pairs, lanes, _ = sums.packed_shape
    channels, features = kernel.shape[2:]
    kernel = kernel.astype(jnp.bfloat16)
    beyond = ((0, sums.layout.depth - channels), (0, panels * lanes - features))
    kernel = jnp.pad(kernel, ((0, 0), (0, 0), *beyond)).reshape(rows, sums.segment, -1)
    # the last chunk may overlap the one before it
    last = (chunks - 1) * sums.depth
    overlap = jnp.zeros((rows, chunks * sums.depth - sums.segment, panels * lanes), kernel.dtype)
    kernel = jnp.concatenate([kernel[:, :last], overlap, kernel[:, last:]], axis=1)
    return kernel.reshape(rows, chunks, pairs, 2, panels, lanes).transpose(4, 0, 1, 2, 5, 3)


def _turned(sums: Correlation, kernel: jax.Array) -> jax.Array:
    """Returns kernels [KH, KW, C, F] as those of the input gradient: [rows, columns, F, stride^2 C]."""
    height, width, channels, features = kernel.shape
    rows, columns, stride = sums.kernel_rows, sums.kernel_columns, sums.target.stride
    beyond = ((0, rows * stride - height), (0, columns * stride - width))
    kernel = jnp.pad(kernel.astype(jnp.bfloat16), (*beyond, (0, 0), (0, 0)))
    kernel = kernel.reshape(rows, stride, columns, stride, channels, features)[::-1, :, ::-1]
    return kernel.transpose(0, 2, 5, 1, 3, 4).reshape(rows, columns, features, -1)


def _narrow(layer: Convolution, x: jax.Array, scaling: Constants) -> jax.Array:
    x = jax.nn.relu(x) if layer.block == "first" else x
    return (rescale(x, Scaling(*scaling)) if scaling else x).astype(jnp.bfloat16)


@functools.cache
def passes_by(unit: Instructions) -> Passes:
    """Returns the passes in bfloat16: on CPU by kernels with these instructions, on other devices by XLA."""
    return Passes(
        *(functools.partial(p, unit) for p in (_forward, _weight_gradient, _input_gradient))
    )
