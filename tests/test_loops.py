"""The queue of unrolls, the learner's loop and the meter, without actors and without JAX programs."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

from seedbed.central.acting import InferenceCounters
from seedbed.central.gate import Gate
from seedbed.central.learning import BatchResult, LearnerLoop
from seedbed.central.meter import CentralMeter, Setup
from seedbed.central.unrolls import UnrollQueue
from seedbed.central.updater import Metrics
from seedbed.run import evaluation
from seedbed.run.evaluation import play_episodes
from seedbed.run.measures import EpisodeStatistics, Stopwatch
from seedbed.run.options import CentralConfig
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import LearnerState, SeedbedError, Timestep
from waiting import wait_for


def unroll(number):
    return FrameTrajectory(number, (), (), ())  # type: ignore[arg-type]


def queue_of(capacity, per_batch, kind=UnrollQueue):
    return kind(capacity, per_batch, most_lag=9, env_steps=0, steps=100)


def test_closing_a_queue_wakes_who_waits_and_drops_what_is_in_it():
    queue, found = queue_of(2, 2), []
    taking = threading.Thread(target=lambda: found.append(queue.take(60.0)), daemon=True)
    taking.start()
    queue.close()
    taking.join(60)
    assert found == [[]]
    full = queue_of(1, 1)
    full.put(unroll(0))
    putting = threading.Thread(target=lambda: found.append(full.put(unroll(1))), daemon=True)
    putting.start()
    full.close()
    putting.join(60)
    assert found == [[], False] and full.take(0.0) == [] and full.env_steps == 0


class Learner:
    """Counts updates in place of learning; it is its own updater."""

    def __init__(self):
        self.updater = self
        self.state = LearnerState({"w": np.zeros(2)}, (), np.int32(0), np.float32(0))

    def refresh(self, progress):
        return False

    def assemble(self, parts):
        return parts

    def update(self, batch, progress):
        self.state = self.state._replace(updates=self.state.updates + 1)
        metrics = [Metrics(np.zeros(1), (name,)) for name in ("lag_max", "loss")]
        return BatchResult(metrics, (), np.int32(3))


def learner_loop(source, kind=Learner):
    return LearnerLoop(kind(), [], source, source.mark)  # type: ignore[arg-type]


def test_a_snapshot_asked_for_as_an_update_ends_comes_although_no_other_update_does():
    """Forces the order: the request finds an update, which ends, and the learner waits; then it goes on."""
    updating, go_on, waiting = (threading.Event() for _ in range(3))

    class Queue(UnrollQueue):
        def take(self, timeout_s):
            if loop.updates:
                waiting.set()
            return super().take(timeout_s)

    class Slow(Learner):
        def update(self, batch, progress):
            updating.set()
            assert go_on.wait(60)
            return super().update(batch, progress)

    class Lock:
        """A lock on which a request that finds it taken is overtaken by the learner."""

        def __init__(self):
            self._lock = threading.Lock()

        def acquire(self, blocking=True):
            free = self._lock.acquire(blocking)
            if not free:
                go_on.set()
                assert waiting.wait(60)
            return free

        def release(self):
            self._lock.release()

        __enter__ = acquire

        def __exit__(self, *exception):
            self.release()

    queue = queue_of(2, 1, Queue)
    loop = learner_loop(queue, Slow)
    loop._updating = Lock()
    thread = threading.Thread(target=loop.run, args=(threading.Event(),), daemon=True)
    thread.start()
    try:
        queue.put(unroll(0))
        assert updating.wait(60)
        loop.request_snapshot()
        state, env_steps = loop.take_snapshot()
        assert (state.updates, env_steps) == (1, 3)
        loop.request_snapshot()  # and of a learner that waits
        wait_for(lambda: loop.take_snapshot() is not None)
        assert loop.take_snapshot() is None
    finally:
        queue.close()
        thread.join(60)


@pytest.mark.parametrize(
    ("actors", "streams", "away_share", "bottleneck"),
    [
        (0, 2, 0.9, "environment"),
        (0, 2, 0.1, "inference"),
        (0, 0, 1.0, "environment"),  # nobody is here
        (1, 0, 0.0, "inference"),  # the run has actors of its own
    ],
)
def test_actors_of_other_machines_can_be_what_limits_a_run(
    monkeypatch, actors, streams, away_share, bottleneck
):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: 0.0)
    monkeypatch.setattr("seedbed.central.meter.time", clock)
    pool = types.SimpleNamespace(cpu_seconds=lambda: 0.0, restarts=0)
    times = [(0.0, 0.0), (20.0, 20.0 * (1 - away_share))]
    remote = types.SimpleNamespace(
        report=lambda: {
            "streams": streams,
            "stream_seconds": times[0][0],
            "waited_seconds": times[0][1],
        }
    )
    acting = types.SimpleNamespace(
        episodes=EpisodeStatistics(1, 1), counters=InferenceCounters(), blocked_s=0.0
    )
    learning = types.SimpleNamespace(updates=0, metrics={}, waiting=Stopwatch(), busy=Stopwatch())
    config = CentralConfig(actors=actors, listen="127.0.0.1:0")
    setup = Setup(None, None, config, pool, acting, learning, queue_of(2, 1), remote)  # type: ignore[arg-type]
    meter = CentralMeter(setup, lambda: 0.0)
    now[0] += 10.0
    acting.counters.busy_s += 4.0
    del times[0]
    line = meter.read(10.0)
    assert line["bottleneck"] == bottleneck
    assert line["streams/away_share"] == pytest.approx(away_share)


def test_what_a_line_tells_is_of_the_time_since_the_line_before(monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], perf_counter=lambda: now[0], process_time=lambda: now[0]
    )
    monkeypatch.setattr("seedbed.central.meter.time", clock)
    monkeypatch.setattr("seedbed.run.measures.time", clock)
    pool = types.SimpleNamespace(cpu_seconds=lambda: 0.0, pids=list, restarts=0)
    blocked, waiting = Stopwatch(), Stopwatch()

    class Acting:
        episodes, counters = EpisodeStatistics(1, 1), InferenceCounters()
        blocked_s = property(lambda self: blocked.read())

    acting, queue = Acting(), queue_of(2, 1)
    learning = types.SimpleNamespace(updates=0, metrics={}, waiting=waiting, busy=Stopwatch())
    env, config = types.SimpleNamespace(frame_skip=4), CentralConfig(actors=1)
    setup = Setup(None, env, config, pool, acting, learning, queue, None)  # type: ignore[arg-type]
    meter = CentralMeter(setup, lambda: 0.0)
    found = []
    for calls, rows in ((10, 80), (20, 100), (20, 100)):
        acting.counters.calls, acting.counters.rows = calls, rows
        waiting.start()  # and goes on waiting into the next interval
        now[0] += 5.0
        found.append(meter.read(20.0 if found else 5.0))
        now[0] += 5.0
        waiting.stop()
        blocked.start()
        now[0] += 10.0
        blocked.stop()
    assert [line["inference_rows_mean"] for line in found] == [8.0, 2.0, None]
    assert [line["learner_waiting_share"] for line in found] == [1.0, 0.5, 0.5]
    assert [line["inference_blocked_share"] for line in found] == [0.0, 0.5, 0.5]


class Running:
    """The result of a program that has not ended."""

    ended = False

    def block_until_ready(self):
        self.ended = True


def test_a_gate_lets_an_announced_call_pass_but_only_one():
    gate, order = Gate(()), []
    assert gate.run("prepare", Running).ended
    gate.announce()
    learner = threading.Thread(
        target=gate.run, args=("minibatch", lambda: order.append("learn")), daemon=True
    )
    learner.start()
    learner.join(0.1)
    assert not order
    order.append("act")
    # Acting comes back before the learner has looked.
    gate.withdraw()
    gate.announce()
    learner.join(60)
    assert order == ["act", "learn"]
    gate.withdraw()


def test_a_gate_tells_how_long_acting_waited_and_for_what(monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("seedbed.central.gate.time", clock)
    monkeypatch.setattr("seedbed.run.measures.time", clock)
    gate = Gate(())

    def learns(seconds):
        now[0] += seconds / 2
        gate.started()
        now[0] += seconds / 2

    assert gate.program_s == 0.0
    gate.run("minibatch", learns, 9.0)  # which compiles
    assert gate.waited.read() == 4.5 and gate.program_s == 0.0
    now[0] += 1.0  # the call is under way, but not behind the learner any more
    gate.finished()
    gate.run("minibatch", learns, 0.5)
    gate.finished()
    assert gate.waited.read() == 4.75
    for _ in range(5):
        gate.run("minibatch", learns, 0.25)
        gate.finished()
        gate.run("prepare", lambda: 0)
    assert gate.program_s == 0.25 and not gate.take_notices()
    for _ in range(2):
        gate.run("minibatch", learns, 0.5)
        gate.finished()
    (notice,) = gate.take_notices()
    assert "(minibatch) takes 250 ms" in notice and "--inference-devices" in notice
    # A program that fails is not under way any more, and one that acting overtakes is not waited for.
    before = gate.waited.read()
    with pytest.raises(ZeroDivisionError):
        gate.run("minibatch", lambda: 1 // 0)
    gate.started()
    now[0] += 1.0
    gate.finished()
    assert gate.waited.read() == before


def test_an_evaluation_that_does_not_end_is_refused_and_not_averaged(monkeypatch):
    """Of three environments the first ends its episodes at step 2, 4 and so on, the others later or never."""
    monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 5)
    slot = types.SimpleNamespace(action=np.zeros(3, np.int32), success=np.zeros(3, np.uint8))
    flag, step = np.zeros(3, bool), 0

    def poll(timeout_s):
        nonlocal step
        ends = np.array([step % 2 == 1, step == 8, False])
        reward = np.ones(3, np.float32)
        slot.timestep = Timestep(np.zeros(3), reward, ends, flag, flag)
        step += 1
        return [0]

    pool = types.SimpleNamespace(num_envs=3, slots=[slot], poll=poll, reply=lambda group: True)
    player = types.SimpleNamespace(act=lambda timestep: np.zeros(3, np.int32))
    with pytest.raises(SeedbedError, match="3 of 6 episodes .* did not end, none within 5 steps"):
        play_episodes(pool, player, 6, threading.Event())  # type: ignore[arg-type]


def test_a_stopwatch_runs():
    watch = Stopwatch()
    watch.stop()
    assert watch.read() == 0.0
    watch.start()
    while watch.read() == 0.0:
        pass
    watch.stop()
    assert watch.read() == watch.read() > 0.0
