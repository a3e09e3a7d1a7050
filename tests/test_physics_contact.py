"""Contacts and the rows made of them, against MuJoCo's contact and efc arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from mujoco_states import MODELS, path
from numpy_jaxpr import evaluate
from seedbed import physics
from seedbed.physics import collision, constraint, mjcf, narrow, refusals, slots
from seedbed.physics.colliders import COLLIDERS
from seedbed.physics.dynamics import mass_matrix, velocity
from seedbed.physics.equality import Moving
from seedbed.physics.kinematics import kinematics
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import DTYPES
from seedbed.simd.schedule.plan import Liveness
from seedbed.simd.vectorize import trace_example

SIZES = {"sphere": ".06", "capsule": ".05 .12", "cylinder": ".07 .1"}
TILTED = "<geom type='plane' size='1 1 1' margin='.02' pos='.1 0 -.02' euler='17 11 0'/>"
LEVEL = "<geom type='plane' size='1 1 1' margin='.02' pos='.1 0 -.02'/>"


def moving(kind: str, name: str, more: str = "") -> str:
    geom = f"<geom type='{kind}' size='{SIZES[kind]}' margin='.01' gap='.005' {more}/>"
    return f"<body name='{name}'><freejoint/>{geom}</body>"


def static(kind: str) -> str:
    return f"<geom type='{kind}' size='{SIZES[kind]}' pos='.02 .01 .03' euler='20 30 40'/>"


def scene(*bodies: str, options: str = "") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(
        f"<mujoco>{options}<worldbody>{''.join(bodies)}</worldbody></mujoco>"
    )


def poses(model: mujoco.MjModel, count: int, parallel: bool = False, seed: int = 0) -> np.ndarray:
    """Random poses [count, nq] of free bodies near the origin."""
    rng = np.random.default_rng(seed)
    qpos = np.zeros((count, model.njnt, 7))
    qpos[:, :, :3] = 0.09 * rng.normal(size=(count, model.njnt, 3))
    qpos[:, :, 3:] = rng.normal(size=(count, model.njnt, 4))
    if parallel:
        qpos[:, 1, 3:] = qpos[:, 0, 3:]
        qpos[::2, 1, 3:] = qpos[::2, 0, [4, 3, 6, 5]] * [-1, 1, 1, -1]  # turned over
    qpos[:, :, 3:] /= np.linalg.norm(qpos[:, :, 3:], axis=-1, keepdims=True)
    return qpos.reshape(count, -1)


@pytest.mark.quick("plane_cylinder")
@pytest.mark.parametrize("collide", [f for f, _ in COLLIDERS.values()], ids=lambda f: f.__name__)
def test_kernels_of_colliders_have_no_wide_types_under_x64(collide):
    """Literals are then of 64 bits."""
    number, vector = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((), (3,)))
    geom = narrow.Geom(vector, vector, vector, number, number, number)
    with jax.enable_x64(True):
        closed = trace_example(collide, "collide", ((geom, geom, number), {})).closed
        live = Liveness(trace(closed, [False] * len(closed.in_avals)))
    assert {node.dtype for node in live.nodes} <= set(DTYPES)


def found(model: mujoco.MjModel, qpos: np.ndarray, dtype: Any) -> list[list[Any]]:
    """Contacts of each pose: (geoms, dist, pos in the world, frame), and how many MuJoCo would list."""
    ours = mjcf.from_mujoco(model).astype(dtype)

    def one(q: jax.Array) -> Any:
        kin = kinematics(ours, q, physics.init(ours, q).qpos_low)
        origins = jnp.stack([jnp.asarray(origin.high) for origin in kin.origins])
        return collision.detect(ours, kin), origins

    contacts, origins = evaluate(jax.vmap(one), qpos.astype(dtype))
    tables = [slots.slots(ours, kinds) for kinds in slots.candidates(ours)]
    rows = []
    for i in range(len(qpos)):
        row = []
        for points, table in zip((contacts.fixed, contacts.moving), tables, strict=True):
            for k in np.flatnonzero(points.active[i]):
                point = jax.tree.map(lambda x, at=(i, k): x[at], points)
                pos = point.pos + origins[i, model.body_treeid[table.frame[k]]]
                basis = {} if table.basis is None else {"basis": table.basis[k].astype(dtype)}
                frame = evaluate(collision.frame_of, point, basis)
                row.append((tuple(table.geom[k]), point.dist, pos, frame))
        rows.append([sorted(row, key=lambda contact: contact[0]), int(contacts.ncon[i])])
    return rows


def wanted(model: mujoco.MjModel, qpos: np.ndarray) -> list[list[Any]]:
    data, rows = mujoco.MjData(model), []
    for q in qpos:
        data.qpos = q
        mujoco.mj_fwdPosition(model, data)
        row = [
            ((c.geom1, c.geom2), c.dist, c.pos.copy(), c.frame.reshape(3, 3).copy())
            for c in data.contact
            if not c.exclude
        ]
        rows.append([sorted(row, key=lambda contact: contact[0]), data.ncon])
    return rows


def differences(ours: list[list[Any]], theirs: list[list[Any]]) -> np.ndarray:
    """Errors of distance, point and frame [n, 3] of contacts that both have; the lists must agree."""
    errors = []
    for (mine, my_count), (other, count) in zip(ours, theirs, strict=True):
        assert my_count == count
        assert [contact[0] for contact in mine] == [contact[0] for contact in other]
        for a, b in zip(mine, other, strict=True):
            errors.append([np.abs(x - y).max() for x, y in zip(a[1:], b[1:], strict=True)])
    return np.array(errors)


SCENES = {
    "plane-sphere": (LEVEL, moving("sphere", "a")),
    "plane-capsule": (LEVEL, moving("capsule", "a")),
    "plane-cylinder": (LEVEL, moving("cylinder", "a")),
    "tilted plane-sphere": (TILTED, moving("sphere", "a")),
    "tilted plane-capsule": (TILTED, moving("capsule", "a")),
    "tilted plane-cylinder": (TILTED, moving("cylinder", "a")),
    "sphere-sphere": (moving("sphere", "a"), moving("sphere", "b")),
    "sphere-capsule": (moving("capsule", "a"), moving("sphere", "b")),
    "capsule-capsule": (moving("capsule", "a"), moving("capsule", "b")),
    "sphere-cylinder": (moving("cylinder", "a"), moving("sphere", "b")),
    "static sphere": (static("sphere"), moving("capsule", "a"), moving("sphere", "b")),
    "static capsule": (static("capsule"), moving("sphere", "a"), moving("capsule", "b")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_contacts_are_mujocos(name):
    model = scene(*SCENES[name])
    qpos = poses(model, 300)
    exact = differences(found(model, qpos, np.float64), wanted(model, qpos))
    assert len(exact) > 50
    assert exact.max() < 1e-12
    qpos = np.float64(np.float32(qpos))
    rounded = differences(found(model, qpos, np.float32), wanted(model, qpos))
    assert rounded[:, :2].max() < 5e-7
    assert np.quantile(rounded[:, 2], 0.99) < 5e-6


def test_upright_cylinder_stands_on_three_points():
    model = scene(LEVEL, moving("cylinder", "a"))
    qpos = np.array([[0.1, 0.2, 0.081, 1, 0, 0, 0], [0, 0, 0.079, 0, 1, 0, 0]])
    theirs = wanted(model, qpos)
    assert [count for _, count in theirs] == [3, 3]
    assert differences(found(model, qpos, np.float64), theirs).max() < 1e-12


def lying(model: mujoco.MjModel, count: int) -> np.ndarray:
    """Poses [count, nq] of a capsule near a disc of a cylinder, at up to about 6 degrees to it."""
    rng = np.random.default_rng(0)
    (radius, _), (disc, half) = model.geom_size[:, :2]
    qpos, mat = np.zeros((count, 14)), np.zeros(9)
    for q in qpos:
        q[10:] = rng.normal(size=4)
        q[10:] /= np.linalg.norm(q[10:])
        mujoco.mju_quat2Mat(mat, q[10:])
        side, turn, tilt = rng.choice([-1, 1]), rng.uniform(0, 2 * np.pi), rng.uniform(-0.1, 0.1)
        height = side * (half + radius + rng.uniform(-0.02, 0.01))
        q[:3] = mat.reshape(3, 3) @ [*rng.normal(size=2) * disc / 2, height]
        axis = mat.reshape(3, 3) @ [np.cos(turn), np.sin(turn), tilt]
        mujoco.mju_quatZ2Vec(q[3:7], axis)
    return qpos


def disc_contacts(model: mujoco.MjModel, qpos: np.ndarray) -> tuple[list[list[Any]], np.ndarray]:
    """MuJoCo's contacts of a capsule with a cylinder, and which poses are those of one that lies on a disc.

    Only for these are they what MuJoCo finds with multiccd, without the second of two that are the same.
    """
    both = wanted(model, qpos)
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_MULTICCD
    alone = wanted(model, qpos)
    mats, lies, rows = np.zeros((2, 9)), [], []
    for q, (many, _), (one, _) in zip(qpos, both, alone, strict=True):
        mujoco.mju_quat2Mat(mats[0], q[3:7])
        mujoco.mju_quat2Mat(mats[1], q[10:])
        axis, up = mats.reshape(2, 3, 3)[:, :, 2]
        upright = bool(one) and abs(one[0][3][0] @ up) > np.sqrt(1 - narrow.LEVEL**2)
        lies.append(upright and abs(axis @ up) < narrow.LEVEL)
        if lies[-1] and len(many) == 2 and np.abs(many[0][2] - many[1][2]).max() < 1e-9:
            many = many[:1]
        rows.append(many if lies[-1] else one)
    return rows, np.array(lies)


def in_order(contacts: list[Any]) -> list[Any]:
    return sorted(contacts, key=lambda contact: contact[1])


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.002, 0.0])
def test_a_capsule_lies_on_a_disc_on_both_ends(margin):
    model = scene(moving("capsule", "a"), moving("cylinder", "b"))
    model.geom_margin[:], model.geom_gap[:] = margin, margin / 2
    qpos = lying(model, 300)
    mine, rounded = (found(model, qpos, dtype) for dtype in (np.float64, np.float32))
    theirs, lies = disc_contacts(model, qpos)
    counts, errors = [], []
    for i in np.flatnonzero(lies):
        ours, single, other = mine[i][0], rounded[i][0], theirs[i]
        assert len(ours) == len(single) == len(other)
        counts.append(len(ours))
        for a, b, c in zip(*map(in_order, (ours, single, other)), strict=True):
            errors.append([np.abs(x - y).max() for x, y in zip(a[1:], c[1:], strict=True)])
            assert abs(b[1] - a[1]) < 1e-6
            assert np.abs(b[2] - a[2]).max() < 1e-4
    assert counts.count(2) > 100
    assert counts.count(1) > 5
    assert (np.quantile(errors, 0.95, axis=0) < [1e-7, 1e-6, 1e-12]).all()
    assert (np.max(errors, axis=0) < [1e-6, 1e-4, 1e-12]).all()


@pytest.mark.slow
def test_capsule_meets_solid_cylinder():
    """MuJoCo's iterative collider is exact to 1e-6, and less so where the capsule's axis is inside."""
    model = scene(moving("capsule", "a"), moving("cylinder", "b"))
    qpos = poses(model, 600)
    mine, rounded = (found(model, qpos, dtype) for dtype in (np.float64, np.float32))
    theirs, lies = disc_contacts(model, qpos)
    errors = {True: [], False: []}
    for (ours, _), (single, _), other, on_disc in zip(mine, rounded, theirs, lies, strict=True):
        assert len(ours) == len(other)
        if len(other) == 1 and not on_disc:
            deep = other[0][1] < -0.05  # the capsule's axis is inside
            # Of two ways out that are equally short, rounding chooses none.
            assert not deep or np.abs(single[0][2] - ours[0][2]).max() < 1e-5
            pairs = zip(ours[0][1:], other[0][1:], strict=True)
            errors[deep].append([np.abs(x - y).max() for x, y in pairs])
    shallow, deep = np.array(errors[False]), np.array(errors[True])
    assert min(len(shallow), len(deep)) > 50
    assert (np.quantile(shallow, 0.95, axis=0) < [1e-9, 1e-6, 1e-4]).all()
    assert (np.quantile(deep, 0.95, axis=0)[:2] < [1e-5, 1e-3]).all()


@pytest.mark.parametrize("name", MODELS)
def test_candidate_pairs_cover_mujocos_contacts(name):
    """Shrunk to a heap, a model shows all pairs that its filters let through."""
    model = mujoco.MjModel.from_xml_path(str(path(name)))
    pairs = set(slots.pairs(model))
    data, seen = mujoco.MjData(model), set()
    rng = np.random.default_rng(0)
    model.geom_margin[:] = 5  # everything is near; the bounding volumes do not know
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_MIDPHASE
    for _ in range(3):
        mujoco.mj_integratePos(model, data.qpos, rng.normal(size=model.nv), 0.3)
        mujoco.mj_forward(model, data)
        seen |= {(int(c.geom1), int(c.geom2)) for c in data.contact}
    assert seen == pairs
    assert not list(refusals.unsupported(model))


def test_exclude_and_masks_filter_pairs():
    xml = """<mujoco><worldbody>
      <body name='a'><freejoint/><geom size='.1'/><geom name='masked' size='.1' contype='0' conaffinity='2'/>
        <body name='child'><joint axis='1 0 0'/><geom size='.1'/>
          <body name='grandchild'><joint axis='1 0 0'/><geom size='.1'/></body></body></body>
      <body name='b'><freejoint/><geom size='.1' conaffinity='4'/></body>
      <body name='c'><freejoint/><geom size='.1' contype='2'/></body>
      </worldbody><contact><exclude body1='a' body2='c'/></contact></mujoco>"""
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    assert {(c.geom1, c.geom2) for c in data.contact} == set(slots.pairs(model))


def test_what_has_no_collider_is_named():
    model = scene(
        moving("cylinder", "a"), moving("cylinder", "b"), moving("sphere", "c", "condim='4'")
    )
    named = "\n".join(refusals.grouped(refusals.unsupported(model)))
    assert "cylinder-cylinder contact (0 of a with 1 of b): use" in named
    assert "condim=4 of geom (2 of c): use 1 or 3" in named


MIXED = (
    "<geom type='plane' size='1 1 1' friction='.5 .1 .1' solref='.03 .8' solmix='2' condim='1'/>",
    moving("capsule", "a", "friction='1.5 .1 .1' solimp='.5 .8 .02 .3 3' condim='3'"),
    moving("sphere", "b", "friction='.3 .1 .1' priority='1' solref='-900 -40' condim='3'"),
    moving("capsule", "c", "solref='-500 -30' solmix='0' solimp='.7 .7 .01' condim='1'"),
    moving("sphere", "d", "solref='.001 1.2' solmix='0' solimp='0 1 0 .5 1' condim='1'"),
    moving("sphere", "e", "friction='0 0 0' solimp='.2 .99 .1 .9 1.5' condim='3'"),
)


def test_parameters_are_mixed_as_mujoco_does():
    model = scene(*MIXED)
    ours, data = mjcf.from_mujoco(model), mujoco.MjData(model)
    tables = [slots.slots(ours, kinds) for kinds in slots.candidates(ours)]
    rows = {}
    for table in tables:
        for k, geoms in enumerate(table.geom):
            rows[tuple(geoms)] = table, k
    seen = set()
    for q in poses(model, 100):
        data.qpos = q
        mujoco.mj_forward(model, data)
        for c in data.contact:
            table, k = rows[c.geom1, c.geom2]
            np.testing.assert_allclose(table.solref[k], c.solref, rtol=1e-14)
            np.testing.assert_allclose(table.solimp[k], c.solimp, rtol=1e-14)
            assert (table.condim[k], table.friction[k]) == (c.dim, c.friction[0])
            assert table.margin[k] == c.includemargin
            seen.add((c.geom1, c.geom2))
    assert len(seen) == len(rows)


LIMITED = """<mujoco><option timestep='.004'/><worldbody>
  <body><joint type='slide' range='-.1 .2' margin='.05' solreflimit='.03 .7'/><geom size='.1' mass='1'/>
    <body><joint axis='0 1 0' range='-5 5' margin='.2' solimplimit='.3 .9 .05 .2 3'/><geom size='.1'/>
      <body><joint axis='0 0 1' range='-10 10' solreflimit='-200 -9'/><geom size='.1' pos='.3 0 0'/>
        <body><joint axis='1 0 0'/><geom size='.1'/></body></body></body></body></worldbody></mujoco>"""


def rows_along(aref: np.ndarray, mu: float) -> np.ndarray:
    """A pyramid's rows [4] of what is along the axes of a contact's frame [3], or the only row [1]."""
    signs = np.array([[1, 1, 0], [1, -1, 0], [1, 0, 1], [1, 0, -1]]) * [1, mu, mu]
    return signs @ aref if len(aref) == 3 else aref


def rows_of(model: mujoco.MjModel, qpos: np.ndarray, qvel: np.ndarray, dtype: Any) -> Any:
    """D and aref [m] of each state's rows in MuJoCo's order, and their residue J qvel = 0."""
    ours = mjcf.from_mujoco(model).astype(dtype)

    def one(q: jax.Array, v: jax.Array) -> Any:
        kin = kinematics(ours, q, physics.init(ours, q).qpos_low)
        moving = Moving(v, *velocity(ours, kin.cdof, v))
        contacts = collision.detect(ours, kin)
        return contacts, constraint.make_rows(
            ours, kin, contacts, q, moving, mass_matrix(ours, kin)
        )

    contacts, rows = evaluate(jax.vmap(one), qpos.astype(dtype), qvel.astype(dtype))
    groups = constraint.groups(ours)
    out = []
    for i in range(len(qpos)):
        near = rows.dofs.stiffness[i] > 0
        pairs = [
            (d, a)
            for d, a in zip(rows.dofs.stiffness[i, near], rows.dofs.aref[i, near], strict=True)
        ]
        found = []
        sides = (contacts.fixed, rows.fixed, groups[0]), (contacts.moving, rows.moving, groups[1])
        for points, edges, group in sides:
            for k in np.flatnonzero(points.active[i]):
                count = 1 if group.slots.condim[k] == 1 else 4
                share = group.slots.rows / count  # a frictionless slot's D is spread over the rows
                stiffness = np.atleast_1d(edges.stiffness[i, k])[0] * share
                aref = rows_along(edges.aref[i, k], group.slots.friction[k])[:count]
                if count == 1:
                    aref = edges.aref[i, k, :1]
                found.append((tuple(group.slots.geom[k]), [(stiffness, a) for a in aref]))
        for _, values in sorted(found, key=lambda contact: contact[0]):
            pairs += values
        out.append(np.array(pairs).reshape(-1, 2))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("case", ["limits", "contacts"])
def test_rows_are_mujocos(case):
    model = mujoco.MjModel.from_xml_string(LIMITED) if case == "limits" else scene(*MIXED)
    rng = np.random.default_rng(1)
    qpos = poses(model, 100) if case == "contacts" else rng.normal(size=(100, model.nq)) * 0.15
    qpos = np.float64(np.float32(qpos))
    qvel = np.float64(np.float32(rng.normal(size=(100, model.nv))))
    data, counts = mujoco.MjData(model), set()
    results = {dtype: rows_of(model, qpos, qvel, dtype) for dtype in (np.float64, np.float32)}
    for i in range(len(qpos)):
        data.qpos, data.qvel = qpos[i], qvel[i]
        mujoco.mj_forward(model, data)
        order = np.argsort(
            [c.geom1 * 1000 + c.geom2 for c in data.contact if not c.exclude], kind="stable"
        )
        starts = [c.efc_address for c in data.contact if not c.exclude]
        sizes = [1 if c.dim == 1 else 4 for c in data.contact if not c.exclude]
        index = [*range(starts[0] if starts else data.nefc)]
        for k in order:
            index += range(starts[k], starts[k] + sizes[k])
        theirs = np.stack([data.efc_D[index], data.efc_aref[index]], axis=1)
        counts.add(data.nefc)
        for dtype, rtol in ((np.float64, 1e-10), (np.float32, 2e-4)):
            scale = np.abs(theirs).max(0, initial=1)
            assert results[dtype][i].shape == theirs.shape
            np.testing.assert_allclose(results[dtype][i] / scale, theirs / scale, atol=rtol)
            if dtype == np.float64:
                np.testing.assert_allclose(results[dtype][i], theirs, rtol=1e-9, atol=1e-9)
    assert len(counts) > 3


@pytest.mark.slow
def test_replaced_friction_is_an_input():
    """Friction of each environment, as in MuJoCo where geom_friction is changed."""
    model = scene(LEVEL, moving("capsule", "a"), moving("sphere", "b"))
    ours = mjcf.from_mujoco(model)
    rng = np.random.default_rng(0)
    qpos, friction = poses(model, 30), rng.uniform(0, 2, (30, model.ngeom, 3))
    qvel = rng.normal(size=(30, model.nv))

    def one(q: jax.Array, v: jax.Array, mu: jax.Array) -> Any:
        changed = ours.replace(geom_friction=mu)
        kin = kinematics(changed, q, physics.init(changed, q).qpos_low)
        moving = Moving(v, *velocity(changed, kin.cdof, v))
        contacts = collision.detect(changed, kin)
        mass = mass_matrix(changed, kin)
        return constraint.make_rows(changed, kin, contacts, q, moving, mass)

    rows = evaluate(jax.vmap(one), qpos, qvel, friction)
    data, seen = mujoco.MjData(model), 0
    for i in range(30):
        model.geom_friction = friction[i]
        data.qpos, data.qvel = qpos[i], qvel[i]
        mujoco.mj_forward(model, data)
        mine = np.concatenate([rows.fixed.stiffness[i, :, 0], rows.moving.stiffness[i, :, 0]])
        np.testing.assert_allclose(np.sort(np.repeat(mine[mine > 0], 4)), np.sort(data.efc_D))
        seen += data.nefc
    assert seen > 100
