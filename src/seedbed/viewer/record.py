"""Plays a trained policy, records the positions of the bodies, and writes a video or a page of them."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.arguments import checked
from seedbed.config.settle import called
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.envs.device.wrappers import innermost, innermost_state
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.fused.playing import NOT_SUMMED, open_episodes, play
from seedbed.policy import TrainedAgent, other_environment, policy_of
from seedbed.printable import printable
from seedbed.types import Array, Environment, EnvState, SeedbedError
from seedbed.viewer.film import Game, film_game
from seedbed.viewer.html import write_html
from seedbed.viewer.recording import Episode, Recording
from seedbed.viewer.video import write_video

SHOWN = 3
"""The number of episodes that `show` plays by default, and the most that `seedbed evaluate` shows."""


@checked
def show(
    run: str | Path,
    trained: TrainedAgent,
    *,
    env: str | None = None,
    episodes: int = SHOWN,
    seed: int = 0,
    video: Path | None = None,
    html: Path | None = None,
) -> None:
    """Plays episodes with a run's policy, and writes them as a video and as an HTML page.

    `trained` is of `restore`. `env` names another environment with the same shapes; None plays the run's
    own. `video` and `html` are the paths to write; None writes no such file. Raises SeedbedError before it
    plays if the environment cannot be drawn: it has no MuJoCo model, or is a game, of which only a video can
    be.
    """
    config = trained.env if env is None else other_environment(trained, env, run)
    if isinstance(config, Game) and html is None:
        if video is not None:
            film_game(config, trained, episodes, seed, video)
        return
    title = printable(f"{Path(run).name} in {env or called(trained.env)}")
    recording = record(config, trained, episodes, seed, title)
    if video is not None:
        write_video(recording, video)
    if html is not None:
        write_html(recording, html)


def record(
    config: HostEnvConfig | Environment,
    trained: TrainedAgent,
    episodes: int,
    seed: int,
    title: str,
) -> Recording:
    """Plays episodes in an environment and records them.

    Raises SeedbedError if the environment cannot be recorded.
    """
    if is_on_device(config) and isinstance(innermost(config), MujocoTask):
        return _on_device(config, trained, episodes, seed, title)
    if isinstance(config, GymEnv | FactoryEnv):
        return _in_gymnasium(config, trained, episodes, seed, title)
    name = type(config).__name__
    if isinstance(config, Game):
        raise SeedbedError(f"{name} has no MuJoCo model to draw; only a video shows it")
    raise SeedbedError(
        f"{name} cannot be drawn: of MuJoCo's tasks only those on the device, and those of Gymnasium's form; "
        "`seedbed evaluate --env` may name one"
    )


def _on_device(
    env: Environment, trained: TrainedAgent, episodes: int, seed: int, title: str
) -> Recording:
    """Plays all episodes at once, each until it terminates or reaches the time limit (1,000 if none).

    Of a task in wrappers, the bodies are drawn as its file has them.
    """
    task: Any = innermost(env)
    reset_key, act_key = jax.random.split(jax.random.key(seed))
    now = jax.jit(functools.partial(open_episodes, trained.agent, env, episodes))(reset_key)
    play_until = jax.jit(functools.partial(play, trained.agent, env))

    @jax.vmap
    def poses(state: EnvState) -> dict[str, Array]:
        inner = innermost_state(env, state).inner
        return {"qpos": inner.qpos, **task.mocap(inner.kept)}

    params, placed, stepped = jax.device_put(trained.params), [poses(now.env)], []
    for count in range(1, (env.episode_steps or 1000) + 1):
        if np.all(now.done):
            break
        now = play_until(params, act_key, now, np.uint32(count))
        placed.append(poses(now.env))
        told = {name: x for name, x in now.env.metrics.items() if name not in NOT_SUMMED}
        stepped.append({**told, "reward": now.env.timestep.reward})
    places, values = (
        jax.tree.map(lambda *rows: np.stack(rows), *jax.device_get(x)) for x in (placed, stepped)
    )
    shown = []
    for i, length in enumerate(np.asarray(now.lengths)):
        series = {name: value[:length, i] for name, value in values.items()}
        where = {name: pose[: length + 1, i] for name, pose in places.items()}
        shown.append(Episode(reward=series.pop("reward"), env_dt=task.dt, series=series, **where))
    return Recording(task.compiled(), tuple(shown), title)


def _in_gymnasium(
    config: GymEnv | FactoryEnv, trained: TrainedAgent, episodes: int, seed: int, title: str
) -> Recording:
    """Plays one episode after the other in Gymnasium's environment, made as for training, until each ends.

    Without a time limit of `gymnasium.make`, an episode has at most 1,000 steps. Raises SeedbedError if the
    environment has no MuJoCo model, in the attributes that `MujocoEnv` has.
    """
    with contextlib.closing(config.one()) as env:
        inner: Any = env.unwrapped
        if not all(hasattr(inner, name) for name in ("model", "data", "dt")):
            raise SeedbedError(f"{called(config)} has no MuJoCo model to draw (model, data and dt)")
        policy, shown = policy_of(trained, seed), []
        most = (env.spec and env.spec.max_episode_steps) or 1000
        for i in range(episodes):
            observation, _ = env.reset(seed=seed + i)
            policy.reset()
            qpos, rewards, reward, over = [inner.data.qpos.copy()], [], 0.0, False
            mocap = [(inner.data.mocap_pos.copy(), inner.data.mocap_quat.copy())]
            told: list[dict[str, float]] = []
            while not over and len(rewards) < most:
                action = policy.act(observation, reward=reward)
                observation, reward, terminated, truncated, info = env.step(action)
                over = terminated or truncated
                qpos.append(inner.data.qpos.copy())
                mocap.append((inner.data.mocap_pos.copy(), inner.data.mocap_quat.copy()))
                rewards.append(reward)
                told.append({k: v for k, v in info.items() if isinstance(v, int | float)})
            series = {name: np.array([each.get(name, np.nan) for each in told]) for name in told[0]}
            poses = map(np.stack, zip(*mocap, strict=True))
            shown.append(Episode(np.stack(qpos), np.array(rewards), inner.dt, series, *poses))
        return Recording(inner.model, tuple(shown), title)
