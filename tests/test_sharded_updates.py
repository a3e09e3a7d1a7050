"""Learners and parameter shards that speak to each other, in threads of one process."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parameter_shards import NoSource, Shards, job_of
from recorded import SPEC as RECORDED
from recorded import record
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.central.learning import Learner
from seedbed.central.updater import LocalUpdater
from seedbed.exit_status import TrainingDiverged
from seedbed.paramserver.beginning import write_saves
from seedbed.paramserver.caller import Stopped
from seedbed.paramserver.directory import SAVE, Address, Directory
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.ledger import BookError, PushCounts
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.role import COORDINATOR, Role, run_role
from seedbed.paramserver.saves import ShardSave
from seedbed.paramserver.shard import LEARNER, role_of
from seedbed.paramserver.updater import ShardedUpdater
from seedbed.run.leaves import not_finite
from seedbed.run.stacking import FrameTrajectory
from seedbed.streams.addresses import Listening
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.streams.messages import Blocks, Message, ProtocolError
from seedbed.types import Output, SeedbedError
from waiting import wait_for


@pytest.fixture
def shards(tmp_path, monkeypatch):
    made = []

    def make(agent, count, host=None, most_lag=100) -> Shards:
        made.append(Shards(tmp_path, job_of(agent, count, most_lag, host)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def noise(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


@pytest.mark.quick("2-*")
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_learner_changes_parameters_as_a_learner_of_its_own(shards, monkeypatch, count, host):
    if host is not None:
        # As if they were on different machines: nothing is shared.
        monkeypatch.setattr("seedbed.paramserver.caller.this_machine", lambda: "another")
    run = shards(
        Dqn(target_period=3, hidden_sizes=(32, 16), normalise_observations=True), count, host
    )
    agent, updater = run.job.agent, run.learner(1)
    local = LocalUpdater(agent, agent.init(jax.random.key(0)), jax.devices()[:1])
    # The batch is the gradient.
    steps = [each.compile(lambda state, batch, key, index: batch) for each in (updater, local)]
    output, key = Output({}, jnp.float32(8)), jax.random.key(1)
    for number in range(7):
        for each, step in zip((updater, local), steps, strict=True):
            each.begin(np.float32(number / 10))
            step((noise(run.job.plan.gradient, number), output), key, np.int32(0))
        ours, theirs = updater.pull(), local.pull()
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert updater.books == [PushCounts(applied=7)] * count
    assert updater.lags == {0: 7 * count}


def recorded(agent, state, batches):
    """Yields batches as replay gives them: what the agent has done, with other rewards in each."""
    timesteps, action, extras, memory = record(agent, state, 8)
    for seed in range(batches):
        rng = np.random.default_rng(seed)
        reward = rng.normal(size=timesteps.reward.shape).astype(np.float32)
        importance = rng.uniform(0.5, 1, 8).astype(np.float32)
        changed = timesteps._replace(reward=reward)
        yield FrameTrajectory(changed, action, extras, memory, importance=importance)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_one_learner_learns_as_plain_dqn_from_the_same_data_and_keys(tmp_path, count):
    agent = Dqn(batch=8, n_step=6, hidden_sizes=(16, 8), target_period=3, dueling=True)
    run = Shards(tmp_path, job_of(agent, count, spec=RECORDED))
    try:
        agent, devices, key = run.job.agent, jax.devices()[:1], jax.random.key(5)
        initial = agent.init(jax.random.key(0))
        plain, sharded = (
            Learner(agent, 1, devices, key, updater)
            for updater in (LocalUpdater(agent, initial, devices), run.learner(1))
        )
        for number, frames in enumerate(recorded(agent, initial, 8)):
            progress = np.float32(number / 10)
            results = [
                jax.device_get(learner.update(learner.assemble([frames]), progress))
                for learner in (plain, sharded)
            ]
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *results)
        ours, theirs = sharded.updater.pull(), plain.updater.pull()
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
            (ours.params, ours.auxiliary),
            (theirs.params, theirs.auxiliary),
        )
        assert ours.updates == theirs.updates == 8
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), initial.params, ours.params)
        assert max(jax.tree.leaves(moved)) > 1e-4
    finally:
        run.close()


def test_what_is_pulled_stays_valid(shards):
    run = shards(Impala(), 2)
    updater = run.learner(1)
    before = updater.pull()
    copy = jax.tree.map(np.array, before)
    for number in range(3):
        updater.push(noise(run.job.plan.gradient, number), Output({}, jnp.float32(8)))
        updater.pull()
    jax.tree.map(np.testing.assert_array_equal, before, copy)


def test_a_shard_that_ends_goes_on_from_its_save_and_learners_wait_for_it(shards):
    run = shards(Dqn(hidden_sizes=(32, 16)), 2)
    first, second = run.learner(1), run.learner(2)
    output = Output({}, jnp.float32(8))
    for number in range(3):
        first.push(noise(run.job.plan.gradient, number), output)
        second.push(noise(run.job.plan.gradient, number + 10), output)
        first.pull(), second.pull()
    second.settle()
    first.begin(np.float32(0))
    before = first.pull()
    run.end(0)
    # It is sent when the shard is back, and made of parameters of the epoch before.
    first.push(noise(run.job.plan.gradient, 20), output)
    later = threading.Timer(0.3, run.start, (0,))
    later.start()
    after = first.pull()
    later.join()
    assert first.books == [PushCounts(3, 1, 0), PushCounts(4, 0, 0)]
    first.push(noise(run.job.plan.gradient, 21), output)
    first.pull()
    assert first.books == [PushCounts(4, 1, 0), PushCounts(5, 0, 0)]
    assert int(before.updates) == 6 and int(after.updates) == 6 and int(first.state.updates) == 7
    second.settle()
    for shard in range(2):
        ledger = run.works[shard].ledger
        assert ledger.version.number == 7 + shard
        assert {number: books.ended for number, books in ledger.books.items()} == {1: 5, 2: 3}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_not_sent(shards, value):
    run = shards(Dqn(hidden_sizes=(8,)), 2)
    updater = run.learner(1)
    grads = noise(run.job.plan.gradient, 0)
    last = jax.tree.leaves(grads)[-1]
    broken = jax.tree.map(lambda x: x.at[..., -1].set(value) if x is last else x, grads)
    with pytest.raises(TrainingDiverged, match="is not finite at learner step 1: training stopped"):
        updater.push(broken, Output({}, jnp.float32(8)))
    assert updater.sent == 0
    # Large numbers are, also where their sum is not.
    assert not_finite({"grads": np.full(8, 3e38, np.float32)}) is None


def test_a_gradient_that_is_not_finite_is_discarded_where_it_arrives(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 2)
    updater, output = run.learner(1), Output({}, jnp.float32(8))
    before = updater.pull()
    grads = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), run.job.plan.gradient)
    for number, shard in enumerate(updater._shards):
        # As a learner without the check sends it.
        shard.push(run.job.plan.division.part(grads, number), 0.0, 8.0)
    updater.settle()
    assert updater.books == [PushCounts(discarded=1)] * 2
    updater.push(noise(run.job.plan.gradient, 0), output)
    after = updater.pull()
    assert updater.books == [PushCounts(applied=1, discarded=1)] * 2
    assert np.isfinite(np.concatenate([np.ravel(x) for x in jax.tree.leaves(after.params)])).all()
    assert int(before.updates) == 0 and int(after.updates) == 1
    report = run.works[0].report()
    assert report["not_finite"] == 1
    assert report["notices"] == ["1 gradients were not finite so far, and were discarded"]
    assert run.works[0].report()["notices"] == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Kind.PULL, {"have": [0], "tally": [0, 0, 0]}),
        (Kind.PULL, {"have": [0, -1], "tally": [0, 0, 0]}),
        (Kind.PULL, {"have": [0, True], "tally": [0, 0, 0]}),
        (Kind.PULL, {"have": [0, 0], "tally": [0, 0.5, 0]}),
        (Kind.PUSH, {"push": 1, "base": [0, 0], "progress": "0", "weight": 1.0}),
        (Kind.PUSH, {"push": True, "base": [0, 0], "progress": 0.0, "weight": 1.0}),
        (Kind.PUSH, {"push": 1, "base": [[], {}], "progress": 0.0, "weight": 1.0}),
    ],
)
def test_a_message_that_cannot_be_changes_nothing(shards, kind, fields):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    work = run.works[0]
    blocks = Blocks(work.layout.up_bytes, work.layout.down_bytes)
    blocks.shared = True  # the gradient is in place
    client = types.SimpleNamespace(role=LEARNER, number=1, blocks=blocks)
    before = work.books()
    with pytest.raises(ProtocolError):
        work.take(client, Message(kind, fields, memoryview(b"")))  # type: ignore[arg-type]
    assert work.books() == before


def test_a_shard_does_not_save_what_is_not_finite(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    work, path = run.works[0], run.directory.path / role_of(0) / SAVE
    before = path.read_bytes()
    state = work._state
    work._state = state._replace(
        optimizer_state=jax.tree.map(lambda x: x + jnp.asarray(jnp.inf, x.dtype), state.params)
    )
    with pytest.raises(TrainingDiverged, match=r"\(optimizer_state.*: it is not saved"):
        work._save(0.0)
    # Nor does the coordinator get it for a checkpoint.
    coordinator = types.SimpleNamespace(role=COORDINATOR, blocks=object())
    with pytest.raises(TrainingDiverged, match="it is not saved"):
        work.take(coordinator, Message(Kind.STATE, {}, memoryview(b"")))  # type: ignore[arg-type]
    work._state = state
    assert path.read_bytes() == before


def test_a_learner_that_was_closed_goes_on(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 2)
    updater, output = run.learner(1), Output({}, jnp.float32(8))
    updater.push(noise(run.job.plan.gradient, 0), output)
    for shard in range(2):
        wait_for(lambda: run.works[shard].ledger.version.number == 1)  # noqa: B023
        # Its answer is lost with its stream, and the coordinator does not see it either.
        updater._shards[shard].caller.close()
        run.close_learner(shard, 1, 1)
    updater.settle()
    assert updater.books == [PushCounts(applied=1)] * 2
    # One shard was told that the next push is missing, before it comes.
    run.close_learner(1, 1, 2)
    for number in (1, 2):
        updater.pull()
        updater.push(noise(run.job.plan.gradient, number), output)
    updater.settle()
    assert updater.books == [PushCounts(applied=3), PushCounts(applied=2, discarded=1)]


def test_a_learner_whose_books_do_not_fit_goes_on_under_another_number(shards, monkeypatch):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    updater, output = run.learner(1), Output({}, jnp.float32(8))
    updater._shards[0].ledger.push()
    updater._shards[0].ledger.books.applied = 1
    updater.push(noise(run.job.plan.gradient, 0), output)
    with pytest.raises(BookError, match="push 2 of learner 1 came after push 0"):
        updater.settle()
    run.works[0].ledger.books[2] = PushCounts(applied=9)
    with pytest.raises(BookError, match="the shard knows of 9 pushes"):
        run.learner(2)

    def make():
        raise BookError("it goes on under another number")

    with pytest.raises(SystemExit) as ended:
        run_role(make)
    assert ended.value.code == "it goes on under another number"  # printed; the status is FAILED


def test_a_learner_of_an_earlier_session_goes_on_under_another_number(shards, tmp_path):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    updater = run.learner(run.directory.take_number("learner"))
    run.end(0)
    # The run is resumed from a checkpoint with 6000 steps, in which those of the learner are counted.
    state = run.job.agent.init(jax.random.key(0))
    write_saves(run.job, tmp_path, state, steps=6000, items=0, owed=0.0)
    run.start(0)
    with pytest.raises(BookError, match="is of an earlier session"):
        updater.begin(np.float32(0))
    leases = run.works[0].leases
    assert leases is not None and leases.total_steps == 6000
    # Also when the shard was started again.
    run.end(0)
    run.start(0)
    with pytest.raises(BookError, match="is of an earlier session"):
        run.learner(1)
    run.learner(run.directory.take_number("learner"))


def test_a_shard_that_cannot_save_says_so_and_tries_again(shards, monkeypatch):
    monkeypatch.setattr("seedbed.paramserver.shard.SAVE_S", 0.05)
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    updater, work = run.learner(1), run.works[0]
    full, write = [True], ShardSave.write

    def writes(save: ShardSave, path: Path) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(save, path)

    monkeypatch.setattr(ShardSave, "write", writes)
    updater.push(noise(run.job.plan.gradient, 0), Output({}, jnp.float32(8)))
    updater.settle()
    notices: list[str] = []
    wait_for(lambda: notices.extend(work.report()["notices"]) or notices)
    time.sleep(0.5)  # it fails again and again
    notices += work.report()["notices"]
    assert len(notices) == 1 and "cannot be written (No space left on device)" in notices[0]
    saves = work.report()["saves"]
    full[0] = False
    wait_for(lambda: work.report()["saves"] > saves)
    saved = ShardSave.read(run.directory.path / role_of(0) / SAVE)
    assert saved.books["pushes"]["number"] == 1
    # The last save is tried again, too, though nothing has changed since.
    full[0] = True
    updater.push(noise(run.job.plan.gradient, 1), Output({}, jnp.float32(8)))
    updater.settle()
    wait_for(lambda: work.report()["notices"])
    full[0] = False
    run.end(0)
    saved = ShardSave.read(run.directory.path / role_of(0) / SAVE)
    assert saved.books["pushes"]["number"] == 2


def test_gradients_of_losses_far_from_the_usual_are_not_pushed(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    updater = run.learner(1, deviations=4.0)
    grads = jax.tree.map(jnp.zeros_like, noise(run.job.plan.gradient, 0))
    # The batch is the gradient.
    step, key = updater.compile(lambda state, batch, key, index: batch), jax.random.key(1)

    def learn(loss):
        metrics = {"loss/total": jnp.float32(loss), "other": jnp.float32(1)}
        learned = step((grads, Output(metrics, jnp.float32(8))), key, np.int32(0))
        assert learned.metrics.names == ("loss/total", "other")

    for number in range(150):
        learn(1.0 + 0.1 * (-1) ** number)
    assert updater.sent == 150
    learn(9.0)
    assert updater.sent == 150
    learn(1.05)
    assert updater.sent == 151


def test_outliers_of_an_agent_that_tells_no_loss_are_refused(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    updater = run.learner(1, deviations=4.0)
    step = updater.compile(lambda state, batch, key, index: batch)
    batch = run.job.plan.gradient, Output({"loss/critic": jnp.float32(1)}, jnp.float32(8))
    batch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch)
    with pytest.raises(
        SeedbedError, match="outlier_deviations is 4, but .* no metric 'loss/total'"
    ):
        step(batch, jax.random.key(1), np.int32(0))
    assert updater.sent == 0


def test_a_new_learner_gets_the_targets_of_the_version_that_it_is_told(shards):
    run = shards(Dqn(target_period=1, hidden_sizes=(8,)), 1)
    first = run.learner(1)
    first.push(noise(run.job.plan.gradient, 0), Output({}, jnp.float32(8)))
    first.settle()  # and nobody pulls
    second = run.learner(2)
    target = run.works[0]._state.auxiliary
    jax.tree.map(np.testing.assert_array_equal, second.state.auxiliary, target)


def test_a_learner_of_another_plan_is_refused(shards, tmp_path):
    run = shards(Dqn(hidden_sizes=(8,)), 1)
    other = job_of(Dqn(hidden_sizes=(9,)), 1)
    with pytest.raises(Exception, match="divides its parameters in another way"):
        ShardedUpdater(
            other.plan,
            7,
            run.directory,
            tmp_path / CREDENTIALS,
            Outliers(0.0),
            NoSource(),
            lambda: False,
        )


def test_the_coordinator_is_let_in_with_room_for_the_state_of_a_shard(shards):
    run = shards(Dqn(hidden_sizes=(8,)), 2)
    for number, work in run.works.items():
        layout = run.job.plan.state_layout(number)
        keeper = Keeper(run.run, RoleSpec(role_of(number), ""), layout.size)
        try:
            copy = keeper.request(lambda keeper: keeper.ask(Kind.STATE, Kind.STATE)).result(30)
            found = layout.views(keeper.caller.take_block(copy, layout.size))
            expected = jax.tree.leaves(work._state)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        finally:
            keeper.close()


def test_a_learner_that_is_to_end_does_not_wait_for_a_shard(tmp_path):
    job = job_of(Dqn(hidden_sizes=(8,)), 1)
    ensure_credentials(tmp_path / CREDENTIALS)
    with pytest.raises(Stopped):
        ShardedUpdater(
            job.plan,
            1,
            Directory(tmp_path),
            tmp_path / CREDENTIALS,
            Outliers(0.0),
            NoSource(),
            lambda: True,
        )


def test_an_address_that_cannot_be_listened_at_is_named_with_a_remedy(tmp_path):
    ensure_credentials(tmp_path / CREDENTIALS)
    role = Role(tmp_path, "x", 1)
    with pytest.raises(SeedbedError, match=r"x cannot listen at 192\.0\.2\.1 .* with --listen"):
        role.serve(None, Listening("192.0.2.1"))


def test_roles_take_ports_of_a_range_in_turn_until_none_is_free(tmp_path):
    ensure_credentials(tmp_path / CREDENTIALS)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
            each.listen()
        first = taken[0].getsockname()[1]
        at = Listening("127.0.0.1", range(first, first + 1))
        with pytest.raises(
            SeedbedError, match=f"x cannot listen at 127.0.0.1:{first}-{first} .*more ports"
        ):
            Role(tmp_path, "x", 1).serve(None, at)
        # The free one behind it.
        free = taken[1].getsockname()[1]
        taken[1].close()
        role, ports = Role(tmp_path, "y", 1), [first, free]
        role.finish()
        role.serve(NoWork(), at._replace(ports=ports))
        found = Directory(tmp_path).find("y")
        assert found is not None and found.hosts == (("127.0.0.1", free),)


class NoWork:
    """The work of a role that ends at once."""

    def close(self) -> None: ...


def test_the_directory_gives_each_number_once(tmp_path):
    directory = Directory(tmp_path)
    assert directory.find("learner-0") is None
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(directory.take_number("x") for _ in range(9)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 36
    address = Address(3, 4, "here", "name", (("a", 1), ("b", 2)))
    directory.announce("x", address)
    assert directory.find("x") == address
