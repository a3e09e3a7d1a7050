"""Which geom types can touch, and how."""

from __future__ import annotations

from seedbed.physics.boxes import box_box, plane_box, sphere_box
from seedbed.physics.capsule_box import capsule_box
from seedbed.physics.narrow import (
    BOX,
    CAPSULE,
    CYLINDER,
    PLANE,
    SPHERE,
    Collider,
    capsule_capsule,
    capsule_cylinder,
    plane_capsule,
    plane_cylinder,
    plane_sphere,
    sphere_capsule,
    sphere_cylinder,
    sphere_sphere,
)

COLLIDERS: dict[tuple[int, int], tuple[Collider, int]] = {
    (PLANE, SPHERE): (plane_sphere, 1),
    (PLANE, CAPSULE): (plane_capsule, 2),
    (PLANE, CYLINDER): (plane_cylinder, 4),
    (PLANE, BOX): (plane_box, 4),
    (SPHERE, SPHERE): (sphere_sphere, 1),
    (SPHERE, CAPSULE): (sphere_capsule, 1),
    (SPHERE, CYLINDER): (sphere_cylinder, 1),
    (SPHERE, BOX): (sphere_box, 1),
    (CAPSULE, CAPSULE): (capsule_capsule, 2),
    (CAPSULE, CYLINDER): (capsule_cylinder, 2),
    (CAPSULE, BOX): (capsule_box, 2),
    (BOX, BOX): (box_box, 8),
}
"""The collider of each pair of geom types, and the number of touches that it returns."""
