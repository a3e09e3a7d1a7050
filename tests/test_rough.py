"""Uneven ground of tiles that are put under the feet: MuJoCo's C code is the oracle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import biped
import quadruped
from seedbed import simd
from seedbed.envs.device.robots.g1 import G1Joystick
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.robots.rough import G1Rough, Go1Rough
from seedbed.envs.device.robots.tiles import Ground
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

ROBOTS, STEPS = 16, 30


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rough") / "robot.xml"
    path.write_text(quadruped.straight(quadruped.xml()))
    return str(path)


@pytest.fixture(scope="module")
def humanoid(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rough") / "humanoid.xml"
    path.write_text(biped.xml("g1"))
    return str(path)


@pytest.fixture(scope="module", params=["go1", "g1"])
def rolled(
    robot: str, humanoid: str, request: pytest.FixtureRequest
) -> tuple[Any, list[tuple[Any, Any, Any, Any]]]:
    """Robots that are dropped on uneven ground: what was before each step, the boxes, controls, and after."""
    kind, file = (Go1Rough, robot) if request.param == "go1" else (G1Rough, humanoid)
    task = kind(xml_file=file, noise_level=0.0, solver_iterations=0)
    nu = task.physics_model().nu
    rng = np.random.default_rng(0)

    def drop(key: Any, place: Any) -> Any:
        state = task.reset(key)
        inner = state.inner
        qpos = inner.qpos.at[:2].set(place).at[2].add(0.15)
        ground = inner.kept.ground._replace(feet=place[None] + inner.kept.ground.feet)
        kept = inner.kept._replace(ground=ground)
        return state._replace(inner=inner._replace(qpos=qpos, kept=kept))

    def step(state: Any, action: Any) -> Any:
        kept = state.inner.kept
        return task.mocap(kept)["mocap_pos"], task.control(kept, action), task.step(state, action)

    places = np.float32(rng.uniform(-6, 6, (ROBOTS, 2)))
    state = jax.jit(simd.vectorize(drop))(jax.random.split(jax.random.key(1), ROBOTS), places)
    forward, rows = jax.jit(simd.vectorize(step)), []
    for _ in range(STEPS):
        action = np.float32(rng.uniform(-0.5, 0.5, (ROBOTS, nu)))
        boxes, ctrl, after = forward(state, action)
        before = jax.tree.map(np.asarray, state.inner._replace(kept=()))
        rows.append((before, np.asarray(boxes), np.asarray(ctrl), after))
        state = after
    return task, rows


@pytest.mark.slow
def test_a_step_on_tiles_is_mujocos(rolled):
    task, rows = rolled
    model = task.compiled()
    model.opt.iterations, model.opt.ls_iterations = 100, 50
    data, touched, off = mujoco.MjData(model), 0, []
    for (before, boxes, ctrl, after), i in itertools.product(rows[4::5], range(ROBOTS)):
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(data, name)[:] = getattr(before, name)[i]
        data.mocap_pos[:], data.ctrl[:] = boxes[i], ctrl[i]
        mujoco.mj_step(model, data, task.frame_skip)
        touched += data.ncon
        off.append(np.abs(data.qvel - np.asarray(after.inner.qvel)[i]).max())
    assert touched > 100, "robots in the air would test nothing"
    assert np.median(off) < 1e-4 and np.max(off) < 1e-2


@pytest.mark.slow
def test_feet_stand_on_the_tile_below_them(rolled):
    task, rows = rolled
    size, seen = task.tile_size, 0
    for _, boxes, _, after in rows[1:]:
        ground, kept = after.inner.kept.ground, after.inner.kept
        now = np.asarray(jax.vmap(lambda m: m.boxes(task.tile_size, task.step_height))(ground))
        below = now.reshape(ROBOTS, len(task.feet), 3, 3)
        places = np.asarray(ground.feet)
        assert (np.abs(below[:, :, 0, :2] - places) <= size / 2 + 1e-5).all()
        gaps = np.abs(below[:, :, 1:, :2] - places[:, :, None]) - size / 2
        # The others are the nearest across each of two sides.
        assert (gaps.max(axis=-1) <= size / 2 + 1e-5).all()
        seen += np.asarray(kept.feet.contact).sum()
        assert boxes.shape == now.shape
    assert seen > 50


def tops_below(line: np.ndarray, stairs: bool, size: float, top: float) -> np.ndarray:
    """Heights of a ground along a line from where the robot begins."""

    @jax.jit
    @jax.vmap
    def below(foot: Any) -> Any:
        ground = Ground(jax.random.key(5), jnp.bool_(stairs), foot[None])
        return ground.boxes(size, top).reshape(3, 3)[0, 2] + 0.5

    return np.asarray(below(np.stack([line, 0 * line], axis=1).astype(np.float32)))


def test_ground_is_flat_at_first_and_rises_as_it_should():
    size, top = 0.3, 0.08
    line = np.arange(0.15, 12, 0.3)
    for stairs in (False, True):
        tops = tops_below(line, stairs, size, top)
        np.testing.assert_allclose(tops[line < 0.9], 0, atol=1e-6)
        steps = np.abs(np.diff(tops))
        if stairs:
            flights = [steps[(line[1:] > a) & (line[1:] < b)] for a, b in ((1.4, 3.3), (8, 10))]
            np.testing.assert_allclose(flights[0], top / 3, atol=1e-6)
            np.testing.assert_allclose(flights[1], top, atol=1e-6)
        else:
            far = tops[line > 4]
            assert far.min() >= 0 and 0.8 * top < far.max() <= top + 1e-6
            assert len(np.unique(far.round(5))) > 20


@pytest.mark.parametrize("size", [0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.6])
def test_every_ring_of_stairs_is_a_step(size):
    line = (np.arange(40) + 0.5) * size
    tops = tops_below(line, True, size, 0.08)
    rings = np.floor((line - 1.0) / size + 1e-6)
    ring = np.maximum(rings, 0)
    step, flight = ring % 8, ring // 8
    wanted = 0.08 * np.minimum((flight + 1) / 3, 1) * np.minimum(step, 8 - step)
    np.testing.assert_allclose(tops, wanted, atol=1e-6)


@pytest.mark.slow
def test_even_tiles_are_a_plane(robot):
    """Feet do not catch at the seams, and what pushes a robot does not push tiles, too."""
    flat = Go1Joystick(xml_file=robot, noise_level=0.0, push_speed=2.0, frame_skip=5)
    tiled = Go1Rough(xml_file=robot, noise_level=0.0, push_speed=2.0, frame_skip=5, step_height=0.0)
    rng = np.random.default_rng(0)
    actions = np.float32(rng.uniform(-0.3, 0.3, (90, ROBOTS, 12)))

    def played(task: Any) -> np.ndarray:
        def forward(state: Any, action: Any) -> Any:
            now = step(state, action)
            return now, now.inner.qpos

        step, reset = simd.vectorize(task.step), simd.vectorize(task.reset)
        keys = jax.random.split(jax.random.key(2), ROBOTS)
        run = jax.jit(lambda: jax.lax.scan(forward, reset(keys), actions)[1])
        return np.asarray(run())

    one, two = played(flat), played(tiled)
    apart = np.abs(one - two).max(axis=-1)
    assert np.median(apart[-1]) < 1e-3 and (apart[20] < 1e-3).mean() > 0.9


def test_boxes_touch_feet_as_the_floor_does_that_they_replace(humanoid):
    """G1's feet touch the floor by pairs of the file, which would stay whatever the floor's bits are."""
    flat = G1Joystick(xml_file=humanoid).compiled()
    rough = G1Rough(xml_file=humanoid).compiled()

    def pairs(model: Any, word: str) -> list[np.ndarray]:
        named = [
            (model.geom(model.pair_geom1[i]).name, model.geom(model.pair_geom2[i]).name)
            for i in range(model.npair)
        ]
        found = [i for i, names in enumerate(named) if any(word in name for name in names)]
        return [np.hstack([model.pair_friction[i], model.pair_dim[i]]) for i in found]

    (one, other), tiles = pairs(flat, "floor"), pairs(rough, "_tile")
    assert not pairs(rough, "floor") and len(tiles) == 6
    np.testing.assert_array_equal(tiles, [one] * 3 + [other] * 3)
    assert one[0] != G1Rough(xml_file=humanoid).compiled().geom("floor").friction[0]


def test_half_of_the_grounds_have_stairs():
    grounds = jax.vmap(lambda key: Ground.drawn(key, 4))(jax.random.split(jax.random.key(0), 400))
    assert 0.4 < np.asarray(grounds.stairs).mean() < 0.6


@pytest.mark.slow
def test_rough_ground_is_a_task(robot, humanoid):
    check_task(Go1Rough(xml_file=robot, push_speed=1.0))
    check_task(G1Rough(xml_file=humanoid))


def test_rough_ground_has_a_mirror_and_a_privileged_part(robot, humanoid):
    for rough, flat in (
        (Go1Rough(xml_file=robot), Go1Joystick(xml_file=robot)),
        (G1Rough(xml_file=humanoid), G1Joystick(xml_file=humanoid)),
    ):
        assert rough.spec.mirror is not None
        seen, known = rough.spec.observation, flat.spec.observation
        assert seen["state"] == known["state"]
        feet = len(rough.feet)
        assert seen["privileged"].shape[0] == known["privileged"].shape[0] + feet


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step_height": -0.1}, "Go1Rough.step_height is -0.1; give 0 or more"),
        ({"step_height": float("nan")}, "Go1Rough.step_height is nan; give 0 or more"),
        ({"tile_size": 0.0}, "Go1Rough.tile_size is 0.0; give 0.1 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(robot, options, said):
    with pytest.raises(SeedbedError, match=said):
        Go1Rough(xml_file=robot, **options)


def test_a_file_without_a_floor_is_refused(robot, tmp_path: Path):
    other = tmp_path / "other.xml"
    other.write_text(Path(robot).read_text().replace('"floor"', '"ground"'))
    with pytest.raises(SeedbedError, match="has no geom 'floor', which uneven ground needs"):
        Go1Rough(xml_file=str(other)).physics_model()
