"""What an episode of a robot with a joystick keeps besides the physics."""

from __future__ import annotations

from typing import NamedTuple

from seedbed.types import Array, Tree


class Feet(NamedTuple):
    """What is known of the feet, in the order of `JoystickTask.feet`."""

    contact: Array  # [n] bool: on the ground after the last step
    air_time: Array  # [n] s since a foot left the ground
    peak: Array  # [n] m, its greatest height since


class Push(NamedTuple):
    """A push of the trunk along the ground, and the time until it."""

    wait: Array  # int32, steps from one push to the next
    steps: Array  # int32, how long it lasts
    seconds: Array  # the same, not rounded
    speed: Array  # m/s
    since: Array  # int32, steps since the last one
    step: Array  # int32, steps of this one
    direction: Array  # [3]


class Seen(NamedTuple):
    """What the observation after a step shows, besides what only critics see of the step itself."""

    measured: Array  # [m] what the robot measures, with noise
    command: Array  # [3] m/s and rad/s: forward, left, turning left
    action: Array  # [nu] of the step before
    contact: Array  # [n] bool, before the step
    air_time: Array  # [n] s
    push: Array  # [3] N, in the step
    pushed: Array  # bool


class Ride(NamedTuple):
    """What an episode keeps besides the physics."""

    key: Array
    step: Array  # int32
    command: Array  # [3] by which the next step is judged
    until: Array  # int32, steps until the command changes
    action: Array  # [nu] of the last step
    earlier: Array  # [nu] of the one before
    feet: Feet
    push: Push
    seen: Seen
    memory: Tree  # what the task itself remembers of what was measured
