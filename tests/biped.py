"""Bipeds of capsules whose joints, feet and sensors have the names of MuJoCo Playground's humanoids."""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    """How a humanoid calls its parts; {} is the side."""

    sides: tuple[str, str]  # of the joints
    leg: str  # yaw, roll, pitch, knee and ankle
    arm: str
    waist: str
    foot: str  # the site
    soles: str  # what touches the floor
    geoms: tuple[str, str, str, str] = ("{}_foot", "{}_shin", "{}_thigh", "{}_hand")
    limbs: tuple[str, str] = ("left", "right")  # sides of all but the joints
    pairs: tuple[
        str, ...
    ] = ()  # geoms that touch: "core0 shin1" are the left foot and the right shin
    frames: tuple[str, str] = ("", "_torso")  # endings of sensors, of the trunk and the upper body
    imu: str = "imu"
    attitude: str = "orientation"
    home: str = "home"
    timestep: float = 0.002


_PARTS = ("core", "shin", "thigh", "hand")
STYLES = {
    "t1": Style(
        ("Left", "Right"),
        "{}_Hip_Yaw {}_Hip_Roll {}_Hip_Pitch {}_Knee_Pitch {}_Ankle_Pitch",
        "{}_Shoulder_Pitch",
        "Waist",
        "{}_foot",
        "{}_foot_1 {}_foot_2 {}_foot_3 {}_foot_4",
        pairs=("core0 core1",),
    ),
    "g1": Style(
        ("left", "right"),
        "{0}_hip_yaw_joint {0}_hip_roll_joint {0}_hip_pitch_joint {0}_knee_joint {0}_ankle_pitch_joint",
        "{}_shoulder_pitch_joint",
        "waist_yaw_joint",
        "{}_foot",
        "{}_foot",
        pairs=("core1 core0", "core0 shin1", "core1 shin0", "hand0 thigh0", "hand1 thigh1"),
        frames=("_pelvis", "_torso"),
        imu="imu_in_pelvis",
        attitude="orientation_pelvis",
        home="knees_bent",
    ),
    "h1": Style(
        ("left", "right"),
        "{0}_hip_yaw {0}_hip_roll {0}_hip_pitch {0}_knee {0}_ankle",
        "{}_shoulder_pitch",
        "torso",
        "{}_foot",
        "{}_foot1",
        timestep=0.004,
    ),
    "berkeley": Style(
        ("LL", "LR"),
        "{0}_HR {0}_HAA {0}_HFE {0}_KFE {0}_FFE",
        "{}_arm",
        "waist",
        "{}_foot",
        "{}_foot1",
        limbs=("l", "r"),
    ),
    "apollo": Style(
        ("l", "r"),
        "{0}_hip_ie {0}_hip_aa {0}_hip_fe {0}_knee_fe {0}_ankle_pd",
        "{}_shoulder_fe",
        "torso_yaw",
        "{}_foot",
        "collision_{}_sole",
        (
            "collision_{}_sole",
            "collision_capsule_body_{}_shin",
            "collision_capsule_body_{}_thigh",
            "collision_{}_hand_plate",
        ),
        ("l", "r"),
        ("hand0 thigh0", "hand1 thigh1", "core0 core1", "shin0 shin1", "thigh0 thigh1"),
        attitude="orientation_torso",
        home="knees_bent",
        timestep=0.005,
    ),
    "op3": Style(
        ("l", "r"),
        "{0}_hip_yaw {0}_hip_roll {0}_hip_pitch {0}_knee {0}_ank_pitch",
        "{}_sho_pitch",
        "head_pan",
        "{}_foot",
        "{0[0]}_foot1 {0[0]}_foot2",
        home="stand_bent_knees",
        timestep=0.004,
    ),
}
_ANGLES = (0.05, 0.04, -0.25, 0.5, -0.25)  # rad, of the left leg in the posture
_IMAGES = (-0.05, -0.04, -0.25, 0.5, -0.25)  # rad, of the right leg
_LEG = """
  <body name="{foot}_hip" pos="0 {y} -.05">
    <inertial pos="0 0 -.1" mass="2" diaginertia=".02 .02 .004"/>
    <joint name="{yaw}" axis="0 0 1" range="-.9 .9"/>
    <joint name="{roll}" axis="1 0 0" range="-.6 .6"/>
    <joint name="{pitch}" axis="0 1 0" range="-1.4 1.4"/>
    <geom name="{thigh}" type="capsule" size=".04" fromto="0 0 -.05 0 0 -.2"/>
    <body name="{foot}_shank" pos="0 0 -.25">
      <inertial pos="0 0 -.1" mass="1.5" diaginertia=".015 .015 .002"/>
      <joint name="{knee}" axis="0 1 0" range="-.1 2"/>
      <geom name="{shin}" type="capsule" size=".035" fromto="0 0 -.05 0 0 -.2"/>
      <body name="{foot}_link" pos="0 0 -.25">
        <inertial pos=".02 0 -.03" mass=".7" diaginertia=".002 .003 .003"/>
        <joint name="{ankle}" axis="0 1 0" range="-.9 .6"/>
        <site name="{foot}" pos=".02 0 -.04" euler="0 .1 0"/>
        {geoms}
      </body>
    </body>
  </body>"""
_ARM = """
      <body name="{side}_upper_arm" pos="0 {y} .25">
        <inertial pos="0 0 -.15" mass=".8" diaginertia=".01 .01 .001"/>
        <joint name="{joint}" axis="0 1 0" range="-1.5 1.5"/>
        <geom name="{hand}" type="sphere" size=".05" pos="0 0 -.38"/>
      </body>"""


def _foot(style: Style, side: str) -> str:
    """The geoms of a foot: spheres at its corners, or a capsule along it, and a core if that is another."""
    soles, core = style.soles.format(*[side] * 9).split(), style.geoms[0].format(side)
    out = 0.03 if side == style.limbs[0] else -0.03
    corners = [(0.1, out), (-0.06, -out), (0.1, -out), (-0.06, out)]
    capsule = '<geom name="{}" type="capsule" size=".02" fromto="-.06 0 {z} .1 0 {z}"/>'
    text = "".join(
        f'<geom name="{sole}" type="sphere" size=".02" pos="{x} {y} -.04"/>'
        for sole, (x, y) in zip(soles, corners, strict=False)
    )
    if len(soles) == 1:
        text = capsule.format(soles[0], z=-0.04)
    return text + (capsule.format(core, z=-0.02) if core not in soles else "")


def _touching(style: Style) -> list[tuple[str, str]]:
    """The pairs of geoms of the robot that touch."""
    geoms = dict(zip(_PARTS, style.geoms, strict=True))
    found = []
    for pair in style.pairs:
        one, two = (geoms[each[:-1]].format(style.limbs[int(each[-1])]) for each in pair.split())
        found.append((one, two))
    return found


def _sensors(style: Style) -> str:
    """What is measured of the trunk, the upper body, the feet and the contacts."""
    text = ""
    for frame, site in zip(style.frames, (style.imu, "imu_in_torso"), strict=True):
        text += f"""
    <gyro site="{site}" name="gyro{frame}"/>
    <velocimeter site="{site}" name="local_linvel{frame}"/>
    <accelerometer site="{site}" name="accelerometer{frame}"/>
    <framezaxis objtype="site" objname="{site}" name="upvector{frame}"/>
    <framelinvel objtype="site" objname="{site}" name="global_linvel{frame}"/>
    <frameangvel objtype="site" objname="{site}" name="global_angvel{frame}"/>"""
    text += f'<framequat objtype="site" objname="{style.imu}" name="{style.attitude}"/>'
    for side in style.limbs:
        foot = style.foot.format(side)
        text += f'<framelinvel objtype="site" objname="{foot}" name="{foot}_global_linvel"/>'
        text += f'<force site="{foot}" name="{foot}_force"/>'
        for sole in style.soles.format(*[side] * 9).split():
            text += (
                f'<contact name="{sole}_floor_found" geom1="{sole}" geom2="floor" data="found"/>'
            )
    for one, two in _touching(style):
        text += f'<contact name="{one}_{two}_found" geom1="{one}" geom2="{two}" data="found"/>'
    return text


def xml(kind: str) -> str:
    """Returns the MJCF of a biped with the names of `kind`, a key of STYLES."""
    style = STYLES[kind]
    legs = arms = ""
    joints, pairs = [style.waist], _touching(style)
    for joint_side, side, y in zip(style.sides, style.limbs, (0.1, -0.1), strict=True):
        names = style.leg.format(*[joint_side] * 9).split()
        leg = dict(zip(("yaw", "roll", "pitch", "knee", "ankle"), names, strict=True))
        _, shin, thigh, hand = (each.format(side) for each in style.geoms)
        foot = style.foot.format(side)
        legs += _LEG.format(foot=foot, y=y, thigh=thigh, shin=shin, geoms=_foot(style, side), **leg)
        arm = style.arm.format(joint_side)
        arms += _ARM.format(side=side, joint=arm, hand=hand, y=1.6 * y)
        joints += [arm]
        pairs += [(sole, "floor") for sole in style.soles.format(*[side] * 9).split()]
    joints += style.leg.format(*[style.sides[0]] * 9).split()
    joints += style.leg.format(*[style.sides[1]] * 9).split()
    servos = "".join(
        f'<position name="{each}" joint="{each}" kp="80" inheritrange="1" forcerange="-40 40"/>'
        for each in joints
    )
    contacts = "".join(
        f'<pair geom1="{one}" geom2="{two}" condim="{3 if two == "floor" else 1}" friction=".6 .6"/>'
        for one, two in pairs
    )
    angles = " ".join(map(str, (0.0, 0.2, 0.2, *_ANGLES, *_IMAGES)))
    return f"""
<mujoco>
  <compiler angle="radian"/>
  <option timestep="{style.timestep}"><flag eulerdamp="disable"/></option>
  <default>
    <joint armature=".01" damping="2" frictionloss=".1" actuatorfrcrange="-60 60"/>
    <geom contype="0" conaffinity="0"/>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 .01"/>
    <body name="trunk" pos="0 0 .7">
      <freejoint/>
      <inertial pos="0 0 .02" mass="4" diaginertia=".03 .03 .03"/>
      <site name="{style.imu}" pos="-.02 0 .01" euler="0 .1 0"/>
      <body name="torso" pos="0 0 .05">
        <inertial pos="0 0 .12" mass="6" diaginertia=".08 .07 .05"/>
        <joint name="{style.waist}" axis="0 0 1" range="-1.5 1.5"/>
        <site name="imu_in_torso" pos="0 0 .1" euler="0 .05 0"/>
        {arms}
      </body>
      {legs}
    </body>
  </worldbody>
  <contact>{contacts}</contact>
  <actuator>{servos}</actuator>
  <sensor>{_sensors(style)}</sensor>
  <keyframe><key name="{style.home}" qpos="0 0 .592 1 0 0 0 {angles}"/></keyframe>
</mujoco>"""
