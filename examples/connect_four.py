"""Connect four against an opponent who moves at random: an environment with masks of actions.

    pip install pettingzoo pygame
    seedbed train connect_four:ConnectFour --steps 1000000

Run it in this folder, so that `connect_four` can be imported. PettingZoo's observation is a dict with an
entry `action_mask`, which is 0 where a column is full; Seedbed's agents never choose such an action.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from pettingzoo.classic import connect_four_v3


class ConnectFour(gymnasium.Env):
    """A game is won with reward 1 and lost with -1; who begins is drawn."""

    def __init__(self) -> None:
        """Makes the game; the spaces are those of a player."""
        self._game = connect_four_v3.raw_env()
        self._me = player = self._game.possible_agents[0]
        self.observation_space = self._game.observation_space(player)
        self.action_space = self._game.action_space(player)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a game, with the opponent's first move if that side begins."""
        super().reset(seed=seed)
        self._game.reset()
        self._me = self.np_random.choice(self._game.possible_agents)
        self._opponent_moves()
        return self._game.observe(self._me), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Moves, and lets the opponent move."""
        self._game.step(int(action))
        self._opponent_moves()
        reward, over = self._game.rewards[self._me], self._game.terminations[self._me]
        return self._game.observe(self._me), float(reward), over, False, {}

    def _opponent_moves(self) -> None:
        """Makes a random move if it is the opponent's turn and the game is not over."""
        other = self._game.agent_selection
        if other == self._me or self._game.terminations[other]:
            return
        columns = self._game.observe(other)["action_mask"].nonzero()[0]
        self._game.step(int(self.np_random.choice(columns)))
