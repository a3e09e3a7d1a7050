"""Cuts through parameter shards while learners hang, or lose their streams: all in threads of one process."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from parameter_shards import Shards, StubLearner, job_of
from seedbed.agents.dqn import Dqn
from seedbed.exit_status import TemporaryError
from seedbed.paramserver import cluster, copies, keeper, shard
from seedbed.paramserver import run as running
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.directory import SAVE
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.launching import Launcher, RoleSpec, launcher_of
from seedbed.paramserver.leases import Tally
from seedbed.paramserver.run import ClusterRun
from seedbed.paramserver.saves import ShardSave
from seedbed.run.folder import RunFolder
from seedbed.types import SeedbedError
from waiting import wait_for


class Outside(Hosts):
    """Roles that somebody else starts, on machines that see the run's folder or not."""

    apart = False

    def keeps_apart(self, name: str) -> bool:
        return self.apart

    def launcher(self, role: RoleSpec) -> Launcher:
        return launcher_of(self._run, role)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two parameter shards, two learners, and a cluster that starts no process of its own."""
    monkeypatch.setattr(keeper, "_HUNG_S", 0.5)
    monkeypatch.setattr(cluster, "_PATIENCE_S", 5.0)
    monkeypatch.setattr(cluster, "_RETRY_S", 0.05)
    shards = Shards(tmp_path, job_of(Dqn(hidden_sizes=(8,)), 2))
    learners = [StubLearner(shards, seat) for seat in range(2)]
    roles = {
        "parameters": [RoleSpec(shard.role_of(i), "") for i in range(2)],
        "replay": [],
        "learners": [RoleSpec(f"learner-{i}", "") for i in range(2)],
    }
    monkeypatch.setattr(cluster, "roles_of", lambda *_: roles)
    made = Cluster(shards.job, tmp_path, None, Outside(tmp_path, 0))
    wait_for(lambda: all(each.report for each in made.all))
    # They learn from the first cut on.
    assert all(each.pausing for each in learners)
    assert made.cut() is not None
    wait_for(lambda: not any(each.pausing for each in learners))
    for each in learners:
        each.pauses = 0
    yield made, learners
    for each in learners:
        each.hang.clear()
    made.kill()
    for each in learners:
        each.end()
    shards.close()


@pytest.mark.slow
def test_a_cut_pauses_learners_and_lets_them_go_on(run):
    made, learners = run
    cut = made.cut()
    assert cut is not None and [each.pauses for each in learners] == [1, 1]
    state = made.job.agent.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, cut.state, jax.device_get(state))
    wait_for(lambda: not any(each.pausing for each in learners))


def test_a_role_without_room_on_its_disk_holds_nobody_up(run, monkeypatch):
    made, learners = run
    full = SimpleNamespace(
        failure=None,
        waits_for_room=True,
        role=SimpleNamespace(name="replay-1"),
        request=lambda _: Future(),
    )
    with monkeypatch.context() as patch:
        patch.setattr(made, "replay", [full])
        assert made.save_replay("7", None) == ["replay-1 was not saved as 7, as its disk is full"]
    monkeypatch.setattr(made.parameters[1], "_full", True)
    assert made.cut() is None and not any(each.pauses for each in learners)


@pytest.mark.parametrize("cuts", [2, 9])
def test_the_last_cut_is_made_again_and_its_failure_is_told(tmp_path, monkeypatch, cuts):
    made, asked = object.__new__(ClusterRun), list[int]()

    def cut() -> str | None:
        asked.append(1)
        return "cut" if len(asked) == cuts else None

    monkeypatch.setattr(running, "_RECUT_S", 0.0)
    shards = [SimpleNamespace(waits_for_room=False)]
    made._cluster = SimpleNamespace(cut=cut, parameters=shards)  # type: ignore[assignment]
    made._folder = RunFolder(tmp_path)
    made._snapshot = lambda cut: cut  # type: ignore[method-assign, assignment, return-value]
    if cuts == 2:
        assert made.last_snapshot() == "cut"
    else:
        with pytest.raises(
            TemporaryError, match="could not be saved: parameter shards had .*--resume"
        ):
            made.last_snapshot()


@pytest.mark.slow
def test_a_learner_that_hangs_is_left_out_of_a_cut(run):
    made, learners = run
    learners[1].hang.set()
    assert made.cut() is not None and learners[0].pauses == 1
    made.check()
    notices = made.learners[1].take_notices()
    assert notices == ["learner-1 has given no sign for 0 s: looking for it"]
    # It is no longer connected.
    assert made.cut() is not None
    learners[1].hang.clear()
    wait_for(lambda: made.learners[1].connected and not learners[1].pausing)
    assert made.cut() is not None and learners[1].pauses


def test_a_learner_whose_stream_breaks_in_a_cut_is_paused_again(run, monkeypatch):
    made, learners = run
    copied: list[bool] = []

    def copy() -> None:
        """The shards have not had the same pushes until the learner has paused again."""
        copied.append(learners[0].pausing)

    monkeypatch.setattr(made, "_copy", copy)
    learners[0].breaks = True
    assert made.cut() is None
    assert copied[-1] and learners[0].pauses > 1
    wait_for(lambda: not learners[0].pausing)


def test_a_parameter_shard_that_does_not_answer_is_named_with_the_reason(run, monkeypatch):
    made, _ = run
    monkeypatch.setattr(cluster, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(made.parameters[1].caller, "last_error", "no route to host")
    monkeypatch.setattr(made, "_close_learners", lambda: None)
    monkeypatch.setattr(made.parameters[1], "request", lambda _: Future())
    with pytest.raises(
        SeedbedError,
        match=r"parameters-1 has not answered for 1 s \(no route to host\): see .*resume",
    ):
        made.cut()


def test_a_lease_ends_with_its_age(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "LEASE_S", 0.3)
    shards = Shards(tmp_path, job_of(Dqn(hidden_sizes=(8,)), 1))
    leases = shards.works[0].leases
    assert leases is not None
    silent, other = shards.learner(1), shards.learner(2)
    try:
        assert silent._source.lease.steps and set(leases._holders) == {1, 2}

        def asked() -> bool:
            other.begin(np.float32(0))
            return set(leases._holders) == {2}

        wait_for(asked)
        # Its stream has not ended: it gets another lease when it asks.
        silent.begin(np.float32(0))
        assert silent._source.lease.steps > Tally().steps and set(leases._holders) == {1, 2}
    finally:
        shards.close()


@pytest.mark.parametrize(("adopts", "expected"), [(True, [10, 40, 100]), (False, [])])
def test_a_coordinator_that_takes_over_tells_how_many_items_there_are(
    tmp_path, monkeypatch, adopts, expected
):
    """A replay shard may have died meanwhile, or just before: until there are enough, it tells again."""
    told: list[int] = []
    asked = SimpleNamespace(caller=SimpleNamespace(send=lambda _, items: told.append(items)))
    usual = {"reported": True, "restarts": 0, "request": lambda ask: ask(asked)}
    keepers = {
        kind: SimpleNamespace(role=RoleSpec(kind, ""), **usual) for kind in ("parameters", "replay")
    }
    roles = {kind: [each.role] for kind, each in keepers.items()} | {"learners": []}
    monkeypatch.setattr(cluster, "roles_of", lambda *_: roles)
    monkeypatch.setattr(cluster, "Keeper", lambda run, role, *_, **__: keepers[role.name])
    job = job_of(Dqn(hidden_sizes=(8,), min_size=100), 1)
    made, replay = Cluster(job, tmp_path, None, Outside(tmp_path, 0), adopts), keepers["replay"]
    for items in (10, 40, 100, 30):
        replay.report = {"items": items}
        made._tell_losses()
    assert told == expected


def test_what_is_learned_elsewhere_is_kept_here_too(run, tmp_path, monkeypatch):
    """With each cut, and by and by between them, where a shard's machine does not see the run's folder."""
    made, _ = run
    paths = [tmp_path / "roles" / shard.role_of(i) / SAVE for i in range(2)]
    for path in paths:
        path.write_bytes(b"old")
    assert made.cut() is not None
    made._copies.close()
    assert [path.read_bytes() for path in paths] == [b"old", b"old"]
    monkeypatch.setattr(Outside, "apart", True)
    found = made.cut()
    assert found is not None
    made._copies.close()
    saves = [ShardSave.read(path) for path in paths]
    assert [save.books for save in saves] == found.books
    parts = [made.job.plan.part(found.state, i) for i in range(2)]
    for save, part in zip(saves, parts, strict=True):
        jax.tree.map(np.testing.assert_array_equal, list(save.leaves), jax.tree.leaves(part))
    for path in paths:
        path.write_bytes(b"old")
    monkeypatch.setattr(copies, "_EVERY_S", 0.0)
    wait_for(lambda: made.check() or all(path.read_bytes() != b"old" for path in paths))
    assert [ShardSave.read(path).books for path in paths] == found.books
