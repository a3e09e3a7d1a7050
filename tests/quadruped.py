"""A quadruped of boxes and capsules whose sensors have the names that robots' tasks read."""

from __future__ import annotations

import re

_PLACES = ((0.19, -0.05), (0.19, 0.05), (-0.19, -0.05), (-0.19, 0.05))
GO1 = ("FR", "FL", "RR", "RL")
"""What Go1's legs are called."""
_LEG = """
  <body name="{leg}_hip" pos="{x} {y} 0">
    <inertial pos="0 0 0" mass=".6" diaginertia=".001 .001 .001"/>
    <joint name="{leg}_hip" axis="1 0 0" range="-.86 .86" frictionloss=".3"/>{hip}
    <body name="{leg}_thigh" pos="0 {side} 0">{thigh}
      <inertial pos="0 0 -.05" mass=".9" diaginertia=".004 .004 .001"/>
      <joint name="{leg}_thigh" axis="0 1 0" range="-.7 4.5" frictionloss=".3"/>
      <body name="{leg}_calf" pos="0 0 -.213">{calf}
        <inertial pos="0 0 -.1" mass=".2" diaginertia=".002 .002 .0001"/>
        <joint name="{leg}_calf" axis="0 1 0" range="-2.8 -.9" frictionloss=".6"/>
        <geom name="{leg}" type="sphere" size=".023" pos="0 0 -.213" contype="0" conaffinity="1"/>
        <site name="{leg}" pos="0 0 -.213"/>
      </body>
    </body>
  </body>"""

_LIMBS = {
    "hip": {"hip": 'type="cylinder" size=".046 .02" pos="0 {half} 0" quat="1 1 0 0"'},
    "thigh": {
        "thigh1": 'type="capsule" size=".015" fromto="-.02 0 0 -.02 0 -.16"',
        "thigh2": 'type="capsule" size=".015" fromto="0 0 0 -.02 0 -.1"',
        "thigh3": 'type="capsule" size=".015" fromto="-.02 0 -.16 0 0 -.2"',
    },
    "calf": {
        "calf1": 'type="capsule" size=".01" fromto="0 0 0 .02 0 -.13"',
        "calf2": 'type="capsule" size=".01" fromto=".02 0 -.13 0 0 -.2"',
    },
}
"""What may touch the ground besides the feet, in each part of a leg."""


def limbs(leg: str, half: float, touch: str) -> dict[str, str]:
    """Returns the geoms of a leg's parts, which touch "floor", "all", or nothing for ""."""
    contype = 1 if touch == "all" else 0
    return {
        part: "".join(
            f'\n<geom name="{leg.lower()}_{name}" {shape.format(half=half)} condim="1" '
            f'contype="{contype}" conaffinity="1"/>'
            for name, shape in shapes.items()
        )
        if touch
        else ""
        for part, shapes in _LIMBS.items()
    }


def xml(home: str = "home", names: tuple[str, ...] = GO1, touch: str = "") -> str:
    """Returns the robot's MJCF.

    `home` is the name of its keyframe, `names` are those of its legs, `touch` what its limbs can touch: only
    "floor", "all", or nothing for "", and then it has none.
    """
    legs = "".join(
        _LEG.format(leg=leg, x=x, y=y, side=2 * half, **limbs(leg, half, touch))
        for leg, (x, y) in zip(names, _PLACES, strict=True)
        for half in [0.04 if y > 0 else -0.04]
    )
    joints = [f"{leg}_{part}" for leg in names for part in ("hip", "thigh", "calf")]
    servos = "".join(
        f'<position joint="{each}" kp="35" inheritrange="1" forcerange="-30 30"/>'
        for each in joints
    )
    feet = "".join(
        f'<framelinvel objtype="site" objname="{leg}" name="{leg}_global_linvel"/>'
        f'<contact name="{leg}_floor_found" geom1="{leg}" geom2="floor" num="1" data="found"/>'
        f'<framepos objtype="site" objname="{leg}" name="{leg}_pos" reftype="site" refname="imu"/>'
        for leg in names
    )
    lying = [f"{leg.lower()}_{part}" for leg in names for each in _LIMBS.values() for part in each]
    for geom in lying if touch else []:
        feet += f'<contact name="{geom}_floor_found" geom1="{geom}" geom2="floor" data="found"/>'
    pose = "0 0 .278 1 0 0 0 .1 .9 -1.8 -.1 .9 -1.8 .1 .9 -1.8 -.1 .9 -1.8"
    return f"""
<mujoco>
  <compiler angle="radian"/>
  <option timestep=".004"><flag eulerdamp="disable"/></option>
  <default><joint armature=".005" damping=".5"/></default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 .01" contype="1" conaffinity="0" friction=".6"/>
    <body name="trunk" pos="0 0 .445">
      <freejoint/>
      <inertial pos=".02 0 0" mass="5.2" diaginertia=".017 .06 .07"/>
      <site name="imu" pos="-.016 -.066 -.006" euler="0 0 .17"/>
      {legs}
    </body>
  </worldbody>
  <actuator>{servos}</actuator>
  <sensor>
    <gyro site="imu" name="gyro"/>
    <velocimeter site="imu" name="local_linvel"/>
    <accelerometer site="imu" name="accelerometer"/>
    <framezaxis objtype="site" objname="imu" name="upvector"/>
    <framelinvel objtype="site" objname="imu" name="global_linvel"/>
    <frameangvel objtype="site" objname="imu" name="global_angvel"/>
    <framequat objtype="site" objname="imu" name="orientation"/>
    {feet}
  </sensor>
  <keyframe><key name="{home}" qpos="{pose}"/></keyframe>
</mujoco>"""


def disordered(xml: str) -> str:
    """Returns the MJCF of a robot without keyframes, as in `examples/dog.xml`, less orderly.

    Its actuators are in the reverse order, its trunk carries a tail without a servo, and is body 2 of the
    file.
    """
    head, rest = xml.split("<actuator>")
    servos, tail = rest.split("</actuator>")
    each = re.findall("<position[^>]*>", servos)
    wag = """
      <body name="tail" pos="-.2 0 0">
        <joint name="wag" axis="0 0 1" damping=".1"/>
        <geom type="sphere" size=".02" mass=".05" contype="0" conaffinity="0"/>
      </body>"""
    head = head.replace(
        '<site name="imu" pos="0 0 .02"/>', '<site name="imu" pos="0 0 .02"/>' + wag
    )
    rock = '<body name="rock"><geom size="1" pos="0 0 9" mass="99"/></body>'
    head = head.replace('<body name="trunk"', f'{rock}<body name="trunk"')
    return f"{head}<actuator>{chr(10).join(reversed(each))}</actuator>{tail}"


def straight(xml: str) -> str:
    """Returns the MJCF of a robot of `xml`, whose inertial sensor is in the middle and not turned."""
    return xml.replace(
        'pos="-.016 -.066 -.006" euler="0 0 .17"', 'pos="-.016 0 -.006" euler="0 .1 0"'
    )
