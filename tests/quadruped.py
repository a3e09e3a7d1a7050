"""A quadruped of boxes and capsules whose sensors have the names that robots' tasks read."""

from __future__ import annotations

_PLACES = ((0.19, -0.05), (0.19, 0.05), (-0.19, -0.05), (-0.19, 0.05))
GO1 = ("FR", "FL", "RR", "RL")
"""What Go1's legs are called."""
_LEG = """
  <body name="{leg}_hip" pos="{x} {y} 0">
    <inertial pos="0 0 0" mass=".6" diaginertia=".001 .001 .001"/>
    <joint name="{leg}_hip" axis="1 0 0" range="-.86 .86" frictionloss=".3"/>
    <body name="{leg}_thigh" pos="0 {side} 0">
      <inertial pos="0 0 -.05" mass=".9" diaginertia=".004 .004 .001"/>
      <joint name="{leg}_thigh" axis="0 1 0" range="-.7 4.5" frictionloss=".3"/>
      <body name="{leg}_calf" pos="0 0 -.213">
        <inertial pos="0 0 -.1" mass=".2" diaginertia=".002 .002 .0001"/>
        <joint name="{leg}_calf" axis="0 1 0" range="-2.8 -.9" frictionloss=".6"/>
        <geom name="{leg}" type="sphere" size=".023" pos="0 0 -.213" contype="0" conaffinity="1"/>
        <site name="{leg}" pos="0 0 -.213"/>
      </body>
    </body>
  </body>"""


def xml(home: str = "home", names: tuple[str, ...] = GO1) -> str:
    """Returns the robot's MJCF; `home` is the name of its keyframe, `names` are those of its legs."""
    legs = "".join(
        _LEG.format(leg=leg, x=x, y=y, side=0.08 if y > 0 else -0.08)
        for leg, (x, y) in zip(names, _PLACES, strict=True)
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
