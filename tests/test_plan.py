"""The model of `seedbed plan`: closed forms, what must not make it slower, its files and its command."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from masked_environment import Masked
from plan_costs import acting, calibration
from seedbed import cli, trees
from seedbed.actors.slots import Slot, slot_layout
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.config.settle import Request, settle
from seedbed.envs.host import versions
from seedbed.envs.host.gym import FactoryEnv, GymEnv, GymHost
from seedbed.files import write_json
from seedbed.paramserver.placement import KINDS
from seedbed.plan import measuring, playing
from seedbed.plan import predict as predicting
from seedbed.plan.acting import Sizes
from seedbed.plan.calibration import calibrated, key_of, path_of
from seedbed.plan.costs import CallCost, from_json, median_of, to_json
from seedbed.plan.engine import (
    NOTHING,
    Card,
    Cores,
    Cost,
    Fellows,
    Machine,
    Simulation,
    Worker,
)
from seedbed.plan.fused import Iteration
from seedbed.plan.hosts import EXAMPLE, HostKind, for_machine, read_hosts, require_fit
from seedbed.plan.predict import Subject, predict
from seedbed.plan.sharded import Traffic
from seedbed.plan.stepping import measure, random_actions, steps
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.types import ArraySpec, Box, EnvSpec, OnPolicy, Replay, SeedbedError

UNROLLS = OnPolicy(20, 32)
FIXTURE = HealthCheck.function_scoped_fixture
HERE = HostKind("here", 2.0)
REPLAY = Replay(batch=32, sequence=1, period=1, capacity=10_000, min_size=100, ratio=4.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(predicting, "_BATCHES", 40)
    monkeypatch.setattr(predicting, "_EACH", 20)
    monkeypatch.setattr(predicting, "_CHUNKS", 2)


def sizes(experience: OnPolicy | Replay, group_size: int = 16) -> Sizes:
    return Sizes(group_size, experience, 1, pads=False, deadline_s=0.0, calls=1)


def central(actors: int, experience: OnPolicy | Replay = UNROLLS) -> Subject:
    config = CentralConfig(actors=actors, envs_per_actor=32)
    return Subject(config, 4, sizes(experience))


def paramserver(learners: int, shards: int) -> Subject:
    config = ParamServerConfig(
        learners=learners, parameter_shards=shards, replay_shards=shards, envs_per_actor=32
    )
    parts = Traffic([1_000_000 // shards] * shards, [1_000_000 // shards] * shards, 1e5, 1e4)
    return Subject(config, 1, sizes(REPLAY), traffic=parts)


def fused(updates: int = 4, size: int = 1_000_000) -> Subject:
    return Subject(FusedConfig(), 1, iteration=Iteration(updates, size))


# The engine


def finish(simulation: Simulation, cores: Cores, costs: list[Cost], weight=1.0) -> list[float]:
    """Does all at once, the first with a weight; returns when each has ended."""
    ended = [0.0] * len(costs)

    def job(number: int):
        yield cores.work(costs[number], weight if number == 0 else 1.0)
        ended[number] = simulation.now

    for number in range(len(costs)):
        simulation.start(job(number))
    simulation.run(lambda: all(ended), 10_000)
    return ended


@pytest.mark.parametrize(("jobs", "count"), [(1, 1.0), (3, 1.0), (5, 2.0), (2, 4.0), (3, 1.5)])
def test_jobs_share_cores(jobs, count):
    """n jobs of one second on c cores end together after n / c seconds, or after one."""
    simulation = Simulation()
    ended = finish(simulation, Cores(simulation, count), [Cost(1.0)] * jobs)
    assert ended == pytest.approx([max(1.0, jobs / count)] * jobs)


def test_a_wide_job_has_the_cores_that_others_leave():
    simulation = Simulation()
    cores = Cores(simulation, 2.0)
    # Three threads on two cores, two of them of the first job: it gets 4/3, and both after the other ended.
    assert finish(simulation, cores, [Cost(2.0, 2.0), Cost(0.2)]) == pytest.approx([1.1, 0.3])
    assert cores.busy_s == pytest.approx(2.2)


def test_weights_divide_a_core():
    simulation = Simulation()
    ended = finish(simulation, Cores(simulation, 1.0), [Cost(1.0), Cost(1.0)], weight=0.25)
    assert ended == pytest.approx([2.0, 1.25])


def test_a_crowd_is_slower():
    simulation = Simulation()
    cores = Cores(simulation, 2.0, speed=2.0, crowding=0.5)
    assert finish(simulation, cores, [Cost(1.0), Cost(1.0)]) == pytest.approx([0.75, 0.75])


def test_threads_of_a_process_slow_one_another():
    """Each takes thrice as long while both work, and wastes half as much again: half a core each."""
    simulation = Simulation()
    cores = Cores(simulation, 4.0)
    machine, ended = Machine(cores, Card(simulation, 1.0, 0.0)), {}
    process = object()
    workers = [Worker(simulation, machine, fellows=Fellows(process, 3.0, 1.5)) for _ in range(2)]
    workers.append(Worker(simulation, machine, fellows=Fellows(object(), 3.0, 1.5)))

    def work(number, seconds):
        yield workers[number].do(Cost(seconds))
        ended[number] = simulation.now

    for number, seconds in enumerate((1.0, 2.0, 1.0)):
        simulation.start(work(number, seconds))
    assert simulation.run(lambda: len(ended) == 3, 1000)
    # After 3 s the first has ended, and the second has done a third of what is left in a second.
    assert ended == pytest.approx({0: 3.0, 1: 4.0, 2: 1.0})
    assert cores.busy_s == pytest.approx(1.5 + 1.5 + 1.0 + 1.0)


def test_each_further_thread_slows_the_others_as_much_again():
    simulation = Simulation()
    cores = Cores(simulation, 4.0)
    machine, process, ended = Machine(cores, Card(simulation, 1.0, 0.0)), object(), list[float]()

    def work(worker):
        yield worker.do(Cost(1.0))
        ended.append(simulation.now)

    for _ in range(3):
        simulation.start(work(Worker(simulation, machine, fellows=Fellows(process, 3.0, 1.5))))
    assert simulation.run(lambda: len(ended) == 3, 1000)
    assert ended == pytest.approx([5.0] * 3) and cores.busy_s == pytest.approx(3 * 2.0)


def test_a_worker_is_a_queue():
    """With arrivals faster than it serves, it serves at its own rate."""
    simulation = Simulation()
    machine = Machine(Cores(simulation, 4.0), Card(simulation, 1.0, 0.0))
    worker, served = Worker(simulation, machine), []

    def arrivals():
        for _ in range(100):
            simulation.start(customer())
            yield simulation.sleep(0.5)

    def customer():
        yield worker.do(Cost(1.0))
        served.append(simulation.now)

    simulation.start(arrivals())
    assert simulation.run(lambda: len(served) == 100, 10_000)
    assert served == pytest.approx([float(n) for n in range(1, 101)])
    assert worker.busy_s == pytest.approx(100.0)


def test_a_card_sends_at_its_rate():
    simulation, came = Simulation(), []
    cards = [Card(simulation, rate, 0.01) for rate in (8.0, 4.0)]  # 1 and 0.5 GB/s

    def message():
        yield cards[0].send(cards[1], 1e9)
        came.append(simulation.now)

    for _ in range(3):
        simulation.start(message())
    simulation.run(lambda: len(came) == 3, 1000)
    # The slower end decides; the last byte comes a latency after it was sent.
    assert came == pytest.approx([2.01, 4.01, 6.01])
    assert cards[0].busy_s == pytest.approx(3.0) and cards[1].busy_s == pytest.approx(6.0)


# Predictions


@pytest.mark.parametrize(
    ("costs", "rate", "limit"),
    [
        (acting(step_s=0.1), 2 * 16 / 0.1, "actors"),  # two actors, one group at a time each
        (acting(update_s=1.0), 32 * 20 / 1.0, "learner thread"),
        (acting(call_s=0.1), None, "inference thread"),
    ],
)
def test_the_slowest_stage_limits(costs, rate, limit):
    found = predict(central(2), calibration(costs), [HostKind("here", 16.0)])
    assert found.saturated == limit and found.loads[limit] > 0.95
    if rate is not None:
        assert found.env_steps_per_s == pytest.approx(rate, rel=0.05)
    else:
        assert found.env_steps_per_s == pytest.approx(found.rows_per_call / 0.1, rel=0.05)
    assert found.frames_per_s == 4 * found.env_steps_per_s
    assert found.updates_per_s == pytest.approx(found.env_steps_per_s / (32 * 20), rel=0.05)


def test_cores_limit():
    """All work of a batch takes the cores' time, whoever does it."""
    found = predict(central(4), calibration(acting(5e-3, 2e-3, 2e-2)), [HostKind("here", 1.0)])
    assert found.saturated == "cores of here"
    rows = found.rows_per_call
    each = 5e-3 / 16 + 2e-3 / rows + 2e-2 / (32 * 20)
    assert found.env_steps_per_s == pytest.approx(1 / each, rel=0.05)


def test_replay_keeps_its_ratio(monkeypatch):
    monkeypatch.setattr(predicting, "_BATCHES", 400)
    found = predict(central(2, REPLAY), calibration(acting()), [HostKind("here", 8.0)])
    assert found.saturated == "learner thread"
    assert found.updates_per_s == pytest.approx(100, rel=0.05)
    assert found.env_steps_per_s == pytest.approx(found.updates_per_s * 32 / 4, rel=0.05)


def test_one_learner_and_one_shard_are_a_chain():
    """The learner waits for its gradient: everything one after another, which takes the sum."""
    found = predict(paramserver(1, 1), calibration(acting()), [HostKind("here", 16.0)])
    # A gradient, 1.1 ms and 2 MB of the learner, and 1 ms and 2 MB of the shard.
    assert found.updates_per_s == pytest.approx(1 / (1e-2 + 3.1e-3 + 3e-3), rel=0.05)
    assert found.discarded_share == 0 and found.lag_mean == 0


def test_many_learners_saturate_a_shard():
    kinds = [HostKind("learners", 8.0, 20, only=("learners",)), HostKind("shards", 4.0)]
    found = predict(paramserver(20, 1), calibration(acting()), kinds)
    assert found.saturated == "parameter shards"
    assert found.updates_per_s == pytest.approx(1 / 3e-3, rel=0.05)
    assert found.lag_mean == pytest.approx(19, rel=0.05)


def test_machines_share_an_iteration():
    one = predict(fused(), calibration(acting()), [HERE])
    assert one.env_steps_per_s == pytest.approx(1000 / 0.03, rel=0.05)
    fast = HostKind("machine", 2.0, 4, gbit_per_s=1e6, latency_ms=0.0)
    four = predict(fused(), calibration(acting()), [fast])
    # The slowest of four ends a part: up to a tenth later than on average.
    assert 3.5 < four.env_steps_per_s / one.env_steps_per_s < 4.0
    slow = dataclasses.replace(fast, gbit_per_s=1e-2)
    found = predict(fused(), calibration(acting()), [slow])
    # Four times in an iteration, 2 * 3 / 4 megabytes at 1.25 MB/s.
    assert found.env_steps_per_s == pytest.approx(1000 / (4 * 1.5 / 1.25), rel=0.05)
    assert found.saturated == "network of machine"


def test_streams_pass_the_ingest_process():
    config = CentralConfig(actors=0, envs_per_actor=32, listen="0.0.0.0:1", stream_groups=400)
    subject = Subject(config, 1, sizes(UNROLLS))
    kinds = [HostKind("learner", 16.0), HostKind("actors", 20.0, 4, price_per_hour=1.0)]
    found = predict(subject, calibration(acting(call_s=1e-5, update_s=1e-5)), kinds)
    assert found.saturated == "ingest process"
    # A timestep and its answer, a tenth of a millisecond each.
    assert found.env_steps_per_s == pytest.approx(16 / 2e-4, rel=0.05)
    assert found.cost_of_1e9_frames == pytest.approx(4e9 / 3600 / found.frames_per_s)


def test_replay_gets_rows_by_the_chunk():
    """A group's rows become items eight at a time: acting goes on at once until then."""
    costs, kinds = calibration(acting(step_s=1e-4, call_s=1e-4)), [HostKind("here", 8.0)]
    found = predict(central(1, dataclasses.replace(REPLAY, ratio=8.0)), costs, kinds)
    # A chunk of 16 environments asks for 32 batches of 10 ms, of which all but 8 are made before acting.
    assert found.action_p50_ms is not None and found.action_p50_ms < 1
    many = dataclasses.replace(REPLAY, batch=4 * 4096)
    found = predict(central(1, many), costs, kinds)
    assert found.env_steps_per_s == pytest.approx(found.updates_per_s * many.batch / 4, rel=0.2)


def test_learners_of_a_machine_take_its_accelerators_in_turn():
    def rate(accelerators: int) -> float:
        kinds = [
            HostKind("shards", 8.0, only=KINDS),
            HostKind("gpus", 16.0, accelerators=accelerators, only=("learners",)),
        ]
        costs = calibration(acting(update_s=0.2))
        return predict(paramserver(2, 1), costs, kinds).updates_per_s

    # A gradient takes 0.2 s of a device, and all else much less.
    assert rate(1) == pytest.approx(5, rel=0.1) and rate(2) == pytest.approx(10, rel=0.1)


def test_a_call_waits_for_others_until_its_deadline_at_most():
    def latency(deadline_s: float) -> float:
        subject = central(2)
        assert subject.sizes is not None
        subject = subject._replace(sizes=subject.sizes._replace(deadline_s=deadline_s, pads=True))
        kinds = [HostKind("here", 16.0, accelerators=1)]
        found = predict(subject, calibration(acting(1e-2, 1e-4, 1e-4)), kinds)
        assert found.action_p50_ms is not None
        return found.action_p50_ms

    # Two groups of an actor are never ready at once, so that a call of all never comes before its deadline.
    assert latency(4e-3) == pytest.approx(4.1, rel=0.1)
    assert latency(0.0) == pytest.approx(0.1, rel=0.3)


def test_an_accelerator_takes_over():
    kinds = [HostKind("here", 16.0, accelerators=1, learning=10.0, inference=10.0)]
    found = predict(central(2), calibration(acting(update_s=10.0)), kinds)
    assert found.env_steps_per_s == pytest.approx(32 * 20 / 1.0, rel=0.05)
    assert found.loads["accelerators of here"] > 0.95


COSTS = st.floats(1e-4, 2e-2)


@settings(max_examples=6, deadline=None, suppress_health_check=[FIXTURE])
@example(0.015625, 0.0078125, 0.0078125, 3.0, True)
@given(COSTS, COSTS, COSTS, st.sampled_from([1.0, 2.0, 3.0]), st.booleans())
def test_more_cores_are_not_slower(step_s, call_s, update_s, cores, replay):
    subject = central(2, REPLAY if replay else UNROLLS)
    costs = calibration(acting(step_s, call_s, update_s))
    # Not steps: replay lets actors be a few batches early or late, a tenth of what is played here.
    few, many = (
        predict(subject, costs, [HostKind("here", count)]).updates_per_s
        for count in (cores, 2 * cores)
    )
    # A call takes whoever is ready, so calls of other sizes may cost a little.
    assert many >= 0.95 * few


@settings(max_examples=6, deadline=None, suppress_health_check=[FIXTURE])
@given(st.floats(0.01, 1.0), st.integers(1, 3), st.integers(1, 2))
def test_a_faster_network_is_not_slower(gigabits, learners, shards):
    def rate(factor: float) -> float:
        kind = HostKind("machine", 4.0, 3, gbit_per_s=factor * gigabits)
        return predict(paramserver(learners, shards), calibration(acting()), [kind]).updates_per_s

    assert rate(4.0) >= 0.95 * rate(1.0)


def test_a_model_of_too_many_events_is_refused(monkeypatch):
    """It may be cut, but not before each learner has made a quarter of its updates."""
    whole = predict(paramserver(4, 2), calibration(acting()), [HERE]).updates_per_s
    monkeypatch.setattr(playing, "_EVENTS", 8_000)
    monkeypatch.setattr(playing, "_LEAST", 0.01)
    cut = predict(paramserver(4, 2), calibration(acting()), [HERE]).updates_per_s
    assert cut != whole and cut == pytest.approx(whole, rel=0.2)
    monkeypatch.setattr(playing, "_LEAST", 0.9)
    with pytest.raises(SeedbedError, match="too many events to simulate: plan a part"):
        predict(paramserver(4, 2), calibration(acting()), [HERE])
    with pytest.raises(SeedbedError, match="too little is acted for a batch"):
        playing.Model([HERE], 0.0).play(lambda: 0, 1, lambda: True)


def test_predictions_are_repeated():
    first, second = (predict(central(2), calibration(acting()), [HERE]) for _ in range(2))
    assert first == second


# Files and the command


def test_calibrations_are_read_again():
    found = calibration(acting())
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_calls_lie_on_the_line_through_what_was_measured():
    calls = tuple(CallCost(n, NOTHING, Cost(1.0 + n, 2.0), NOTHING) for n in (1, 2, 8))
    costs = dataclasses.replace(acting(), calls=calls)
    for groups in (1, 2, 5, 8, 100):
        assert costs.call(groups) == CallCost(groups, NOTHING, Cost(1.0 + groups, 2.0), NOTHING)


def test_hosts_are_read(tmp_path):
    path = tmp_path / "hosts.toml"
    path.write_text(EXAMPLE)
    learner, actors = read_hosts(path)
    assert learner == HostKind("learner", 32.0, price_per_hour=1.5)
    assert (actors.count, actors.cores) == (10, 64.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts = 3", r"a table \[\[hosts\]\] for each kind"),
        ("[[hosts", "is not TOML"),
        ("[[host]]\ncores = 2", r"has host; write\n  \[\[hosts\]\]"),
        ('[[hosts]]\nname = "a"', r"\[\[hosts\]\] 1 has no cores"),
        ('[[hosts]]\nname = "a"\ncores = 2\nsped = 2', "'sped'; did you mean speed"),
        ('[[hosts]]\nname = "a"\ncores = 0', "cores is 0: it must be more than 0"),
        ('[[hosts]]\nname = "a"\ncores = nan', "cores is nan"),
        ('[[hosts]]\nname = "a"\ncores = true', "cores is True: give a number"),
        ('[[hosts]]\nname = "a"\ncores = 2\ncount = 1.5', "count is 1.5: give a whole number"),
        ('[[hosts]]\nname = "a"\ncores = 2\nonly = ["x"]', "some of parameters, replay, learners"),
        ('[[hosts]]\nname = "a"\ncores = 2\nonly = [["x"]]', "some of parameters, replay"),
        ('[[hosts]]\nname = "a"\ncores = 2\ncount = 1000000000', "it may be 10000 at most"),
        (f'[[hosts]]\nname = "a"\ncores = 1{"0" * 400}', "cores is too large: it may be 1e.06"),
        ('[[hosts]]\nname = ""\ncores = 2', "name is '': give a word"),
        ('[[hosts]]\nname = "a"\ncores = 2\nlearning = 20', "`learning`, .* add accelerators = 1"),
        ('[[hosts]]\nname = "a"\ncores = 2\ninference = 2', "`inference`, .* add accelerators"),
        ('[[hosts]]\nname = "a"\ncores = 2\n' * 2, "names 'a' twice"),
    ],
)
def test_wrong_hosts_are_refused(tmp_path, text, says):
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(SeedbedError, match=says):
        read_hosts(path)


@pytest.mark.parametrize(
    ("config", "kinds", "says"),
    [
        (CentralConfig(actors=1), [HERE, HostKind("b", 2.0)], "does not listen: add --listen"),
        (
            CentralConfig(actors=1, listen="0.0.0.0:1"),
            [HERE, HostKind("b", 64.0)],
            "give --stream-groups 128",
        ),
        (CentralConfig(listen="0.0.0.0:1"), [HERE], "has no actors"),
        (
            ParamServerConfig(),
            [HERE, HostKind("b", 2.0, actors=1)],
            "b has `actors`, which the paramserver runtime does not know",
        ),
        (FusedConfig(), [HostKind("a", 2.0, only=("replay",))], "a has `only`"),
        (FusedConfig(), [HostKind("a", 2.0, accelerators=1, inference=9.0)], "a has `inference`"),
        (ParamServerConfig(), [HostKind("a", 2.0, only=("replay",))], "coordinates takes every"),
    ],
)
def test_runs_that_do_not_fit_their_hosts_are_refused(config, kinds, says):
    with pytest.raises(SeedbedError, match=says):
        require_fit(kinds, config)


def test_actors_that_are_left_open_are_those_of_the_learners_machine():
    open_ = TrainConfig(GymEnv("CartPole-v1"), Impala(), CentralConfig())
    kind = HostKind("learner", 32.0)
    assert for_machine(open_, kind).runtime.actors == 32
    # Agents with replay share few steps among few actors, as the run does.
    short = dataclasses.replace(open_, agent=Dqn(), runtime=CentralConfig(steps=100_000))
    assert for_machine(short, kind).runtime.actors == 1
    given = dataclasses.replace(open_, runtime=CentralConfig(actors=3))
    assert for_machine(given, kind) == given
    fits_its_batch = dataclasses.replace(open_, agent=Ppo())
    assert for_machine(fits_its_batch, kind) == fits_its_batch


def test_a_calibration_depends_on_ones_own_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "own_corridor.py"
    keys = []
    for length in ("5", "50"):
        source.write_text(f"LENGTH = {length}")
        versions.of_module.cache_clear()  # as another process would see it
        config = TrainConfig(FactoryEnv("own_corridor:make"), Impala(), CentralConfig(actors=1))
        keys.append(key_of(config, far=False))
    assert {"file own_corridor"} == keys[0]["own"].keys() - {"gymnasium"}
    assert path_of(keys[0]) != path_of(keys[1])


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A calibration of CartPole that is kept already."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    config = settle(Request("cartpole/impala"), lambda found: found).config
    write_json(path_of(key_of(config, far=False)), to_json(calibration(acting())))


def test_the_command_tells_a_table(kept, capsys):
    assert cli.main(["plan", "cartpole/impala", "--actors", "1"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    for words in ("environment steps/s", "updates/s", "saturates first", "measured on cpu"):
        assert words in told
    assert cli.main(["plan", "cartpole/impala", "--actors", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert math.isfinite(found["predicted"]["env_steps_per_s"])
    assert from_json(found["measured"]) == calibration(acting())


def test_the_command_refuses_what_it_cannot_plan(kept, tmp_path, capsys):
    two = tmp_path / "two.toml"
    two.write_text('[[hosts]]\nname = "a"\ncores = 2\ncount = 2')
    for words, says in (
        ([], "name what to plan first"),
        (["cartpole/impala", "--run", "r"], "a plan makes no run"),
        (["cartpole/impala", "--host", "h"], "did you mean --hosts?"),
        (["cartpole/impala", "--hosts", str(tmp_path / "none")], "cannot be read"),
        (["cartpole/impala", "--hosts", "3"], "a plan takes a file with the machines"),
        (["cartpole/impala", "--learners", "2"], "a plan knows one learner"),
        (["cartpole/impala", "--learner-devices", "0", "1"], "give one with --learner-devices"),
        (["cartpole/impala", "--inference-devices", "0", "1"], "a plan knows one of each"),
        (["cartpole/impala", "--listen", "127.0.0.1:0"], "listens and has no actors"),
        (
            ["CartPole-v1", "--agent", "dqn", "--runtime", "paramserver", "--replay", "bundled"],
            "bundled",
        ),
        (["cartpole/ppo", "--seeds", "2"], "leave out --seeds"),
        (["cartpole/dqn", "--hosts", str(two)], "replay trains on one device"),
    ):
        assert cli.main(["plan", *words]) in (1, 2)
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_parts_of_cartpole_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    words, told = Request("cartpole/impala"), list[str]()
    config = settle(words, lambda found: found).config
    first = calibrated(config, False, False, told.append, seconds=0.2)
    assert first.acting is not None and told == ["steps of environments", "inference", "learning"]
    assert first.acting.step.cpu_s > 0 and first.acting.update.cpu_s > 0
    assert [call.groups for call in first.acting.calls] == [1, 2, 4, 8]
    # It is kept.
    assert calibrated(config, False, False, told.append) == first and len(told) == 3


@pytest.mark.slow
def test_parts_of_gorila_are_measured(tmp_path, monkeypatch):
    """A replay shard costs its process, the streams' thread and whoever adds and takes; over TLS more."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    config = settle(Request("cartpole/gorila"), lambda found: found).config
    found = calibrated(config, True, False, lambda text: None, seconds=1.0)
    assert found.replay is not None and found.far_replay is not None and found.shards is not None
    assert all(spent > 0 for trip in found.replay for spent in trip)
    assert sum(found.far_replay.draw) > sum(found.replay.draw)
    # A batch is larger than a step of a group.
    assert found.replay.draw.shard > found.replay.row.shard
    assert from_json(to_json(found)) == found


def test_of_several_measurements_each_field_counts_by_its_median():
    stream = calibration(acting()).stream
    measured = [(acting(x, y, z), stream) for x, y, z in ((3, 1, 9), (1, 2, 8), (2, 9, 7))]
    assert median_of(measured) == (acting(2, 2, 8), stream)
    assert median_of([(acting(x), None) for x in (5, 1, 3)]) == (acting(3), None)


@pytest.mark.parametrize(
    "agent", [functools.partial(Ppo, epochs=1), pytest.param(Impala, marks=pytest.mark.slow)]
)
def test_learning_from_unrolls_is_measured(agent, monkeypatch):
    """Nobody publishes parameters meanwhile, for which an agent that acts, stops and learns waits."""
    monkeypatch.setattr(measuring, "GROUPS", 2)
    with tempfile.TemporaryDirectory() as folder:
        tiny = agent(batch=8, unroll=4, hidden_sizes=(8,))
        with measuring.bench(GymEnv("CartPole-v1"), tiny, 4, Path(folder), 0.02) as parts:
            assert [call.groups for call in parts.calls()] == [1, 2]
            assert parts.update(parts.batch(), sharded=agent is Impala)[0].cpu_s > 0


class Ranged(gymnasium.Env):
    """An environment that refuses an action beyond its bounds."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(5, 10, (2,))

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("made", [Masked, lambda: Masked(2), Ranged])
def test_actions_that_are_measured_are_allowed(made):
    host, bell = GymHost(made, "made", 3, 0), os.eventfd(0)
    layout = slot_layout(host.spec, 3)
    slot = Slot(layout, bytearray(layout.size))
    slot.publish(trees.leaves(host.reset()))
    assert len(steps(host, slot, bell, 0.05)) > 5
    os.close(bell)


def test_actions_without_bounds_are_near_the_others():
    action = Box((3,), (-math.inf, -math.inf, 7.0), (math.inf, -4.0, math.inf))
    spec = EnvSpec(ArraySpec((1,), "float32"), action)
    drawn = random_actions(spec, np.zeros((50, 1)), 50, np.random.default_rng(0))
    assert np.all(drawn >= [-1, -5, 7]) and np.all(drawn <= [1, -4, 8])


def test_an_environment_that_prints_is_measured(capfd):
    env = FactoryEnv("counting_environment:make_talking")
    assert all(part > 0 for part in measure(env, 1, 1, 0.02))
    assert "a step" in capfd.readouterr().err
