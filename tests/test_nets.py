"""Networks: shapes, sizes, scaling of bytes, and memory that is reset where an episode opens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.nets.convolution import Scaling
from seedbed.nets.heads import DuelingHead, PolicyHead, ValueHead
from seedbed.nets.policy import ActorCritic, rescale_values
from seedbed.nets.recurrent import LSTM, LSTMState, initial_lstm_state
from seedbed.nets.torsos import Convolution, DeepResNet, Mlp, Nature, Torso, auto_torso
from seedbed.types import SeedbedError

KEY = jax.random.key(0)


def images(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def apply(module, *inputs):
    return jax.jit(module.apply)(*inputs)


def build(module, *inputs):
    """Initialises and applies in one compiled program: (outputs, params)."""
    return jax.jit(lambda *x: module.init_with_output(KEY, *x))(*inputs)


@pytest.mark.slow
def test_nature_has_the_published_shape():
    x = images((3, 84, 84, 4))
    y, params = build(Nature(), x)
    assert y.shape == (3, 512) and y.dtype == jnp.float32
    kernels = [params["params"][f"Convolution_{i}"]["kernel"].shape for i in range(3)]
    assert kernels == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert count(params) == 1_684_128
    low_precision = apply(Nature(dtype=jnp.bfloat16), params, x)
    assert low_precision.dtype == jnp.float32
    np.testing.assert_allclose(low_precision, y, atol=0.05 * float(jnp.abs(y).max()))


@pytest.mark.slow
def test_deep_resnet_has_the_published_shape():
    x = images((2, 20, 24, 3))
    y, params = build(DeepResNet(), x)
    assert y.shape == (2, 256) and y.dtype == jnp.float32
    convolutions = [name for name in params["params"] if name.startswith("Convolution")]
    assert len(convolutions) == 15
    # 20 x 24 halves, rounded up, to 3 x 3 pixels of 32 channels.
    assert params["params"]["Mlp_0"]["Dense_0"]["kernel"].shape == (288, 256)


@pytest.mark.slow
def test_residual_blocks_add_to_what_they_are_given():
    x = images((1, 8, 8, 1))
    _, params = build(DeepResNet((4,)), x)
    zero = params["params"] | {
        name: jax.tree.map(jnp.zeros_like, params["params"][name])
        for name in ("Convolution_1", "Convolution_2", "Convolution_3", "Convolution_4")
    }
    first = apply(
        Convolution(4, 3, padding=1, relu=False), {"params": params["params"]["Convolution_0"]}, x
    )
    pooled = jax.lax.reduce_window(first, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    dense = apply(Mlp((256,)), {"params": params["params"]["Mlp_0"]}, jnp.maximum(pooled, 0))
    np.testing.assert_allclose(apply(DeepResNet((4,)), {"params": zero}, x), dense, atol=1e-5)


@pytest.mark.quick("Nature*", "Mlp*")
@pytest.mark.parametrize("module", [Nature(), DeepResNet((4, 4)), Mlp((8,))], ids=str)
def test_bytes_are_fractions_of_255(module):
    x = images((2, 36, 36, 1))
    y, params = build(module, x)
    np.testing.assert_allclose(apply(module, params, x / np.float32(255)), y, rtol=1e-4, atol=1e-5)
    assert 0.1 < float(jnp.sqrt(jnp.square(y).mean())) < 3  # neither fades nor explodes


def scaling_of(x, seed=1):
    """A plain function of leaves like `x`, and the `Scaling` that stands for it."""
    rng = np.random.default_rng(seed)
    unit = 255 if x.dtype == np.uint8 else 1
    offset = (unit * rng.uniform(0, 1, x.shape[1:])).astype(np.float32)
    scale = (rng.uniform(1, 20, x.shape[1:]) / unit).astype(np.float32)
    scaled = np.clip((x.astype(np.float32) - offset) * scale, -5, 5)
    return Scaling(jnp.asarray(offset), jnp.asarray(scale)), scaled


@pytest.mark.quick(
    "mlp-bytes-bfloat16", "mlp-bytes-float32", "mlp-floats-bfloat16", "mlp-floats-float32"
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "image"),
    [
        *((kind, "bytes") for kind in ("nature", "resnet", "mlp")),
        *((kind, "floats") for kind in ("nature", "mlp")),
    ],
)
def test_scaled_images(kind, dtype, image):
    x = images((2, 36, 36, 2))
    x = x if image == "bytes" else x / np.float32(255)
    scaling, scaled = scaling_of(x)
    module = {
        "nature": Nature(dtype=dtype),
        "resnet": DeepResNet((4, 4), dtype=dtype),
        "mlp": Mlp((8,), dtype=dtype),
    }[kind]
    y, params = build(module, scaled)
    assert (np.abs(scaled) == 5).any() and float(jnp.sqrt(jnp.square(y).mean())) > 0.1

    def loss(params, *inputs):
        return jnp.sin(module.apply(params, *inputs)).sum()

    actual, expected = (apply(module, params, *a) for a in ((x, scaling), (scaled,)))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    actual, expected = (jax.jit(jax.grad(loss))(params, *a) for a in ((x, scaling), (scaled,)))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4 * float(jnp.abs(e).max()))


@pytest.mark.slow
def test_a_tree_of_observations_is_scaled_leaf_by_leaf():
    rng = np.random.default_rng(0)
    observation = {
        "arm": rng.normal(size=(3, 7)).astype(np.float32),
        "camera": images((3, 12, 12, 3)),
        "gripper": np.ones(3, np.float32),
        "keys": images((3, 5)),
    }
    pairs = {name: scaling_of(leaf) for name, leaf in observation.items()}
    scaling, scaled = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    scaling["gripper"], scaled["gripper"] = None, observation["gripper"]  # this one is not
    for torso in (Torso("resnet", (16, 8)), Torso("mlp", (16, 8))):
        y, params = build(torso, scaled)
        np.testing.assert_allclose(
            apply(torso, params, observation, scaling), y, rtol=1e-4, atol=1e-4
        )
    with pytest.raises(ValueError, match="camera"):
        apply(torso, params, observation, {"arm": scaling["arm"]})
    with pytest.raises(ValueError, match=r"offset has shape \(5,\)"):
        apply(torso, params, observation, scaling | {"arm": scaling["keys"]})


@pytest.mark.slow
def test_nature_refuses_small_images_and_the_others_take_them():
    x = images((2, 10, 10, 4))
    with pytest.raises(SeedbedError, match="choose torso auto, resnet or mlp"):
        Nature().init(KEY, x)
    assert build(DeepResNet((4,)), x)[0].shape == (2, 256)


@pytest.mark.parametrize(
    ("shape", "torso"),
    [
        ((84, 96, 3), "nature"),
        ((36, 36, 1), "nature"),
        ((35, 99, 1), "small"),
        ((20, 20, 9), "small"),
        ((19, 99, 3), "mlp"),
        ((7, 7, 20), "mlp"),
        ((19, 99), "mlp"),
        ((5000,), "mlp"),
        ((), "mlp"),
        ((3, 84, 84), "channels first: transpose it to"),
        ((84, 84), "without channels"),
        ((4, 84, 84, 3), "more axes than an image"),
    ],
)
def test_auto_takes_the_largest_torso_that_fits_and_guesses_nothing(shape, torso):
    if " " not in torso:
        assert auto_torso(shape) == torso
        return
    with pytest.raises(SeedbedError, match=f"{torso}.*or choose torso mlp, which flattens it"):
        auto_torso(shape)


def test_auto_chooses_for_each_image_and_all_else_is_numbers_of_one_mlp():
    leaves = {
        "far": np.zeros((1, 40, 40, 1), np.int32),
        "near": np.ones((1, 20, 20, 1), np.float32),
        "cells": np.ones((1, 7, 7, 3), np.int16),
        "count": np.ones(1, np.int32),
    }
    torso = Torso("auto", (8,))
    y, params = jax.eval_shape(lambda x: torso.init_with_output(KEY, x), leaves)
    assert set(params["params"]) == {"Nature_0", "Small_0", "Mlp_0"}
    assert params["params"]["Mlp_0"]["Dense_0"]["kernel"].shape == (7 * 7 * 3 + 1, 8)
    assert y.shape == (1, 512 + 256 + 8) and y.dtype == np.float32
    numbers = {"cells": leaves["cells"], "count": leaves["count"]}
    got, params = build(torso, numbers)
    floats = jax.tree.map(lambda x: x.astype(np.float32), numbers)
    np.testing.assert_allclose(apply(torso, params, floats), got)


@pytest.mark.slow
def test_lstm_forgets_before_it_consumes_the_opening_row():
    x = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    first = np.zeros((5, 2), bool)
    first[2, 0] = True
    module = LSTM(4)
    (outputs, _), params = build(module, x, first, initial_lstm_state(2, 4))
    fresh, _ = apply(module, params, x[2:], first[2:], initial_lstm_state(2, 4))
    np.testing.assert_allclose(outputs[2:, 0], fresh[:, 0], atol=1e-6)
    assert (np.abs(outputs[2:, 1] - fresh[:, 1]) > 1e-4).any()
    grads = jax.grad(
        lambda y: apply(module, params, y, first, initial_lstm_state(2, 4))[0][2:].sum()
    )(x)
    assert (grads[:2, 0] == 0).all() and (grads[:2, 1] != 0).any()


@pytest.mark.slow
def test_lstm_gradients_are_those_of_the_equations_row_by_row():
    rng = np.random.default_rng(0)
    x, first = rng.normal(size=(6, 3, 5)).astype(np.float32), rng.random((6, 3)) < 0.3
    state = LSTMState(*rng.normal(size=(2, 3, 4)).astype(np.float32))
    weight = rng.normal(size=(6, 3, 4)).astype(np.float32)
    assert first[0].any() and not first[0].all() and first[1:].any()
    module = LSTM(4)
    _, params = build(module, x, first, state)

    def slowly(params, x, first, state):
        weights, (hidden, cell), outputs = params["params"], state, []
        for t in range(len(x)):
            hidden, cell = (jnp.where(first[t][:, None], 0.0, s) for s in (hidden, cell))
            gates = x[t] @ weights["input"] + hidden @ weights["recurrent"] + weights["bias"][None]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            outputs.append(hidden)
        return jnp.stack(outputs), LSTMState(hidden, cell)

    def gradients(form):
        def total(params, x, state):
            outputs, end = form(params, x, first, state)
            return (weight * outputs).sum() + jnp.square(end.cell).sum() + end.hidden.sum()

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(params, x, state)

    mine, expected = gradients(module.apply), gradients(slowly)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), mine, expected
    )
    assert all((np.abs(leaf) > 1e-3).any() for leaf in jax.tree.leaves(expected))


@pytest.mark.slow
def test_heads():
    x = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    parameters, _ = build(PolicyHead(6), x)
    assert parameters.shape == (3, 2, 6) and float(jnp.abs(parameters).max()) < 0.1
    value, params = build(ValueHead(), x)
    assert value.shape == (3, 2)
    np.testing.assert_allclose(jnp.linalg.norm(params["params"]["Dense_0"]["kernel"]), 1, rtol=1e-5)
    q, params = build(DuelingHead(5), x)
    assert q.shape == (3, 2, 5)
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(params))
    assert sizes == sorted([(64, 512), (512,), (512, 1), (1,), (64, 512), (512,), (512, 5)])
    no_advantage = jax.tree.map(lambda w: jnp.zeros_like(w) if w.shape == (512, 5) else w, params)
    value = apply(DuelingHead(5), no_advantage, x)
    np.testing.assert_allclose(q.mean(-1), value[..., 0], atol=1e-5)


@pytest.mark.slow
def test_actor_critic_scales_observations():
    x = {"image": images((2, 3, 12, 12, 1)), "b": images((2, 3, 4)) / np.float32(255)}
    pairs = {name: scaling_of(leaf[0]) for name, leaf in x.items()}
    scaling = {name: pair[0] for name, pair in pairs.items()}
    scaled = {
        name: np.clip((leaf - np.asarray(s.offset)) * np.asarray(s.scale), -5, 5)
        for (name, leaf), s in zip(x.items(), scaling.values(), strict=True)
    }
    reward, first = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    module = ActorCritic(6, "resnet", (16,))
    (parameters, value, _), params = build(module, scaled, (), reward, first, ())
    p, v, _ = apply(module, params, x, (), reward, first, (), scaling)
    np.testing.assert_allclose(p, parameters, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(v, value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lstm_size", [0, 8])
def test_actor_critic_steps_equal_the_unrolled_form(lstm_size):
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(5, 3, 4)).astype(np.float32), "b": rng.random((5, 3), np.float32)}
    reward, first = rng.normal(size=(5, 3)).astype(np.float32), rng.random((5, 3)) < 0.3
    previous = rng.normal(size=(5, 3, 2)).astype(np.float32)
    module = ActorCritic(6, sizes=(16,), activation="tanh", lstm_size=lstm_size)
    core = module.initial_core(3)
    (parameters, value, _), params = build(module, x, previous, reward, first, core)
    assert parameters.shape == (5, 3, 6) and value.shape == (5, 3)
    step = jax.jit(module.apply)
    for t in range(5):
        row = jax.tree.map(lambda leaf, t=t: leaf[t : t + 1], (x, previous, reward, first))
        p, v, core = step(params, *row, core)
        np.testing.assert_allclose(p[0], parameters[t], atol=1e-6)
        np.testing.assert_allclose(v[0], value[t], atol=1e-5)
    assert (core == ()) == (lstm_size == 0)

    def parameters_of(previous, reward):
        return apply(module, params, x, previous, reward, first, module.initial_core(3))[0]

    # By the same program: another may round otherwise.
    usual = parameters_of(previous, reward)

    def changed(previous, reward):
        return np.asarray(parameters_of(previous, reward) != usual).any(-1)

    # What precedes an opening row belongs to another episode. Rewards are clipped on their way in.
    opening = first[..., None]
    assert not changed(np.where(opening, previous + 1, previous), np.where(first, 9, reward)).any()
    assert not changed(previous, np.clip(reward, -1, 1)).any()
    assert changed(previous + 0.1, reward).any() == (lstm_size > 0)
    assert changed(previous, reward + 0.1).any() == (lstm_size > 0)


@pytest.mark.parametrize("value_sizes", [(), (8,)], ids=["shared", "separate"])
def test_rescaling_values_changes_nothing_else(value_sizes):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    reward, first = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    module = ActorCritic(6, sizes=(16,), value_sizes=value_sizes)
    core = module.initial_core(3)
    (parameters, value, _), params = build(module, x, (), reward, first, core)
    rescaled = rescale_values(params, jnp.float32(3.0), jnp.float32(-0.5))
    p, v, _ = apply(module, rescaled, x, (), reward, first, core)
    np.testing.assert_array_equal(p, parameters)
    np.testing.assert_allclose(v, 3.0 * value - 0.5, atol=1e-5)
