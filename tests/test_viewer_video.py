"""Films: what is drawn, how it is encoded, and what is left when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.types import SeedbedError
from seedbed.viewer import record, video
from seedbed.viewer.recording import Episode, Recording
from seedbed.viewer.video import write_video

ANT = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
WIDTH, HEIGHT = 320, 240


def walking_ant(steps: int, speed: float = 1.0, start: float = 0.0) -> Recording:
    """An ant carried along x, its legs swinging."""
    qpos = np.zeros((steps + 1, 15))
    time = 0.05 * np.arange(steps + 1)
    qpos[:, 0], qpos[:, 2], qpos[:, 3] = start + speed * time, 0.6, 1.0
    qpos[:, 7:] = 0.5 * np.sin(6.0 * time)[:, None] + [0, 1, 0, -1, 0, -1, 0, 1]
    return Recording(ANT, (Episode(qpos, np.ones(steps), 0.05),), "ant")


@pytest.fixture(scope="module")
def can_draw() -> None:
    failures = []
    for backend in video.BACKENDS:
        code = "import mujoco; mujoco.GLContext(16, 16).make_current()"
        environment = {**os.environ, "MUJOCO_GL": backend}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        if done.returncode == 0:
            return
        failures.append(backend)
    pytest.skip(f"nothing draws without a display: {' and '.join(failures)} fail")


@pytest.fixture
def ffmpeg() -> str:
    return pytest.importorskip("imageio_ffmpeg", reason="needs the extra video").get_ffmpeg_exe()


def decode(ffmpeg: str, path: Path) -> np.ndarray:
    """Reads a film: `[frames, HEIGHT, WIDTH, 3]`."""
    command = [ffmpeg, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    done = subprocess.run([*command, "-"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, HEIGHT, WIDTH, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("can_draw")
def test_film_shows_every_frame(tmp_path, ffmpeg):
    path = tmp_path / "ant.mp4"
    write_video(walking_ant(19), path, width=WIDTH, height=HEIGHT)
    assert list(tmp_path.iterdir()) == [path]
    frames = decode(ffmpeg, path).astype(int)
    assert len(frames) == 20
    assert np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)).min() > 1.0  # all differ: it moves
    middle = frames[:, 90:150, 130:190].reshape(20, -1, 3)
    red, _, blue = middle.transpose(2, 0, 1)
    brown = (red - blue > 40).mean(1)
    assert brown.min() > 0.1, "the ant is not in the middle"


@pytest.mark.slow
@pytest.mark.usefixtures("can_draw")
def test_ground_goes_along(tmp_path, ffmpeg):
    near, far = tmp_path / "near.mp4", tmp_path / "far.mp4"
    tile = 80.0 / 60.0  # of the ant's ground
    for path, start in ((near, 0.0), (far, 300 * tile)):
        write_video(walking_ant(2, start=start), path, width=WIDTH, height=HEIGHT, fps=10)
    near_frames, far_frames = (decode(ffmpeg, path).astype(int) for path in (near, far))
    assert len(near_frames) == 2  # 0.1 s at 10 a second
    assert np.abs(near_frames - far_frames).mean() < 4.0


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ({}, "film.avi", "must end in .mp4"),
        ({}, "none/film.mp4", "there is no folder"),
        ({"width": 161}, "film.mp4", "must be even"),
        ({"height": 0}, "film.mp4", "must be even and 16 or more"),
        ({"fps": 0.0}, "film.mp4", "fps is 0.0"),
        ({"camera": "nose"}, "film.mp4", "no camera 'nose'; there are follow, track"),
    ],
)
def test_refused(tmp_path, monkeypatch, options, name, text):
    monkeypatch.setattr(video, "find_ffmpeg", lambda: "ffmpeg")
    with pytest.raises(SeedbedError, match=text):
        write_video(walking_ant(2), tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(SeedbedError, match=r"pip install 'seedbed\[video\]'"):
        write_video(walking_ant(2), tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


def test_missing_driver_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "find_ffmpeg", lambda: "ffmpeg")
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    with pytest.raises(SeedbedError, match=r"apt-get install libegl1.*crayons"):
        write_video(walking_ant(2), tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("can_draw")
def test_failed_film_leaves_nothing(tmp_path, monkeypatch):
    kept = tmp_path / "film.mp4"
    kept.write_bytes(b"an older film")
    monkeypatch.setattr(video, "find_ffmpeg", lambda: "false")
    with pytest.raises(SeedbedError, match="filming failed"):
        write_video(walking_ant(2), kept, width=WIDTH, height=HEIGHT)
    assert list(tmp_path.iterdir()) == [kept] and kept.read_bytes() == b"an older film"


@pytest.fixture
def given(monkeypatch):
    """The rewards that a policy is given, which does nothing, in an episode that is recorded."""
    rewards = []

    class Still:
        def __init__(self, *_):
            pass

        def reset(self):
            rewards.clear()

        def act(self, observation, reward=None):
            rewards.append(reward)
            return np.zeros(1, np.float32)

    monkeypatch.setattr(record, "policy_of", Still)
    return rewards


@pytest.mark.parametrize(
    ("kwargs", "steps"), [({"max_episode_steps": 7}, 7), ({"own_limit": 5}, 5)]
)
def test_a_recorded_episode_ends_as_in_training(given, kwargs, steps):
    """Of an environment that the users' module registers, with the run's own options."""
    config = GymEnv("own_environments:OwnPendulum-v0", kwargs=kwargs)
    film = record._in_gymnasium(config, None, 2, 0, "")
    assert [len(each.reward) for each in film.episodes] == [steps, steps]


def test_an_environment_of_a_function_is_recorded(given):
    config = FactoryEnv("own_environments:OwnPendulum", kwargs={"own_limit": 5})
    film = record.record(config, None, 1, 0, "")  # type: ignore[arg-type]
    assert [len(each.reward) for each in film.episodes] == [5]


def test_a_policy_that_is_filmed_is_given_its_rewards(given):
    """A memory may be fed the reward before."""
    film = record._in_gymnasium(GymEnv("InvertedPendulum-v5"), None, 1, 0, "")
    rewards = film.episodes[0].reward
    assert len(rewards) > 3 and given == [0.0, *rewards[:-1]]
    np.testing.assert_array_equal(film.episodes[0].series["reward_survive"], rewards)
