"""What depends on parameters alone is computed once for them, whatever the function is."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.nets.products import multiply
from seedbed.run.hoisting import Hoisted

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(40, 24)).astype(np.float32),
    "bias": RNG.normal(size=24).astype(np.float32),
}


def placed(params):
    return jax.tree.map(jnp.asarray, params)


def rest_of(hoisted, derived, size):
    """Returns what a call takes of the parameters, and its compiled program."""
    (rest,) = hoisted._rests[size, derived.platform]
    return [derived.values[number] for number in rest.numbers], rest.compute


def operations_of(hoisted, derived, size, *arguments):
    """Returns the names of the operations that a call consists of."""
    values, compute = rest_of(hoisted, derived, size)
    (call,) = jax.make_jaxpr(compute)(values, *arguments).eqns
    return [equation.primitive.name for equation in call.params["jaxpr"].eqns]


def test_calls_give_what_the_function_gives_for_each_parameters():
    def layer(params, x):
        return {"y": jax.nn.relu(x @ jnp.exp(params["kernel"]) + params["bias"][None]), "x": x}

    hoisted, x = Hoisted(layer), RNG.normal(size=(5, 40)).astype(np.float32)
    for factor in (1.0, 0.5, 2.0):
        params = jax.tree.map(lambda a, factor=factor: jnp.asarray(factor * a), PARAMS)
        derived = hoisted.derive(params)
        for _ in range(2):
            made = hoisted(5, derived, x)
            jax.tree.map(np.testing.assert_array_equal, made, jax.jit(layer)(params, x))
    assert "exp" not in operations_of(hoisted, derived, 5, x)


def test_sizes_share_what_is_computed_once_for_parameters():
    def layer(params, x):
        scale = jnp.exp(jnp.broadcast_to(params["bias"], (len(x), 24)))
        return x @ (params["kernel"] * 2.0) + scale

    hoisted, counted = Hoisted(layer), []
    first = hoisted.derive(placed(PARAMS))
    for rows in (8, 16, 32, 8, 16):
        assert hoisted(rows, first, np.ones((rows, 40), np.float32)).shape == (rows, 24)
    (derivation,) = hoisted._derivations
    assert len(derivation.numbers) == 1

    def counting(leaves):
        counted.append(len(leaves))
        return derivation.compute(leaves)

    hoisted._derivations[0] = derivation._replace(compute=counting)
    second = hoisted.derive(placed(PARAMS))
    for rows in (8, 16, 32):
        hoisted(rows, second, np.ones((rows, 40), np.float32))
    assert counted == [2]


def numbered(rows):
    return np.random.default_rng(rows).normal(size=(40, 24)).astype(np.float32)


@pytest.mark.parametrize(
    "changed",
    [
        lambda kernel, rows: kernel * float(rows),
        lambda kernel, rows: kernel * numbered(rows),
        lambda kernel, rows: kernel * jnp.asarray(numbered(rows)),
        lambda kernel, rows: jax.lax.fori_loop(0, rows, lambda _, k: k + 1.0, kernel),
        lambda kernel, rows: jax.pure_callback(
            lambda k: np.asarray(k) * np.float32(rows),
            jax.ShapeDtypeStruct((40, 24), "float32"),
            kernel,
        ),
    ],
    ids=["literal", "array", "array of JAX's", "loop", "callback"],
)
def test_sizes_do_not_share_what_differs(changed):
    def layer(params, x):
        return x @ changed(params["kernel"], len(x))

    hoisted, params = Hoisted(layer), placed(PARAMS)
    derived = hoisted.derive(params)
    for rows in (1, 3, 1, 2):
        x = np.ones((rows, 40), np.float32)
        np.testing.assert_allclose(
            hoisted(rows, derived, x), layer(params, x), rtol=1e-5, atol=1e-4
        )


def test_arguments_of_other_dtypes_and_structure_are_traced_anew():
    def choose(params, terms):
        total = params["bias"].sum() * 0
        return total + 10 * terms.get("a", 0) + 100 * terms.get("b", 0) + 1000 * terms.get("c", 0)

    hoisted = Hoisted(choose)
    derived = hoisted.derive(placed(PARAMS))
    for terms in ({"a": 1.0, "b": 2.0}, {"b": 1.0, "c": 2.0}, {"a": 1.0, "b": 2.0}, {"a": 1}):
        terms = {name: np.asarray(value) for name, value in terms.items()}
        assert hoisted(1, derived, terms) == choose(PARAMS, terms)
    assert len(hoisted._rests[1, "cpu"]) == 3


def test_shard_map_in_the_function():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("rows"))
    product = jax.shard_map(lambda k, x: x @ k, mesh=mesh, in_specs=specs, out_specs=specs[1])
    hoisted, x = (
        Hoisted(lambda params, x: product(params["kernel"] * 2, x)),
        np.ones((3, 40), np.float32),
    )
    derived = hoisted.derive(placed(PARAMS))
    np.testing.assert_allclose(hoisted(3, derived, x), x @ PARAMS["kernel"] * 2, rtol=1e-5)


def test_a_nan_that_no_call_takes_is_no_error():
    def safe(params, x):
        return jnp.where(x > 0, x, jnp.log(params["bias"] - 100))

    hoisted, x = Hoisted(safe), np.ones(24, np.float32)
    with jax.debug_nans(True):
        derived = hoisted.derive(placed(PARAMS))
        np.testing.assert_array_equal(hoisted(1, derived, x), x)
        np.testing.assert_array_equal(hoisted(1, hoisted.derive(placed(PARAMS)), x), x)


def test_donated_arguments_are_donated_and_parameters_are_not():
    def move(params, x, memory):
        return memory + params["bias"].sum() + x

    hoisted, params = Hoisted(move, donate=(1,)), placed(PARAMS)
    derived, memory = hoisted.derive(params), jnp.zeros(8)
    hoisted(0, derived, np.float32(1.0), memory).block_until_ready()
    assert memory.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_an_effect_comes_at_each_call():
    seen = []

    def told(params, x):
        jax.debug.callback(lambda a: seen.append(float(a)), params["bias"].sum())
        return x * params["bias"].sum()

    hoisted, x = Hoisted(told), np.float32(3.0)
    derived = hoisted.derive(placed(PARAMS))
    for _ in range(3):
        np.testing.assert_allclose(hoisted(0, derived, x), 3 * PARAMS["bias"].sum(), rtol=1e-5)
    jax.effects_barrier()
    assert len(seen) == 3


def test_keys_loops_branches_and_calls():
    def busy(params, key, x):
        scale = jax.lax.fori_loop(0, 3, lambda _, a: a * 0.5, params["kernel"])
        bias = jax.lax.cond(x[0, 0] > 0, lambda b: b, lambda b: -b, params["bias"])
        _, sums = jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(24), x @ scale)
        noise = jax.vmap(lambda k: jax.random.normal(k, (24,)))(jax.random.split(key, len(x)))
        return (
            jax.jit(jax.checkpoint(jnp.tanh))(sums + bias[None])
            + noise
            + jax.random.key_data(fixed)[0]
        )

    fixed = jax.random.key(5)
    hoisted, key = Hoisted(busy), jax.random.key(1)
    derived = hoisted.derive(placed(PARAMS))
    for sign in (1.0, -1.0):
        x = sign * np.abs(RNG.normal(size=(3, 40))).astype(np.float32)
        expected = jax.jit(busy)(PARAMS, key, x)
        np.testing.assert_allclose(hoisted(3, derived, key, x), expected, rtol=1e-5, atol=1e-5)
    assert "while" not in operations_of(hoisted, derived, 3, key, x)


def test_a_layer_in_bfloat16_packs_its_matrix_once():
    def layer(params, x):
        return multiply(x, params["kernel"], jnp.bfloat16)

    hoisted, x = Hoisted(layer), RNG.normal(size=(6, 40)).astype(np.float32)
    derived = hoisted.derive(placed(PARAMS))
    np.testing.assert_array_equal(hoisted(6, derived, x), jax.jit(layer)(PARAMS, x))
    # by a kernel, where there are any, and rounded before XLA multiplies elsewhere
    values, _ = rest_of(hoisted, derived, 6)
    assert not any(value is derived.params["kernel"] for value in values)
    assert operations_of(hoisted, derived, 6, x).count("ffi_call") <= 1


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation of a random program: which values it reads, and what it makes."""

    kind: str
    reads: tuple[int, int]


KINDS = {
    "add": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "sum": lambda a, b: jnp.broadcast_to(a.sum(0), b.shape),
    "table": lambda a, b: b + jnp.arange(4.0)[None],
    "where": lambda a, b: jnp.where(a > 0, a, b),
}
STEPS = st.builds(Step, st.sampled_from(sorted(KINDS)), st.tuples(*[st.integers(0, 99)] * 2))


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.lists(STEPS, min_size=1, max_size=12), st.lists(st.integers(0, 99), min_size=1, max_size=3)
)
def test_random_programs_are_unchanged(steps, outputs):
    def program(params, x, y):
        values = [params["a"], params["b"], x, y]
        for step in steps:
            a, b = (values[i % len(values)] for i in step.reads)
            values.append(KINDS[step.kind](a, b) * 0.5)
        return [values[i % len(values)] for i in outputs]

    arrays = RNG.normal(size=(4, 3, 4)).astype(np.float32)
    params = {"a": jnp.asarray(arrays[0]), "b": jnp.asarray(arrays[1])}
    hoisted = Hoisted(program)
    made = hoisted(0, hoisted.derive(params), arrays[2], arrays[3])
    for mine, expected in zip(made, program(params, arrays[2], arrays[3]), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4)


def test_threads_may_derive_while_another_one_calls():
    def layer(params, x):
        return x @ (params["kernel"] * 2.0)

    hoisted, params, x = Hoisted(layer), placed(PARAMS), np.ones((2, 40), np.float32)
    expected, wrong = 2.0 * PARAMS["kernel"].sum(0), []

    def work():
        for i in range(20):
            made = np.asarray(hoisted(i % 3, hoisted.derive(params), x))
            if not np.allclose(made, expected, rtol=1e-4, atol=1e-4):
                wrong.append(i)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
