"""Max pooling with a gradient that is fast both on CPU and on accelerators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.llvm import host_vector_unit
from seedbed.nets.convolution_vjp import kernel_target
from seedbed.nets.native import pooling as kernels
from seedbed.nets.native.bfloat16.instructions import host_instructions
from seedbed.nets.native.bfloat16.product import LANES
from seedbed.nets.native.call import batched, call_kernel, count_chunks
from seedbed.nets.native.pooling import Pooling


def max_pool(
    x: jax.Array, *, window: int = 3, stride: int = 2, padding: int | Literal["SAME"] = 1
) -> jax.Array:
    """Computes the largest value of each channel in square windows of NHWC images.

    If maxima in a window are equal, the first of them in row-major order gets the gradient; nothing gets that
    of a window with NaN, whose maximum is NaN. Kernels have no second derivative.

    Args:
        x: images [N, H, W, C], float32 or bfloat16. What a pixel gets from several windows is summed in
            float32.
        window: height and width of a window.
        stride: step between neighbouring windows, in both directions.
        padding: number of cells added to each of the four sides, less than `window`; or "SAME" for
            ceil(H / stride) result rows, as in TensorFlow. Added cells are never a maximum.

    Returns:
        Maxima [N, OH, OW, C] of the dtype of x.

    Raises:
        ValueError: a rank, a size or an option does not fit.
        TypeError: x is neither float32 nor bfloat16.
    """
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {x.shape}; pass [N, H, W, C] with no empty axis but N")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; convert it to float32 or bfloat16")
    if window < 1 or stride < 1:
        raise ValueError(f"window {window} and stride {stride} must be >= 1")
    if padding != "SAME" and padding not in range(window):
        raise ValueError(f"padding {padding!r} must be 'SAME' or a number from 0 to window - 1")
    if padding != "SAME" and min(x.shape[1:3]) + 2 * padding < window:
        raise ValueError(f"window {window} does not fit into image {x.shape[1:3]}; pad it more")
    _, height, width, channels = x.shape
    margins = tuple(_margin(n, window, stride, padding) for n in (height, width))
    narrow = x.dtype == jnp.bfloat16 and host_instructions() is not None
    layer = Pooling(
        height=height,
        width=width,
        channels=channels,
        window=window,
        stride=stride,
        margins=(margins[0], margins[1]),
        kind="bfloat" if narrow else "float",
        lanes=LANES if narrow else host_vector_unit().width,
    )
    y: Any = _pool(layer, x if narrow else x.astype(jnp.float32))
    return y.astype(x.dtype)


def _margin(size: int, window: int, stride: int, padding: int | Literal["SAME"]) -> tuple[int, int]:
    if padding != "SAME":
        return padding, padding
    total = max(0, (-(-size // stride) - 1) * stride + window - size)
    return total // 2, total - total // 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pool(layer: Pooling, x: jax.Array) -> jax.Array:
    return _forward(layer)(x)


def _pool_fwd(layer: Pooling, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _forward(layer)(x)
    return y, (x, y)


def _pool_bwd(layer: Pooling, saved: tuple, dy: jax.Array) -> tuple[jax.Array]:
    return (_gradient(layer)(*saved, dy),)


_pool.defvjp(_pool_fwd, _pool_bwd)


@functools.cache
def _forward(layer: Pooling) -> Callable[..., Any]:
    """Returns a function from x to the maxima y, with a rule for vmap."""

    def native(x: jax.Array) -> jax.Array:
        target = kernel_target("seedbed_max_pool_forward", kernels.forward_ir, (layer,), 1, 2)
        shapes = [(x.shape[0], *layer.output, layer.channels), (count_chunks(x), 1)]
        return call_kernel(target, (x,), shapes, x.dtype)[0]

    return batched(native, functools.partial(_xla_pool, layer), images=1)


@functools.cache
def _gradient(layer: Pooling) -> Callable[..., Any]:
    """Returns a function from (x, y, dy) to the gradient dx, with a rule for vmap."""

    def native(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        target = kernel_target("seedbed_max_pool_gradient", kernels.gradient_ir, (layer,), 3, 2)
        shapes = [x.shape, (count_chunks(x), layer.ring_size)]
        return call_kernel(target, (x, *arrays), shapes, x.dtype)[0]

    def fallback(x: jax.Array, y: jax.Array, dy: jax.Array) -> jax.Array:
        del y
        return jax.vjp(functools.partial(_xla_pool, layer), x)[1](dy)[0]

    return batched(native, fallback, images=3)


def _xla_pool(layer: Pooling, x: jax.Array) -> jax.Array:
    size, stride = layer.window, layer.stride
    padding = ((0, 0), *layer.margins, (0, 0))
    # in float32, so that gradients are summed in float32
    y = lax.reduce_window(
        x.astype(jnp.float32),
        -jnp.inf,
        lax.max,
        (1, size, size, 1),
        (1, stride, stride, 1),
        padding,
    )
    return y.astype(x.dtype)
