"""Renders a recording into an MP4 file, with MuJoCo's own renderer and without a display."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from seedbed import strict_json
from seedbed.exit_status import ExitStatus
from seedbed.files import load_json
from seedbed.streams.supervisor import start_module
from seedbed.types import SeedbedError
from seedbed.viewer.recording import (
    MjModel,
    Recording,
    View,
    compute_poses,
    find_view,
    mujoco,
    place_bodies,
    written_whole,
)

BACKENDS = {"egl": "libegl1", "osmesa": "libosmesa6"}
"""The backends that can draw without a display, in the order tried, and the apt package of each."""
MAX_FPS = 60
"""The most frames per second if the caller gives no `fps`."""
SHIFTED_PLANE = 5.0
"""Metres. A plane with larger half sizes counts as the ground, and moves along with the camera."""


@dataclasses.dataclass(frozen=True)
class Shots:
    """The captions of all frames of a film and how to draw it: the instructions for the drawing process."""

    width: int
    height: int
    fps: float
    radius: float
    azimuth: float
    elevation: float
    camera: str  # "follow" or the name of one of the model's cameras
    captions: tuple[tuple[str, str, str], ...]  # for every frame: names, values and the title
    ffmpeg: str  # path of the program
    output: str  # path of the film


def write_video(
    recording: Recording,
    path: str | Path,
    *,
    width: int = 640,
    height: int = 480,
    fps: float | None = None,
    camera: str = "follow",
) -> None:
    """Writes the episodes one after another, at their true speed, as H.264 in MP4 to `path` (.mp4).

    `width` and `height` are even numbers of pixels, 16 or more. Without `fps`, every frame is shown once, at
    most 60 per second. `camera` is "follow" or the name of one of the model's cameras. Raises SeedbedError
    if an argument is wrong, if nothing here can draw or encode, or if the file cannot be written.
    """
    if width < 16 or height < 16 or width % 2 or height % 2:
        raise SeedbedError(f"the film is {width} x {height}: both must be even and 16 or more")
    if fps is not None and not fps > 0.0:
        raise SeedbedError(f"fps is {fps}: it must be above 0")
    names = [recording.model.camera(i).name for i in range(recording.model.ncam)]
    if camera != "follow" and camera not in names:
        raise SeedbedError(
            f"no camera {camera!r}; there are {', '.join(['follow', *filter(None, names)])}"
        )
    ffmpeg = find_ffmpeg()
    fps = fps or min(MAX_FPS, 1.0 / min(episode.env_dt for episode in recording.episodes))
    view = find_view(recording)
    # What is drawn lies beside the film: the room that it needs is missing there, or nowhere.
    beside = Path(path).absolute().parent
    with (
        written_whole(path, ".mp4") as partial,
        tempfile.TemporaryDirectory(prefix=".film-", dir=beside) as folder,
    ):
        placements, target, captions = _choose_frames(recording, view, fps)
        output = str(partial.absolute())
        shots = Shots(
            width=width,
            height=height,
            fps=fps,
            radius=view.radius,
            azimuth=view.azimuth,
            elevation=view.elevation,
            camera=camera,
            captions=tuple(captions),
            ffmpeg=ffmpeg,
            output=output,
        )
        job = Path(folder)
        mujoco.mj_saveModel(recording.model, str(job / "model.mjb"), None)
        np.savez(job / "frames.npz", placements=placements, target=target)
        (job / "shots.json").write_text(strict_json.dumps(dataclasses.asdict(shots)))
        _draw_in_child(job, len(placements), f"filming {Path(path).name}")


def find_ffmpeg() -> str:
    """Returns the path of ffmpeg; raises SeedbedError if there is none."""
    try:
        import imageio_ffmpeg  # pyright: ignore[reportMissingImports]

        return imageio_ffmpeg.get_ffmpeg_exe()
    except ImportError as error:
        raise SeedbedError(
            "writing a video needs the extra `video`: pip install 'seedbed[video]'"
        ) from error
    except RuntimeError as error:
        raise SeedbedError(f"imageio-ffmpeg has no ffmpeg for this machine: {error}") from error


def _choose_frames(
    recording: Recording, view: View, fps: float
) -> tuple[np.ndarray, np.ndarray, list[tuple[str, str, str]]]:
    """Chooses the frame nearest to each tick; returns placements, targets `[N, 3]` and captions.

    N counts the frames of the film, all episodes together. Ticks are 1 / `fps` seconds apart.
    """
    placements, targets, captions = [], [], []
    total = len(recording.episodes)
    for number, episode in enumerate(recording.episodes, 1):
        steps = len(episode.reward)
        ticks = np.arange(int(steps * episode.env_dt * fps + 1e-6) + 1)
        frames = np.minimum(np.round(ticks / (fps * episode.env_dt)).astype(int), steps)
        path = compute_poses(recording.model, episode, view).target
        returns = np.concatenate([[0.0], np.cumsum(episode.reward)])
        placements.append(episode.placements(recording.model)[frames])
        targets.append(path[frames])
        title = recording.title + (f"  (episode {number} of {total})" if total > 1 else "")
        for frame in frames:
            lines = {
                "Return": f"{returns[frame]:.2f}",
                "Step": f"{frame} of {steps}",
                "Time": f"{frame * episode.env_dt:.2f} s",
            }
            captions.append(("\n".join(lines), "\n".join(lines.values()), title))
    return np.concatenate(placements), np.concatenate(targets), captions


def _draw_in_child(job: Path, frames: int, text: str) -> None:
    """Draws in a new process, because MuJoCo chooses its backend when it is imported.

    Tries the backend in MUJOCO_GL, or else each of `BACKENDS`. Raises SeedbedError if none can draw, or if
    drawing fails.
    """
    given = os.environ.get("MUJOCO_GL")
    failures = []
    for backend in (given,) if given else BACKENDS:
        with (job / "errors").open("wb") as errors, _drawing(job, backend, errors) as child:
            assert child.stdout is not None
            if child.stdout.readline() == b"ready\n":
                _show_progress(child, frames, text)
                if child.wait() == 0:
                    return
                raise SeedbedError(f"filming failed: {_last_line(job / 'errors')}")
        failures.append(f"{backend}: {_last_line(job / 'errors')}")
    packages = " or ".join(f"`apt-get install {package}`" for package in BACKENDS.values())
    raise SeedbedError(
        f"nothing can draw without a display here; try {packages} ({'; '.join(failures)})"
    )


@contextlib.contextmanager
def _drawing(job: Path, backend: str, errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the drawing process and yields it; at the end, kills it and its encoder if they still run."""
    child = start_module(
        "seedbed.viewer.video",
        (str(job),),
        {"MUJOCO_GL": backend},
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    with child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _show_progress(child: subprocess.Popen[bytes], frames: int, text: str) -> None:
    console = Console(stderr=True, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=frames)
        assert child.stdout is not None
        for line in child.stdout:
            progress.update(task, completed=int(line))


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the drawing process died without a word"


class _Stage:
    """An OpenGL context with a model in it, for drawing frames. For one thread."""

    def __init__(self, model: MjModel, shots: Shots) -> None:
        self._model, self._shots = model, shots
        model.vis.global_.offwidth, model.vis.global_.offheight = shots.width, shots.height
        model.vis.quality.offsamples, model.vis.quality.shadowsize = 4, 2048
        if model.nlight == 0:
            # The only light would be the weak lamp on the camera.
            model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = 0.4, 0.6
        self._gl = mujoco.GLContext(shots.width, shots.height)
        self._gl.make_current()
        sizes = mujoco.mjtFontScale
        large = sizes.mjFONTSCALE_200 if shots.height >= 900 else sizes.mjFONTSCALE_100
        font = sizes.mjFONTSCALE_50 if shots.height < 360 else large
        self._context = mujoco.MjrContext(model, font.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=2 * model.ngeom + 1000)
        self._data, self._option = mujoco.MjData(model), mujoco.MjvOption()
        self._rectangle = mujoco.MjrRect(0, 0, shots.width, shots.height)
        self._pixels = np.empty((shots.height, shots.width, 3), np.uint8)
        self._camera = mujoco.MjvCamera()
        self._aim()

    def _aim(self) -> None:
        shots = self._shots
        if shots.camera != "follow":
            self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            self._camera.fixedcamid = self._model.camera(shots.camera).id
            return
        angle = np.radians(self._model.vis.global_.fovy / 2.0)
        across = np.arctan(np.tan(angle) * min(1.0, shots.width / shots.height))
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        self._camera.azimuth, self._camera.elevation = shots.azimuth, shots.elevation
        self._camera.distance = 1.15 * shots.radius / np.sin(across)

    def draw(
        self, placement: np.ndarray, target: np.ndarray, caption: tuple[str, ...]
    ) -> np.ndarray:
        """Draws one frame; returns pixels uint8 `[height, width, 3]`, the lowest row first.

        The array is used again for the next frame.
        """
        place_bodies(self._model, self._data, placement)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        self._camera.lookat[:] = target
        mujoco.mjv_updateScene(
            self._model,
            self._data,
            self._option,
            None,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL.value,
            self._scene,
        )
        self._shift_ground(target)
        mujoco.mjr_render(self._rectangle, self._scene, self._context)
        names, values, title = caption
        font, place = mujoco.mjtFont.mjFONT_NORMAL, mujoco.mjtGridPos
        rectangle, context = self._rectangle, self._context
        mujoco.mjr_overlay(font, place.mjGRID_TOPLEFT, rectangle, names, values, context)
        mujoco.mjr_overlay(font, place.mjGRID_BOTTOMLEFT, rectangle, title, "", context)
        mujoco.mjr_readPixels(self._pixels, None, self._rectangle, self._context)
        return self._pixels

    def _shift_ground(self, target: np.ndarray) -> None:
        """Moves the drawn ground towards `target` by whole tiles of its texture.

        The ground is drawn only up to its size (40 m from the start of a walker); in physics it has no end.
        """
        for geom in self._scene.geoms[: self._scene.ngeom]:
            plane = geom.type == mujoco.mjtGeom.mjGEOM_PLANE and geom.category != 0
            if not plane or not 0.0 < SHIFTED_PLANE < min(geom.size[:2]):
                continue
            repeat = self._model.mat_texrepeat[geom.matid] if geom.matid >= 0 else np.ones(2)
            tile = np.maximum(2.0 * geom.size[:2] / np.maximum(repeat, 1.0), 0.1)
            axes = geom.mat.reshape(3, 3)[:, :2]
            moved = np.round((target - geom.pos) @ axes / tile) * tile
            geom.pos += axes @ moved

    def close(self) -> None:
        """Frees the memory of the graphics driver."""
        self._context.free()
        self._gl.free()


def _draw(job: Path) -> None:
    """Runs the drawing process on the files in `job`, and raises SystemExit with its status.

    Prints `ready` when it can draw, then the number of frames drawn after each frame.
    """
    shots = Shots(**load_json(job / "shots.json"))
    frames = np.load(job / "frames.npz")
    placements, target = frames["placements"], frames["target"]
    stage = _Stage(mujoco.MjModel.from_binary_path(str(job / "model.mjb")), shots)
    stage.draw(placements[0], target[0], ("", "", ""))
    _say("ready")
    encoder = start_encoder(
        shots.ffmpeg, shots.output, (shots.width, shots.height), shots.fps, ("-vf", "vflip")
    )
    assert encoder.stdin is not None
    try:
        for number, caption in enumerate(shots.captions):
            encoder.stdin.write(stage.draw(placements[number], target[number], caption).tobytes())
            _say(str(number + 1))
    except BrokenPipeError as error:
        # The encoder has printed why it ended, or the parent process is gone.
        raise SystemExit(ExitStatus.FAILED) from error
    encoder.stdin.close()
    stage.close()
    raise SystemExit(encoder.wait())


def start_encoder(
    ffmpeg: str, output: str, size: tuple[int, int], fps: float, filters: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    """Starts a process that encodes frames into H.264 in MP4; it takes them as RGB bytes on its stdin."""
    width_height, rate = f"{size[0]}x{size[1]}", f"{fps:.6g}"
    raw = ("-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", width_height)
    x264 = ("-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart")
    command = [ffmpeg, "-y", "-loglevel", "error", *raw, "-framerate", rate, "-i", "-"]
    command += [*filters, *x264, "-f", "mp4", output]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    _draw(Path(sys.argv[1]))
