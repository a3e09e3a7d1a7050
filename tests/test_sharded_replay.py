"""A learner's replay in shards: what goes there, what is drawn, and what is lost when a shard dies."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from central_runs import View
from replay_shards import AGENT, ENVS, FAR, Shards
from seedbed.agents.q_learning import ActingValues
from seedbed.central.inference import ActOutput
from seedbed.paramserver import replay_client, replay_shard, train
from seedbed.paramserver.beginning import roles_of
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.directory import SAVE
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.leases import Lease
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.replay_folder import (
    forget_former,
    has_former,
    layout_of,
    role_of,
    set_aside,
)
from seedbed.paramserver.replay_shard import RowLayout, priorities_layout
from seedbed.paramserver.replaying import ShardedReplay
from seedbed.paramserver.saves import ShardSave
from seedbed.paramserver.shard import LEARNER
from seedbed.run.checking import check_agent
from seedbed.run.checkpoint_helper import name_of
from seedbed.run.runtime import Start
from seedbed.streams.messages import CONTROL_BYTES, Message, ProtocolError
from seedbed.types import ActorState, SeedbedError, StorageError, Timestep
from waiting import wait_for


@pytest.fixture
def shards(tmp_path):
    made: list[Shards] = []

    def make(**options) -> Shards:
        made.append(Shards(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Environments:
    """The steps of the groups of a learner: rewards count the steps of each environment, and never repeat."""

    def __init__(self, replay: ShardedReplay, learner: int, seed: int = 0) -> None:
        self.replay, self.learner = replay, learner
        self.count = [0, 0]
        self.random = np.random.default_rng(seed)
        self.drawn: dict[tuple[int, int], tuple[float, int, ActingValues]] = {}

    def name(self, group: int) -> np.ndarray:
        env = np.arange(ENVS) + ENVS * (group + 2 * self.learner)
        return np.stack([env, np.full(ENVS, self.count[group])], axis=-1).astype(np.float32)

    def step(self, group: int, first: bool = False) -> None:
        no = np.zeros(ENVS, bool)
        timestep = Timestep(
            self.name(group)[None],
            self.random.normal(size=(1, ENVS)).astype(np.float32),
            no[None],
            no[None],
            np.full((1, ENVS), first or self.count[group] == 0),
        )
        values = self.random.normal(size=(2, 1, ENVS)).astype(np.float32)
        action = self.random.integers(0, 2, (1, ENVS)).astype(np.int32)
        output = ActOutput(action, ActingValues(*values), ActorState((), ()), 0)
        for i, (env, at) in enumerate(self.name(group).astype(int)):
            given = timestep.reward[0, i], action[0, i], ActingValues(*values[:, 0, i])
            self.drawn[env, at] = given
        self.replay.add([group], [0], timestep, output)
        self.count[group] += 1


def observations(batch) -> list[tuple[int, int]]:
    """Returns (environment, step) of each item of a batch."""
    return [tuple(map(int, row)) for row in batch.timesteps.observation[0]]


@pytest.mark.parametrize("options", [{}, {"replay": "bundled"}])
def test_every_step_becomes_an_item_once(shards, options):
    run = shards(learners=2, replay_shards=2, **options)
    replays = [run.learner(seat, seat + 1) for seat in range(2)]
    environments = [Environments(replay, seat) for seat, replay in enumerate(replays)]
    for _ in range(50):
        for each in environments:
            each.step(0)
            each.step(1)
    for replay in replays:
        replay.finish()
        wait_for(lambda replay=replay: replay.ended)
    # 49 transitions of 8 environments; the last step of each has no successor yet.
    for replay in replays:
        assert replay.tally.steps == 49 * 2 * ENVS
        wait_for(lambda replay=replay: replay.tally.added == 49 * 2 * ENVS)
    assert [work.replay.items for work in run.works.values()] == [49 * 2 * ENVS] * 2
    seen = [set(), set()]
    for seat, replay in enumerate(replays):
        for _ in range(60):
            (batch,) = replay.take(10.0)
            seen[seat] |= {env // (2 * ENVS) for env, _ in observations(batch)}
            replay.learned(0, {}, np.ones(AGENT.batch))
    assert seen == ([{0}, {1}] if options else [{0, 1}, {0, 1}])


def test_rows_that_wait_are_sent_in_messages_that_a_shard_takes(shards, monkeypatch):
    run = shards()
    size = RowLayout(layout_of(run.job)).size
    monkeypatch.setattr(replay_shard, "MOST_BYTES", 2 * size + 1000)
    monkeypatch.setattr(replay_client, "MOST_BYTES", 2 * size + CONTROL_BYTES)
    replay = run.learner(0, 1)
    each = Environments(replay, 0)
    for _ in range(200):
        each.step(0)
        each.step(1)
    replay.finish()
    wait_for(lambda: replay.ended and replay.tally.added == 199 * 2 * ENVS)
    monkeypatch.setattr(replay_client, "MOST_BYTES", size - 1 + CONTROL_BYTES)
    with pytest.raises(SeedbedError, match="a step of a group of environments takes"):
        run.learner(0, 2)


def test_shards_are_drawn_from_as_one_replay(shards):
    run = shards(learners=1, replay_shards=2)
    replay = run.learner(0, 1)
    environments = Environments(replay, 0)
    for _ in range(13):
        environments.step(0)
    for _ in range(40):
        environments.step(1)
    replay.finish()
    wait_for(lambda: replay.tally.added == ENVS * (12 + 39))
    # The batches that were drawn ahead, before all items were there, do not count.
    weights = dict(named_items(run))
    assert len(weights) == ENVS * (12 + 39)
    counts = dict.fromkeys(weights, 0)
    total = sum(weights.values())
    for number in range(600):
        (batch,) = replay.take(10.0)
        found = observations(batch)
        if number > 3:
            expected = np.array([weights[each] / total for each in found])
            importance = (expected / expected.min()) ** -AGENT.importance_exponent
            np.testing.assert_allclose(batch.importance, importance, rtol=1e-5)
            for each in found:
                counts[each] += 1
        replay.learned(0, {}, ())
    drawn = sum(counts.values())
    names = list(weights)
    result = stats.chisquare(
        [counts[each] for each in names], [drawn * weights[each] / total for each in names]
    )
    assert result.pvalue > 1e-4


def test_each_shard_draws_by_random_numbers_of_its_own(shards):
    run = shards(replay_shards=2)
    first, second = (work.replay._random.random(8) for work in run.works.values())
    assert not np.isin(first, second).any()


def test_new_priorities_reach_the_items_of_their_shards(shards):
    run = shards(learners=1, replay_shards=2)
    replay = run.learner(0, 1)
    environments = Environments(replay, 0)
    for _ in range(30):
        environments.step(0)
        environments.step(1)
    wait_for(lambda: replay.tally.added > 100)
    for _ in range(200):
        (batch,) = replay.take(10.0)
        # Items of even steps are hardly drawn any more.
        even = np.array([step % 2 == 0 for _, step in observations(batch)])
        replay.learned(0, {}, np.where(even, 1e-6, 1.0))
    found = [each for _ in range(20) for each in observations(_next(replay))]
    assert np.mean([step % 2 == 0 for _, step in found]) < 0.05


def _next(replay):
    (batch,) = replay.take(10.0)
    replay.learned(0, {}, ())
    return batch


@pytest.mark.parametrize(
    ("kind", "fields", "priority"),
    [
        (Kind.APPEND, {"first": 1, "rows": [], "ends": [-1]}, None),
        (Kind.APPEND, {"first": 1, "rows": [], "ends": [1 << 40]}, None),
        (Kind.APPEND, {"first": 1, "rows": [[True, True]], "ends": []}, None),
        (Kind.APPEND, {"first": -1, "rows": [], "ends": []}, None),
        (Kind.APPEND, {"first": 1, "rows": [[0, True]], "ends": []}, None),
        (Kind.DRAW, {"tag": 1, "count": 1.5}, None),
        (Kind.PRIORITIES, {"count": 1 << 40}, 1.0),
        (Kind.PRIORITIES, {"count": 1}, float("nan")),
        (Kind.SAVE, {"name": "x", "keep": None}, None),
    ],
)
def test_a_message_that_cannot_be_is_refused(shards, kind, fields, priority):
    run = shards(replay_shards=1)
    block = b"x"
    if priority is not None:
        layout = priorities_layout(1)
        array = np.empty(layout.size, np.uint8)
        layout.write([np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([priority])], array)
        block = array.tobytes()
    work, client = run.works[0], types.SimpleNamespace(role=LEARNER, number=1)
    client.connection = types.SimpleNamespace(limit=0)
    work.greet(client, {"role": LEARNER, "number": 1})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        work.take(client, Message(kind, fields, memoryview(block)))  # type: ignore[arg-type]


def test_when_a_shard_dies_the_others_go_on_and_nothing_saved_is_lost(shards):
    run = shards(learners=1, replay_shards=2)
    replay = run.learner(0, 1)
    environments = Environments(replay, 0)
    for _ in range(33):
        environments.step(0)
        environments.step(1)
    wait_for(lambda: replay.tally.steps == 32 * 2 * ENVS)
    saved = run.works[0].replay.items
    run.works[0].replay.save("7")
    run.end(0)
    # Its rows wait, and batches come from the other one.
    for number in range(12):
        environments.step(0, first=number == 4)
        environments.step(1, first=number == 4)
    for _ in range(40):
        assert _next(replay) is not None
    envs = {env // ENVS for _ in range(10) for env, _ in observations(_next(replay))}
    assert envs == {1}
    run.start(0)
    wait_for(lambda: replay.tally.steps == 43 * 2 * ENVS)
    assert run.works[0].replay.items >= saved
    replay.finish()
    # Streams begin again with the first episode that the shard sees from its beginning: 8 rows, 7 items.
    wait_for(lambda: replay.ended and run.works[0].replay.items == saved + 7 * ENVS)
    assert run.works[1].replay.items == 43 * ENVS
    wait_for(
        lambda: {env // ENVS for env, _ in observations(_next(replay))} == {0, 1},
    )


def test_a_learner_that_adds_nothing_draws_what_others_have_added(shards):
    run = shards(learners=2, replay_shards=2)
    silent, adding = run.learner(0, 1), run.learner(1, 2)
    wait_for(lambda: all(client.epoch for client in silent._clients))
    environments = Environments(adding, 1)
    for _ in range(20):
        environments.step(0)
        environments.step(1)
    assert {env // ENVS for env, _ in observations(_next(silent))} <= {2, 3}


def test_acting_waits_for_its_lease(shards):
    run = shards(learners=1, replay_shards=1)
    replay = run.learner(0, 1)
    replay.extend(Lease(1 << 40, 0, 0, 0))
    done = threading.Event()
    environments = Environments(replay, 0)

    def act() -> None:
        environments.step(0)
        done.set()

    thread = threading.Thread(target=act)
    thread.start()
    assert not done.wait(0.3)
    replay.extend(FAR)
    assert done.wait(10)
    thread.join()
    assert replay.take(0.05) == []


def test_a_row_has_what_acting_gave(shards):
    run = shards(learners=1, replay_shards=1)
    replay = run.learner(0, 1)
    environments = Environments(replay, 0)
    for _ in range(40):
        environments.step(0)
        environments.step(1)
    batch = _next(replay)
    observation = batch.timesteps.observation
    np.testing.assert_array_equal(observation[1, :, 0], observation[0, :, 0])
    np.testing.assert_array_equal(observation[1, :, 1], observation[0, :, 1] + 1)
    for item, (env, at) in enumerate(observations(batch)):
        _, action, extras = environments.drawn[env, at]
        assert batch.timesteps.reward[1, item] == environments.drawn[env, at + 1][0]
        assert batch.action[0, item] == action
        assert jax.tree.map(lambda leaf, item=item: leaf[0, item], batch.extras) == extras
        assert batch.timesteps.first[:, item].tolist() == [at == 0, False]


def named_items(run: Shards) -> list[tuple[tuple[int, int], float]]:
    """Returns (environment, step) of all items, with their weights."""
    found = []
    for work in run.works.values():
        storage = work.replay._storage
        tree = storage.items.tree.weights
        for slot in np.flatnonzero(tree > 0):
            chunk, offset = (
                storage.items.windows.chunks[slot, 0],
                storage.items.windows.offset[slot],
            )
            row = storage.records._typed[0][chunk, offset]
            found.append((tuple(map(int, row)), round(float(tree[slot]), 9)))
    return sorted(found)


@pytest.mark.quick("changes1")
@pytest.mark.parametrize("changes", [{"replay_shards": 1}, {"replay_shards": 3}, {"learners": 3}])
def test_whole_streams_move_to_other_numbers_of_shards_and_learners(tmp_path, changes):
    options = {"learners": 2, "replay_shards": 2}
    run = Shards(tmp_path, **options)
    for seat, rows in enumerate((20, 45)):
        environments = Environments(run.learner(seat, seat + 1), seat)
        for _ in range(rows):
            environments.step(0)
            environments.step(1)
    for replay, rows in zip(run.replays, (20, 45), strict=True):
        replay.finish()
        wait_for(lambda replay=replay, rows=rows: replay.tally.added == 2 * ENVS * (rows - 1))
    before = named_items(run)
    assert len(before) == 2 * ENVS * (19 + 44)
    for work in run.works.values():
        work.replay.save("5")
    run.close()
    # Twice: the first time, it is killed before all streams have moved.
    for _ in range(2):
        moved = Shards(tmp_path, "5", **{**options, **changes})
        assert named_items(moved) == before
        moved.close()
        shutil.rmtree(tmp_path / "roles" / role_of(0) / "replay")
    moved = Shards(tmp_path, "5", **{**options, **changes})
    forget_former(tmp_path)
    assert named_items(moved) == before
    moved.learner(0, 7)
    assert observations(_next(moved.replays[0]))
    # A shard that dies comes back with them.
    moved.end(0)
    moved.save = None
    moved.start(0)
    assert named_items(moved) == before
    moved.close()


def saved_run(run: Path, save: str, rows: int = 20) -> Shards:
    """Returns a run with one replay shard that has ended; its items are saved under a name."""
    shards = Shards(run, learners=1, replay_shards=1)
    environments = Environments(shards.learner(0, 1), 0)
    for _ in range(rows):
        environments.step(0)
        environments.step(1)
    shards.replays[0].finish()
    wait_for(lambda: shards.replays[0].tally.added == 2 * ENVS * (rows - 1))
    shards.works[0].replay.save(save)
    shards.close()
    return shards


def save_replay(keeper: Keeper, name: str) -> list[str]:
    """Saves a replay shard as the coordinator does; returns what went wrong."""
    cluster = Cluster.__new__(Cluster)
    cluster.replay, cluster.parameters = [keeper], []
    return cluster.save_replay(name, None)


def test_a_save_may_take_long_and_one_that_has_failed_is_made_again(shards, monkeypatch):
    monkeypatch.setattr("seedbed.paramserver.cluster._PATIENCE_S", 0.1)
    run = shards(learners=1, replay_shards=1)
    keeper, calls, replay = (
        Keeper(run.run, RoleSpec(role_of(0), ""), 0),
        [],
        run.works[0].replay,
    )
    save, failing = replay.save, [True]

    def slowly(name: str, keep: str | None) -> None:
        calls.append(name)
        time.sleep(0.5)
        if failing[0]:
            raise StorageError("disk full")
        save(name, keep)

    monkeypatch.setattr(replay, "save", slowly)
    try:
        assert save_replay(keeper, "5") == ["disk full"]
        failing[0] = False
        assert save_replay(keeper, "5") == []
        assert save_replay(keeper, "5") == []
        assert calls == ["5", "5"]
        # That of a coordinator that has died may still be going on.
        assert run.works[0]._save("6", None) and not run.works[0]._save("7", None)
        assert save_replay(keeper, "7") == [] and calls[2:] == ["6", "7"]
    finally:
        keeper.close()


@pytest.mark.slow
def test_a_shard_of_a_resumed_run_that_is_killed_comes_back_with_its_newest_save(tmp_path):
    run = saved_run(tmp_path, "5")
    keeper = Keeper(tmp_path, roles_of(run.job, tmp_path, "5")["replay"][0], 0)
    try:
        wait_for(lambda: keeper.report, seconds=120)
        items = keeper.report["items"]
        assert items == run.works[0].replay.items

        assert [save_replay(keeper, name) for name in ("6", "7")] == [[], []]
        indexes = sorted((tmp_path / "roles" / role_of(0) / "replay").glob("*.index"))
        assert [path.name.split(".")[1] for path in indexes] == ["6", "7"]
        pid = keeper.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: keeper.pid != pid and keeper.connected, seconds=120)
        found = keeper.request(lambda keeper: keeper.fetch_report())
        assert found.result(30)["items"] == items
    finally:
        keeper.close()


def test_a_run_is_resumed_with_the_items_that_its_shards_have_saved(tmp_path):
    run = saved_run(tmp_path, name_of(5))
    items, view = run.works[0].replay.items, View()
    job = dataclasses.replace(run.job, gradient=check_agent(run.job.agent))
    job.write(tmp_path)
    state = job.agent.init(jax.random.key(0))
    session = types.SimpleNamespace(
        run=types.SimpleNamespace(path=tmp_path),
        view=view,
        start=Start(5),
        interrupted=lambda: False,
        begun=lambda agent, state: state,
        resume=lambda template: (state, {"items": 900, "owed": 3.0}),
    )

    def leases() -> tuple[int, float]:
        assert train._prepare(job, session, Hosts(tmp_path, 0)) == name_of(5)
        saved = ShardSave.read(tmp_path / "roles" / "parameters-0" / SAVE).books["leases"]
        return saved["held"], saved["owed"]

    assert leases() == (items, 3.0)
    assert not any("was not saved" in each for each in view.messages)
    (index,) = (tmp_path / "roles" / role_of(0) / "replay").glob("*.index")
    index.unlink()
    assert leases() == (0, 0.0)
    assert (
        "the replay of replay-0 was not saved with this checkpoint: filling it again"
        in view.messages
    )


def test_a_kill_while_former_shards_are_removed_loses_nothing(tmp_path, monkeypatch):
    run = saved_run(tmp_path, "5")
    moved = Shards(tmp_path, "5", learners=1, replay_shards=2)
    found = named_items(moved)
    moved.close()
    assert has_former(tmp_path) and len(found) == run.works[0].replay.items
    remove = shutil.rmtree

    def half(folder: Path, **options) -> None:
        for shard in folder.glob("replay-*"):
            remove(shard)
        if folder.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(KeyboardInterrupt):
        forget_former(tmp_path)
    monkeypatch.undo()
    again = Shards(tmp_path, "5", learners=1, replay_shards=2)
    assert named_items(again) == found
    again.close()
    forget_former(tmp_path)
    assert not list((tmp_path / "roles").glob("*former"))


def test_items_of_groups_of_another_size_cannot_be_taken_over(tmp_path):
    run = Shards(tmp_path, learners=1, replay_shards=1)
    run.close()
    with pytest.raises(
        SeedbedError, match="groups of 4 environments, now they are of 2: resume with"
    ):
        set_aside(
            tmp_path,
            dataclasses.replace(
                run.job, config=dataclasses.replace(run.job.config, envs_per_actor=4)
            ),
        )
