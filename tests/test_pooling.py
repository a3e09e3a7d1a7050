"""Our max pooling against XLA's: values, gradient, transformations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from bfloat16_emulation import emulation, real_kernels
from guarded_memory import run_guarded
from seedbed.nets.native import pooling as kernels
from seedbed.nets.native.pooling import Pooling
from seedbed.nets.pooling import max_pool


def _reference(x, *, window=3, stride=2, padding=1):
    if padding != "SAME":
        padding = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    sizes, steps = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, sizes, steps, padding)


def _value_and_gradient(function, x, **options):
    def total(x):
        y = function(x, **options)
        return (jnp.sin(1.0 + jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y).sum(), y

    gradient, y = jax.grad(total, has_aux=True)(x)
    return y, gradient


def _check_equal(x, transform=jax.jit, **options):
    ours, theirs = (
        transform(lambda x, f=f: _value_and_gradient(f, x, **options))(x)
        for f in (max_pool, _reference)
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-5)


def _images(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.quick("21-*", "11-*")
@pytest.mark.parametrize("padding", [1, "SAME"])
@pytest.mark.parametrize(("size", "channels"), [(84, 16), (42, 32), (21, 32), (11, 3)])
def test_resnet_layers_match_xla(size, channels, padding):
    _check_equal(_images(3, size, size, channels), padding=padding)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (5, 9, 9, 40))),
    window=st.integers(1, 4),
    stride=st.integers(1, 3),
    same=st.booleans(),
)
def test_odd_shapes(shape, window, stride, same):
    window = min(window, *shape[1:3])
    padding = "SAME" if same else window - 1
    _check_equal(_images(*shape), window=window, stride=stride, padding=padding)


@pytest.mark.parametrize("unit", ["emulated", "host"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 21, 21, 32), {"padding": "SAME"}),
        ((3, 9, 7, 21), {"window": 3, "stride": 1, "padding": 2}),
        ((2, 8, 6, 5), {"window": 2, "stride": 3, "padding": 0}),
        ((2, 3, 2, 3), {"window": 4, "stride": 2, "padding": 3}),
    ],
)
def test_bfloat16(shape, options, unit):
    """Many maxima of 8 bits are equal. Gradients are whole numbers, so sums are exact in any order."""
    x = _images(*shape).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    shape = _reference(wide, **options).shape
    dy = jnp.asarray(np.random.default_rng(1).integers(-99, 99, shape), jnp.bfloat16)
    with emulation("pairs") if unit == "emulated" else real_kernels():
        y, derivative = jax.vjp(lambda x: max_pool(x, **options), x)
        (dx,) = derivative(dy)
    expected, derivative = jax.vjp(lambda x: _reference(x, **options), wide)
    (expected_dx,) = derivative(dy.astype(jnp.float32))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(y.astype(jnp.float32), expected)
    np.testing.assert_array_equal(dx, expected_dx.astype(jnp.bfloat16))


def test_threads_share_no_memory():
    """Each share of a batch has a ring of rows of its own."""
    x = _images(64, 9, 7, 16)
    gradient = jax.jit(jax.grad(lambda x: (max_pool(x) ** 2).sum()))
    expected = np.concatenate([gradient(part) for part in jnp.split(x, 16)])
    for _ in range(50):
        np.testing.assert_array_equal(gradient(x), expected)


@pytest.mark.parametrize(("kind", "lanes"), [("bfloat", 16), ("float", 16), ("float", 4)])
@pytest.mark.parametrize(
    ("shape", "window", "stride", "margins"),
    [
        ((9, 7, 5), 3, 2, ((1, 1), (1, 1))),
        ((2, 3, 17), 3, 2, ((0, 1), (1, 1))),
        ((9, 8, 3), 2, 5, ((0, 0), (0, 0))),
        ((2, 3, 3), 4, 2, ((3, 3), (3, 3))),
    ],
)
def test_no_memory_beyond_the_images_is_touched(shape, window, stride, margins, kind, lanes):
    images, size = 2, {"float": 4, "bfloat": 2}[kind]
    layer = Pooling(*shape, window, stride, margins, kind, lanes)
    x = images * size * math.prod(shape)
    y = images * size * math.prod(layer.output) * layer.channels
    assert run_guarded(kernels.forward_ir(layer), [x, y, 4], images)
    assert run_guarded(kernels.gradient_ir(layer), [x, y, y, x, 4 * layer.ring_size], images)


def test_bfloat16_runs_by_its_kernels():
    def loss(x):
        return max_pool(x).astype(jnp.float32).sum()

    x = _images(2, 8, 8, 16).astype(jnp.bfloat16)
    with emulation("pairs"):
        text = jax.jit(jax.grad(loss)).lower(x).as_text()
    calls = [line for line in text.splitlines() if "seedbed_max_pool" in line]
    assert len(calls) == 2 and all("bf16" in line for line in calls)


def test_first_of_equal_maxima_takes_the_gradient():
    _check_equal(jnp.zeros((2, 7, 7, 4)), padding=0)


def test_nan_propagates():
    x = _images(1, 8, 8, 3).at[0, 3, 3, 1].set(jnp.nan).at[0, 6, 6, 2].set(-jnp.nan)
    for dtype in (jnp.float32, jnp.bfloat16):
        y = x.astype(dtype)
        np.testing.assert_array_equal(
            max_pool(y).astype(jnp.float32), _reference(y.astype(jnp.float32))
        )


def test_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def transform(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")))

    _check_equal(_images(4, 7, 7, 4), transform=transform)


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (jnp.zeros((8, 8, 3)), {}, ValueError, r"x has shape \(8, 8, 3\)"),
        (jnp.zeros((2, 8, 8, 3), jnp.int32), {}, TypeError, "x is int32"),
        (jnp.zeros((2, 8, 8, 3)), {"padding": 3}, ValueError, "padding 3 must be"),
        (jnp.zeros((2, 8, 8, 3)), {"padding": "VALID"}, ValueError, "padding 'VALID' must be"),
        (jnp.zeros((2, 1, 1, 3)), {"padding": 0}, ValueError, "window 3 does not fit"),
        (jnp.zeros((2, 8, 8, 3)), {"stride": 0}, ValueError, "stride 0 must be"),
    ],
)
def test_errors_name_the_remedy(x, options, error, match):
    with pytest.raises(error, match=match):
        max_pool(x, **options)
