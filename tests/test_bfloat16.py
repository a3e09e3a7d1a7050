"""Convolution and products in bfloat16: emulated on any CPU, and real on one with the instructions."""

import functools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bfloat16_emulation import emulation, real_kernels
from guarded_memory import run_guarded
from seedbed import llvm
from seedbed.llvm import Target, VectorUnit, host_has_pairs, host_has_tiles
from seedbed.nets import convolution, dense, pooling, products
from seedbed.nets.convolution import Scaling, conv2d, rescale
from seedbed.nets.native.bfloat16 import correlation, instructions, weights
from seedbed.nets.native.bfloat16 import dense as dense_kernels
from seedbed.nets.native.bfloat16.instructions import UNITS
from seedbed.nets.native.convolution import Convolution

# image [N, H, W, C], kernel size, features, stride, padding, activation, dtype of the image
LAYERS = {
    "nature 1": ((2, 84, 84, 4), 8, 32, 4, 0, "relu", "uint8"),
    "nature 2": ((3, 20, 20, 32), 4, 64, 2, 0, "relu", "bfloat16"),
    "nature 3": ((5, 9, 9, 64), 3, 64, 1, 0, "relu", "bfloat16"),
    "resnet entry": ((1, 84, 84, 4), 3, 16, 1, 1, None, "uint8"),
    "resnet 16": ((1, 42, 42, 16), 3, 16, 1, 1, "relu", "bfloat16"),
    "resnet 16 to 32": ((1, 21, 21, 16), 3, 32, 1, 1, None, "float32"),
    "resnet 32": ((2, 11, 11, 32), 3, 32, 1, 1, "relu", "bfloat16"),
    "one channel": ((5, 9, 10, 1), 3, 7, 3, 2, None, "bfloat16"),
    "odd channels": ((5, 9, 10, 5), 3, 21, 2, 1, "relu", "float32"),
    "three panels": ((5, 11, 13, 3), 4, 33, 3, 1, "relu", "bfloat16"),
    "wide padding": ((2, 6, 6, 22), 3, 5, 1, 3, "relu", "float32"),
    "overlapping chunks": ((2, 6, 6, 20), 5, 5, 1, 3, "relu", "float32"),
    "one pixel": ((5, 5, 6, 3), 1, 5, 2, 1, None, "bfloat16"),
    "one position": ((1, 4, 4, 3), 4, 33, 1, 0, "relu", "bfloat16"),
}
QUICK = ("nature 3", "odd channels")
# positions that a kernel in pairs loads a pixel for, as far as registers go
TURNS = {"nature 2": 2, "resnet 16": 3}
# as LLVM names a host whose model number is masked
AMX = Target("x86_64-unknown-linux-gnu", "rocketlake", "+" + ",+".join(llvm._FOR_TILES))


@pytest.fixture(params=UNITS)
def emulated(request):
    with emulation(request.param):
        yield


def _arrays(shape, size, features, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, shape) if dtype == "uint8" else rng.normal(size=shape)
    size = size if isinstance(size, tuple) else (size, size)
    kernel = rng.normal(size=(*size, shape[-1], features)) / np.sqrt(shape[-1] * size[0] * size[1])
    return jnp.asarray(x, dtype), *(
        jnp.asarray(a, jnp.float32) for a in (kernel, rng.normal(size=features))
    )


def _layer(name, batch=None):
    shape, size, features, stride, padding, activation, dtype = LAYERS[name]
    arrays = _arrays((batch or shape[0], *shape[1:]), size, features, dtype)
    return arrays, {"stride": stride, "padding": padding, "activation": activation}


def _exact(a):
    """The numbers rounded to bfloat16, as float64."""
    return np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64)


def _reference(x, kernel, dy, stride, padding):
    """The products (without bias) and the gradients of kernel and x, in float64."""
    margin = (padding, padding)
    padded = np.pad(x, ((0, 0), margin, margin, (0, 0)))
    height, width = kernel.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (1, 2))
    windows = windows[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)
    y = np.tensordot(windows, kernel, 3)
    dkernel = np.tensordot(windows, dy, ([0, 1, 2], [0, 1, 2]))
    dpadded = np.zeros(padded.shape)
    rows, columns = (stride * n for n in dy.shape[1:3])
    for i in range(height):
        for j in range(width):
            dpadded[:, i : i + rows : stride, j : j + columns : stride] += dy @ kernel[i, j].T
    inside = slice(padding, -padding or None)
    return y, dkernel, dpadded[:, inside, inside]


def _value_and_gradients(arrays, constants=(), **options):
    """y, a gradient dy of it, and those of all arrays that have one."""
    inputs = arrays[1:] if arrays[0].dtype == jnp.uint8 else arrays

    @jax.jit
    def run(constants, *arrays):
        def one(*inputs):
            scaling = Scaling(*constants) if constants else None
            x = arrays[: 3 - len(inputs)]
            return conv2d(*x, *inputs, scaling=scaling, dtype=jnp.bfloat16, **options)

        y, pull = jax.vjp(one, *arrays[3 - len(inputs) :])
        dy = jnp.sin(1.0 + jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, dy.astype(jnp.bfloat16), pull(dy.astype(jnp.bfloat16))

    return run(tuple(constants), *arrays)


def _assert_close(actual, expected, terms):
    """Sums of `terms` products are exact but for the rounding of float32 and of their type."""
    assert actual.shape == expected.shape
    scale = 2.0**-23 * np.sqrt(terms) * max(np.abs(expected).max(initial=0), 1e-30)
    relative = 2.0**-8 if actual.dtype == jnp.bfloat16 else 2.0**-23
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=relative, atol=2 * scale
    )


def _check(arrays, constants=(), **options):
    x, kernel, bias = arrays
    y, dy, gradients = _value_and_gradients(arrays, constants, **options)
    assert y.dtype == jnp.bfloat16
    dy = _exact(dy)
    if options["activation"]:
        dy = np.where(np.asarray(y) > 0, dy, 0)
    seen = rescale(x, Scaling(*constants)) if constants else x
    product, dkernel, dx = _reference(
        _exact(seen), _exact(kernel), dy, options["stride"], options["padding"]
    )
    expected = product + np.asarray(bias, np.float64)
    positions = dy.shape[0] * dy.shape[1] * dy.shape[2]
    taps = kernel[..., 0].size
    _assert_close(y, np.maximum(expected, 0) if options["activation"] else expected, taps)
    *images, got_kernel, got_bias = gradients
    assert got_kernel.dtype == got_bias.dtype == jnp.float32
    _assert_close(got_kernel, dkernel, positions)
    _assert_close(got_bias, dy.sum((0, 1, 2)), positions)
    if images:
        assert images[0].dtype == x.dtype
        if constants:
            offset, scale = (np.asarray(a, np.float64) for a in constants)
            scaled = (np.asarray(x, np.float64) - offset) * scale
            dx = np.where(np.abs(scaled) < convolution.CLIP, dx * scale, 0)
        _assert_close(images[0], dx, kernel[:, :, 0].size)


def _scaling(x, seed=1):
    """Tables for images like `x`, some of whose numbers are clipped."""
    rng = np.random.default_rng(seed)
    low, high = (0, 255) if x.dtype == jnp.uint8 else (-1, 1)
    offset, scale = rng.uniform(low, high, x.shape[1:]), rng.uniform(0.5, 10, x.shape[1:])
    return jnp.asarray(offset, jnp.float32), jnp.asarray(scale / (high - low), jnp.float32)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS]
)
def test_layers_are_exact(emulated, name):
    arrays, options = _layer(name)
    _check(arrays, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_scaled_images(emulated, dtype):
    arrays = _arrays((5, 18, 15, 3), 4, 20, dtype)
    seen = rescale(arrays[0], Scaling(*_scaling(arrays[0])))
    assert 0.05 < (jnp.abs(seen) == convolution.CLIP).mean() < 0.5
    _check(arrays, _scaling(arrays[0]), stride=2, padding=1, activation="relu")


needs = {
    "tiles": pytest.mark.skipif(not host_has_tiles(), reason="no AMX tiles on this CPU"),
    "pairs": pytest.mark.skipif(not host_has_pairs(), reason="no AVX512-BF16 on this CPU"),
}
real = pytest.mark.parametrize("unit", [pytest.param(n, marks=needs[n]) for n in UNITS])


@pytest.mark.quick(
    "nature 1-*", "resnet 16-*", "odd channels-*", "overlapping chunks-*", "one position-*"
)
@real
@pytest.mark.parametrize("name", LAYERS)
def test_real_instructions_are_exact(monkeypatch, unit, name):
    monkeypatch.setattr(convolution, "host_instructions", lambda: unit)
    arrays, options = _layer(name)
    with real_kernels():
        _check(arrays, **options)


def test_an_image_is_the_same_in_any_batch(emulated):
    (x, *weights), options = _layer("odd channels", 9)
    run = functools.partial(conv2d, dtype=jnp.bfloat16, **options)
    together = run(x, *weights)
    np.testing.assert_array_equal(run(x[4:5], *weights), together[4:5])
    assert run(x[:0], *weights).shape == (0, *together.shape[1:])


def test_threads_do_not_change_bits(emulated):
    arrays, options = _layer("odd channels", 64)
    run = jax.jit(lambda *a: _value_and_gradients(a, **options))
    expected = run(*arrays)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: run(*arrays), range(20)):
            jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize("name", ["nature 3", "overlapping chunks"])
def test_nonfinite_numbers_stay_in_their_windows(emulated, name):
    (x, kernel, bias), options = _layer(name)
    for bad in (np.nan, np.inf):
        x = x.at[1, 4, -1, 3].set(bad)
        y = conv2d(x, kernel, bias, dtype=jnp.bfloat16, **options)
        expected = conv2d(x.astype(jnp.float32), kernel, bias, **options)
        np.testing.assert_array_equal(jnp.isfinite(y), jnp.isfinite(expected))
        # where chunks overlap, tiles multiply inf by 0 once more
        if name == "nature 3":
            np.testing.assert_array_equal(jnp.isnan(y), jnp.isnan(expected))


@pytest.mark.parametrize(
    "axes", [(0, None, None), pytest.param((None, 0, None), marks=pytest.mark.slow)]
)
def test_vmap(emulated, axes):
    arrays, options = _layer("odd channels")
    arrays = tuple(
        a if axis is None else jnp.stack([a, 2 * a]) for a, axis in zip(arrays, axes, strict=True)
    )

    def one(*arrays):
        return _value_and_gradients(arrays, **options)

    mapped = jax.vmap(one, axes)(*arrays)
    for i in range(2):
        parts = (a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True))
        _assert_near(jax.tree.map(lambda m, i=i: m[i], mapped), one(*parts))


@pytest.mark.slow
def test_shard_map(emulated):
    if jax.device_count() < 2:
        pytest.skip("needs two virtual devices")
    (x, kernel, bias), options = _layer("odd channels", 6)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss(kernel, x):
        y = conv2d(x, kernel, bias, dtype=jnp.bfloat16, **options)
        return (y.astype(jnp.float32) ** 2).sum()

    mapped = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    _assert_near(jax.jit(mapped)(kernel, x), jax.grad(loss)(kernel, x))


def _assert_near(actual, expected, tolerance=1e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = (np.asarray(v, np.float64) for v in (a, e))
        assert np.linalg.norm(a - e) <= tolerance * np.linalg.norm(e)


def _lowered(platform, options, arrays):
    x, *weights = arrays

    def loss(weights):
        y = conv2d(x, *weights, dtype=jnp.bfloat16, **options)
        return y.astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).trace(weights).lower(lowering_platforms=(platform,)).as_text()


def test_who_runs_what(emulated, monkeypatch):
    arrays, options = _layer("odd channels")
    text = _lowered("cpu", options, arrays)
    assert "seedbed_bfloat16_forward" in text and "seedbed_bfloat16_weight" in text
    # nobody wants the gradient of the images
    assert "seedbed_bfloat16_input" not in text and "stablehlo.convolution" not in text
    for unit, platform in (("tiles", "cuda"), (None, "cpu"), (None, "cuda")):
        monkeypatch.setattr(convolution, "host_instructions", lambda unit=unit: unit)
        text = _lowered(platform, options, arrays)
        assert "seedbed" not in text.replace("seedbed.", "")
        assert "stablehlo.convolution" in text


def _module_texts(name, unit):
    shape, size, features, stride, padding, activation, dtype = LAYERS[name]
    layer = Convolution(
        *shape[1:],
        size,
        size,
        features,
        stride,
        padding,
        activation is not None,
        {"uint8": "i8", "float32": "float", "bfloat16": "bfloat"}[dtype],
        VectorUnit(16, 32),
    )
    unit = UNITS[unit]
    yield layer, "forward", correlation.forward_ir(layer, unit)
    yield layer, "weight_gradient", weights.weight_gradient_ir(layer, unit)
    yield layer, "input_gradient", correlation.input_gradient_ir(layer, unit)


def _loops(assembly, instruction):
    """The instructions of the innermost loops with an instruction."""
    for block in re.split(r"^(?=\.LBB)", assembly, flags=re.MULTILINE):
        if "Inner Loop Header" in block and instruction in block:
            body = re.split(r"^\tj\w+.*$", block, maxsplit=1, flags=re.MULTILINE)[0]
            yield re.findall(r"^\t([a-z]\w*)(.*)$", body, re.MULTILINE)


def _blocks(text):
    return [
        tuple(map(int, sizes)) for sizes in re.findall(r"@block_(\d+)_(\d+)\(ptr noalias", text)
    ]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "name",
    [n if n == "three panels" else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS],
)
def test_no_memory_beyond_the_buffers_is_touched(name, unit):
    for layer, kind, text in _module_texts(name, unit):
        images, outputs = 2, 2 if layer.relu else 1
        x = images * layer.image_size * {"i8": 1, "float": 4, "bfloat": 2}[layer.source]
        y = images * layer.output_size * 2
        if kind == "forward":
            sums = correlation.forward(layer, UNITS[unit])
            packed = 2 * math.prod(sums.packed_shape)
            sizes = [x, packed, 64 * sums.panels, y, 4 * sums.scratch_size]
        elif kind == "input_gradient":
            sums = correlation.input_gradient(layer, UNITS[unit])
            dx = images * layer.image_size * (2 if sums.target.kind == "bfloat" else 4)
            sizes = [*[y] * outputs, 2 * math.prod(sums.packed_shape), dx, 4 * sums.scratch_size]
        else:
            sums = weights.weight_gradient(layer, UNITS[unit])
            results = [math.prod(sums.sum_shape), layer.features, sums.places[-1]]
            sizes = [x, *[y] * outputs, *(4 * n for n in results)]
        assert run_guarded(text, sizes, images), kind


# rows, inputs, outputs
PRODUCTS = ((1, 1, 1), (3, 5, 7), (33, 40, 17), (31, 33, 100), (64, 64, 64), (16, 3136, 32))


@pytest.mark.quick("3-5-7-*", "31-33-100-*")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("source", ["float", "bfloat"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_no_memory_beyond_matrices_is_touched(unit, source, rows, inputs, outputs):
    size = {"float": 4, "bfloat": 2}[source]
    matrix = dense_kernels.packed(inputs, outputs)
    packed = 2 * math.prod(matrix.shape)
    for emit in (dense_kernels.pack_rows_ir, dense_kernels.pack_columns_ir):
        assert run_guarded(emit(matrix, source), [size * inputs * outputs, packed], rows)
    whole = dense_kernels.Transpose(rows, inputs, source)
    text = dense_kernels.transpose_ir(whole)
    assert run_guarded(text, [size * rows * inputs, 2 * rows * inputs, 4], rows)
    layer = dense_kernels.RowProduct(UNITS[unit], rows, matrix, source)
    results = 4 * math.prod(layer.result_shape), 4 * layer.scratch_size
    assert run_guarded(
        dense_kernels.row_product_ir(layer), [size * rows * inputs, packed, *results], rows
    )


def _check_products(unit, rows, inputs, outputs, dtype):
    rng = np.random.default_rng(rows + inputs)
    x, kernel, dy = (
        jnp.asarray(rng.normal(size=shape), kind)
        for shape, kind in (
            ((rows, inputs), dtype),
            ((inputs, outputs), jnp.float32),
            ((rows, outputs), dtype),
        )
    )
    for run, (a, b), (left, right) in (
        (dense.product, (x, kernel), (_exact(x), _exact(kernel))),
        (dense.product_with_transpose, (dy, kernel), (_exact(dy), _exact(kernel).T)),
        (dense.sum_of_rows, (x, dy), (_exact(x).T, _exact(dy))),
    ):
        y = jax.jit(functools.partial(run, UNITS[unit]))(a, b)
        assert y.dtype == jnp.float32
        _assert_close(y, left @ right, left.shape[1])


@pytest.mark.quick("shape0-*", "shape2-*", "shape5-*")
@real
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [*PRODUCTS, (640, 3136, 512), (8192, 27, 128), (700, 3, 3)])
def test_real_products_are_exact(unit, shape, dtype):
    _check_products(unit, *shape, dtype)


def test_layers_use_the_kernels_and_match_xla(emulated, monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 40)), jnp.float32)
    kernels = jnp.asarray(rng.normal(size=(2, 40, 21)), jnp.float32)

    def loss(kernels, x):
        # two networks at once, as twin critics are
        y = jax.vmap(lambda kernel: products.multiply(x, kernel, jnp.bfloat16))(kernels)
        return jnp.sin(y).sum(), y

    def run():
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(kernels, x)

    text = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(kernels, x).as_text()
    assert text.count("seedbed_dense_product") >= 6 and "dot_general" not in text
    (narrow, y) = run()
    for module in (convolution, products, pooling):
        monkeypatch.setattr(module, "host_instructions", lambda: None)
    jax.clear_caches()
    (expected, expected_y) = run()
    _assert_near((narrow, y), (expected, expected_y))
    assert y.shape == (2, 2, 5, 21)
    assert products.multiply(x[:0], kernels[0], jnp.bfloat16).shape == (0, 5, 21)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dtype": jnp.float16}, TypeError, "dtype is float16; pass float32 or bfloat16"),
        ({"x": jnp.zeros((1, 9, 9, 3), jnp.float16)}, TypeError, "float32 or uint8 or bfloat16"),
        ({"kernel": jnp.zeros((3, 3, 3, 8), jnp.bfloat16)}, TypeError, "kernel is bfloat16"),
        (
            {"x": jnp.zeros((1, 9, 9, 3), jnp.bfloat16), "dtype": jnp.float32},
            TypeError,
            "x is bfloat16; convert it to float32 or uint8",
        ),
    ],
)
def test_errors_name_the_remedy(changes, error, match):
    x, kernel, bias = _arrays((1, 9, 9, 3), 3, 8, "float32")
    arguments = {"x": x, "kernel": kernel, "bias": bias, "stride": 1, "dtype": jnp.bfloat16}
    with pytest.raises(error, match=match):
        conv2d(**(arguments | changes))


@pytest.mark.parametrize("refused", ["by the CPU", "by Linux", "elsewhere", "nowhere"])
def test_who_has_tiles(monkeypatch, refused):
    features = dict.fromkeys(llvm._FOR_TILES, True)
    if refused == "by the CPU":
        features["amx-bf16"] = False
    asked = []

    def syscall(*request):
        asked.append(request)
        return -1 if refused == "by Linux" else 0

    monkeypatch.setattr(llvm.llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(llvm.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(llvm.sys, "platform", "darwin" if refused == "elsewhere" else "linux")
    warning = pytest.warns(RuntimeWarning, match="Linux refuses this CPU's tiles")
    with warning if refused == "by Linux" else nullcontext():
        assert host_has_tiles.__wrapped__() is (refused == "nowhere")
    assert asked == [(158, 0x1023, 18)] * (refused in ("by Linux", "nowhere"))


def test_pairs_are_timed_once_and_used_where_they_pay(monkeypatch, tmp_path):
    monkeypatch.setattr(instructions, "host_has_tiles", lambda: False)
    monkeypatch.setattr(instructions, "host_has_pairs", lambda: True)
    for gain, answer in ((1.1, None), (1.9, "pairs")):
        monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / str(gain)))
        monkeypatch.setattr(instructions, "measure_gain", lambda gain=gain: gain)
        assert instructions.host_instructions.__wrapped__() == answer
        monkeypatch.setattr(instructions, "measure_gain", lambda: pytest.fail("timed again"))
        assert instructions.host_instructions.__wrapped__() == answer
    monkeypatch.setattr(instructions, "host_has_pairs", lambda: False)
    assert instructions.host_instructions.__wrapped__() is None


def test_products_have_derivatives_of_any_order(emulated):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 9)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)

    def penalty(multiply, kernel):
        gradient = jax.grad(lambda k: jnp.sin(multiply(x, k)).sum())(kernel)
        return (gradient**2).sum()

    narrow = jax.grad(
        functools.partial(penalty, lambda x, k: products.multiply(x, k, jnp.bfloat16))
    )
    exact = jax.grad(functools.partial(penalty, jnp.matmul))
    _assert_near(narrow(kernel), exact(kernel), 0.02)


@pytest.mark.slow
def test_products_under_vmap(emulated):
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.normal(size=(6, 3, 9)), jnp.float32)
    kernels = jnp.asarray(rng.normal(size=(6, 9, 5)), jnp.float32)

    def gradients(x, kernel):
        def loss(x, kernel):
            return jnp.sin(products.multiply(x, kernel, jnp.bfloat16)).sum()

        return jax.grad(loss, (0, 1))(x, kernel)

    for axes in ((0, 0), (0, None), (None, 0)):
        arrays = [a if axis == 0 else a[0] for a, axis in zip((xs, kernels), axes, strict=True)]
        mapped = jax.vmap(gradients, axes)(*arrays)
        for i in range(6):
            one = gradients(xs[i * (axes[0] == 0)], kernels[i * (axes[1] == 0)])
            jax.tree.map(lambda m, o, i=i: np.testing.assert_array_equal(m[i], o), mapped, one)
    assert jax.vmap(gradients)(xs[:0], kernels[:0])[1].shape == (0, 9, 5)
    # Elsewhere they are products of batches, and not a loop.
    text = jax.jit(jax.vmap(gradients)).trace(xs, kernels).lower(lowering_platforms=("cuda",))
    assert "while" not in text.as_text() and "seedbed_dense" not in text.as_text()


def test_products_of_other_dtypes_and_of_nothing(emulated):
    x, kernel = jnp.ones((4, 3)), jnp.ones((3, 2))
    for dtype in (jnp.float16, jnp.int32):
        y = products.multiply(x.astype(dtype), kernel, jnp.bfloat16)
        np.testing.assert_array_equal(y, np.full((4, 2), 3, np.float32))
    for lead in ((0,), (2, 0), (4,)):
        y = products.multiply(jnp.ones((*lead, 0)), jnp.ones((0, 2)), jnp.bfloat16)
        np.testing.assert_array_equal(y, np.zeros((*lead, 2)))
    none = jnp.zeros((0, 3, 3, 3, 8))
    y = jax.vmap(lambda k: conv2d(jnp.ones((1, 5, 5, 3)), k, jnp.zeros(8), stride=1))(none)
    assert y.shape == (0, 1, 3, 3, 8)


def test_a_row_has_the_same_bits_in_any_batch(emulated):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(70, 65)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(65, 40)), jnp.float32)
    together = products.multiply(x, kernel, jnp.bfloat16)
    for count in (1, 5, 15, 33):
        some = products.multiply(x[7 : 7 + count], kernel, jnp.bfloat16)
        np.testing.assert_array_equal(some, together[7 : 7 + count])
