"""Plays a trained policy, records the positions of the bodies, and writes a video or a page of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from seedbed import api, simd
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.envs.host.gym import GymEnv
from seedbed.run.keys import environment_keys
from seedbed.types import Array, EnvState, SeedbedError
from seedbed.viewer.html import write_html
from seedbed.viewer.recording import Episode, Recording
from seedbed.viewer.video import write_video

SHOWN = 3
"""The number of episodes that `show` plays by default, and the most that `seedbed evaluate` shows."""


def show(
    run: str | Path,
    *,
    env: str | None = None,
    episodes: int = SHOWN,
    seed: int = 0,
    video: Path | None = None,
    html: Path | None = None,
) -> None:
    """Plays episodes with a run's best policy and writes them as a video and as an HTML page.

    `env` names another environment with the same shapes; None plays the run's own. `video` and `html` are
    the paths to write; None writes no such file. Raises SeedbedError if the environment has no MuJoCo model.
    """
    trained = api.restore(run)
    config = trained.env if env is None else api.other_environment(trained, env, run)
    title = f"{Path(run).name} in {env or type(trained.env).__name__}"
    if isinstance(config, MujocoTask):
        recording = _on_device(config, trained, episodes, seed, title)
    elif isinstance(config, GymEnv):
        recording = _in_gymnasium(config, trained, episodes, seed, title)
    else:
        raise SeedbedError(
            f"{type(config).__name__} has no MuJoCo model to draw: --video and --html show MuJoCo's tasks"
        )
    if video is not None:
        write_video(recording, video)
    if html is not None:
        write_html(recording, html)


def _on_device(
    env: MujocoTask, trained: api.TrainedAgent, episodes: int, seed: int, title: str
) -> Recording:
    """Plays all episodes at once, each until it terminates or reaches the time limit (1,000 if none)."""
    agent, steps = trained.agent, env.episode_steps or 1000
    reset_key, act_key = jax.random.split(jax.random.key(seed))
    env_ids = jnp.arange(episodes, dtype=jnp.uint32)
    move = simd.vectorize(env.step)

    @jax.jit
    def play() -> tuple[Array, Array, Array]:
        def step(now: tuple[EnvState, Any], count: Array) -> tuple[tuple[EnvState, Any], Any]:
            state, actor = now
            keys = environment_keys(act_key, env_ids, jnp.stack([count, jnp.uint32(0)]))
            timestep = state.timestep
            action, _, actor = agent.act(trained.params, actor, timestep, keys, evaluate=True)
            moved = move(state, action)
            row = (moved.inner.qpos, moved.timestep.reward, moved.timestep.terminated)
            return (moved, actor), row

        state = simd.vectorize(env.reset)(jax.random.split(reset_key, episodes))
        begun = (state, agent.actor_state(env_ids, episodes))
        _, (qpos, reward, terminated) = jax.lax.scan(
            step, begun, jnp.arange(steps, dtype=jnp.uint32)
        )
        return jnp.concatenate([state.inner.qpos[None], qpos]), reward, terminated

    qpos, reward, terminated = jax.device_get(play())
    shown = []
    for i in range(episodes):
        ends = np.flatnonzero(terminated[:, i])
        length = int(ends[0]) + 1 if len(ends) else steps
        shown.append(Episode(qpos[: length + 1, i], reward[:length, i], env.dt))
    return Recording(env.model_path, tuple(shown), title)


def _in_gymnasium(
    config: GymEnv, trained: api.TrainedAgent, episodes: int, seed: int, title: str
) -> Recording:
    """Plays one episode after the other in Gymnasium's own environment, with its time limit (1,000 if none).

    Raises SeedbedError if the environment has no MuJoCo model.
    """
    env: Any = gymnasium.make(config.id, **dict(config.kwargs)).unwrapped
    if not hasattr(env, "data") or not hasattr(env, "dt"):
        raise SeedbedError(
            f"{config.id} has no MuJoCo model to draw: --video and --html show MuJoCo's tasks"
        )
    limit = gymnasium.spec(config.id).max_episode_steps or 1000
    policy = api.Policy(trained, seed)
    shown = []
    for i in range(episodes):
        observation, _ = env.reset(seed=seed + i)
        policy.reset()
        qpos, rewards, reward, terminated = [env.data.qpos.copy()], [], 0.0, False
        while not terminated and len(rewards) < limit:
            action = policy.act(observation, reward=reward)
            observation, reward, terminated, _, _ = env.step(action)
            qpos.append(env.data.qpos.copy())
            rewards.append(reward)
        shown.append(Episode(np.stack(qpos), np.array(rewards), env.dt))
    model = env.model
    env.close()
    return Recording(model, tuple(shown), title)
