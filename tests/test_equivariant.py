"""Networks that are equivariant under a mirror, and the reflections of which they know."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.actors.slots import spec_from_json, spec_to_json
from seedbed.agents.ppo import Ppo
from seedbed.nets.equivariant import halves
from seedbed.ops import statistics
from seedbed.ops.statistics import RunningStatistics
from seedbed.run.stacking import stacked_spec
from seedbed.spaces import Mirror, Reflection, joined, policy_spec
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, SeedbedError, Timestep

SWAP = Reflection((1, 0, 2, 3), (-1, -1, 1, -1))
FLIP = Reflection((0,), (-1,))
TURN = Reflection((1, 0), (1, 1))
SPEC = EnvSpec(
    {
        "state": ArraySpec((4,), "float32"),
        "push": ArraySpec((1,), "float32"),
        "privileged": ArraySpec((2,), "float32"),
    },
    Box((4,), (-1.0, -1.0, -2.0, -1.0), (1.0, 1.0, 3.0, 1.0)),
    Mirror({"state": SWAP, "push": FLIP, "privileged": TURN}, SWAP),
)


def reflected(x, of: Reflection):
    return np.asarray(x)[..., list(of.order)] * np.array(of.signs, np.float32)


# A machine may be slow.
PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


@st.composite
def reflections(draw) -> Reflection:
    size = draw(st.integers(1, 9))
    left = draw(st.permutations(range(size)))
    order, signs = list(range(size)), [1] * size
    while left:
        i = left.pop()
        j = left.pop() if left and draw(st.booleans()) else i
        order[i], order[j] = j, i
        signs[i] = signs[j] = draw(st.sampled_from([-1, 1]))
    return Reflection(tuple(order), tuple(signs))


@PATIENT
@hypothesis.given(reflections())
def test_halves_are_the_even_and_the_odd_vectors(reflection):
    even, odd = halves(reflection)
    both = np.concatenate([even, odd], axis=1)
    np.testing.assert_allclose(both @ both.T, np.eye(len(reflection.order)), atol=1e-6)
    np.testing.assert_array_equal(reflected(even.T, reflection), even.T)
    np.testing.assert_array_equal(reflected(odd.T, reflection), -odd.T)


@PATIENT
@hypothesis.given(st.lists(reflections(), min_size=1, max_size=3))
def test_joined_reflections_are_those_of_the_parts(parts):
    vectors = [np.arange(1.0, 1 + len(part.order)) for part in parts]
    whole = reflected(np.concatenate(vectors), joined(parts))
    by_part = [reflected(x, part) for x, part in zip(vectors, parts, strict=True)]
    np.testing.assert_array_equal(whole, np.concatenate(by_part))


@pytest.mark.quick("value_sizes1")
@pytest.mark.parametrize("value_sizes", [(), (6, 4)])
def test_the_policy_of_a_reflected_observation_is_the_reflected_policy(value_sizes):
    agent = Ppo(
        SPEC,
        equivariant=True,
        hidden_sizes=(8, 10),
        value_sizes=value_sizes,
        normalise_observations=True,
        activation="swish",
    )
    state = jax.jit(agent.init)(jax.random.key(1))
    rng = np.random.default_rng(2)
    # Statistics and weights of learning are not symmetric by themselves.
    noisy = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape), state.params.weights)
    shapes = state.params.seen.mean
    seen = RunningStatistics(
        weight=jnp.float32(9),
        mean=jax.tree.map(lambda x: np.float32(rng.standard_normal(x.shape)), shapes),
        variance=jax.tree.map(lambda x: np.float32(rng.uniform(0.5, 2, x.shape)), shapes),
    )
    params = state.params._replace(weights=noisy, seen=seen)
    shown = {
        name: np.float32(rng.standard_normal((1, 7, *leaf.shape)))
        for name, leaf in SPEC.observation.items()
    }
    other = {name: reflected(x, SPEC.mirror.observation[name]) for name, x in shown.items()}

    @jax.jit
    def run(observation):
        row, none = np.zeros((1, 7), np.float32), np.zeros((1, 7), bool)
        steps = Timestep(observation, row, none, none, none)
        parameters, value, _ = agent._evaluate(params, steps, (), ())
        return parameters[0], value[0]

    (one, value), (two, same) = jax.device_get((run(shown), run(other)))
    mean, scale = np.split(one, 2, axis=-1)
    plain = dataclasses.replace(SWAP, signs=(1, 1, 1, 1))
    wanted = np.concatenate([reflected(mean, SWAP), reflected(scale, plain)], axis=-1)
    np.testing.assert_allclose(two, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(same, value, rtol=2e-5, atol=2e-5)
    assert np.abs(one - two).max() > 0.1, "a network that sees nothing would be equivariant too"
    assert np.ptp(value) > 0.1


def test_hidden_layers_have_half_the_weights():
    def sizes(equivariant: bool) -> dict[str, int]:
        agent = Ppo(SPEC, equivariant=equivariant, hidden_sizes=(16, 16), value_sizes=(2,))
        state = jax.eval_shape(agent.init, jax.random.key(0))
        torso = state.params.weights["params"]["Torso_0"]
        (mlp,) = torso.values()
        return {"/".join(map(str, path)): x.size for path, x in jax.tree.leaves_with_path(mlp)}

    assert sum(x for name, x in sizes(True).items() if "_1" in name and "bias" not in name) == 128
    assert sum(x for name, x in sizes(False).items() if "_1" in name and "kernel" in name) == 256


def test_statistics_are_those_of_the_data_and_its_reflections():
    rows = np.random.default_rng(0).normal([1, -2, 3, 0.5], [1, 2, 0.5, 1], (400, 4))
    rows = rows.astype(np.float32)
    blank = statistics.initial({"x": ArraySpec((4,), "float32")})

    def of(data):
        return statistics.absorb(blank, statistics.deviations(blank, {"x": jnp.asarray(data)}))

    found = statistics.symmetrised(of(rows), {"x": SWAP})
    wanted = of(np.concatenate([rows, reflected(rows, SWAP)]))
    np.testing.assert_allclose(found.mean["x"], wanted.mean["x"], atol=1e-5)
    np.testing.assert_allclose(found.variance["x"], wanted.variance["x"], rtol=1e-4)


def test_a_mirror_outlives_what_is_done_with_a_spec():
    assert spec_from_json(spec_to_json(SPEC)) == SPEC
    assert stacked_spec(SPEC, 1) == SPEC
    assert stacked_spec(SPEC, 2).mirror is None
    seen = policy_spec(SPEC)
    assert seen.mirror == Mirror({"state": SWAP, "push": FLIP}, SWAP)


@pytest.mark.parametrize(
    ("order", "signs"),
    [((1, 2, 0), (1, 1, 1)), ((1, 0), (1, -1)), ((0, 0), (1, 1)), ((0,), (2,)), ((0, 1), (1,))],
)
def test_what_a_second_mirror_does_not_undo_is_refused(order, signs):
    with pytest.raises(SeedbedError, match="second mirror"):
        Reflection(order, signs)


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        (Mirror(SWAP, SWAP), "does not fit its observation"),
        (Mirror({"state": FLIP, "push": FLIP, "privileged": TURN}, SWAP), "does not fit its"),
        (Mirror({"state": SWAP, "push": FLIP}, SWAP), "does not fit its observation"),
        (dataclasses.replace(SPEC.mirror, action=TURN), "does not fit Box"),
        (
            dataclasses.replace(SPEC.mirror, action=Reflection((0, 1, 2, 3), (1, 1, -1, 1))),
            "from -3.0 to 2.0 of number 2",
        ),
    ],
)
def test_a_mirror_of_something_else_is_refused(mirror, said):
    with pytest.raises(SeedbedError, match=said):
        dataclasses.replace(SPEC, mirror=mirror)


def test_choices_have_no_mirror():
    with pytest.raises(SeedbedError, match="does not fit Discrete"):
        EnvSpec(ArraySpec((4,), "float32"), Discrete(4), Mirror(SWAP, SWAP))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recurrent": True}, "set recurrent to False"),
        ({"torso": "nature"}, "torso to mlp"),
        ({"hidden_sizes": (64, 33)}, "an even number of units"),
        ({"value_sizes": (7,)}, "an even number of units"),
        ({"spec": dataclasses.replace(SPEC, mirror=None)}, "tells no mirror symmetry"),
    ],
)
def test_networks_that_cannot_be_equivariant_are_refused(options, said):
    with pytest.raises(SeedbedError, match=f"Ppo.equivariant is True.*{said}"):
        Ppo(equivariant=True, **options)
