"""Random MJCF models over all that the engine simulates, and one step of them against MuJoCo's.

By hand, for many seeds (prints a line for each model that is flagged):

    python tests/random_models.py 0 100
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

import mujoco_states as oracle
from seedbed import physics, simd
from seedbed.physics import narrow

STATES = 48
"""States of each model: a third drawn, a third settled without control, a third under random control."""
DEEP = 0.02
"""States with a deeper contact, in m, are left out."""
ALLOWED = 1e-3
"""The largest error of a step, as `mujoco_states.step_error` measures it."""
FEATURES = frozenset(
    (
        *("integrator Euler", "integrator RK4", "other gravity", "fluid", "no eulerdamp"),
        *("root free", "root upright", "root slides", "root link", "several trees"),
        *("trees far apart", "tilted floor", "second plane", "static geoms", "exclude"),
        *("static geom sphere", "static geom capsule", "static geom cylinder"),
        *("geom sphere", "geom capsule", "geom cylinder", "geom without contacts"),
        *("several geoms", "given inertia", "welded body", "turned frame", "uneven masses", "site"),
        *("joint hinge", "joint slide", "several joints", "axis along a frame's", "joint position"),
        *("damping", "stiffness", "armature", "ref", "springref"),
        *("limit", "narrow range", "limit margin", "solreflimit", "direct solreflimit"),
        *("solimplimit", "motor", "ctrlrange", "forcerange"),
        *("integrator implicitfast", "frictionloss", "solreffriction", "solimpfriction"),
        *("position servo", "velocity servo", "general actuator", "actuatorfrcrange", "gravcomp"),
        *("geom box", "fixed tendon", "driven tendon", "contact pair"),
        *("ball joint", "mocap body", "activation"),
        *("connect", "weld", "joint equality", "impratio", "site actuator"),
        *("friction", "no friction", "low friction", "high friction", "condim 1"),
        *("contact margin", "gap", "priority", "solmix", "solref", "direct solref", "solimp"),
    )
)
"""What every tenth model has, at least: all that the engine simulates."""
ROUND, CYLINDER = ' contype="1" conaffinity="19"', ' contype="2" conaffinity="1"'
"""Masks of moving geoms: two cylinders do not meet."""
BOXES, FLOOR = ' contype="16" conaffinity="16"', ' contype="1" conaffinity="31"'
"""Masks of moving boxes, which meet all but cylinders, and of what does not move and meets all geoms."""
ALONE = ' contype="4" conaffinity="0"'
"""Masks of moving geoms that meet the world only."""


class Drawn(NamedTuple):
    """A random model: its MJCF, and which features it has."""

    xml: str
    features: frozenset[str]


class _Draw:
    """Draws one model; `features` grows on the way."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        # What came later is drawn apart, so that the older seeds keep their bodies.
        self.later, self.latest, self.newest, self.last, self.pushing = (
            np.random.default_rng([seed, k]) for k in (1, 2, 3, 4, 5)
        )
        self.features: set[str] = set()
        self.names = 0
        self.joints: list[tuple[str, float]] = []
        self.bodies: list[str] = []
        self.geoms: list[str] = []
        self.sites: list[tuple[str, float]] = []

    def chance(self, feature: str, share: float, rng: np.random.Generator | None = None) -> bool:
        """Whether something has a feature, which is then noted."""
        found = bool((rng or self.rng).random() < share)
        if found:
            self.features.add(feature)
        return found

    def pick(self, feature: str, *values: str) -> str:
        value = str(self.rng.choice(values))
        self.features.add(f"{feature} {value}")
        return value

    def near(self, low: float, high: float, rng: np.random.Generator | None = None) -> float:
        """A number whose logarithm is uniform."""
        return float(10 ** (rng or self.rng).uniform(np.log10(low), np.log10(high)))

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def vector(self, scale: float) -> str:
        return _text(*self.rng.normal(size=3) * scale)

    def frame(self) -> str:
        """A rotation, and in some bodies none."""
        if self.chance("turned frame", 0.6):
            return f' quat="{_text(*self.rng.normal(size=4))}"'
        return ""

    def solref(self, name: str = "solref") -> str:
        if not self.chance(name, 0.5):
            return ""
        if self.chance(f"direct {name}", 0.3):
            return f' {name}="{_text(-self.near(100, 1e4), -self.near(1, 100))}"'
        return f' {name}="{_text(self.near(0.005, 0.1), self.rng.uniform(0.3, 1.5))}"'

    def solimp(self, name: str = "solimp") -> str:
        if not self.chance(name, 0.5):
            return ""
        low, high = self.rng.uniform(0.3, 0.95), self.rng.choice([0.9, 0.95, 0.99, 0.9999, 1.1])
        power = self.rng.choice([1, 2, 2, 3.5])
        middle = self.rng.uniform(0.1, 0.9)
        return f' {name}="{_text(low, high, self.near(1e-4, 0.05), middle, power)}"'

    def contact(self) -> str:
        """The parameters of a geom's contacts."""
        text = ""
        if self.chance("friction", 0.7):
            mu = 0.0 if self.chance("no friction", 0.2) else self.near(1e-4, 2)
            self.features.add("low friction" if mu < 0.01 else "high friction")
            text += f' friction="{_text(mu)}"'
        if self.chance("condim 1", 0.25):
            text += ' condim="1"'
        if self.chance("contact margin", 0.25):
            text += f' margin="{_text(self.near(1e-4, 0.03))}"'
        if self.chance("gap", 0.2):
            text += f' gap="{_text(self.near(1e-4, 0.02))}"'
        if self.chance("priority", 0.15):
            text += f' priority="{self.rng.integers(-1, 3)}"'
        if self.chance("solmix", 0.2):
            text += f' solmix="{_text(self.rng.choice([0, 0.3, 2.0]))}"'
        return text + self.solref() + self.solimp()

    def geom(self, density: float, *, upright: bool = False) -> str:
        """A moving geom of a size between 3 and 20 cm."""
        kind = "cylinder" if upright else self.pick("geom", "sphere", "capsule", "cylinder")
        size = [self.rng.uniform(0.03, 0.12)]
        if kind != "sphere":
            size.append(self.rng.uniform(0.03, 0.2))
        masks = CYLINDER if kind == "cylinder" else ROUND
        if self.chance("geom that meets the world only", 0.4):
            masks = ALONE.replace("4", "8") if kind == "cylinder" else ALONE
        elif self.chance("geom without contacts", 0.2):
            masks = ' contype="0" conaffinity="0"'
        if not upright and self.chance("geom box", 0.1, self.later):
            kind, masks = "box", BOXES
            size = list(self.later.uniform(0.03, 0.15, 3))
        place = "" if upright else f' pos="{self.vector(0.05)}"{self.frame()}'
        self.geoms.append(f"geom{len(self.geoms)}")
        return (
            f'<geom name="{self.geoms[-1]}" type="{kind}" size="{_text(*size)}"'
            f' density="{_text(density)}"{place}{masks}{self.contact()}/>'
        )

    def joint(self, kind: str, density: float, number: int = 0) -> str:
        """A hinge or slide, with springs, dampers and motors that fit bodies of a density.

        `number` is its own in its body, where no two may have one axis.
        """
        name, heft = self.name("joint"), density / 1000
        self.joints.append((name, heft))
        axis = self.rng.normal(size=3)
        if self.chance("axis along a frame's", 0.5):
            axis = np.eye(3)[number]
        text = f'<joint name="{name}" type="{kind}" axis="{_text(*axis)}"'
        if self.chance("joint position", 0.4):
            text += f' pos="{self.vector(0.05)}"'
        # A slide without limits carries its body metres away.
        if self.chance("limit", 0.5 if kind == "hinge" else 1):
            reach = 1.2 if kind == "hinge" else 0.2
            low, high = self.rng.uniform(-reach, 0.05), self.rng.uniform(0, reach)
            high = max(high, low + 0.02)
            if self.chance("narrow range", 0.15):
                high = low + self.near(1e-3, 0.02)
            text += f' limited="true" range="{_text(low, high)}"'
            if self.chance("limit margin", 0.4):
                text += f' margin="{_text(self.near(1e-3, 0.3))}"'
            text += self.solref("solreflimit") + self.solimp("solimplimit")
        for field, most in (("damping", 1.0), ("stiffness", 20.0), ("armature", 0.05)):
            if self.chance(field, 0.35):
                text += f' {field}="{_text(self.near(1e-3 * most, most) * heft)}"'
        for field in ("ref", "springref"):
            if self.chance(field, 0.2):
                text += f' {field}="{_text(self.rng.uniform(-0.3, 0.3))}"'
        if self.chance("frictionloss", 0.3, self.later):
            text += f' frictionloss="{_text(self.near(1e-3, 1, self.later) * heft)}"'
            if self.chance("solreffriction", 0.4, self.later):
                text += f' solreffriction="{_text(self.near(5e-3, 0.1, self.later), 1)}"'
            if self.chance("solimpfriction", 0.4, self.later):
                text += f' solimpfriction="{_text(self.later.uniform(0.5, 0.98), 0.99, 0.01)}"'
        if self.chance("actuatorfrcrange", 0.2, self.later):
            most = self.near(0.01, 1, self.later) * heft
            text += f' actuatorfrclimited="true" actuatorfrcrange="{_text(-most, most)}"'
        return text + "/>"

    def body(self, density: float, depth: int, place: str, joints: str, inner: str = "") -> str:
        name = self.name("body")
        self.bodies.append(name)
        geoms = self.geom(density)
        if self.chance("several geoms", 0.3):
            geoms += self.geom(density * self.near(0.1, 10))
        if self.chance("site", 0.2):
            self.sites.append((f"site{len(self.sites)}", density / 1000))
            turned = _text(*self.pushing.normal(size=4))
            geoms += f'<site name="{self.sites[-1][0]}" pos="{self.vector(0.1)}" quat="{turned}"/>'
        if self.chance("given inertia", 0.15):
            mass = density * self.near(1e-4, 1e-2)
            moments = mass * self.near(1e-4, 0.03) * self.rng.uniform(0.7, 1.2, 3)
            geoms += (
                f'<inertial pos="{self.vector(0.03)}" mass="{_text(mass)}"'
                f' diaginertia="{_text(*moments)}"/>'
            )
        if self.chance("welded body", 0.15):
            geoms += f'<body pos="{self.vector(0.1)}"{self.frame()}>{self.geom(density)}</body>'
        children = ""
        for _ in range(int(self.rng.integers(0, 3)) if depth else 0):
            children += self.link(density, depth - 1)
        if depth and self.chance("ball joint", 0.15, self.newest):
            children += self.ball(density)
        if self.chance("gravcomp", 0.1, self.later):
            place += f' gravcomp="{_text(self.later.uniform(0.1, 1.2))}"'
        return f'<body name="{name}" {place}>{joints}{inner}{geoms}{children}</body>'

    def ball(self, density: float) -> str:
        """A body on a ball joint."""
        heft = density / 1000
        text = f'<joint type="ball" pos="{_text(*self.newest.normal(size=3) * 0.03)}"'
        for field, most in (("damping", 0.1), ("stiffness", 5.0), ("armature", 0.01)):
            if self.newest.random() < 0.5:
                text += f' {field}="{_text(self.near(1e-2 * most, most, self.newest) * heft)}"'
        place = _text(*self.newest.normal(size=3) * 0.15)
        size = _text(*self.newest.uniform(0.03, 0.1, 2))
        return (
            f'<body pos="{place}" quat="{_text(*self.newest.normal(size=4))}">{text}/>'
            f'<geom type="capsule" size="{size}" density="{_text(density)}"{ROUND}/></body>'
        )

    def link(self, density: float, depth: int) -> str:
        """A body that hangs on another one by one to three joints."""
        density *= self.near(0.03, 30) if self.chance("uneven masses", 0.3) else self.near(0.5, 2)
        count = 1 + (self.rng.random() < 0.25) + (self.rng.random() < 0.1)
        if count > 1:
            self.features.add("several joints")
        joints = "".join(
            self.joint(self.pick("joint", "hinge", "slide"), density, k) for k in range(count)
        )
        way = self.rng.normal(size=3)
        way *= self.rng.uniform(0.1, 0.35) / np.linalg.norm(way)
        place = f'pos="{_text(*way)}"{self.frame()}'
        return self.body(density, depth, place, joints)

    def tree(self, place: np.ndarray) -> str:
        density = 1000 * self.near(1e-3, 1e3)
        self.features.add(f"density of 1e{round(np.log10(density))}")
        root = str(self.rng.choice(["free", "upright", "slides", "link"], p=[0.4, 0.15, 0.15, 0.3]))
        self.features.add(f"root {root}")
        x, y = place
        height = self.rng.uniform(0.08, 0.3)
        if root == "link":
            joints = self.joint(self.pick("joint", "hinge", "slide"), density)
            return self.body(density, 2, f'pos="{_text(x, y, 0.3)}"{self.frame()}', joints)
        if root == "slides":
            kinds = ["slide"] * int(self.rng.integers(1, 4)) + ["hinge"] * int(self.rng.integers(2))
            joints = "".join(self.joint(kind, density, k % 3) for k, kind in enumerate(kinds))
            return self.body(density, 1, f'pos="{_text(x, y, height)}"{self.frame()}', joints)
        if root == "upright":
            self.bodies.append(name := self.name("body"))
            return (
                f'<body name="{name}" pos="{_text(x, y, 0.2)}"><freejoint/>'
                f"{self.geom(density, upright=True)}</body>"
            )
        return self.body(density, 1, f'pos="{_text(x, y, height)}"{self.frame()}', "<freejoint/>")

    def static(self, place: np.ndarray) -> str:
        kind = self.pick("static geom", "sphere", "capsule", "cylinder")
        size = [0.1] if kind == "sphere" else [0.08, 0.2]
        masks = ' contype="2" conaffinity="5"' if kind == "cylinder" else FLOOR
        pos = _text(*place, self.rng.uniform(0, 0.15))
        geom = f'<geom type="{kind}" size="{_text(*size)}"{masks}{self.contact()}/>'
        moved = ' mocap="true"' if self.chance("mocap body", 0.4, self.newest) else ""
        return f'<body pos="{pos}"{self.frame()}{moved}>{geom}</body>'

    def actuator(self, joint: str, heft: float, gear: float) -> str:
        """A motor with a gear, or another actuator, for a joint of bodies with a heft."""
        stiff, damp = (self.near(0.1, 20, self.later) * heft, self.near(1e-2, 1, self.later) * heft)
        place = self.later.uniform(-0.3, 0.3)
        if self.chance("position servo", 0.25, self.later):
            return f'<position joint="{joint}" kp="{_text(stiff)}" kv="{_text(damp)}"'
        if self.chance("velocity servo", 0.15, self.later):
            return f'<velocity joint="{joint}" kv="{_text(damp)}" gear="2"'
        if self.chance("general actuator", 0.15, self.later):
            return (
                f'<general joint="{joint}" gaintype="affine" biastype="affine" gear="-1.5"'
                f' gainprm="{_text(stiff, damp, -damp / 3)}"'
                f' biasprm="{_text(place * heft, -stiff, -damp)}"'
            )
        return f'<motor joint="{joint}" gear="{_text(gear)}"'

    def actuators(self) -> str:
        rows = ""
        for joint, heft in self.joints:
            if not self.chance("motor", 0.5):
                continue
            gear = self.near(0.01, 10) * heft
            rows += self.actuator(joint, heft, gear)
            if self.chance("ctrlrange", 0.5):
                rows += ' ctrllimited="true" ctrlrange="-0.7 1"'
            if self.chance("forcerange", 0.3):
                rows += ' forcelimited="true" forcerange="-0.3 0.5"'
            rows += "/>"
        if self.joints and self.chance("activation", 0.3, self.newest):
            joint, heft = self.joints[int(self.newest.integers(len(self.joints)))]
            kind = self.newest.choice(["integrator", "filter", "filterexact"])
            rows += (
                f'<general joint="{joint}" dyntype="{kind}"'
                f' dynprm="{_text(self.near(0.01, 0.1, self.newest))}"'
                f' gainprm="{_text(self.near(0.1, 10, self.newest) * heft)}" actearly="true"'
                ' actlimited="true" actrange="-0.2 0.3"/>'
            )
        for site, heft in self.sites:
            if self.chance("site actuator", 0.6, self.pushing):
                push, turn = self.pushing.normal(size=(2, 3)) * heft * [[3], [0.3]]
                rows += f'<motor site="{site}" gear="{_text(*push, *turn)}"/>'
        return rows

    def tendon(self, damps: bool) -> tuple[str, str]:
        """A fixed tendon over two joints, and its actuator; both may be ""."""
        if len(self.joints) < 2 or not self.chance("fixed tendon", 0.5, self.latest):
            return "", ""
        ends = self.latest.choice(len(self.joints), 2, replace=False)
        heft = min(self.joints[i][1] for i in ends)
        joints = "".join(
            f'<joint joint="{self.joints[i][0]}" coef="{_text(self.latest.uniform(-2, 2))}"/>'
            for i in ends
        )
        stiff, damp = (self.near(*x, self.latest) * heft for x in ((0.1, 10), (1e-3, 0.1)))
        text = f'<fixed name="tendon" stiffness="{_text(stiff)}"'
        text += f' damping="{_text(damp)}"' if damps else ""
        driven = ""
        if self.chance("driven tendon", 0.6, self.latest):
            driven = f'<position tendon="tendon" kp="{_text(stiff)}"'
            driven += f' kv="{_text(damp)}"/>' if damps else "/>"
        return f"<tendon>{text}>{joints}</fixed></tendon>", driven

    def pair(self) -> str:
        """A named pair of the floor and a moving geom."""
        if not self.chance("contact pair", 0.2, self.latest):
            return ""
        mu, margin = self.near(0.01, 1, self.latest), self.latest.choice([0, 0.005])
        return (
            f'<pair geom1="floor" geom2="{self.latest.choice(self.geoms)}" condim="3" gap="0.001"'
            f' friction="{_text(mu, mu)}" margin="{_text(margin)}"'
            f' solref="{_text(self.near(0.01, 0.05, self.latest), 1)}"/>'
        )

    def equalities(self, apart: bool) -> str:
        """Two bodies, or one and the world, that share a point or a pose; a joint that follows another."""
        rows, rng = "", self.last
        for kind in ("connect", "weld"):
            if apart or not self.chance(kind, 0.25, rng):
                continue
            ends = rng.choice(self.bodies, min(2, len(self.bodies)), replace=False)
            rows += f'<{kind} body1="{ends[0]}"'
            if len(ends) > 1 and rng.random() < 0.7:
                rows += f' body2="{ends[1]}"'
            rows += f' anchor="{_text(*rng.normal(size=3) * 0.1)}"'
            rows += ' torquescale="0.2"' if kind == "weld" and rng.random() < 0.5 else ""
            rows += f' solref="{_text(self.near(0.01, 0.1, rng), 1)}"/>'
        names = [name for name, _ in self.joints]
        if len(names) > 1 and self.chance("joint equality", 0.3, rng):
            first, second = rng.choice(names, 2, replace=False)
            rows += f'<joint joint1="{first}" joint2="{second}" polycoef="0 {_text(rng.normal())} .5 0 0"'
            rows += f' solref="{_text(self.near(0.01, 0.1, rng), 1)}"/>'
        return rows

    def option(self) -> str:
        text = f'timestep="{_text(self.rng.choice([0.001, 0.002, 0.005, 0.01]))}"'
        integrator = self.pick("integrator", "Euler", "RK4")
        if self.chance("other gravity", 0.15):
            text += f' gravity="{_text(*self.rng.normal(size=2) * 2, -8)}"'
        if self.chance("fluid", 0.2):
            text += (
                f' density="{_text(self.near(1, 1000))}" viscosity="{_text(self.near(1e-5, 0.1))}"'
            )
            text += f' wind="{self.vector(1)}"'
        elif self.chance("integrator implicitfast", 0.4, self.later):
            integrator = "implicitfast"
        text += f' integrator="{integrator}"'
        flag = '<flag eulerdamp="disable"/>' if self.chance("no eulerdamp", 0.15) else ""
        return f"<option {text}>{flag}</option>"


def draw(seed: int) -> Drawn:
    """Draws a model of one to three trees over a floor."""
    d = _Draw(seed)
    trees = int(d.rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2]))
    if trees > 1:
        d.features.add("several trees")
    apart = d.near(10, 1000) if trees > 1 and d.chance("trees far apart", 0.4) else 0.8
    tilt = ""
    if d.chance("tilted floor", 0.15):
        tilt = f' euler="{_text(*d.rng.uniform(-8, 8, 3))}"'
        apart = min(apart, 0.8)
    world = f'<geom name="floor" type="plane" size="1 1 1"{tilt}{FLOOR}{d.contact()}/>'
    if d.chance("second plane", 0.15):
        world += f'<geom type="plane" size="1 1 1" pos="0 -1 0" euler="-80 0 0"{FLOOR}/>'
    for k in range(trees):
        place = d.rng.uniform(-0.5, 0.5, 2) * (k > 0) * apart
        if k and apart > 1:
            place = place + apart * np.array([1.0, 0])
        world += d.tree(place)
        if d.chance("static geoms", 0.4):
            world += d.static(place + d.rng.uniform(-0.3, 0.3, 2))
    if len(d.bodies) > 1 and d.chance("exclude", 0.3):
        first, second = d.rng.choice(d.bodies, 2, replace=False)
        excluded = f'<exclude body1="{first}" body2="{second}"/>'
    else:
        excluded = ""
    option, actuators = d.option(), d.actuators()
    tendon, driven = d.tendon(damps="implicitfast" not in option)
    equality = d.equalities(apart > 1)
    if d.chance("impratio", 0.2, d.last):
        option = option.replace(
            "<option", f'<option impratio="{_text(d.near(0.3, 10, d.last))}"', 1
        )
    xml = (
        f"<mujoco>{option}<worldbody>{world}</worldbody>{tendon}<actuator>{actuators}{driven}</actuator>"
        f"<contact>{excluded}{d.pair()}</contact><equality>{equality}</equality></mujoco>"
    )
    return Drawn(xml, frozenset(d.features))


def _text(*numbers: float) -> str:
    return " ".join(f"{x:.7g}" for x in numbers)


def compiled(xml: str) -> Any:
    """MuJoCo's model with the sizes and places that float32 has, and its solver run as far as it goes."""
    model = oracle.oracle(xml)
    for name in ("geom_size", "geom_margin", "geom_gap", "pair_margin", "pair_gap"):
        getattr(model, name)[:] = np.float32(getattr(model, name))
    for name in ("jnt_range", "jnt_margin", "qpos0"):
        getattr(model, name)[:] = np.float32(getattr(model, name))
    model.opt.tolerance, model.opt.iterations = 1e-15, 300
    model.opt.ls_iterations, model.opt.ls_tolerance = 200, 1e-8
    return model


def is_beyond(model: Any, fields: Any) -> bool:
    """Whether geoms are so deep in one another that no simulation meets it, or MuJoCo is no oracle.

    It is none where a capsule's axis is in or near a cylinder, or lies on one (docs/physics.md).
    """
    probe = mujoco.MjData(model)
    probe.qpos = fields[0]
    mujoco.mj_kinematics(model, probe)
    mujoco.mj_comPos(model, probe)
    mujoco.mj_collision(model, probe)
    found: dict[tuple[int, int], int] = {}
    for contact in probe.contact[: probe.ncon]:
        if contact.dist < -DEEP:
            return True
        pair = contact.geom1, contact.geom2
        if [int(model.geom_type[g]) for g in pair] == [narrow.CAPSULE, narrow.CYLINDER]:
            found[pair] = found.get(pair, 0) + 1
            if found[pair] > 1 or contact.dist < -0.8 * model.geom_size[pair[0], 0]:
                return True
    return False


def states(model: Any, count: int, seed: int) -> oracle.Cases:
    """States of three kinds that float32 holds exactly; those of models that explode are left out."""
    rng, found = np.random.default_rng(seed), []
    model = copy.copy(model)
    model.opt.tolerance, model.opt.ls_tolerance = 1e-6, 0.01
    data = mujoco.MjData(model)
    span = np.where(model.actuator_ctrllimited, model.actuator_ctrlrange[:, 1], 1)

    def keep() -> bool:
        fields = data.qpos, data.qvel, data.ctrl, data.qacc_warmstart
        sane = all(np.isfinite(x).all() for x in fields) and np.abs(data.qvel).max() < 50
        if sane and not is_beyond(model, fields):
            found.append([np.float64(np.float32(x)) for x in fields])
        return bool(sane)

    def drawn() -> None:
        mujoco.mj_resetData(model, data)
        mujoco.mj_integratePos(model, data.qpos, rng.normal(size=model.nv), 0.05)
        data.qvel = rng.normal(size=model.nv) * rng.choice([0.01, 0.3, 1])

    third = count // 3
    for _ in range(third):
        drawn()
        data.ctrl = span * rng.uniform(-1.3, 1.3, model.nu)
        keep()
    for kind in (0, 1):
        for start in range(4):
            drawn()
            if kind == 0:
                data.qvel[:] = 0
            for t in range(100 + 200 * (start + 1)):
                if kind and t % 5 == 0:
                    data.ctrl = span * rng.uniform(-1.3, 1.3, model.nu)
                last = t >= 100 + 200 * (start + 1) - 5 * (third // 4)
                if last and t % 5 == 4 and not keep():
                    break
                mujoco.mj_step(model, data)
                if any(w.number for w in data.warning):
                    break
            for w in data.warning:
                w.number = 0
    sizes = model.nq, model.nv, model.nu, model.nv
    columns = zip(*found, strict=True) if found else ([] for _ in sizes)
    pairs = zip(columns, sizes, strict=True)
    return oracle.Cases(
        *(np.reshape(np.array(column), (len(found), size)) for column, size in pairs)
    )


def own_step(xml: str, cases: oracle.Cases) -> tuple[jax.Array, ...]:
    """Our qpos, qvel, qacc, solver_error and solver_niter [n, ...] after a step of the kernel."""
    model = physics.load(xml)

    def one(qpos: Any, qvel: Any, ctrl: Any, warmstart: Any) -> Any:
        begun = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, begun, ctrl)
        return data.qpos, data.qvel, data.qacc, data.solver_error, data.solver_niter

    step = jax.jit(simd.vectorize(one))
    return step(*(jnp.asarray(x, jnp.float32) for x in cases))


def spread(model: Any, cases: oracle.Cases, which: np.ndarray, seed: int = 0) -> np.ndarray:
    """MuJoCo's own relative change [n] where inputs change by one rounding: the largest of eight.

    Each of the eight is made in both directions, so that a contact that one rounding makes or breaks is met.
    A position changes by the rounding of a number between 0.25 and 1: poses are sums of such numbers (m, or
    parts of a quaternion), and beyond 1 m the engine keeps more than a float32 of a root's position.
    """
    rng = np.random.default_rng(seed)
    some = oracle.Cases(*(x[which] for x in cases))
    sizes = [np.abs(x) for x in some]
    sizes[0] = np.clip(sizes[0], 0.25, 1)
    worst = np.zeros(len(which))
    for _ in range(8):
        signs = [rng.choice([-1, 1], x.shape[1:]) for x in some]
        for way in (-1, 1):
            moved = [x + way * s * 2.0**-24 * r for x, s, r in zip(some, signs, sizes, strict=True)]
            changed = oracle.after_step(model, oracle.Cases(*moved), ["qvel"])["qvel"]
            worst = np.maximum(worst, oracle.step_error(model, some, changed))
    return worst


class Verdict(NamedTuple):
    """The outcome of one model: errors, and which states count as wrong."""

    error: np.ndarray  # [n] of each state
    excused: np.ndarray  # [n] bool: MuJoCo is as sensitive
    flagged: np.ndarray  # [n] bool
    cases: oracle.Cases
    own: Any


def judge(xml: str, seed: int, count: int = STATES) -> Verdict:
    """Compares one step from each state with MuJoCo's."""
    model = compiled(xml)
    cases = states(model, count, seed)
    if not len(cases.qpos):  # it explodes, or its geoms are in one another
        none = np.zeros(0)
        return Verdict(none, none.astype(bool), none.astype(bool), cases, None)
    own = own_step(xml, cases)
    error = oracle.step_error(model, cases, np.asarray(own[1], np.float64))
    wrong = ~(error <= ALLOWED)
    excused = np.zeros(len(error), bool)
    which = np.flatnonzero(wrong)
    if len(which):
        excused[which] = error[which] <= 3 * spread(model, cases, which)
    return Verdict(error, excused, wrong & ~excused, cases, own)


def main() -> None:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    total = flagged = excused = bad = 0
    for seed in range(first, last):
        drawn = draw(seed)
        found = judge(drawn.xml, seed)
        total += len(found.error)
        excused += int(found.excused.sum())
        flagged += int(found.flagged.sum())
        bad += bool(found.flagged.any())
        if found.flagged.any():
            print(
                f"{seed}: {found.flagged.sum()} of {len(found.error)} flagged,"
                f" worst {np.nanmax(np.where(found.flagged, found.error, 0)):.1e},"
                f" niter {np.max(found.own[4])}; {', '.join(sorted(drawn.features))}",
                flush=True,
            )
    print(
        f"{last - first} models, {bad} flagged; {total} states, {flagged} flagged, {excused} excused"
    )


if __name__ == "__main__":
    main()
