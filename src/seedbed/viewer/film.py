"""Films a trained policy in a game of pixels: what a person would see, as an MP4 file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.doom import DoomEnv
from seedbed.policy import TrainedAgent, policy_of
from seedbed.types import Array, SeedbedError
from seedbed.viewer.recording import written_whole
from seedbed.viewer.video import find_ffmpeg, start_encoder

Game = AtariEnv | DoomEnv
"""Games that can be filmed: the same seed plays alike, once as the agent sees it and once for people."""
MOST_STEPS = 27_000
"""The most steps of an episode that are filmed: half an hour of play, Atari's own limit."""


def film_game(
    config: Game,
    trained: TrainedAgent,
    episodes: int,
    seed: int,
    path: Path,
    most_steps: int = MOST_STEPS,
) -> list[float]:
    """Plays episodes one after another and films at most `most_steps` steps of each; `path` ends in .mp4.

    Returns the return of each in what was filmed. Raises SeedbedError without ffmpeg, or if the file cannot
    be written.
    """
    ffmpeg = find_ffmpeg()
    returns = []
    with written_whole(path, ".mp4") as partial:
        height, width = config.screen
        size, rate = (width, height), config.steps_per_s
        encoder = start_encoder(ffmpeg, str(partial.absolute()), size, rate, ())
        assert encoder.stdin is not None
        try:
            for episode in range(episodes):
                returns.append(0.0)
                for picture, reward in _play(config, trained, seed + episode, most_steps):
                    returns[-1] += reward
                    encoder.stdin.write(picture.tobytes())
        except BrokenPipeError:
            pass  # the encoder has said why it ended
        finally:
            encoder.stdin.close()
            status = encoder.wait()
        if status:
            raise SeedbedError(f"filming failed: ffmpeg ended with {status}, see above")
    return returns


def _play(
    config: Game, trained: TrainedAgent, seed: int, most_steps: int
) -> Iterator[tuple[Array, float]]:
    """Plays one episode; yields its pictures uint8 `[H, W, 3]` and the reward that came with each."""
    whole: Game = config.for_evaluation()
    # The same game twice: the agent sees a small picture, the film the game's own.
    game, screen = whole.make(1, seed), whole.make_coloured(seed)
    try:
        policy = policy_of(trained, seed)
        timestep, seen = game.reset(), screen.reset()
        for _ in range(most_steps):
            yield seen.observation[0], float(timestep.reward[0])
            if timestep.terminated[0] or timestep.truncated[0]:
                return
            action = policy.act(timestep.observation, timestep.first, timestep.reward)
            timestep, seen = game.step(action), screen.step(action)
            if not np.array_equal(timestep.reward, seen.reward):
                name = config.game if isinstance(config, AtariEnv) else config.scenario
                raise SeedbedError(f"{name} cannot be filmed: it does not play twice alike")
    finally:
        game.close()
        screen.close()
