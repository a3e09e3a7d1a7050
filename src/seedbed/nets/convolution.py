"""Two-dimensional convolution that is fast both on CPU and on accelerators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.llvm import host_vector_unit
from seedbed.nets import bfloat16
from seedbed.nets.convolution_vjp import (
    SOURCES,
    Constants,
    Passes,
    before_activation,
    convolve,
    kernel_target,
    xla_convolution,
)
from seedbed.nets.native import convolution as kernels
from seedbed.nets.native.bfloat16.instructions import UNITS, host_instructions
from seedbed.nets.native.call import batched, call_kernel, count_chunks, same_axes, sum_chunks
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.rescaling import CLIP, Scaling, check_scaling, rescale


def conv2d(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    stride: int,
    padding: int = 0,
    activation: Literal["relu"] | None = None,
    scaling: Scaling | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Convolves NHWC images, adds a bias and applies an optional relu.

    On CPU, it runs kernels that are compiled for the host's vector unit, or with bfloat16 for its tiles or
    pairs; on other devices, and with bfloat16 on CPUs that gain nothing by it, XLA's convolution. It is
    differentiable in `kernel`, `bias` and `x` if that is not uint8. Compiled code computes only the
    gradients that are used.

    Args:
        x: images [N, H, W, C], float32, uint8 (converted without a division by 255) or, if that is `dtype`,
            bfloat16.
        kernel: weights [KH, KW, C, F].
        bias: one per feature, [F].
        stride: step between neighbouring results, in both directions.
        padding: number of zeros added to each of the four sides.
        activation: "relu" or None.
        scaling: two arrays [H, W, C], or None. The input is then `rescale(x, scaling)`, which is padded
            afterwards. It costs almost nothing on CPU. It gets no gradient.
        dtype: float32, in which all arithmetic is done, or bfloat16, to which images, kernel and results are
            then rounded. By kernels, sums and the gradients of kernel and bias are not; XLA rounds these.

    Returns:
        Features [N, OH, OW, F] of `dtype`, OH = (H + 2 padding - KH) // stride + 1.

    Raises:
        ValueError: a rank, a size or an option does not fit.
        TypeError: a dtype does not fit.
    """
    _check(x, kernel, bias, stride, padding, activation)
    _check_dtype(x, dtype)
    if scaling is not None:
        check_scaling(x, scaling)
    layer = _layer(x, kernel, stride, padding, activation, scaling)
    constants = map(lax.stop_gradient, scaling or ())
    x, kernel, bias, *constants = same_axes(x, kernel, bias, *constants)
    passes = _PASSES
    if dtype == jnp.bfloat16:
        unit = host_instructions()
        if unit is None:
            return bfloat16.xla_convolve(layer, x, kernel, bias, tuple(constants))
        passes = bfloat16.passes_by(UNITS[unit])
    return convolve(passes, layer, x, kernel, bias, tuple(constants))


def _layer(
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
    padding: int,
    activation: str | None,
    scaling: Scaling | None,
) -> Convolution:
    _, height, width, channels = x.shape
    return Convolution(
        height=height,
        width=width,
        channels=channels,
        kernel_height=kernel.shape[0],
        kernel_width=kernel.shape[1],
        features=kernel.shape[3],
        stride=stride,
        padding=padding,
        relu=activation == "relu",
        source=SOURCES[jnp.dtype(x.dtype)],
        unit=host_vector_unit(),
        clip=None if scaling is None else CLIP,
    )


def _check_dtype(x: jax.Array, dtype: Any) -> None:
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"dtype is {jnp.dtype(dtype).name}; pass float32 or bfloat16")
    allowed = (jnp.float32, jnp.uint8) + ((jnp.bfloat16,) if dtype == jnp.bfloat16 else ())
    if x.dtype not in allowed:
        names = " or ".join(jnp.dtype(d).name for d in allowed)
        raise TypeError(f"x is {x.dtype}; convert it to {names}")


def _check(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    stride: int,
    padding: int,
    activation: str | None,
) -> None:
    for name, value, rank, layout in (
        ("x", x, 4, "[N, H, W, C]"),
        ("kernel", kernel, 4, "[KH, KW, C, F]"),
        ("bias", bias, 1, "[F]"),
    ):
        if value.ndim != rank:
            raise ValueError(f"{name} has shape {value.shape}; pass {layout}")
        if name != "x" and value.dtype != jnp.float32:
            raise TypeError(f"{name} is {value.dtype}; convert it to float32")
    if kernel.shape[2] != x.shape[3]:
        raise ValueError(f"kernel takes {kernel.shape[2]} channels but x has {x.shape[3]}")
    if bias.shape[0] != kernel.shape[3]:
        raise ValueError(f"bias has {bias.shape[0]} entries for {kernel.shape[3]} features")
    if stride < 1 or padding < 0:
        raise ValueError(f"stride {stride} must be >= 1 and padding {padding} >= 0")
    if activation not in ("relu", None):
        raise ValueError(f"activation {activation!r} is unknown; use 'relu' or None")
    if 0 in (*x.shape[1:], *kernel.shape):
        raise ValueError(f"x {x.shape} and kernel {kernel.shape} must have no empty axis but N")
    if any(n + 2 * padding < k for n, k in zip(x.shape[1:3], kernel.shape[:2], strict=True)):
        raise ValueError(
            f"kernel {kernel.shape[:2]} does not fit into image {x.shape[1:3]} of padding {padding}"
        )


@functools.cache
def _forward(layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (x, kernel, bias[, offset, scale]) to y, with a rule for vmap."""

    def native(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        shape = (x.shape[0], *layer.output, layer.features)
        results = [shape, (count_chunks(x), layer.copy_size)]
        target = kernel_target(
            "seedbed_convolution_forward", kernels.forward_ir, (layer,), 1 + len(arrays), 2
        )
        return call_kernel(target, (x, *arrays), results)[0]

    def fallback(x: jax.Array, kernel: jax.Array, bias: jax.Array, *scaling: jax.Array) -> Any:
        y = xla_convolution(layer, _scaled(x, scaling), kernel) + bias[None, None, None]
        return jax.nn.relu(y) if layer.relu else y

    return batched(native, fallback, images=1)


@functools.cache
def _weight_gradient(layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (x, dy[, y][, offset, scale]) to (dkernel, dbias)."""
    shape = (layer.kernel_height, layer.kernel_width, layer.channels, layer.features)

    def native(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = count_chunks(arrays[0])
        results = [(chunks, *shape), (chunks, layer.features), (chunks, layer.scratch_size)]
        dkernel, dbias, _ = call_kernel(
            kernel_target(
                "seedbed_convolution_weight_gradient",
                kernels.weight_gradient_ir,
                (layer,),
                len(arrays),
                3,
            ),
            arrays,
            results,
        )
        return sum_chunks(dkernel), sum_chunks(dbias)

    def fallback(x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = 2 if layer.relu else 1
        dy, x = before_activation(*arrays[:outputs]), _scaled(x, arrays[outputs:])
        x, dy, zeros = same_axes(x, dy, jnp.zeros(shape, jnp.float32))
        (dkernel,) = jax.vjp(lambda kernel: xla_convolution(layer, x, kernel), zeros)[1](dy)
        return dkernel, dy.sum((0, 1, 2))

    return batched(native, fallback, images=0)


@functools.cache
def _input_gradient(layer: Convolution) -> Callable[..., Any]:
    """Returns a function from (dy[, y], kernel) to dx, before the gradient of the scaling."""
    image = (layer.height, layer.width, layer.channels)

    def native(*arrays: jax.Array) -> jax.Array:
        *outputs, kernel = arrays
        transposed = kernel.reshape(layer.taps, layer.features).T
        results = [
            (outputs[0].shape[0], *image),
            (count_chunks(outputs[0]), layer.scratch_size),
        ]
        target = kernel_target(
            "seedbed_convolution_input_gradient",
            kernels.input_gradient_ir,
            (layer,),
            len(arrays),
            2,
        )
        return call_kernel(target, (*outputs, transposed), results)[0]

    def fallback(*arrays: jax.Array) -> jax.Array:
        *outputs, kernel = arrays
        dy = before_activation(*outputs)
        dy, zeros = same_axes(dy, jnp.zeros((dy.shape[0], *image), jnp.float32))
        return jax.vjp(lambda x: xla_convolution(layer, x, kernel), zeros)[1](dy)[0]

    return batched(native, fallback, images=2 if layer.relu else 1)


def _scaled(x: jax.Array, scaling: Constants) -> jax.Array:
    return rescale(x, Scaling(*scaling)) if scaling else x


_PASSES = Passes(_forward, _weight_gradient, _input_gradient)
