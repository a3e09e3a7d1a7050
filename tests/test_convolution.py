"""Our convolution against XLA's: values, gradients, transformations, vector widths, threads."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from seedbed.llvm import VectorUnit
from seedbed.nets import convolution
from seedbed.nets.convolution import CLIP, Scaling, conv2d, rescale

# image [N, H, W, C], kernel size, features, stride, padding, activation
LAYERS = {
    "nature 1": ((3, 84, 84, 4), 8, 32, 4, 0, "relu"),
    "nature 2": ((3, 20, 20, 32), 4, 64, 2, 0, "relu"),
    "nature 3": ((9, 9, 9, 64), 3, 64, 1, 0, "relu"),
    "resnet entry": ((2, 84, 84, 4), 3, 16, 1, 1, None),
    "resnet 16": ((2, 42, 42, 16), 3, 16, 1, 1, "relu"),
    "resnet 16 to 32": ((2, 42, 42, 16), 3, 32, 1, 1, None),
    "resnet 32": ((2, 11, 11, 32), 3, 32, 1, 1, "relu"),
}


def _reference(x, kernel, bias, *, stride, padding=0, activation=None):
    # Padding of its own, at some shapes with stride 2, stops jaxlib 0.10.2's compiler in a failed check.
    margin = (padding, padding)
    y = lax.conv_general_dilated(
        jnp.pad(x.astype(jnp.float32), ((0, 0), margin, margin, (0, 0))),
        kernel,
        (stride, stride),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jax.nn.relu(y + bias[None, None, None]) if activation else y + bias[None, None, None]


def _arrays(shape, size, features, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == np.uint8:
        x = rng.integers(0, 256, shape).astype(np.uint8)
    else:
        x = rng.normal(size=shape).astype(np.float32)
    size = size if isinstance(size, tuple) else (size, size)
    kernel = rng.normal(size=(*size, shape[-1], features)) / np.sqrt(shape[-1] * size[0] * size[1])
    bias = rng.normal(size=features)
    return jnp.asarray(x), jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32)


def _value_and_gradients(function, arrays, **options):
    """y and the gradients of a fixed weighted sum of it, for all float32 arrays."""
    inputs = tuple(i for i, a in enumerate(arrays) if a.dtype == jnp.float32)

    def total(*arrays):
        y = function(*arrays, **options)
        weight = jnp.sin(1.0 + jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return (weight * y).sum(), y

    gradients, y = jax.jit(jax.grad(total, argnums=inputs, has_aux=True))(*arrays)
    return (y, *gradients)


def _assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        scale = float(jnp.abs(e).max()) if e.size else 1.0
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * max(scale, 1e-30))


def _check_equal(arrays, **options):
    _assert_close(
        _value_and_gradients(conv2d, arrays, **options),
        _value_and_gradients(_reference, arrays, **options),
    )


def _scaling(x, seed=1):
    """Tables for images like `x`, some of whose numbers are clipped."""
    rng = np.random.default_rng(seed)
    low, high = (0, 255) if x.dtype == jnp.uint8 else (-1, 1)
    offset = rng.uniform(low, high, x.shape[1:])
    scale = rng.uniform(0.5, 10, x.shape[1:]) / (high - low)
    return Scaling(jnp.asarray(offset, jnp.float32), jnp.asarray(scale, jnp.float32))


def _scaled(x, kernel, bias, offset, scale, **options):
    return conv2d(x, kernel, bias, scaling=Scaling(offset, scale), **options)


def _scaled_reference(x, kernel, bias, offset, scale, **options):
    offset, scale = lax.stop_gradient((offset[None], scale[None]))
    x = jnp.clip((x.astype(jnp.float32) - offset) * scale, -5.0, 5.0)
    return _reference(x, kernel, bias, **options)


def _check_scaled_equal(arrays, **options):
    """Values and all gradients; those of the tables are zero."""
    arrays = (*arrays, *_scaling(arrays[0]))
    _assert_close(
        _value_and_gradients(_scaled, arrays, **options),
        _value_and_gradients(_scaled_reference, arrays, **options),
    )


@pytest.fixture(params=[4, 8, 16])
def width(request, monkeypatch):
    """Kernels of each vector width; LLVM splits vectors that the host lacks."""
    unit = VectorUnit(request.param, 32 if request.param == 16 else 16)
    monkeypatch.setattr(convolution, "host_vector_unit", lambda: unit)
    return request.param


@pytest.mark.quick("nature 1", "nature 3", "resnet 16")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_xla(name):
    shape, size, features, stride, padding, activation = LAYERS[name]
    arrays = _arrays(shape, size, features)
    _check_equal(arrays, stride=stride, padding=padding, activation=activation)


@pytest.mark.parametrize("padding", [0, 1])
def test_bytes_match_xla(padding):
    arrays = _arrays((5, 16, 13, 3), 4, 20, np.uint8)
    _check_equal(arrays, stride=2, padding=padding, activation="relu")


@pytest.mark.slow
def test_every_width(width):
    arrays = _arrays((5, 9, 10, 5), 3, 21)
    _check_equal(arrays, stride=2, padding=1, activation="relu")
    _check_equal(_arrays((2, 7, 7, width), 2, 2 * width, np.uint8), stride=1)
    _check_scaled_equal(arrays, stride=2, padding=1, activation="relu")
    _check_scaled_equal(_arrays((2, 7, 7, 3), 2, width, np.uint8), stride=1)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    # One image of one channel stops jaxlib 0.10.2's compiler in a failed check, and the process with it.
    shape=st.tuples(*(st.integers(1, n) for n in (9, 12, 12, 9))).filter(
        lambda shape: shape[0] > 1 or shape[3] > 1
    ),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    features=st.integers(1, 40),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    activation=st.sampled_from(["relu", None]),
)
def test_odd_shapes(shape, size, features, stride, padding, activation):
    size = tuple(min(k, n + 2 * padding) for k, n in zip(size, shape[1:3], strict=True))
    arrays = _arrays(shape, size, features)
    _check_equal(arrays, stride=stride, padding=padding, activation=activation)


@pytest.mark.quick("relu-2-*", "None-0-uint8")
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("activation", ["relu", None])
def test_scaled_images_match_xla(dtype, padding, activation):
    arrays = _arrays((9, 16, 13, 3), 4, 20, dtype)
    seen = rescale(arrays[0], _scaling(arrays[0]))
    assert 0.05 < (jnp.abs(seen) == CLIP).mean() < 0.5
    _check_scaled_equal(arrays, stride=2, padding=padding, activation=activation)


def test_two_batch_sizes_share_one_kernel():
    for n in (1, 40):
        _check_equal(_arrays((n, 8, 8, 3), 3, 8), stride=1, activation="relu")
    x, kernel, bias = _arrays((0, 8, 8, 3), 3, 8)
    assert conv2d(x, kernel, bias, stride=1).shape == (0, 6, 6, 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_propagate(bad):
    x, kernel, bias = _arrays((2, 6, 6, 3), 3, 5)
    x = x.at[1, 2, 2, 0].set(bad)
    y = conv2d(x, kernel, bias, stride=1, activation="relu")
    expected = _reference(x, kernel, bias, stride=1, activation="relu")
    np.testing.assert_array_equal(jnp.isfinite(y), jnp.isfinite(expected))
    np.testing.assert_array_equal(jnp.isnan(y), jnp.isnan(expected))
    bias = bias.at[0].set(jnp.nan)
    assert jnp.isnan(conv2d(x, kernel, bias, stride=1, activation="relu")[..., 0]).all()


@pytest.mark.quick("axes1", "axes2", "axes3")
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (None, 0, 0), (None, None, 0)])
def test_vmap(axes):
    x, kernel, bias = _arrays((3, 7, 7, 3), 3, 6)
    arrays = tuple(
        a if axis is None else jnp.stack([a, 2 * a])
        for a, axis in zip((x, kernel, bias), axes, strict=True)
    )

    def run(function):
        def one(*arrays):
            return _value_and_gradients(function, arrays, stride=2, activation="relu")

        return jax.vmap(one, axes)(*arrays)

    _assert_close(run(conv2d), run(_reference))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [None, np.uint8, np.float32], ids=str)
def test_shard_map(check_vma, dtype):
    """Of plain images, or of scaled ones of `dtype`."""
    if jax.device_count() < 2:
        pytest.skip("needs two virtual devices")
    x, *weights = _arrays((8, 8, 8, 3), 3, 8, dtype or np.float32)
    constants = () if dtype is None else _scaling(x)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def run(function):
        def local(x, weights, constants):
            def loss(weights):
                y = function(x, *weights, *constants, stride=1, activation="relu")
                return (y**2).sum(), y

            gradient, y = jax.grad(loss, has_aux=True)(weights)
            return gradient if check_vma else lax.psum(gradient, "data"), y

        specs = (P("data"), P(), P()), (P(), P("data"))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=check_vma
        )
        return jax.jit(mapped)(x, weights, constants)

    pair = (conv2d, _reference) if dtype is None else (_scaled, _scaled_reference)
    _assert_close(*map(run, pair))


def test_concurrent_calls():
    arrays = _arrays((64, 12, 12, 4), 3, 16)
    run = jax.jit(lambda *a: _value_and_gradients(conv2d, a, stride=1, activation="relu"))
    expected = run(*arrays)

    def work(_):
        return [run(*arrays) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for result in results:  # bit for bit, whichever thread ran which share
                jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_other_platforms_use_xla():
    x, kernel, bias = _arrays((2, 8, 8, 3), 3, 8, np.uint8)

    def loss(kernel):
        return conv2d(x, kernel, bias, stride=1, activation="relu").sum()

    for platform, ours in (("cuda", False), ("cpu", True)):
        text = jax.jit(jax.grad(loss)).trace(kernel).lower(lowering_platforms=(platform,)).as_text()
        assert ("seedbed_convolution" in text) is ours
        assert ("stablehlo.convolution" in text) is not ours


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": jnp.zeros((4, 8, 8))}, ValueError, r"x has shape \(4, 8, 8\)"),
        ({"x": jnp.zeros((4, 8, 8, 3), jnp.int32)}, TypeError, "x is int32"),
        ({"x": jnp.zeros((4, 8, 8, 2))}, ValueError, "kernel takes 3 channels but x has 2"),
        ({"x": jnp.zeros((4, 2, 8, 3))}, ValueError, "does not fit into image"),
        ({"kernel": jnp.zeros((3, 3, 3, 8), jnp.bfloat16)}, TypeError, "kernel is bfloat16"),
        ({"bias": jnp.zeros(7)}, ValueError, "bias has 7 entries for 8 features"),
        ({"stride": 0}, ValueError, "stride 0"),
        ({"activation": "gelu"}, ValueError, "activation 'gelu' is unknown"),
        (
            {"scaling": Scaling(jnp.zeros((8, 8, 3)), jnp.ones((8, 8)))},
            ValueError,
            r"scale has shape \(8, 8\); pass that of one observation, \(8, 8, 3\)",
        ),
        (
            {"scaling": Scaling(jnp.zeros((8, 8, 3), jnp.uint8), jnp.ones((8, 8, 3)))},
            TypeError,
            "offset is uint8",
        ),
    ],
)
def test_errors_name_the_remedy(change, error, match):
    x, kernel, bias = _arrays((4, 8, 8, 3), 3, 8)
    arguments = {"x": x, "kernel": kernel, "bias": bias, "stride": 1} | change
    with pytest.raises(error, match=match):
        conv2d(**arguments)
