"""The rules by which a run ends before its steps: a return that is reached, no progress, or enough time."""

from __future__ import annotations

import math

from seedbed.run.runtime import Runtime, Score

WINDOW = 100
"""Episodes that must have ended before their mean return says anything."""


class StoppingRules:
    """The options `until_return`, `until_stale` and `max_minutes` of a run. For the session's thread.

    A return counts as reached when the mean of the last 100 episodes has reached it and the evaluation that
    follows has, too. What is stale is counted from the start of this process. Of a population, the mean of
    all members' episodes counts, and the median of their evaluations.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._options = runtime, runtime.options
        self._best, self._best_at = -math.inf, runtime.progress().env_steps
        # The number of episodes at which the mean return is looked at next.
        self._look_at = WINDOW
        self._reached = (
            False  # whether the evaluation that comes next has been asked for by a return
        )
        self._over = ""  # why the run is to end, but for its time
        self.confirmed = False  # whether an evaluation has reached the return that was asked for

    def asks_for_evaluation(self) -> bool:
        """Returns whether the mean return is there, so that an evaluation should confirm it.

        If that does not, it asks again after 100 more episodes.
        """
        if self._options.until_return == math.inf:
            return False
        recent = self._runtime.recent_episodes()
        if recent["episodes"] < self._look_at:
            return False
        self._reached = recent["episode_return_mean"] >= self._options.until_return
        if self._reached:
            self._look_at = recent["episodes"] + WINDOW
        return self._reached

    def take_score(self, env_steps: int, score: Score | None) -> None:
        """Notes what came of an evaluation of the parameters at `env_steps`; None if nothing did."""
        reached, self._reached = self._reached, False
        if score is None:
            return
        options, mean = self._options, score.metrics["episode_return_mean"]
        if reached and mean >= options.until_return:
            self.confirmed = True
            self._over = (
                f"the return of {options.until_return:g} is reached: {mean:.2f} in an evaluation"
            )
        stale = env_steps - self._best_at
        if mean > self._best:
            self._best, self._best_at = mean, env_steps
        elif options.until_stale and stale >= options.until_stale:
            best = f"{self._best:.2f} at {self._best_at:,} steps"
            self._over = f"no evaluation in {stale:,} steps was better than {best}"

    def ask(self, by: str) -> None:
        """Ends the run because somebody has asked for it."""
        self._over = f"{by} asked to end the run"

    def reason(self, trained_s: float) -> str:
        """Returns why the run ends now, "" if it goes on; it has trained for `trained_s`."""
        if not self._over and trained_s >= 60 * self._options.max_minutes:
            return f"{self._options.max_minutes:g} minutes of training are over"
        return self._over
