"""Gymnasium's spaces in our terms: every action lands in its space, what has no exact form is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.envs.host.spaces import actions_of, observation_leaves
from seedbed.types import ArraySpec, Box, Discrete, MultiDiscrete, SeedbedError

INF = float("inf")
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])
SIGNED = [np.int8, np.int16, np.int32, np.int64]


@st.composite
def choices(draw: Any) -> tuple[spaces.Space, list[int]]:
    """A space of choices, and for each the number of its values."""
    kind = draw(st.sampled_from(["discrete", "multi", "binary", "integers"]))
    dtype = draw(st.sampled_from(SIGNED))
    if kind == "discrete":
        n, start = draw(st.integers(1, 100)), draw(st.integers(-20, 20))
        return spaces.Discrete(n, start=start, dtype=dtype), [n]
    shape = draw(SHAPES.filter(len))
    if kind == "binary":
        return spaces.MultiBinary(shape), [2] * int(np.prod(shape))
    if kind == "multi":
        counts = draw(st.lists(st.integers(1, 50), min_size=4, max_size=4))
        counts = np.array(counts[: int(np.prod(shape))]).reshape(shape)
        start = np.full(shape, draw(st.integers(-20, 20)))
        return spaces.MultiDiscrete(counts, dtype=dtype, start=start), counts.ravel().tolist()
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from([*SIGNED, np.uint8, np.uint32, np.uint64, np.bool_]))
    limit = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    edge = draw(st.sampled_from(["low", "high", "middle"]))
    width = min(draw(st.integers(1, 255)), int(limit[1]) - int(limit[0]))
    middle = (int(limit[0]) + int(limit[1]) - width) // 2
    low = {"low": limit[0], "high": limit[1] - width, "middle": middle}[edge]
    box = spaces.Box(
        np.full(shape, low, dtype), np.full(shape, low + width, dtype), shape, dtype=dtype
    )
    return box, [width + 1] * int(np.prod(shape))


@settings(max_examples=150, deadline=None)
@given(choices(), st.integers(0, 2**32 - 1))
def test_every_choice_is_one_value_of_its_space(found: Any, seed: int) -> None:
    space, counts = found
    spec, decode = actions_of(space, "x")
    assert spec == (
        Discrete(counts[0]) if isinstance(space, spaces.Discrete) else MultiDiscrete(tuple(counts))
    )
    last = np.array(counts, np.int32) - 1
    inner = np.random.default_rng(seed).integers(0, np.array(counts), dtype=np.int32)
    batch = np.stack([np.zeros_like(last), last, inner])
    if isinstance(spec, Discrete):
        batch = batch[:, 0]
    decoded = [decode(row) for row in batch]
    for value in decoded:
        assert space.contains(value), (space, value)
        assert value.dtype == space.dtype and value.shape == space.shape
    together = decode(batch)
    assert together.dtype == space.dtype and (together == np.stack(decoded)).all()
    # the first, and as far from it as the choices are apart
    ends = zip(np.ravel(decoded[0]), np.ravel(decoded[2]), strict=True)
    assert [int(b) - int(a) for a, b in ends] == np.ravel(batch[2]).tolist()


LOW = st.sampled_from([-INF, -1e300, -3.4e38, -1e6, -0.1, 0.0, 1e-9, 0.1, 2 / 3, 7.0])


@st.composite
def real_boxes(draw: Any) -> spaces.Box:
    """A Box whose elements have bounds of all kinds, or none, with room between them."""
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    shape = draw(SHAPES)
    pairs = []
    for _ in range(int(np.prod(shape))):
        low, high = draw(LOW), -draw(LOW)
        pairs.append((low, high) if np.float16(low) < np.float16(high) else (0.0, 1.0))
    low, high = np.array(pairs).T.astype(dtype)
    return spaces.Box(low.reshape(shape), high.reshape(shape), dtype=dtype)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@settings(max_examples=150, deadline=None)
@given(real_boxes(), st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4))
def test_every_real_action_lies_in_its_space(space: spaces.Box, units: list[float]) -> None:
    spec, decode = actions_of(space, "x")
    assert isinstance(spec, Box) and spec.shape == space.shape
    low, high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
    assert (low < high).all() and np.isfinite(high - low)[np.isfinite(low + high)].all()
    # a policy's actions are float32, between bounds of float32
    low = np.where(np.isinf(low), np.minimum(high, 50) - 50, low)
    high = np.where(np.isinf(high), low + 50, high)
    share = (np.array(units, np.float32)[: low.size] + 1) / 2
    action = np.clip(low + share * (high - low), low, high)
    batch = np.stack([action, low, high]).reshape(3, *space.shape)
    together = decode(batch)
    for given_, value in zip(batch, together, strict=True):
        one = decode(given_)
        assert isinstance(one, np.ndarray) and one.dtype == space.dtype
        assert one.shape == space.shape and space.contains(one), (space, given_, one)
        np.testing.assert_array_equal(one, value)
        np.testing.assert_allclose(one.astype(float), given_, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Dict({"a": spaces.Discrete(2)}), "actions of a Dict space .*TransformAction"),
        (spaces.Tuple([spaces.Discrete(2)]), "actions of a Tuple space .*flatten them into one"),
        (spaces.Text(3), "actions of a Text space .*wrap them into Discrete"),
        (spaces.Box(0, 256, (2,), np.int32), "integers of 257 values each .at most 256"),
        (spaces.Box(-(2**63), 2**63 - 1, (), np.int64), "18,446,744,073,709,551,616 values"),
        (spaces.Box(0, 1, (0,)), "hold nothing to choose"),
        (spaces.Box(0, 0, (2,)), "without room for a float32 between"),
        (spaces.Box(0.1, 0.1 + 1e-12, (1,), np.float64), "without room for a float32 between"),
    ],
)
def test_actions_that_cannot_be_had_are_named(space: spaces.Space, words: str) -> None:
    with pytest.raises(SeedbedError, match=f"environment 'x': .*{words}"):
        actions_of(space, "x")


@pytest.mark.parametrize("action", [[1.01, 0.0], [0.0, -0.5], [np.nan, 1.0]])
def test_an_action_out_of_bounds_is_an_error_and_not_clipped(action: list[float]) -> None:
    low, high = np.array([[-1, 0], [1, np.inf]], np.float32)
    _, decode = actions_of(spaces.Box(low, high), "x")
    with pytest.raises(SeedbedError, match="the agent must keep its actions between the bounds"):
        decode(np.array([action], np.float32))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (
            spaces.Discrete(1_000_000),
            r"observation is Discrete\(1000000\).*1,000,000 ones and zeros",
        ),
        (spaces.MultiDiscrete([4000, 97]), r"4,097 ones and zeros \(at most 4,096\); wrap it"),
        (spaces.Dict({"a": spaces.Dict({})}), r"observation\['a'\] is an empty space"),
        (spaces.Tuple([spaces.Box(0, 1, (3, 0))]), r"observation\[0\] has shape \(3, 0\)"),
        (spaces.Sequence(spaces.Discrete(2)), "is a Sequence space, which has no array form"),
    ],
)
def test_observations_without_an_array_form_of_reasonable_size_are_named(
    space: spaces.Space, words: str
) -> None:
    with pytest.raises(SeedbedError, match=f"environment 'x': .*{words}"):
        observation_leaves(space, "x")


@pytest.mark.quick("space1-value1-got1", "space2-value2-got2", "space3-value3-got3")
@pytest.mark.parametrize(
    ("space", "value", "got"),
    [
        (spaces.Discrete(4096), 4095, ArraySpec((4096,), "float32")),
        (spaces.Box(0, 1, (2,), np.bool_), [True, False], ArraySpec((2,), "float32")),
        (spaces.Box(-9, 9, (1,), np.int16), np.array([-9]), ArraySpec((1,), "int16")),
        (spaces.Box(0, 2**40, (1,), np.int64), np.array([2**40]), ArraySpec((1,), "float32")),
    ],
)
def test_observations_are_kept_as_they_are(space: spaces.Space, value: Any, got: Any) -> None:
    leaf = observation_leaves(space, "x")
    assert leaf.spec == got
    row = np.zeros(got.shape, got.dtype)
    assert leaf.write(row, value) is None
    wanted = np.eye(4096)[value] if isinstance(space, spaces.Discrete) else value
    np.testing.assert_array_equal(row, wanted)


def test_an_integer_that_does_not_fit_is_named() -> None:
    leaf = observation_leaves(spaces.Box(0, 255, (2,), np.uint8), "x")
    problem = leaf.write(np.zeros(2, np.uint8), np.array([7, 300]))
    assert problem == "holds 300, which does not fit into uint8"
