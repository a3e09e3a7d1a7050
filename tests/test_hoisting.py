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


def operations_of(hoisted, derived, *arguments):
    """Returns the names of the operations that a call consists of."""
    _, rest = next(iter(hoisted._rests.values()))
    (values,) = derived.values.values()
    return [
        e.primitive.name
        for e in jax.make_jaxpr(rest)(values, *arguments).eqns[0].params["jaxpr"].eqns
    ]


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
    assert "exp" not in operations_of(hoisted, derived, x)


def test_the_derivation_is_shared_by_shapes_and_done_once_for_parameters():
    def layer(params, x):
        return x @ (params["kernel"] * 2.0)

    hoisted, counted = Hoisted(layer), []
    first = hoisted.derive(placed(PARAMS))
    for rows in (1, 2, 4, 1, 2):
        assert hoisted(rows, first, np.ones((rows, 40), np.float32)).shape == (rows, 24)
    assert len(first.values) == len(hoisted._derivations) == 1
    ((text, derivation),) = hoisted._derivations.items()

    def counting(leaves):
        counted.append(len(leaves))
        return derivation.compute(leaves)

    hoisted._derivations[text] = derivation._replace(compute=counting)
    second = hoisted.derive(placed(PARAMS))
    for rows in (1, 2, 4):
        hoisted(rows, second, np.ones((rows, 40), np.float32))
    assert counted == [2]


def test_shapes_whose_derivations_differ_have_one_each():
    def layer(params, x):
        return x @ (params["kernel"] * float(len(x)))

    hoisted = Hoisted(layer)
    derived = hoisted.derive(placed(PARAMS))
    for rows in (1, 3):
        x = np.ones((rows, 40), np.float32)
        np.testing.assert_allclose(
            hoisted(rows, derived, x), rows * x @ PARAMS["kernel"], rtol=1e-5
        )
    assert len(derived.values) == 2


def test_what_is_not_changed_is_not_copied():
    def layer(params, x):
        return x @ params["kernel"] + params["bias"][None]

    hoisted, params = Hoisted(layer), placed(PARAMS)
    derived = hoisted.derive(params)
    hoisted(1, derived, np.ones((1, 40), np.float32))
    (values,) = derived.values.values()
    assert any(value is params["kernel"] for value in values)


def test_a_broadcast_is_made_at_each_call():
    def layer(params, x):
        return x + jnp.broadcast_to(params["bias"] + 1.0, x.shape)

    hoisted, x = Hoisted(layer), np.ones((64, 24), np.float32)
    derived = hoisted.derive(placed(PARAMS))
    np.testing.assert_allclose(hoisted(64, derived, x), x + PARAMS["bias"] + 1.0, rtol=1e-6)
    (values,) = derived.values.values()
    assert max(value.size for value in values) == 24


def test_results_of_parameters_alone_and_of_constants_alone():
    def several(params, x):
        return {
            "twice": params["bias"] * 2,
            "raw": params["bias"],
            "ones": jnp.ones(3),
            "seven": 7,
            "x": x,
        }

    hoisted, x = Hoisted(several), np.arange(3.0, dtype=np.float32)
    made = hoisted(0, hoisted.derive(placed(PARAMS)), x)
    jax.tree.map(np.testing.assert_array_equal, made, jax.jit(several)(PARAMS, x))


def test_functions_without_parameters():
    hoisted = Hoisted(lambda params, x: x + 1)
    assert hoisted(0, hoisted.derive({}), np.float32(1.0)) == 2.0


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
    assert "while" not in operations_of(hoisted, derived, key, x)


def test_a_layer_in_bfloat16_packs_its_matrix_once():
    def layer(params, x):
        return multiply(x, params["kernel"], jnp.bfloat16)

    hoisted, x = Hoisted(layer), RNG.normal(size=(6, 40)).astype(np.float32)
    derived = hoisted.derive(placed(PARAMS))
    np.testing.assert_array_equal(hoisted(6, derived, x), jax.jit(layer)(PARAMS, x))
    # by a kernel, where there are any, and rounded before XLA multiplies elsewhere
    (values,) = derived.values.values()
    assert not any(value is derived.params["kernel"] for value in values)
    assert operations_of(hoisted, derived, x).count("ffi_call") <= 1


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


@pytest.mark.parametrize("threads", [4])
def test_threads_may_derive_while_another_one_calls(threads):
    def layer(params, x):
        return x @ (params["kernel"] * 2.0)

    hoisted, params, x = Hoisted(layer), placed(PARAMS), np.ones((2, 40), np.float32)
    expected, wrong = 2.0 * PARAMS["kernel"].sum(0), []

    def work():
        for i in range(20):
            made = np.asarray(hoisted(i % 3, hoisted.derive(params), x))
            if not np.allclose(made, expected, rtol=1e-4, atol=1e-4):
                wrong.append(i)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
