"""simd.vectorize against jax.vmap: under jit, vmap, shard_map and grad, and what it refuses."""

from __future__ import annotations

import dataclasses
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mujoco_states
from seedbed import physics
from seedbed.llvm import host_vector_unit
from seedbed.simd import derivative, inspect, primitive, vectorize
from seedbed.simd.cpu import compiler
from seedbed.simd.frontend import trace
from seedbed.simd.store import build
from seedbed.types import SeedbedError

pytestmark = pytest.mark.usefixtures("no_fallback")

WIDTHS = [w for w in (4, 8, 16) if w <= host_vector_unit().width]
SIZES = (1, 2, 15, 17, 4096)


def step(state, action, *, gain):
    """Some of everything: several types, a loop, a branch."""

    def body(carry):
        i, x = carry
        return i + 1, x * 0.9 + action * gain

    _, x = jax.lax.while_loop(lambda c: c[0] < state["steps"], body, (0, state["x"]))
    on = state["on"] ^ (x > 0.5)
    bits = state["bits"] * jnp.uint32(2654435761) >> 3
    total = jax.lax.cond(on[0], lambda: x.sum(), lambda: x[0])
    return {
        "x": jnp.where(on, x, -x),
        "on": on,
        "bits": bits,
        "steps": jnp.minimum(state["steps"] + 1, 7),
    }, total


def batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    state = {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "on": rng.integers(0, 2, (rows, 3)).astype(bool),
        "bits": rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        "steps": rng.integers(0, 7, rows).astype(np.int32),
    }
    action = rng.normal(size=(rows, 3)).astype(np.float32)
    return state, action, rng.normal(size=rows).astype(np.float32)


def assert_close(got, want, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)

    def check(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, got, want)


@pytest.mark.quick("8")
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_vmap_at_every_width_and_size(width, monkeypatch):
    monkeypatch.setattr(build, "lanes", lambda: width)
    fast = vectorize(step)
    for rows in SIZES:
        state, action, gain = batch(rows)
        want = jax.vmap(lambda s, a, g: step(s, a, gain=g))(state, action, gain)
        assert_close(fast(state, action, gain=gain), want)


@pytest.mark.skipif(len(WIDTHS) < 2, reason="one width only")
def test_widths_agree_bit_for_bit(monkeypatch):
    state, action, gain = batch(77)
    results = []
    for width in WIDTHS:
        monkeypatch.setattr(build, "lanes", lambda width=width: width)
        results.append(vectorize(step)(state, action, gain=gain))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_is_a_kernel_inside_jit():
    text = jax.jit(vectorize(lambda x: x + 1)).lower(np.zeros(3, np.float32)).as_text()
    assert "seedbed_vectorize" in text


def test_all_is_well_in_many_threads():
    state, action, gain = batch(256)
    want = vectorize(step)(state, action, gain=gain)
    results = [None] * 6

    def work(i):
        results[i] = vectorize(step)(state, action, gain=gain)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, want)


def test_compiles_once(monkeypatch):
    made = []
    compiled = build.compile_program

    def count(*args):
        made.append(args)
        return compiled(*args)

    monkeypatch.setattr(build, "compile_program", count)
    for _ in range(3):
        vectorize(lambda x: x * 3.25 + 0.125)(np.ones(4, np.float32))
    assert len(made) == 1


# vmap


@pytest.mark.quick("axes0", "axes1", "axes2", "axes4")
@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (0, None), (None, 1)])
def test_vmap_folds_into_the_batch(axes):
    def f(x, y):
        return x * 2 + y.sum(), y[0] > x

    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 5)).astype(np.float32)
    y = rng.normal(size=(5, 5, 2)).astype(np.float32)
    x = x if axes[0] is not None else x[0]
    y = y if axes[1] is not None else y[0]
    got = jax.vmap(vectorize(f), in_axes=axes)(x, y)
    assert_close(got, jax.vmap(jax.vmap(f), in_axes=axes)(x, y))


def test_vmap_makes_shared_operands_rows():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    scale = np.float32([1, 10, 100])

    def inner(x, scale):
        return vectorize(lambda v: v * scale)(x)

    got = jax.vmap(inner)(x, scale)
    assert_close(got, x * scale[:, None])
    assert_close(jax.vmap(inner, in_axes=(None, 0))(x[0], scale), x[0] * scale[:, None])
    assert_close(jax.vmap(inner, in_axes=(0, None))(x, scale[1]), x * scale[1])
    twice = jax.vmap(jax.vmap(inner, in_axes=(None, 0)), in_axes=(0, None))
    assert_close(twice(x, scale), x[:, None] * scale[None, :, None])


# Closed-over values


def test_traced_values_are_shared():
    @jax.jit
    def run(x, offset, which):
        return vectorize(lambda v: jnp.where(which, v + offset.sum(), v))(x)

    x = np.arange(5, dtype=np.float32)
    assert_close(run(x, np.float32([1, 2]), np.bool_(True)), x + 3)
    assert_close(run(x, np.float32([1, 2]), np.bool_(False)), x)


def test_large_arrays_are_shared_and_small_ones_compiled_in():
    large = jnp.arange(2000, dtype=jnp.float32)
    small = jnp.arange(3, dtype=jnp.float32)

    def f(x):
        return x * small + large[7]

    text = str(jax.make_jaxpr(vectorize(f))(np.ones((4, 3), np.float32)))
    assert "shared=(False, True)" in text
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    assert_close(vectorize(f)(x), jax.vmap(f)(x))


def test_weak_types_make_no_difference():
    def f(x):
        return x * 2

    strong = vectorize(f)(jnp.ones(3, jnp.float32))
    weak = vectorize(f)(jnp.broadcast_to(jnp.asarray(1.0), 3))
    assert strong.dtype == weak.dtype == jnp.float32
    assert not weak.weak_type


def test_keys_cross_as_their_data():
    def f(key, x):
        key, used = jax.random.split(key)
        return key, x + jax.random.uniform(used)

    keys = jax.random.split(jax.random.key(3), 9)
    x = np.zeros(9, np.float32)
    got, want = vectorize(f)(keys, x), jax.vmap(f)(keys, x)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(jax.random.key_data(got[0]), jax.random.key_data(want[0]))
    assert got[0].dtype == want[0].dtype


# Derivatives


def smooth(x, w, n, on):
    return jnp.where(on, jnp.tanh(x @ w) * n, 0.0).sum(), n + 1


@pytest.mark.slow
def test_gradient_is_that_of_vmap():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 3)).astype(np.float32)
    w = rng.normal(size=(6, 3, 2)).astype(np.float32)
    n, on = np.arange(6, dtype=np.int32), rng.integers(0, 2, 6).astype(bool)

    def loss(run):
        return lambda x, w: (run(smooth)(x, w, n, on)[0] ** 2).sum()

    got = jax.grad(loss(vectorize), argnums=(0, 1))(x, w)
    # 1 - tanh(x)^2 has few digits where tanh is near 1.
    assert_close(got, jax.grad(loss(jax.vmap), argnums=(0, 1))(x, w), 1e-4)
    jitted = jax.jit(jax.value_and_grad(loss(vectorize)))(x, w)
    assert_close(jitted, jax.value_and_grad(loss(jax.vmap))(x, w), 1e-4)
    each = jax.vmap(jax.grad(loss(vectorize)), in_axes=(None, 0))
    assert each(x, w[None]).shape == (1, 6, 3)


def test_gradient_of_whole_numbers_is_float0():
    n, on = np.ones(2, np.int32), np.ones(2, bool)
    x, w = np.ones((2, 3), np.float32), np.ones((2, 3, 2), np.float32)
    grads = jax.grad(lambda *a: vectorize(smooth)(*a)[0].sum(), argnums=(0, 2, 3), allow_int=True)(
        x, w, n, on
    )
    assert [g.dtype for g in grads] == [np.float32, jax.dtypes.float0, jax.dtypes.float0]


def test_gradient_through_scan_and_again():
    def roll(run, x):
        def body(x, _):
            return run(lambda v: jnp.sin(v) * 1.1)(x), None

        return jax.lax.scan(body, x, None, length=5)[0].sum()

    x = np.linspace(0, 1, 7).astype(np.float32)
    for derive in (jax.grad, lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())):
        got = jax.jit(derive(lambda x: roll(vectorize, x)))(x)
        assert_close(got, derive(lambda x: roll(jax.vmap, x))(x), 1e-5)


DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[:, None]),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (jnp.cos(x),)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1].sum()),
    "grad of checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
}


@pytest.mark.quick("jit-*")
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_every_kind_of_derivative_is_that_of_vmap(name, wrap):
    def wave(x):
        return jnp.sin(x) * x + jnp.where(x > 0, x * x * x, jnp.exp(x))

    derive, x = DERIVATIVES[name], np.linspace(-1, 1, 6).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # all have kernels
        got = wrap(derive(vectorize(wave)))(x)
    assert_close(got, derive(jax.vmap(wave))(x), 1e-5)


def test_a_named_value_is_kept_and_not_computed_again():
    def root(a):
        """Solves y = cos(a y) by iteration; the tangent takes the solution over."""

        @jax.custom_jvp
        def solved(a):
            body = lambda y: y + 0.7 * (jnp.cos(a * y) - y)  # noqa: E731
            return jax.lax.while_loop(
                lambda s: s[1] < 60, lambda s: (body(s[0]), s[1] + 1), (a, 0)
            )[0]

        @solved.defjvp
        def tangent(primals, tangents):
            (a,), (da,) = primals, tangents
            y = checkpoint_name(solved(a), derivative.KEPT)
            return y, -jnp.sin(a * y) * y * da / (1 + jnp.sin(a * y) * a)

        return 3 * solved(a)

    x = np.linspace(0.2, 1, 5).astype(np.float32)
    run = lambda f: jax.grad(lambda x: f(x).sum())  # noqa: E731
    assert_close(run(vectorize(root))(x), run(jax.vmap(root))(x), 1e-5)
    text = str(jax.make_jaxpr(run(vectorize(root)))(x))
    assert text.count(" while[") == 1
    both = str(jax.make_jaxpr(jax.grad(lambda x: run(vectorize(root))(x).sum()))(x))
    assert both.count(" while[") == 1


def test_shared_operands_are_summed_once():
    def f(x, a, b):
        return vectorize(lambda v: v * a + jnp.sin(v) * b.sum())(x).sum()

    given = np.arange(5, dtype=np.float32), np.float32(2), np.ones(3, np.float32)
    got = jax.grad(f, argnums=(0, 1, 2))(*map(jnp.asarray, given))
    x = given[0]
    assert_close(got, (2 + 3 * np.cos(x), x.sum(), np.full(3, np.sin(x).sum())), 1e-5)
    text = str(jax.make_jaxpr(jax.grad(f, argnums=(1, 2)))(*map(jnp.asarray, given)))
    # Of b in the example, of the results, and of all cotangents.
    assert text.count("reduce_sum[axes=(0,)") == 3


# Several devices


MESHES = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kernel", [True, False])
def test_shard_map(check_vma, kind, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(compiler, "unsupported", lambda: "this is a test")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))

    def one(v, scale):
        def body(total, t):  # its carry varies over no mesh axis until v is added
            return total + t * v * scale, None

        return jax.lax.scan(body, jnp.zeros(()), np.float32([1, 2]))[0] + v * 2

    def f(x, scale):
        return vectorize(lambda v: one(v, scale))(x)

    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error" if kernel else "ignore", RuntimeWarning)
        x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("d")))
        run = jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma
            )
        )
        assert_close(run(x, np.float32(3)), np.asarray(x) * 11)
        gradient = jax.grad(lambda s: run(x, s).sum())(jnp.float32(3))
        assert_close(gradient, np.float32(3 * np.asarray(x).sum()))


def test_random_numbers_have_a_kernel_inside_shard_map():
    """Of a function that no other test calls: its kernel is built where it is lowered, inside the mesh."""

    def draw(key):
        return 1.0625 * jax.random.uniform(key, (3,))

    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    keys = jax.random.split(jax.random.key(0), 4)
    run = jax.shard_map(vectorize(draw), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(run)(keys), jax.vmap(draw)(keys))


def test_shard_map_with_values_that_vary():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def f(x, scale):
        return vectorize(lambda v: v * scale[0] + 1)(x)

    run = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=True)
    )
    x, scale = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    assert_close(run(x, scale), x * np.repeat(scale, 2) + 1)
    gradient = jax.grad(lambda s: run(x, s).sum())(scale)
    assert_close(gradient, x.reshape(4, 2).sum(1))


@pytest.mark.parametrize("kind", MESHES)
def test_shards_of_the_batch_stay_where_they_are(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    sharding = NamedSharding(mesh, P("d"))
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), sharding)
    run = jax.jit(vectorize(lambda v: (v * 2, v.sum())))
    text = run.lower(x).compile().as_text()
    assert "all-gather" not in text
    double, total = run(x)
    assert double.sharding.is_equivalent_to(sharding, 2)
    assert_close((double, total), (np.asarray(x) * 2, np.asarray(x).sum(1)))


# Refusals


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (({"a": np.zeros(3)},), r"argument \[0\]\['a'\] is float64; convert"),
        ((np.arange(3),), r"\[0\] is int64; convert"),
        ((np.zeros(3, np.int8),), r"\[0\] is int8; convert"),
        ((1.0,), r"\[0\] is 1.0, a float; pass an array"),
        ((np.float32(1),), r"\[0\] is np.float32\(1.0\), a float32; pass an array"),
        ((np.zeros((), np.float32),), r"\[0\] has no batch axis"),
        (
            (np.zeros(3, np.float32), np.zeros(4, np.float32)),
            r"\[1\] has batch size 4, but .*\[0\] has 3",
        ),
        ((), r"hold no array"),
        ((None,), r"hold no array"),
        (("text",), r"a str; pass an array"),
    ],
)
def test_wrong_leaves_are_named(args, words):
    with pytest.raises(SeedbedError, match=words):
        vectorize(lambda *a: a)(*args)


def test_wrong_keyword_leaves_are_named():
    with pytest.raises(SeedbedError, match=r"keyword argument \['gain'\] is float64"):
        vectorize(step)({}, np.zeros((2, 3), np.float32), gain=np.zeros(2))


def test_side_effects_are_refused():
    def f(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(SeedbedError, match="side effects"):
        vectorize(f)(np.ones(3, np.float32))


def unknown(x):
    return jnp.sort(x)


def test_what_has_no_kernel_runs_as_vmap_and_says_so_once():
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match="unknown.* runs as jax.vmap.*'sort'"):
        got = vectorize(unknown)(x)
    assert_close(got, jax.vmap(unknown)(x), 1e-5)
    vectorize(unknown)(x + 1)  # a second warning would be an error here


def sorted_thrice(x):
    for _ in range(3):
        x = jnp.sort(x) + 1
    return x.sum()


def doubled_thrice(x):
    return ((x * 2) * 2 * 2).sum()


def test_large_functions_are_refused_rather_than_slow(monkeypatch):
    x = np.ones((3, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        vectorize(sorted_thrice)(x)
    monkeypatch.setattr(primitive, "LARGEST_FALLBACK", 3)
    words = r"sorted_thrice.*'sort'.* 7 equations .*\(at most 3\).*call jax\.vmap"
    with pytest.raises(SeedbedError, match=words):
        vectorize(sorted_thrice)(x[:2])  # of another shape, or it would be found compiled


@pytest.mark.parametrize("platform", ["tpu", "METAL"])
def test_other_devices_run_vmap_and_say_so_once(platform):
    x, both = np.ones((3, 4), np.float32), (doubled_thrice, jax.grad(doubled_thrice))
    primitive._say.cache_clear()
    traced = [jax.jit(vectorize(f)).trace(x) for f in both]
    assert all("custom_call" in run.lower().as_text() for run in traced)
    with pytest.warns(RuntimeWarning, match=f"not for {platform}.* Ant then takes") as said:
        texts = [run.lower(lowering_platforms=(platform,)).as_text() for run in traced]
    assert len(said) == 1
    assert "custom_call" not in "".join(texts)


def test_other_devices_compile_large_functions_and_say_so(monkeypatch):
    monkeypatch.setattr(primitive, "LARGEST_FALLBACK", 3)
    primitive._say.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"not for tpu.* doubled_thrice has 4 equations"):
        jax.jit(vectorize(doubled_thrice)).trace(np.ones((2, 4), np.float32)).lower(
            lowering_platforms=("tpu",)
        )


@pytest.fixture
def vax(monkeypatch):
    """A CPU that has no kernels."""
    primitive._say.cache_clear()
    monkeypatch.setattr(compiler, "unsupported", lambda: "there is no code generator for vax CPUs")


def pendulum(name="inverted_pendulum"):
    """A step of a pendulum, from (qpos, qvel, ctrl) to (qpos, qvel), and three rows of arguments."""
    model, rng = physics.load(mujoco_states.path(name)), np.random.default_rng(0)

    def step(qpos, qvel, ctrl):
        after = physics.step(model, physics.init(model)._replace(qpos=qpos, qvel=qvel), ctrl)
        return after.qpos, after.qvel

    sizes = (model.nq, model.nv, model.nu)
    return step, [0.1 * rng.normal(size=(3, n)).astype(np.float32) for n in sizes]


@pytest.mark.slow
def test_other_cpus_run_vmap_and_say_so_once(vax):
    step, rows = pendulum("inverted_double_pendulum")
    with pytest.warns(RuntimeWarning, match=r"vax CPUs\. .*Ant then takes .* XLA compiles") as said:
        np.testing.assert_array_equal(vectorize(lambda v: v + 2)(np.ones(3, np.float32)), 3)
        jax.jit(vectorize(step)).lower(*rows)
    assert len(said) == 1


@pytest.mark.slow
def test_physics_and_its_derivatives_without_kernels(monkeypatch, request):
    step, rows = pendulum()

    def both(*rows):
        one = tuple(jnp.ones_like(row) for row in rows)
        results, pull = jax.vjp(vectorize(step), *rows)
        pushed = jax.jvp(vectorize(step), rows, one)[1]
        return results, pull(results), pushed

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        want = jax.jit(both)(*rows)
    request.getfixturevalue("vax")
    with pytest.warns(RuntimeWarning, match="vax") as said:
        got = jax.jit(lambda *rows: both(*rows))(*rows)
    assert len(said) == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.slow
def test_humanoid_is_refused_without_kernels(vax):
    model = physics.load(mujoco_states.path("humanoid"))
    state = jax.tree.map(lambda x: np.broadcast_to(x, (2, *x.shape)), physics.init(model))
    step = vectorize(lambda state, ctrl: physics.step(model, state, ctrl))
    with pytest.raises(SeedbedError, match=r"vax CPUs\. .* equations are too many"):
        jax.jit(step).lower(state, np.zeros((2, model.nu), np.float32))


def test_another_ffi_version_runs_vmap(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the API version (0.1) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    x = np.ones(3, np.float32)
    with pytest.warns(RuntimeWarning, match="XLA does not accept.*version"):
        np.testing.assert_array_equal(vectorize(lambda v: v + 2.5)(x), x + 2.5)


# Reports


def test_inspect_counts():
    def f(x, n):
        def body(total, row):
            return total + row * x, jnp.where(x > row, jnp.sqrt(x * row + 1) / (x + row) * x, 0.0)

        total, kept = jax.lax.scan(body, 0.0, np.arange(40, dtype=np.float32))
        return jax.lax.while_loop(lambda c: c < n, lambda c: c * 2 + total, total), kept[3] + x

    one = jax.ShapeDtypeStruct((), np.float32)
    report = inspect(f, one, one)
    assert [len(path) for path in sorted(report.flops)] == [0, 1, 1]
    assert any("(40)" in path[0] for path in report.flops if path)
    assert any("while" in path[0] for path in report.flops if path)
    assert report.flops[()] == 1  # the last sum
    assert report.lanes == host_vector_unit().width
    assert 0 < report.guarded < report.operations
    assert report.ir_bytes > report.code_bytes > 1000
    assert {"jaxpr", "graph", "IR", "machine code"} == {*report.seconds}
    for words in ("test_inspect_counts", "1 guard holds", "in an iteration of loop 0", "seconds"):
        assert words in str(report)
    assert "2 guards hold" in str(dataclasses.replace(report, guards=2))


def test_too_large_a_graph_names_its_lines(monkeypatch):
    monkeypatch.setattr(trace, "LIMIT", 500)

    def big(x):
        for _ in range(30):
            x = jnp.sin(x) * x  # the line
        return x

    with pytest.raises(SeedbedError, match=r"more than 500.*test_vectorize\.py:\d+ \(\d+\)"):
        inspect(big, jax.ShapeDtypeStruct((3,), np.float32))
