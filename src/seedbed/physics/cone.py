"""The force of one contact from its slack: MuJoCo's friction pyramid, as hard as the dtype can tell.

The slack y = (N, T1, T2) is J a - aref along the axes of the contact's frame, or (N) without friction. The
pyramid's rows are N + mu T1, N - mu T1, N + mu T2 and N - mu T2. A row pushes if it is negative, with D times
its size; D grows with 1 / mu^2. The cost of a contact is half the sum of D times the squares of the rows that
push.

Where D is too large for the dtype, the normal gives way: the rows are then N + c f plus and minus mu T, where
f is the sum of their forces and c the compliance. That leaves friction as it was, since mu^2 D is not large.
The solver raises aref until qacc is that of hard rows (`solver.compensate`).
`stiffness` is D, or the six numbers of `gains` if any contact of the group may need a compliance.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.types import Array


class Push(NamedTuple):
    """The force of a contact at a slack, and the rows it comes from."""

    force: jax.Array  # [3] or [1] along the axes of its frame
    rows: jax.Array  # [4] or [1] bool, the rows that push


class Rise(NamedTuple):
    """The effect of a step on the rows' cost along it."""

    slope: jax.Array  # the slope at the end of the step minus the slope at its start
    bend: jax.Array  # the curvature at the end
    changed: jax.Array  # bool: the rows that push at the end are not those that push at the start


def gains(stiffness: Array, compliance: Array) -> jax.Array:
    """Returns D, 1 / D and, for one to four pushing rows, 1 / (1 / D + rows * c), as [6]; D must not be 0."""
    soft = 1 / stiffness
    return jnp.stack([stiffness, soft, *(1 / (soft + k * compliance) for k in range(1, 5))])


def compliance(gain: Array) -> jax.Array:
    """Returns how much more than 1 / D a normal with these `gains` gives way to a unit of force."""
    return jnp.maximum(1 / gain[2] - gain[1], 0)


def rows_of(slack: Array, mu: Array) -> jax.Array:
    """Returns the rows of a pyramid without compliance, [4], or the only row [1]."""
    if len(slack) == 1:
        return slack
    n, a, b = slack[0], mu * slack[1], mu * slack[2]
    return jnp.stack([n + a, n - a, n + b, n - b])


def push(stiffness: Array, mu: Array, slack: Array) -> Push:
    """Returns the force of a contact and the rows that push."""
    if stiffness.ndim and len(slack) > 1:
        return _giving(stiffness, mu, slack)
    stiffness = _of_one_row(stiffness)
    rows = rows_of(slack, mu)
    pushing = rows < 0
    force = -jnp.where(pushing, stiffness, 0) * rows
    if len(force) > 1:
        a, b, c, d = math.unstack(force)
        force = jnp.stack([a + b + c + d, mu * (a - b), mu * (c - d)])
    return Push(force, pushing)


def _of_one_row(stiffness: Array) -> Array:
    """Returns the stiffness of a contact's only row, which may give way, or the stiffness of each row."""
    return stiffness[2] if stiffness.ndim else stiffness


def _giving(gain: Array, mu: Array, slack: Array) -> Push:
    """Returns the push of a contact with compliance; `gain` [6] are its `gains`.

    The rows push in the order of their slack, the most negative first: one of each axis, then the opposite
    one of the second axis and of the first. Of j rows, f is minus the sum of N plus and minus mu T, over
    1 / D + j c. The next row pushes, too, if its own slack at that force is negative. All differences are
    taken before D multiplies them.
    """
    d, soft, *k = math.unstack(gain)
    n, t1, t2 = math.unstack(slack)
    sign1, sign2 = (jnp.where(t < 0, -1, 1).astype(t.dtype) for t in (t1, t2))
    u1, u2 = mu * sign1 * t1, mu * sign2 * t2
    first = u1 >= u2
    a, b = jnp.where(first, u1, u2), jnp.where(first, u2, u1)
    f1, f2, f3, f4 = (a - n) * k[0], (a + b - 2 * n) * k[1], (a - 3 * n) * k[2], -4 * n * k[3]
    one = f1 > 0
    two = one & (a - b < soft * f1)
    three = two & (a + 3 * b < soft * f2)
    four = three & (4 * a < soft * f3)

    def by_number(*values: Array) -> Array:
        value = jnp.where(one, values[0], 0)
        for pushes, other in zip((two, three, four), values[1:], strict=True):
            value = jnp.where(pushes, other, value)
        return value

    total = by_number(f1, f2, f3, f4)
    along = by_number(f1, (f2 + (a - b) * d) / 2, (f3 + 2 * a * d) / 3, 2 * a * d)
    across = by_number(jnp.zeros_like(f1), (f2 - (a - b) * d) / 2, 2 * b * d, 2 * b * d)
    along1, along2 = jnp.where(first, along, across), jnp.where(first, across, along)
    near1, far1 = jnp.where(first, one, two), jnp.where(first, four, three)
    near2, far2 = jnp.where(first, two, one), jnp.where(first, three, four)
    plus1, plus2 = sign1 < 0, sign2 < 0
    rows = [
        jnp.where(plus1, near1, far1),
        jnp.where(plus1, far1, near1),
        jnp.where(plus2, near2, far2),
        jnp.where(plus2, far2, near2),
    ]
    return Push(jnp.stack([total, -mu * sign1 * along1, -mu * sign2 * along2]), jnp.stack(rows))


def curvature(stiffness: Array, mu: Array, pushing: jax.Array) -> jax.Array:
    """Returns the second derivative of the cost by the slack, [3, 3] or [1, 1].

    `pushing` [4] or [1] marks the rows that push.
    """
    if not stiffness.ndim or len(pushing) == 1:
        weights = jnp.where(pushing, _of_one_row(stiffness), 0)
        if len(weights) == 1:
            return weights[None]
        a, b, c, d = math.unstack(weights)
        return _symmetric(
            a + b + c + d, mu * (a - b), mu * (c - d), mu * mu * (a + b), 0, mu * mu * (c + d)
        )
    d, _, *k = math.unstack(stiffness)
    a1, b1, a2, b2 = math.unstack(jnp.where(pushing, 1, 0).astype(d.dtype))
    n1, n2 = mu * (a1 - b1), mu * (a2 - b2)
    number = a1 + b1 + a2 + b2
    inverse = 1 / jnp.maximum(number, 1)
    total = jnp.zeros_like(d)
    for j in range(1, 5):
        total = jnp.where(number == j, j * k[j - 1], total)
    # The rows' mean slope moves against the compliance; what differs from the mean moves against D alone.
    mean1, mean2 = n1 * inverse, n2 * inverse
    return _symmetric(
        total,
        total * mean1,
        total * mean2,
        total * mean1 * mean1 + d * (mu * mu * (a1 + b1) - n1 * mean1),
        total * mean1 * mean2 - d * n1 * mean2,
        total * mean2 * mean2 + d * (mu * mu * (a2 + b2) - n2 * mean2),
    )


def _symmetric(nn: Array, n1: Array, n2: Array, one: Array, across: Array, two: Array) -> jax.Array:
    if isinstance(across, int):
        across = np.zeros((), nn.dtype)
    rows = [nn, n1, n2], [n1, one, across], [n2, across, two]
    return jnp.stack([jnp.stack(row) for row in rows])


def cost(stiffness: Array, mu: Array, slack: Array) -> jax.Array:
    """Returns the cost of a contact. It is quadratic in each piece, so it is half of slack times force."""
    return -0.5 * math.dot(slack, push(stiffness, mu, slack).force)


def rise(stiffness: Array, mu: Array, slack: Array, step: Array, size: Array | int) -> Rise:
    """Returns the Rise of `size` times `step` from the slack of a contact."""
    if not stiffness.ndim or len(slack) == 1:
        return rise_of_rows(_of_one_row(stiffness), rows_of(slack, mu), rows_of(step, mu), size)
    before, after = (push(stiffness, mu, y) for y in (slack, slack + size * step))
    bend = (curvature(stiffness, mu, after.rows) * step[None]).sum(-1)
    bend = math.dot(bend, step)
    changed = (before.rows != after.rows).any()
    slope = jnp.where(changed, math.dot(before.force - after.force, step), size * bend)
    return Rise(slope, bend, changed)


def rise_of_rows(
    stiffness: Array,
    slack: Array,
    step: Array,
    size: Array | int,
    bounds: tuple[Array, Array] | None = None,
) -> Rise:
    """Returns the Rise of `size` times `step` in rows that share one stiffness or have one each.

    The cost of a row is quadratic where its slack is negative, or between its `bounds`, and linear beyond.
    The slope is computed as a change, because the large forces that balance at the start would hide it.
    """
    if bounds is not None:
        return _rise_between(stiffness, slack, step, size, bounds)
    there = slack + size * step
    before, after = slack < 0, there < 0
    moved = jnp.where(before, jnp.where(after, size * step, -slack), jnp.where(after, there, 0))
    weight = stiffness * step
    changed = (before != after) & (stiffness > 0)
    return Rise((weight * moved).sum(), jnp.where(after, weight * step, 0).sum(), changed.any())


def _rise_between(
    stiffness: Array, slack: Array, step: Array, size: Array | int, bounds: tuple[Array, Array]
) -> Rise:
    (low, high), there = bounds, slack + size * step
    old, new = (jnp.minimum(jnp.maximum(x, low), high) for x in (slack, there))
    before, after = ((x > low) & (x < high) for x in (slack, there))
    moved = jnp.where(before & after, size * step, new - old)
    weight = stiffness * step
    changed = ((before != after) | (~before & (old != new))) & (stiffness > 0)
    return Rise((weight * moved).sum(), jnp.where(after, weight * step, 0).sum(), changed.any())
