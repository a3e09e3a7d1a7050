"""The residual block by its kernels, emulated and on the host, against float32 and XLA."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bfloat16_emulation import emulation, real_kernels
from guarded_memory import run_guarded
from seedbed.llvm import VectorUnit
from seedbed.nets.native.bfloat16 import correlation, weights
from seedbed.nets.native.bfloat16.instructions import UNITS
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.residual import residual_block
from seedbed.nets.torsos import DeepResNet

SHAPES = [(2, 9, 7, 5), (3, 11, 11, 16), (1, 6, 21, 32), (16, 5, 4, 16)]


def _whole_numbers(shape, channels):
    """Arrays of whole numbers, so small and kernels so sparse that 8 bits hold all results."""
    rng = np.random.default_rng(0)

    def kernel():
        kept = rng.random((3, 3, channels, channels)) < 3 / (9 * channels)
        return jnp.asarray(rng.integers(-1, 2, kept.shape) * kept, jnp.float32)

    def bias():
        return jnp.asarray(rng.integers(-2, 3, channels), jnp.float32)

    x, dy = (jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for _ in range(2))
    return (x, (kernel(), bias()), (kernel(), bias())), dy


def _value_and_gradients(arrays, dy, dtype):
    def total(x, first, second):
        y = residual_block(x.astype(dtype), first, second)
        return (y.astype(jnp.float32) * dy).sum(), y

    gradients, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays)
    assert y.dtype == dtype
    return y.astype(jnp.float32), gradients


def _assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.quick("shape3-pairs", "shape1-host")
@pytest.mark.parametrize("unit", ["tiles", "pairs", "host"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_exact(shape, unit):
    arrays, dy = _whole_numbers(shape, shape[-1])
    expected = _value_and_gradients(arrays, dy, jnp.float32)
    assert max(jnp.abs(expected[0]).max(), jnp.abs(expected[1][0]).max()) < 256
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(expected))
    with real_kernels() if unit == "host" else emulation(unit):
        _assert_equal(_value_and_gradients(arrays, dy, jnp.bfloat16), expected)


@pytest.mark.quick("shape0-3-pairs", "shape1-5-pairs", "shape1-5-tiles")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("shape", "size"), [((7, 5, 17), 3), ((4, 3, 3), 5)])
def test_no_memory_beyond_the_images_is_touched(shape, size, unit):
    images = 2
    make = functools.partial(
        Convolution, *shape, size, size, shape[-1], 1, size // 2, source="bfloat"
    )
    x = 2 * images * math.prod(shape)
    for block, relu in (("first", True), ("second", False)):
        layer = make(relu=relu, unit=VectorUnit(16, 32), block=block)
        sums = correlation.forward(layer, UNITS[unit])
        packed = 2 * math.prod(sums.packed_shape)
        sizes = [*[x] * (1 if relu else 2), packed, 64 * sums.panels, x, 4 * sums.scratch_size]
        assert run_guarded(correlation.forward_ir(layer, UNITS[unit]), sizes, images), block
        sums = correlation.input_gradient(layer, UNITS[unit])
        packed = 2 * math.prod(sums.packed_shape)
        sizes = [*[x] * (4 if relu else 1), packed, x, 4 * sums.scratch_size]
        assert run_guarded(correlation.input_gradient_ir(layer, UNITS[unit]), sizes, images), block
        found = weights.weight_gradient(layer, UNITS[unit])
        results = math.prod(found.sum_shape), layer.features, found.places[-1]
        sizes = [*[x] * (3 if relu else 2), *(4 * count for count in results)]
        assert run_guarded(weights.weight_gradient_ir(layer, UNITS[unit]), sizes, images), block


def test_only_kernels_touch_the_images():
    arrays, _ = _whole_numbers((2, 9, 7, 16), 16)

    def gradients(x, first, second):
        y, derivative = jax.vjp(residual_block, x, first, second)
        return y, derivative(y)

    x = arrays[0].astype(jnp.bfloat16)
    with emulation("pairs"):
        text = jax.jit(gradients).lower(x, *arrays[1:]).as_text()
    calls = re.findall(r"custom_call @(seedbed_bfloat16_[a-z]+_?[a-z]*?)_[0-9a-f]{6}", text)
    assert len(calls) == 6, calls
    image = "tensor<2x9x7x16xbf16>"
    others = [
        line for line in text.splitlines() if image in line and "stablehlo" in line and "=" in line
    ]
    assert all("custom_call" in line for line in others), others


def test_the_sum_is_rounded_once():
    zeros, bias = jnp.zeros((3, 3, 2, 2)), jnp.full(2, 1 + 2.0**-8)
    x = jnp.full((1, 3, 3, 2), 256.0, jnp.bfloat16)
    with emulation("pairs"):
        y = residual_block(x, (zeros, bias), (zeros, bias))
    # the bias alone would be rounded to 1, and the tie between 256 and 258 to 256
    np.testing.assert_array_equal(y.astype(jnp.float32), 258.0)


def test_nan_passes():
    arrays, _ = _whole_numbers((2, 9, 7, 5), 5)
    x = arrays[0].astype(jnp.bfloat16).at[0, 4, 3, 2].set(-jnp.nan)
    with emulation("pairs"):
        y = residual_block(x, *arrays[1:])
    assert jnp.isnan(y[0, 4, 3, 2]) and not jnp.isnan(y[1]).any()
    assert jnp.isnan(y).sum() > 1


def test_vmap_and_shard_map():
    arrays, dy = _whole_numbers((4, 9, 7, 5), 5)
    x, *weights = arrays
    expected = _value_and_gradients(arrays, dy, jnp.float32)[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    with emulation("pairs"):
        narrow = x.astype(jnp.bfloat16)
        mapped = jax.vmap(residual_block, (0, None, None))(narrow.reshape(2, 2, 9, 7, 5), *weights)
        sharded = jax.jit(
            jax.shard_map(
                residual_block, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
            )
        )(narrow, *weights)
    for y in (mapped.reshape(4, 9, 7, 5), sharded):
        np.testing.assert_array_equal(y.astype(jnp.float32), expected)


def test_shard_map_sums_gradients():
    arrays, dy = _whole_numbers((4, 9, 7, 5), 5)
    expected = _value_and_gradients(arrays, dy, jnp.float32)[1]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def gradients(x, first, second, dy):
        def total(*arrays):
            return (residual_block(*arrays).astype(jnp.float32) * dy).sum()

        return jax.grad(total, (1, 2))(x.astype(jnp.bfloat16), first, second)

    with emulation("pairs"):
        found = jax.jit(
            jax.shard_map(
                gradients,
                mesh=mesh,
                in_specs=(P("data"), P(), P(), P("data")),
                out_specs=(P(), P()),
            )
        )(*arrays, dy)
    _assert_equal(found, expected[1:])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x, k, b: (x[0], k, b), ValueError, r"x has shape \(9, 7, 5\)"),
        (lambda x, k, b: (x.astype(jnp.int32), k, b), TypeError, "x is int32"),
        (lambda x, k, b: (x[..., :4], k, b), ValueError, r"pass \[K, K, 4, 4\] with K odd"),
        (lambda x, k, b: (x, k[:2, :2], b), ValueError, r"kernel has shape \(2, 2, 5, 5\)"),
        (lambda x, k, b: (x, k[0, 0, 0, 0], b), ValueError, r"kernel has shape \(\)"),
        (lambda x, k, b: (x, k, b[:2]), ValueError, r"bias has shape \(2,\); pass \[5\]"),
        (lambda x, k, b: (x, k.astype(jnp.bfloat16), b), TypeError, "weights are bfloat16"),
    ],
)
def test_errors_name_the_remedy(change, error, match):
    (x, (kernel, bias), second), _ = _whole_numbers((2, 9, 7, 5), 5)
    x, kernel, bias = change(x, kernel, bias)
    with emulation("pairs"), pytest.raises(error, match=match):
        residual_block(x, (kernel, bias), second)


def test_the_deep_networks_parameters_have_the_names_of_its_convolutions():
    x = jnp.zeros((1, 36, 36, 4), jnp.uint8)
    shapes = jax.eval_shape(DeepResNet().init, jax.random.key(0), x)["params"]
    assert {name for name in shapes if name != "Mlp_0"} == {f"Convolution_{i}" for i in range(15)}
    assert shapes["Convolution_14"]["kernel"].shape == (3, 3, 32, 32)
