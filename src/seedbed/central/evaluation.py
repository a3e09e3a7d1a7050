"""Evaluations beside training, in a thread and an actor process of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from seedbed.actors.pool import ActorPool
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.run.evaluation import (
    Play,
    Player,
    evaluation_envs,
    evaluation_pool,
    initial_player,
    play_episodes,
)
from seedbed.run.runtime import Score
from seedbed.types import Agent, Tree


class EvaluationOptions(Protocol):
    """The options of a run that its evaluations follow."""

    @property
    def evaluate_episodes(self) -> int:
        """Episodes in an evaluation."""
        ...

    @property
    def actor_timeout_s(self) -> float:
        """Seconds after which a silent actor is replaced."""
        ...


class Evaluation:
    """An evaluation of parameters in a thread and an actor process of its own; a `run.runtime.Evaluation`."""

    def __init__(
        self,
        agent: Agent,
        env: HostEnvConfig,
        options: EvaluationOptions,
        play: Play,
        params: Tree,
        seed: int,
    ) -> None:
        """Starts the thread at once. `agent` is bound, and `params` are on the host."""
        # Written by the thread before it ends.
        self.score: Score | None = None
        self.failure: Exception | None = None
        self._agent, self._env, self._options = agent, env, options
        self._play, self._params, self._seed = play, params, seed
        self._pool: ActorPool | None = None
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        options, episodes = self._options, self._options.evaluate_episodes
        seed, envs = self._seed, evaluation_envs(episodes)
        try:
            pool = evaluation_pool(self._env, envs, seed, options.actor_timeout_s)
            self._pool = pool
            with pool:
                spec = pool.wait_spec(self._cancel.is_set)
                if spec is None:
                    return
                state = initial_player(self._agent, spec, self._env.frame_stack, envs)
                player = Player(self._play, self._params, state, seed)
                result = play_episodes(pool, player, episodes, self._cancel)
            self.score = None if result is None else _score(result)
        except Exception as failure:
            self.failure = failure

    @property
    def done(self) -> bool:
        """Whether the evaluation has ended, with or without a score. Any thread may read it."""
        return not self._thread.is_alive()

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds of the actor so far. Any thread may read it."""
        return self._pool.cpu_seconds() if self._pool else 0.0

    @property
    def pids(self) -> list[int]:
        """The process id of the actor, or an empty list if it has not started or the evaluation has ended.

        Any thread may read it.
        """
        return self._pool.pids() if self._pool and not self.done else []

    def take_notices(self) -> list[str]:
        """Returns messages about the actor's death or silence, each once. Call from one thread at a time."""
        return self._pool.take_notices() if self._pool else []

    def cancel(self) -> None:
        """Asks the evaluation to end without a score; does not wait. Any thread may call this."""
        self._cancel.set()

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Waits for the end of the evaluation; cancels it if `give_up` returns True.

        `give_up` is called by the waiting thread, about every 0.2 s. Any thread may call this.
        """
        while not self.done:
            if give_up():
                self.cancel()
            self._thread.join(0.2)


def _score(result: dict[str, Any]) -> Score:
    mean, deviation = result["episode_return_mean"], result["episode_return_std"]
    text = f"{mean:.2f} +- {deviation:.2f} ({result['episodes']} episodes)"
    return Score(mean, text, result, {})
