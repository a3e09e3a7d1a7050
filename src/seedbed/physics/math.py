"""Vectors, quaternions and spatial algebra on arrays [..., k]; quaternions are (w, x, y, z).

Spatial vectors [..., 6] are (angular, linear). A spatial inertia has ten numbers, in MuJoCo's order: xx, yy,
zz, xy, xz, yz of the rotational inertia about the reference point; mass times the offset [3] of the centre
of mass; mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.types import Array

MIN_SQUARE = 1e-30
"""A vector whose squared length is not above this counts as zero (mjMINVAL squared). A normal float32."""


def tidy(x: np.ndarray) -> np.ndarray:
    """Rounds elements within 1e-12 of 0, 1 or -1, so that structure shows as exact constants; no zero is -0.

    Sums differ in their last bit from one make of CPU to another, and so in the sign of what is left of 0.
    """
    near = np.round(x) + 0.0
    return np.where((np.abs(near) <= 1) & (np.abs(x - near) < 1e-12), near, x)


def constant(x: Any, dtype: Any) -> Any:
    """Casts a floating-point array to `dtype`; numpy stays numpy. Anything else is returned unchanged."""
    if isinstance(x, np.ndarray | jax.Array) and jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(dtype)
    return x


def take(array: jax.Array, i: jax.Array) -> jax.Array:
    """Reads row i of [n, ...]; i is a traced int32 within range."""
    return lax.dynamic_index_in_dim(array, i, 0, keepdims=False)


def put(array: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    """Writes row i of [n, ...]; i is an int32 within range, constant or traced. Returns the new array."""
    return lax.dynamic_update_index_in_dim(array, value, i, 0)


def unstack(x: Array, axis: int = -1) -> list[Any]:
    """Splits [..., n] into n arrays [...]; numpy stays numpy."""
    if isinstance(x, np.ndarray):
        return list(np.moveaxis(x, axis, 0))
    # One operation, which is traced in a small part of the time of as many slices.
    return list(jnp.unstack(x, axis=axis)) if x.shape[axis] else []


def stack(xs: Sequence[Any]) -> Any:
    """Joins n arrays [...] into [..., n]; the result is numpy if all of them are."""
    constant = all(isinstance(x, np.ndarray | np.generic) for x in xs)
    return np.stack(xs, axis=-1) if constant else jnp.stack(xs, axis=-1)


def mul(a: Any, b: Any) -> Any:
    """Multiplies numbers; two traced ones in half the time that `a * b` takes."""
    return lax.mul(a, b) if _are_traced(a, b) else a * b


def sub(a: Any, b: Any) -> Any:
    """Subtracts numbers; two traced ones in half the time that `a - b` takes."""
    return lax.sub(a, b) if _are_traced(a, b) else a - b


def _are_traced(a: Any, b: Any) -> bool:
    traced = isinstance(a, jax.core.Tracer) and isinstance(b, jax.core.Tracer)
    return traced and a.shape == b.shape and a.dtype == b.dtype


def dot(a: Array, b: Array) -> jax.Array:
    """Returns the inner product over the last axis."""
    return (a * b).sum(-1)


def cross(a: Array, b: Array) -> jax.Array:
    """Returns the vector product [..., 3]."""
    (ax, ay, az), (bx, by, bz) = unstack(a), unstack(b)
    x, y, z = (ay, bz, az, by), (az, bx, ax, bz), (ax, by, ay, bx)
    return stack([sub(mul(p, q), mul(r, s)) for p, q, r, s in (x, y, z)])


def apply(matrix: Array, vector: Array) -> jax.Array:
    """Multiplies matrices [..., 3, 3] by vectors [..., 3]."""
    return (matrix * vector[..., None, :]).sum(-1)


def matmul(a: Array, b: Array) -> jax.Array:
    """Multiplies matrices [..., 3, 3]; written as a sum, so that terms with a constant zero drop out."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def quat_mul(a: Array, b: Array) -> jax.Array:
    """Returns the Hamilton product [..., 4]."""
    (aw, ax, ay, az), (bw, bx, by, bz) = unstack(a), unstack(b)
    return stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ]
    )


def quat_to_mat(quat: Array) -> jax.Array:
    """Returns the rotation matrix [..., 3, 3] of a unit quaternion [..., 4]."""
    w, x, y, z = unstack(quat)
    rows = [
        stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)]),
        stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)]),
        stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]),
    ]
    return jnp.stack(rows, axis=-2)


def normalize_quat(quat: Array) -> jax.Array:
    """Returns the quaternion [4] scaled to length 1, or the identity if it is zero (mju_normalize4)."""
    square = dot(quat, quat)
    fits = square > MIN_SQUARE
    unit = quat / jnp.sqrt(jnp.where(fits, square, 1))
    return jnp.where(fits, unit, np.array([1, 0, 0, 0], quat.dtype))


def np_quat_mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the Hamilton product [4] of two constant quaternions [4]."""
    w = a[0] * b[0] - a[1:] @ b[1:]
    return np.concatenate([[w], a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:])])


def np_quat_to_mat(quat: np.ndarray) -> np.ndarray:
    """Returns the rotation matrix [3, 3] of a constant unit quaternion [4], after `tidy`."""
    w, v = quat[0], quat[1:]
    skew = np.cross(np.eye(3), v)
    return tidy((w * w - v @ v) * np.eye(3) + 2 * np.outer(v, v) + 2 * w * skew)


def two_sum(a: Array, b: Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum of a and b and its rounding error (Knuth, TAOCP 2, 4.2.2).

    The derivative of the error is zero.
    """
    total = a + b
    part = total - a
    return total, lax.stop_gradient((a - (total - part)) + (b - part))


def rotational_mul(inertia: Array, vector: Array) -> jax.Array:
    """Multiplies the rotational part of a spatial inertia [..., 10] by a vector [..., 3]."""
    xx, yy, zz, xy, xz, yz = unstack(inertia[..., :6])
    x, y, z = unstack(vector)
    return stack([xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z])


def inertia_mul(inertia: Array, motion: Array) -> jax.Array:
    """Returns the momentum [..., 6] of a spatial inertia [..., 10] with a motion [..., 6]."""
    xx, yy, zz, xy, xz, yz, hx, hy, hz, mass = unstack(inertia)
    wx, wy, wz, vx, vy, vz = unstack(motion)
    return stack(
        [
            xx * wx + xy * wy + xz * wz + (hy * vz - hz * vy),
            xy * wx + yy * wy + yz * wz + (hz * vx - hx * vz),
            xz * wx + yz * wy + zz * wz + (hx * vy - hy * vx),
            mass * vx + (hz * wy - hy * wz),
            mass * vy + (hx * wz - hz * wx),
            mass * vz + (hy * wx - hx * wy),
        ]
    )


def shift_motion(motion: Array, offset: Array) -> jax.Array:
    """Moves a motion [..., 6] to another reference point, `offset` [..., 3] away from the old one."""
    w = motion[..., :3]
    return jnp.concatenate([w, motion[..., 3:] + cross(w, offset)], axis=-1)


def shift_force(force: Array, offset: Array) -> jax.Array:
    """Moves a wrench [..., 6] to another reference point, `offset` [..., 3] away from the old one."""
    f = force[..., 3:]
    return jnp.concatenate([force[..., :3] - cross(offset, f), f], axis=-1)


def shift_inertia(inertia: Array, offset: Array) -> jax.Array:
    """Moves a spatial inertia [..., 10] to another reference point.

    `offset` [..., 3] points from the new reference point to the old one: the opposite sign of `shift_motion`.
    """
    xx, yy, zz, xy, xz, yz, hx, hy, hz, mass = unstack(inertia)
    rx, ry, rz = unstack(offset)
    mx, my, mz = mass * rx, mass * ry, mass * rz
    kx, ky, kz = 2 * hx + mx, 2 * hy + my, 2 * hz + mz
    ax, ay, az = rx * kx, ry * ky, rz * kz
    return stack(
        [
            xx + (ay + az),
            yy + (ax + az),
            zz + (ax + ay),
            xy - 0.5 * (rx * ky + ry * kx),
            xz - 0.5 * (rx * kz + rz * kx),
            yz - 0.5 * (ry * kz + rz * ky),
            hx + mx,
            hy + my,
            hz + mz,
            mass,
        ]
    )


def may_differ(x: Array) -> bool:
    """Returns whether an array may have a number that is not 0."""
    return isinstance(x, jax.Array) or bool(x.any())


def quat_difference(quat: Array, reference: Array) -> jax.Array:
    """Returns the rotation vector [3] from a reference to a quaternion [4], in the reference's frame.

    The first need not be normalised. Its angle is at most pi (mju_subQuat).
    """
    conjugate = reference * np.array([1, -1, -1, -1], reference.dtype)
    w, *v = unstack(quat_mul(conjugate, normalize_quat(quat)))
    # Of the two quaternions of a rotation, that of the smaller angle.
    sign = jnp.where(w < 0, -1, 1)
    w, v = sign * w, sign * jnp.stack(v)
    square = dot(v, v)
    near = square < 1e-12
    size = jnp.sqrt(jnp.where(near, 1, square))
    return v * jnp.where(near, 2 / jnp.where(near, w, 1), 2 * jnp.arctan2(size, w) / size)
