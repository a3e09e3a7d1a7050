"""What parameter shards on hosts with folders of their own have learned, kept in the run's folder, too."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from pathlib import Path

from seedbed.paramserver.directory import SAVE
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.saves import Saver, ShardSave
from seedbed.run.folder import ROLES

_EVERY_S = 60.0
"""Seconds between two copies of a shard: so much is lost at most if its machine is."""


class Copies:
    """The copies of all shards that are elsewhere. For the coordinator's thread."""

    def __init__(
        self,
        run: Path,
        shards: Sequence[Keeper],
        fetch: Callable[[Keeper], ShardSave],
        apart: Callable[[str], bool],
    ) -> None:
        """`fetch` copies a shard, in its keeper's thread; `apart` says whether a role has another folder."""
        self._shards, self._fetch, self._apart = shards, fetch, apart
        self._savers = [Saver(run / ROLES / keeper.role.name / SAVE) for keeper in shards]
        # What was asked of a shard, and how often it had been started again then.
        self._asked: dict[int, tuple[concurrent.futures.Future[ShardSave], int]] = {}
        self._due_s: dict[int, float] = {}

    def tend(self, now_s: float) -> None:
        """Asks for the copies that are due, and writes those that have come, beside training."""
        for number, keeper in enumerate(self._shards):
            asked = self._asked.get(number)
            name = keeper.role.name
            if asked is not None and asked[0].done():
                answer, restarts = self._asked.pop(number)
                # What a shard that has died meanwhile has learned is older than what its successor saves.
                same = keeper.restarts == restarts and self._apart(name)
                if same and answer.exception() is None:
                    self._write(number, answer.result())
            elif asked is None and now_s > self._due_s.setdefault(number, now_s + _EVERY_S):
                self._due_s[number] = now_s + _EVERY_S
                if keeper.connected and self._apart(name):
                    self._asked[number] = keeper.request(self._fetch), keeper.restarts

    def keep(self, saves: Sequence[ShardSave]) -> None:
        """Writes those of all shards at a cut, beside training, where they are elsewhere."""
        for number, (keeper, save) in enumerate(zip(self._shards, saves, strict=True)):
            if self._apart(keeper.role.name):
                self._write(number, save)

    def _write(self, number: int, save: ShardSave) -> None:
        saver = self._savers[number]
        if not saver.busy:
            saver.offer(save)

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once."""
        return [notice for saver in self._savers for notice in saver.take_notices()]

    def close(self) -> None:
        """Waits until nothing is written."""
        for saver in self._savers:
            saver.close()
