"""Films of games of pixels: what a person would see of the game that the agent plays."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest

from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.wrappers import time_limit
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.policy import TrainedAgent
from seedbed.types import SeedbedError
from seedbed.viewer import film, record

PONG = AtariEnv("pong", stickiness=0.25)


class RandomPolicy:
    """Acts at random, and remembers what it saw."""

    def __init__(self, trained, seed):
        self.rng, self.trained = np.random.default_rng(seed), trained

    def act(self, observation, first, reward):
        self.trained.seen.append((observation, bool(first[0])))
        return self.rng.integers(0, 6, 1)


@pytest.fixture
def trained(monkeypatch):
    monkeypatch.setattr(film, "policy_of", RandomPolicy)
    found = TrainedAgent(types.SimpleNamespace(env=PONG), None, None, (), 0)  # type: ignore[arg-type]
    object.__setattr__(found, "seen", [])
    return found


@pytest.mark.slow
def test_the_film_shows_the_game_that_is_played(tmp_path, trained, monkeypatch):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "film.mp4"
    returns = film.film_game(PONG, trained, 2, 0, path, most_steps=60)
    assert len(returns) == 2 and all(score in range(-5, 5) for score in returns)
    frames = imageio_ffmpeg.read_frames(str(path))
    described = next(frames)
    assert described["source_size"] == (160, 210) and described["fps"] == 15.0
    pictures = [np.frombuffer(frame, np.uint8).reshape(210, 160, 3) for frame in frames]
    assert len(pictures) == 120 and len(trained.seen) == 120
    # The agent's grey square is the picture made smaller. H.264 changes it a little.
    for at in (3, 59, 60, 119):
        grey = pictures[at].astype(float) @ (0.299, 0.587, 0.114)
        seen = trained.seen[at][0][0].astype(float)
        assert abs(grey.mean() - seen.mean()) < 3.0
        rows, columns = np.arange(84) * 210 // 84, np.arange(84) * 160 // 84
        assert np.abs(grey[rows][:, columns] - seen).mean() < 6.0
    assert [first for _, first in trained.seen].count(True) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_game_that_does_not_play_twice_alike_is_refused(tmp_path, trained, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    other = AtariEnv("breakout")
    monkeypatch.setattr(AtariEnv, "make_coloured", lambda self, seed: other.make(1, seed + 1))
    breakout = RandomPolicy.act

    def act(self, observation, first, reward):
        return np.minimum(breakout(self, observation, first, reward), 3)

    monkeypatch.setattr(RandomPolicy, "act", act)
    with pytest.raises(SeedbedError, match="pong cannot be filmed: it does not play twice alike"):
        film.film_game(PONG, trained, 1, 0, tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())


def test_games_are_filmed_and_not_drawn(tmp_path, trained, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    short = functools.partial(film.film_game, most_steps=5)
    monkeypatch.setattr(record, "film_game", short)
    record.show(tmp_path, trained, episodes=1, video=tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").stat().st_size > 1000
    with pytest.raises(SeedbedError, match="AtariEnv has no MuJoCo model to draw; only a video"):
        record.show(tmp_path, trained, html=tmp_path / "film.html")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            FactoryEnv("gymnasium.envs.classic_control:CartPoleEnv"),
            "CartPoleEnv has no MuJoCo model to draw",
        ),
        (time_limit(CartPole(), 5), "_TimeLimit cannot be drawn: of MuJoCo's tasks"),
        (GymEnv("CartPole-v1"), "CartPole-v1 has no MuJoCo model to draw"),
    ],
)
def test_what_cannot_be_drawn_is_told_truly(tmp_path, env, text):
    trained = TrainedAgent(types.SimpleNamespace(env=env), None, None, (), 0)  # type: ignore[arg-type]
    with pytest.raises(SeedbedError, match=text):
        record.show(tmp_path, trained, html=tmp_path / "page.html")
