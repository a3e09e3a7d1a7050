"""Streams for the host's replay in which every row says whose it is, and a slow account of their items."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from seedbed import trees, types
from seedbed.replay.host.items import Windows
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import HostReplay, Sample
from seedbed.types import ArraySpec, Discrete, EnvSpec, Timestep

IMAGE = (32, 32)
SPEC = EnvSpec(
    {"image": ArraySpec(IMAGE, "uint8"), "where": ArraySpec((3,), "int32")}, Discrete(1000)
)
EXTRAS = {"q": np.zeros((2,), np.float32)}
CORE = (np.zeros((3,), np.float32), np.zeros((), np.int32))


def experience(**changes) -> types.Replay:
    given = {"batch": 4, "sequence": 5, "period": 5, "capacity": 100, "min_size": 1, "ratio": 1.0}
    return types.Replay(**{**given, **changes})


def layout(replay: types.Replay, groups: int = 2, size: int = 3, **changes) -> Layout:
    return Layout(replay, SPEC, EXTRAS, CORE, groups, size, **changes)


class Row(NamedTuple):
    """Row `step` of an episode; a stream's rows are numbered from `start`."""

    env: int
    episode: int
    step: int
    length: int  # rows of the episode, if it is not interrupted


def image_of(env: np.ndarray, episode: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Makes images `[..., 32, 32]` of which some compress and some do not."""
    seeds = np.asarray(env * 1009 + episode * 31 + step, np.uint64)[..., None]
    noise = (seeds + np.arange(1024, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    noise = (noise >> np.uint64(56)).astype(np.uint8)
    flat = np.broadcast_to((seeds % np.uint64(251)).astype(np.uint8), noise.shape)
    return np.where(np.asarray(env % 2 == 0)[..., None], noise, flat).reshape(
        *np.shape(env), *IMAGE
    )


class Stream:
    """The rows of a group's environments, whose episode e has 2 to `longest` rows."""

    def __init__(self, group: int, size: int, longest: int) -> None:
        self.envs = np.arange(group * size, (group + 1) * size)
        self.longest = longest
        self.episode = np.zeros(size, np.int64)
        self.step = np.full(size, -1)

    def lengths(self, episode: np.ndarray) -> np.ndarray:
        return episode_length(self.envs, episode, self.longest)

    def restart(self) -> None:
        self.episode += 1
        self.step[:] = -1

    def advance(self) -> tuple[Timestep, np.ndarray, dict, tuple]:
        """Makes the next row of all."""
        over = self.step + 1 == self.lengths(self.episode)
        self.episode = self.episode + over
        self.step = np.where(over, 0, self.step + 1)
        return row_of(self.envs, self.episode, self.step, self.longest)


def episode_length(env: np.ndarray, episode: np.ndarray, longest: int) -> np.ndarray:
    return 2 + (env * 7919 + episode * 104729 + 13 * episode**2) % (longest - 1)


def row_of(env, episode, step, longest) -> tuple[Timestep, np.ndarray, dict, tuple]:
    """Makes what replay keeps of rows `[...]`."""
    last = step + 1 == episode_length(env, episode, longest)
    truncates = (env + episode) % 3 == 0
    code = (env * 65536 + episode * 256 + step).astype(np.float32)
    where = np.stack([env, episode, step], axis=-1).astype(np.int32)
    observation = {"image": image_of(env, episode, step), "where": where}
    reward = np.where(step == 0, 0, code).astype(np.float32)
    timestep = Timestep(observation, reward, last & ~truncates, last & truncates, step == 0)
    core = (np.stack([code, code + 1, code + 2], -1), (code * 2).astype(np.int32))
    return timestep, (code % 997).astype(np.int32), {"q": np.stack([code, -code], -1)}, core


def read_all(replay: HostReplay) -> tuple[Sample, np.ndarray]:
    """Returns all items, oldest first, and their weights."""
    items, storage = replay._storage.items, replay._storage
    live = np.flatnonzero(items.tree.weights > 0)
    live = live[np.argsort(items.generation[live])]
    out = replay.make_sample(len(live))
    windows: Windows = items.read(live)
    if len(live):
        storage.records.gather(windows, trees.leaves((out.timesteps, out.action, out.extras)))
        storage.read_cores(windows, trees.leaves(out.core))
    out.slots[:], out.generations[:] = live, items.generation[live]
    return out, items.tree.weights[live].copy()


def require_whole(replay: HostReplay, sample: Sample, longest: int) -> None:
    """Asserts that each item is what `types.Replay` says, row for row."""
    keeps, context = replay.layout.experience, replay.layout.context
    where = sample.timesteps.observation["where"][context]  # [B, 3], where the learned part begins
    env, episode, start = (where[:, i].astype(np.int64) for i in range(3))
    rows = replay.layout.item_rows
    length = episode_length(env, episode, longest)
    step = start + np.arange(rows)[:, None] - context  # [T, B]
    assert (start % keeps.period == 0).all() and (start + 1 < length).all()
    there = (step >= 0) & (step < length)
    grid = (np.broadcast_to(env, step.shape), np.broadcast_to(episode, step.shape))
    timestep, action, extras, core = row_of(*grid, np.where(there, step, 0), longest)

    def expect(given: np.ndarray, wanted: np.ndarray, padding: float = 0) -> None:
        mask = there[-len(given) :].reshape(len(given), -1, *(1,) * (given.ndim - 2))
        np.testing.assert_array_equal(given, np.where(mask, wanted[-len(given) :], padding))

    expect(sample.timesteps.observation["image"], timestep.observation["image"])
    expect(sample.timesteps.observation["where"], timestep.observation["where"])
    expect(sample.timesteps.reward, timestep.reward)
    expect(sample.timesteps.terminated, timestep.terminated)
    expect(sample.timesteps.truncated, timestep.truncated)
    expect(sample.timesteps.first, timestep.first, padding=True)
    steps = keeps.steps
    expect(sample.action, action[-steps:])
    expect(sample.extras["q"], extras["q"][-steps:])
    known = start >= keeps.burn_in
    for given, wanted in zip(sample.core, core, strict=True):
        entered = wanted[rows - steps]
        mask = known.reshape(-1, *(1,) * (given.ndim - 1))
        np.testing.assert_array_equal(given, np.where(mask, entered, 0))


@dataclasses.dataclass
class Recorder:
    """Feeds a replay and lists the items that it should hold, slowly."""

    replay: HostReplay
    longest: int

    def __post_init__(self) -> None:
        shape = self.replay.layout
        self.streams = [
            Stream(group, shape.group_size, self.longest) for group in range(shape.num_groups)
        ]
        self._rows: list[list[list[tuple[int, int]]]] = [
            [[] for _ in range(shape.group_size)] for _ in self.streams
        ]
        self.expected: list[tuple[tuple[int, ...], list[tuple[int, int] | None]]] = []

    def append(self, group: int) -> None:
        stream = self.streams[group]
        self.replay.append(group, *stream.advance())
        for env, rows in enumerate(self._rows[group]):
            rows.append((int(stream.episode[env]), int(stream.step[env])))

    def restart(self, group: int) -> None:
        """Ends the streams of a group and lists their items."""
        self.replay.restart(group)
        for env, rows in zip(self.streams[group].envs, self._rows[group], strict=True):
            self.expected += [(int(env), item) for item in self._items(int(env), rows)]
            rows.clear()
        self.streams[group].restart()

    def _items(self, env: int, rows: list[tuple[int, int]]) -> list[list[tuple[int, int] | None]]:
        shape, keeps = self.replay.layout, self.replay.layout.experience
        opening = [i for i, (_, step) in enumerate(rows) if step == 0] + [len(rows)]
        parts = [rows[a:b] for a, b in itertools.pairwise(opening)]
        items = []
        for part in parts:
            episode = np.int64(part[-1][0]) if part else 0
            over = bool(part) and part[-1][1] + 1 == episode_length(
                np.int64(env), episode, self.longest
            )
            for start in range(0, len(part) - 1, keeps.period):
                if start + keeps.sequence < len(part) or over:
                    span = range(start - shape.context, start + keeps.sequence + 1)
                    items.append([part[i] if 0 <= i < len(part) else None for i in span])
        return items


def rows_of(sample: Sample, column: int) -> tuple[int, list[tuple[int, int] | None]]:
    """Reads from an item whose rows it has; None is padding."""
    where, first = sample.timesteps.observation["where"][:, column], sample.timesteps.first
    image = sample.timesteps.observation["image"][:, column]
    rows: list[tuple[int, int] | None] = []
    env = -1
    for t, (owner, episode, step) in enumerate(where.tolist()):
        padding = bool(first[t, column]) and not image[t].any() and not (owner or episode or step)
        # Row (0, 0, 0) differs from padding by its picture only.
        expected = image_of(*(np.int64(x) for x in (owner, episode, step)))
        if padding and expected.any():
            rows.append(None)
        else:
            np.testing.assert_array_equal(image[t], expected)
            rows.append((episode, step))
            env = owner
    return env, rows
