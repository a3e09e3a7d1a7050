"""Machine code on disk: what finds it again, and what can go wrong with files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from seedbed import cache
from seedbed.llvm import host_vector_unit
from seedbed.simd import derivative, vectorize
from seedbed.simd.store import build, sources
from seedbed.simd.store.digest import Indescribable, digest
from source_graph import SOURCE, import_graph, read_modules


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    cache._complain.cache_clear()
    return tmp_path / "cache" / "kernels"


def files(folder):
    return sorted(p.name for p in folder.iterdir())


# Files


def test_what_is_saved_is_loaded(folder):
    assert cache.load("key") is None
    cache.save("key", b"code")
    cache.save("other", b"")
    assert cache.load("key") == b"code"
    assert cache.load("other") == b""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {(folder / name).stat().st_mode & 0o777 for name in files(folder)} == {0o600}


@pytest.mark.parametrize("keep", [0, 5, 20, 48, 49, 52])
def test_torn_files_do_not_count(folder, keep):
    cache.save("key", b"code")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert cache.load("key") is None
    cache.save("key", b"code")
    assert cache.load("key") == b"code"


def test_altered_and_misnamed_files_do_not_count(folder):
    cache.save("key", b"code")
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    for i in (0, 20, len(data) - 1):
        data[i] ^= 1
        path.write_bytes(data)
        assert cache.load("key") is None
        data[i] ^= 1
    path.rename(folder / cache._name("other"))
    assert cache.load("other") is None


def test_the_least_recently_used_goes(folder, monkeypatch):
    monkeypatch.setattr(cache, "LARGEST", 2600)
    for i in range(3):
        cache.save(f"key{i}", b"x" * 800)
        os.utime(folder / cache._name(f"key{i}"), (1000 + i, 1000 + i))
    assert cache.load("key0") is not None  # used: the oldest is now key1
    cache.save("key3", b"x" * 800)
    assert [cache.load(f"key{i}") is not None for i in range(4)] == [True, False, True, True]


def test_unfinished_files_are_removed_when_old(folder):
    cache.save("key", b"code")
    old, new = folder / "old.part", folder / "new.part"
    old.touch(), new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    cache.save("key", b"code")
    assert not old.exists()
    assert new.exists()


@pytest.mark.slow
def test_many_writers_and_readers(folder):
    stop, wrong = time.monotonic() + 1.0, []

    def work(i):
        while time.monotonic() < stop:
            cache.save("key", bytes([i]) * 5000)
            code = cache.load("key")
            if code is not None and len({*code}) != 1:
                wrong.append(code)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(files(folder)) == 1


def test_without_a_directory_it_says_so_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="not kept for the next start.*SEEDBED_CACHE") as said:
        cache.save("key", b"code")
        assert cache.load("key") is None
        cache.save("key", b"code")
    assert len(said) == 1


def test_a_directory_that_others_may_write_to_is_not_trusted(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write"):
        cache.save("key", b"code")
    assert not files(folder)
    folder.chmod(0o755)
    cache.save("key", b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache.load("key") == b"code"


def test_home_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("SEEDBED_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache" / "seedbed" / "kernels"


# Names of jaxprs


def named(fn, *args):
    return digest(jax.make_jaxpr(fn)(*args))


X = np.ones(3, np.float32)
TABLE = np.arange(5000, dtype=np.float32)


def test_equal_functions_have_one_name():
    def f(x):
        return jax.nn.relu(x) @ x + jax.lax.fori_loop(0, 3, lambda i, c: c * 2, 1.0)

    def g(y):
        return jax.nn.relu(y) @ y + jax.lax.fori_loop(0, 3, lambda j, d: d * 2, 1.0)

    assert named(f, X) == named(g, X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * 2.0000002,
        lambda x: x * -2.0,
        lambda x: x + 2.0,
        lambda x: 2.0 * x * 1.0,
        lambda x: jax.jit(lambda v: v * 2.5)(x),
    ],
)
def test_other_functions_have_other_names(other):
    assert named(lambda x: x * 2.0, X) != named(other, X)


def test_what_has_an_address_has_no_name():
    class Token:
        pass

    jaxpr = jax.make_jaxpr(lambda x: x + 1)(X)
    equation = jaxpr.eqns[0]
    odd = equation.replace(params={**equation.params, "odd": Token()})
    with pytest.raises(Indescribable):
        digest(jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=[odd])))


SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from seedbed.simd import derivative, vectorize
from seedbed.simd.store import build
if sys.argv[1] == "hit":
    def fail(*_, **__):
        raise AssertionError("a hit traces nothing")
    build.trace = build.compile_program = fail
def f(x, k):
    y = jax.nn.gelu(jnp.where(k > 2, x, 0.0))
    return jax.lax.while_loop(lambda c: c[0] < k, lambda c: (c[0] + 1, c[1] * y), (0, x))[1]
print(vectorize(f)(np.linspace(-1, 2, 20, dtype=np.float32), np.arange(20, dtype=np.int32)).sum())
"""
DERIVED = (
    SCRIPT.split("def f(x, k)")[0]
    + """
from seedbed.simd import derivative
if sys.argv[1] == "hit":
    derivative._linearized = derivative._transposed = fail
SLOPE = float(sys.argv[2])
@jax.custom_jvp
def scaled(x):
    return 2 * x
scaled.defjvp(lambda primals, tangents: (scaled(*primals), SLOPE * tangents[0]))
def f(x, row):
    rows = np.linspace(0, 0.5, 60, dtype=np.float32)
    return jax.lax.scan(lambda y, row: (jnp.sin(scaled(y) * row) + x, None), x * row, rows)[0]
x = np.linspace(-1, 2, 20, dtype=np.float32)
if sys.argv[1] == "together":
    print("ready", flush=True)
    sys.stdin.readline()
loss = lambda x: jax.lax.scan(lambda y, u: (vectorize(f)(y, u), None), x, jnp.stack([x, x]))[0].sum()
print(jax.grad(loss)(x).sum(), jax.jvp(lambda x: vectorize(f)(x, x), (x,), (x,))[1].sum())
"""
)


def run_script(kind, script=SCRIPT, *more):
    command = [sys.executable, "-W", "error", "-c", script, kind, *more]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_another_process_finds_it_without_tracing(folder):
    first = run_script("miss")
    assert len(files(folder)) == 1
    assert run_script("hit") == first
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert run_script("miss") == first
    assert run_script("hit") == first


@pytest.mark.slow
def test_another_process_finds_derivatives_and_traces_none(folder):
    """Whether one process has derived them, or two at the same time."""
    command = [sys.executable, "-W", "error", "-c", DERIVED, "together", "2"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **streams) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    first, second = (process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert second == first
    # The function, its tangent, that one's transpose, and what is known of the two.
    assert len(files(folder)) >= 5
    assert run_script("hit", DERIVED, "2") == first


@pytest.mark.slow
def test_another_rule_is_another_derivative(folder):
    """Although the function itself is the same."""
    first = run_script("miss", DERIVED, "2")
    assert np.isfinite([float(number) for number in first.split()]).all()
    assert run_script("miss", DERIVED, "0.5") != first
    assert run_script("hit", DERIVED, "0.5") != first
    assert run_script("hit", DERIVED, "2") == first


def ruled(slope):
    @jax.custom_jvp
    def scaled(x):
        return 2 * x

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), slope * tangents[0]))

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(scaled)(y), x)

    return jax.make_jaxpr(loop)(X)


def test_rules_are_part_of_a_description_if_they_are_asked_for():
    one, other = ruled(2.0), ruled(np.full(1, 3.0, np.float32))
    assert digest(one) == digest(other)
    assert digest(one, rules=True) != digest(other, rules=True)
    assert digest(one, rules=True) == digest(ruled(2.0), rules=True) != digest(one)


def test_rules_of_other_kinds_have_no_description():
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, x), lambda x, g: (x * g,))
    closed = jax.make_jaxpr(doubled)(X)
    assert digest(closed)
    with pytest.raises(Indescribable):
        digest(closed, rules=True)
    assert jax.grad(lambda x: vectorize(doubled)(x).sum())(X).tolist() == X.tolist()


def test_what_is_known_must_agree_with_what_is_made(folder, monkeypatch):
    """A file about a derivative is not believed where the derivative itself says something else."""
    x = np.linspace(0, 1, 3, dtype=np.float32)
    monkeypatch.setattr(build, "_BUILDS", {})
    monkeypatch.setattr(
        derivative,
        "recall",
        lambda recipe: {
            "types": [[[[[], "float32", False]], [[[], "float32", False]]]] * 2,
            "operands": [],
            "kept": [],
        },
    )
    with pytest.raises(RuntimeError, match="is not what it is"):
        jax.jvp(vectorize(lambda v: jnp.sin(v) * v), (x,), (x,))


def another_process(monkeypatch):
    """Forgets what this process has derived and compiled."""
    monkeypatch.setattr(build, "_BUILDS", {})
    derivative.linearize.cache_clear()
    derivative.transpose.cache_clear()


def refuse(*_, **__):
    raise AssertionError("this is on disk")


@pytest.mark.parametrize("case", ["unchecked", "shared by all", "shared by a device's rows"])
def test_derivatives_inside_shard_map(folder, monkeypatch, case):
    """They are on disk, too; only where types name mesh axes are they traced, to find their machine code."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    spec = P() if case == "shared by all" else P("d")
    x, y = np.linspace(-1, 2, 8, dtype=np.float32), np.full(4, 3, np.float32)

    def one(v, scale):
        def body(total, t):
            return jnp.sin(total * t) + v * scale, None

        return jax.lax.scan(body, v * scale, np.linspace(0, 1, 60, dtype=np.float32))[0]

    def gradients():
        def loss(x, y):
            return vectorize(lambda v: one(v, y[0]))(x).sum()

        split = jax.shard_map(
            jax.grad(loss, argnums=(0, 1)),
            mesh=mesh,
            in_specs=(P("d"), spec),
            out_specs=(P("d"), spec),
            check_vma=case != "unchecked",
        )
        return [np.asarray(g) for g in jax.jit(split)(x, y)]

    another_process(monkeypatch)
    by_x, by_y = gradients()
    want = jax.grad(lambda x, y: jax.vmap(lambda v: one(v, y))(x).sum(), (0, 1))(x, y[0])
    np.testing.assert_allclose(by_x, want[0], rtol=1e-4)
    np.testing.assert_allclose(by_y.sum(), want[1], rtol=1e-4)
    another_process(monkeypatch)
    monkeypatch.setattr(build, "compile_program", refuse)
    if case != "shared by a device's rows":
        monkeypatch.setattr(derivative, "_linearized", refuse)
        monkeypatch.setattr(derivative, "_transposed", refuse)
    again = gradients()
    assert again[0].tolist() == by_x.tolist()
    assert again[1].tolist() == by_y.tolist()


def test_a_loop_over_time_traces_one_tangent(folder, monkeypatch):
    """Although `lax.scan` asks for that by its inputs before that by its state, too."""
    traced = []

    def counted(*args):
        traced.append(args)
        return linearized(*args)

    linearized = derivative._linearized
    monkeypatch.setattr(derivative, "_linearized", counted)

    def loss(u):
        step = vectorize(lambda y, u: jnp.tanh(y * 2 + u))
        return jax.lax.scan(lambda y, u: (step(y, u), None), jnp.zeros(3), u)[0].sum()

    got = jax.grad(loss)(jnp.ones((4, 3)))
    assert len(traced) == 1

    def plain(u):
        return jax.lax.scan(lambda y, u: (jnp.tanh(y * 2 + u), None), jnp.zeros(3), u)[0].sum()

    np.testing.assert_allclose(got, jax.grad(plain)(jnp.ones((4, 3))), rtol=1e-4)


def backwards(slope):
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, x), lambda x, cotangent: (slope * cotangent,))
    return doubled


def test_another_way_back_is_another_derivative(folder):
    for slope in (2.0, 5.0):
        doubled = backwards(slope)
        got = jax.grad(lambda x, f=doubled: vectorize(lambda v: f(v) + 1)(x).sum())(X)
        assert got.tolist() == [slope] * 3


def keeping(first, second):
    def f(x):
        a, b = checkpoint_name(jnp.sin(x), first), checkpoint_name(jnp.cos(2 * x), second)
        return a * a * a * b * b * b

    return f


@pytest.mark.slow
def test_what_is_kept_is_part_of_a_derivative(folder):
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    for names in ((derivative.KEPT, "other"), ("other", derivative.KEPT)):
        f = keeping(*names)
        want = jax.jvp(jax.vmap(f), (x,), (x,))[1]
        np.testing.assert_allclose(jax.jvp(vectorize(f), (x,), (x,))[1], want, rtol=1e-5)
        back = jax.grad(lambda x, f=f: vectorize(f)(x).sum())(x)
        np.testing.assert_allclose(back * x, want, rtol=1e-5)


def test_what_does_not_move_has_no_slope(folder):
    """Not even an infinite one, times 0."""

    def f(x, y):
        return x * jax.lax.fori_loop(0, 30, lambda _, b: jnp.sqrt(b), y)

    y, one = np.array([0, 0, 1, 2], np.float32), np.ones(4, np.float32)
    got = jax.jvp(lambda x: vectorize(f)(x, y), (one,), (one,))[1]
    np.testing.assert_allclose(got, [0, 0, 1, 1], rtol=1e-5)


def test_each_setting_has_code_of_its_own(folder, monkeypatch):
    def f(x):
        return x * 1.75

    vectorize(f)(np.ones(3, np.float32))
    assert len(files(folder)) == 1
    monkeypatch.setattr(build, "lanes", lambda: 4)
    vectorize(f)(np.ones(3, np.float32))
    assert len(files(folder)) == 1 + (host_vector_unit().width != 4)
    monkeypatch.setattr(build, "fingerprint", lambda names: "another")
    vectorize(f)(np.ones(3, np.float32))
    assert len(files(folder)) == 2 + (host_vector_unit().width != 4)


def test_another_way_of_drawing_is_another_kernel(folder):
    def f(key):
        return jax.random.bits(key, (3,))

    keys = jax.random.split(jax.random.key(3), 4)
    drawn = []
    for way in (True, False):
        with jax.threefry_partitionable(way):
            drawn.append(np.asarray(vectorize(f)(keys)))
            np.testing.assert_array_equal(drawn[-1], jax.vmap(f)(keys))
    assert (drawn[0] != drawn[1]).any() and len(files(folder)) == 2


def test_any_source_of_the_compiler_makes_other_code(tmp_path, monkeypatch):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def compiler_after(path, text):
        write(path, text)
        return sources.fingerprint.__wrapped__(sources.COMPILER)

    monkeypatch.setattr(sources, "_PACKAGE", tmp_path)
    for path in sources.COMPILER:
        write(path if path.endswith(".py") else f"{path}/a.py", "")
    inside = ("llvm.py", "ffi.py", "simd/ir/a.py", "simd/cpu/a.py", "simd/cpu/inner/b.py")
    names = {compiler_after(path, text) for path in inside for text in ("x = 1", "x = 2")}
    (tmp_path / "simd/cpu/a.py").rename(tmp_path / "simd/cpu/inner/a.py")
    names.add(sources.fingerprint.__wrapped__(sources.COMPILER))
    assert len(names) == 11
    for path in ("simd/primitive.py", "cache.py", "nets/native/tile.py", "ops/a.py"):
        assert compiler_after(path, "x = 1") == compiler_after(path, "x = 2") in names


@pytest.mark.slow
def test_the_compiler_uses_no_other_source():
    modules = read_modules(SOURCE)
    graph, named = import_graph(modules), {path: name for name, (path, _) in modules.items()}
    inside = {named[path] for path in sources.sources(sources.COMPILER)}
    used = {module for name in inside for module in graph[name]}
    assert {"simd.frontend.trace", "simd.cpu.compiler", "simd.store.digest"} <= inside
    # where machine code is kept, and the base class of the compiler's error
    assert used - inside == {"cache", "types"}
