"""The central runtime through the whole data plane: real actor processes, real threads."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from central_runs import View, Waker, checkpoints, counting_env, gone, helper_of, spawn, train
from checkpoint_files import stopped
from counting_agent import CountingAgent
from counting_environment import environment_number, timestep_number
from described import undescribed
from saved import lines
from seedbed.actors.local import local_pool
from seedbed.actors.process import ActorProcess, Launcher
from seedbed.central import train as central
from seedbed.central.acting import InferenceLoop
from seedbed.central.evaluation import Evaluation
from seedbed.central.inference import Inference, act_output
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.envs.host.gym import FactoryEnv
from seedbed.exit_status import ExitStatus, StoppedEarly, TrainingDiverged
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import name_of
from seedbed.run.measures import EpisodeStatistics
from seedbed.testing import counting
from seedbed.types import SeedbedError, bind
from waiting import wait_for

HERE = Path(__file__).parent


pytestmark = pytest.mark.usefixtures("importable")


class Recorder:
    """Checks every unroll of one environment against the one before it."""

    def __init__(self):
        self.last, self.rows, self.transitions, self.lives = None, 0, 0, 0
        self.ended = {}  # the last timestep of each life that is over, by the environment's number

    def check(self, steps, action, version, draws):
        observation = steps.observation
        if self.last is None or not np.array_equal(self.last, observation[0]):
            # a new life of the actor: another seed, from the beginning
            assert self.last is None or self.last[counting.ENV] != observation[0][counting.ENV]
            assert observation[0][counting.EPISODE] == 0
            # the very first unroll of a group may begin a little later
            assert observation[0][counting.STEP] == 0 or self.last is None
            assert steps.first[0] or self.last is None
            self.lives += 1
            if self.last is not None:
                number, episode, step, _ = self.last.tolist()
                self.ended[number] = timestep_number(number, episode, step, 7)
        assert (np.diff(version) >= 0).all()
        assert np.unique(draws).size == draws.size, "a key was used twice"
        self.rows += len(action)
        for t in range(len(action)):
            env, episode, step, _ = observation[t].tolist()
            if steps.first[t + 1]:
                expected = [env, episode + 1, 0, 0]
                assert steps.terminated[t] or steps.truncated[t]
                assert steps.reward[t + 1] == 0
            else:
                expected = [env, episode, step + 1, int(action[t])]
                assert steps.reward[t + 1] == 1000 * episode + step + 1
                self.transitions += 1
            assert observation[t + 1].tolist() == expected
        self.last = observation[-1]


class Plane:
    """Actors, inference and a consumer of unrolls in place of the learner.

    With `synchronous` a batch has so many unrolls of each environment, else it is any unroll of a group.
    """

    UNROLL = 6

    def __init__(self, actors, synchronous=0, devices=2, **options):
        launcher = Launcher(env=counting_env(**options), envs_per_group=2, groups=2, seed=0)
        self.pool = local_pool(launcher, actors=actors)
        spec = self.pool.spec
        batch = synchronous * self.pool.num_envs or self.pool.group_size
        agent = CountingAgent(
            unroll=self.UNROLL,
            batch=batch,
            actions=counting.NUM_ACTIONS,
            synchronous=synchronous > 0,
        )
        self.agent, self.per_batch = bind(agent, spec), batch // self.pool.group_size
        ids = np.arange(self.pool.num_envs).reshape(self.pool.num_groups, self.pool.group_size)
        self.inferences = [
            Inference(self.agent, spec, 1, device, part, self.pool.num_envs, jax.random.key(0))
            for device, part in zip(jax.devices(), np.array_split(ids, devices), strict=False)
        ]
        params = self.agent.init(jax.random.key(0)).params
        for inference in self.inferences:
            inference.publish(params, 0)
            inference.compile(spec)
        self.queue = UnrollQueue(4 * self.per_batch, self.per_batch, 0, 0, 10**9)
        size, groups = self.pool.group_size, self.pool.num_groups
        output = act_output(self.agent, spec, 1, size)
        sink = UnrollSink(self.queue, self.agent.experience, spec, 1, output, groups)
        episodes = EpisodeStatistics(groups, size)
        self.loop = InferenceLoop(self.pool, self.inferences, sink, episodes)
        self.stop = threading.Event()
        self.failures = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.recorders = {}
        self.version = 0

    def _run(self):
        try:
            self.loop.run(self.stop)
        except BaseException as failure:
            self.failures.append(failure)
            self.queue.close()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.stop.set()
        self.queue.close()
        self.thread.join(10)
        self.pool.close()

    def consume(self, count):
        for _ in range(count):
            unrolls = self.queue.take(60.0)
            if not unrolls:
                raise self.failures[0]
            for unroll in unrolls:
                self.check(jax.tree.map(np.asarray, unroll))
            self.version += 1
            for inference in self.inferences:
                inference.publish({"mean": np.float32(0)}, self.version)

    def check(self, unroll):
        if self.agent.synchronous:
            assert (unroll.params_version == self.version).all(), "acted by an older policy"
        for env in range(unroll.action.shape[1]):
            number = int(unroll.extras["env"][0, env])
            assert (unroll.extras["env"][:, env] == number).all()
            self.recorders.setdefault(number, Recorder()).check(
                jax.tree.map(lambda leaf, e=env: leaf[:, e], unroll.timesteps),
                unroll.action[:, env],
                unroll.params_version[:, env],
                unroll.extras["draw"][:, env],
            )


def test_every_transition_arrives_once_in_order_and_at_its_place():
    with Plane(actors=2) as plane:
        plane.consume(200)
        assert sorted(plane.recorders) == list(range(8))
        assert all(recorder.lives == 1 for recorder in plane.recorders.values())
        arrived = sum(recorder.rows for recorder in plane.recorders.values())
        published = sum(slot.step * plane.pool.group_size for slot in plane.pool.slots)
        in_flight = 8 * 6 * 3 + 5 * 12  # skipped first rows, half unrolls, last rows, the queue
        assert arrived <= published <= arrived + in_flight
        assert plane.loop.episodes.summary()["episodes"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("unrolls", [1, 2])
def test_a_synchronous_agent_acts_and_stops_also_where_actors_die(unrolls):
    with Plane(actors=2, synchronous=unrolls, sleep_s=0.0003) as plane:

        def rest():
            deadline = time.monotonic() + 60
            while len(plane.queue._items) < plane.per_batch and time.monotonic() < deadline:
                time.sleep(0.001)
            calls = plane.loop.counters.calls
            time.sleep(0.05)
            assert plane.loop.counters.calls == calls, "it acts on before the update"
            assert len(plane.queue._items) == plane.per_batch

        plane.consume(20)
        assert [recorder.lives for recorder in plane.recorders.values()] == [1] * 8
        rows = {recorder.rows for recorder in plane.recorders.values()}
        assert rows == {20 * unrolls * 6}
        os.kill(plane.pool.pids()[0], signal.SIGKILL)  # in the middle of a batch
        plane.consume(5)
        rest()
        os.kill(plane.pool.pids()[1], signal.SIGKILL)  # between batches
        plane.consume(5)
        rows = [recorder.rows for recorder in plane.recorders.values()]
        assert sum(rows) == 30 * 8 * unrolls * 6
        assert sum(recorder.lives for recorder in plane.recorders.values()) == 16


class Soon:
    """An array that a device takes a moment to compute."""

    def __init__(self, array):
        self.array, self.at = array, time.monotonic() + 0.002

    def is_ready(self):
        return time.monotonic() >= self.at

    def __array__(self, dtype=None, copy=None):
        time.sleep(max(0.0, self.at - time.monotonic()))
        return np.asarray(self.array)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_an_accelerator_pads_and_has_two_calls_under_way(monkeypatch, accelerators, count):
    """Its loop, on CPUs that pass for some: every transition arrives once and in order here too."""
    padded, under_way, act = [], [], Inference.act

    def noted(self, timestep, groups):
        padded.append(len(timestep.first) - len(groups))
        (calls,) = [s.calls for s in plane.loop._shards if s.inference is self]
        under_way.append(len(calls))
        output = act(self, timestep, groups)
        return output._replace(action=Soon(output.action))

    monkeypatch.setattr(Inference, "act", noted)
    # The thread that `with` starts uses `plane` at once.
    plane = Plane(actors=3 * count, devices=count)
    with plane:
        plane.consume(100)
        deadline = time.monotonic() + 60
        while (max(padded) == 0 or max(under_way) == 0) and time.monotonic() < deadline:
            plane.consume(10)
        assert max(padded) > 0 and max(under_way) == 1
        assert all(recorder.lives == 1 for recorder in plane.recorders.values())


def test_killed_actors_lose_their_own_half_unroll_and_nothing_else(monkeypatch):
    died, just_completed, close, release = {}, {}, UnrollSink._close, ActorProcess.release

    def noted_release(process):
        for slot in process.slots:
            died.update(
                dict.fromkeys(slot.timestep.observation[:, counting.ENV].tolist(), slot.step)
            )
        release(process)

    def close_and_kill(sink, group, timestep):
        """Kills an actor at the moment in which it has completed an unroll that counts."""
        complete = len(sink._complete)
        close(sink, group, timestep)
        if len(sink._complete) > complete and kill.is_set():
            kill.clear()
            numbers = timestep.observation[:, counting.ENV].tolist()
            step = plane.pool.slots[group].step
            just_completed.update(dict.fromkeys(numbers, step))
            victim = psutil.Process(plane.pool.pids()[group // 2])
            victim.kill()
            victim.wait(60)

    monkeypatch.setattr(ActorProcess, "release", noted_release)
    monkeypatch.setattr(UnrollSink, "_close", close_and_kill)
    rng, kill = random.Random(1), threading.Event()
    with Plane(actors=3, sleep_s=0.0003) as plane:
        plane.consume(60)
        for round_ in range(4):
            if round_ % 2:
                kill.set()
            else:
                os.kill(rng.choice(plane.pool.pids()), signal.SIGKILL)
            plane.consume(60)
        ended = {}
        deadline = time.monotonic() + 60
        while not (len(ended) >= 8 and just_completed.keys() <= ended.keys()):
            plane.consume(10)
            ended = {n: t for each in plane.recorders.values() for n, t in each.ended.items()}
            assert time.monotonic() < deadline, "no killed actor came back"
    assert len(just_completed) == 4
    for number, last in ended.items():
        # A timestep may have come that nobody acted on, and those since the last whole unroll are lost.
        assert 0 <= died[number] - last <= Plane.UNROLL
        assert last == just_completed.get(number, last)


@pytest.mark.slow
def test_a_stopped_actor_stalls_no_one_and_one_that_hangs_is_replaced(pool_clock):
    number = environment_number(0, actor=1, group=0, index=1)
    with Plane(actors=2, fault="hang", fault_at=400, fault_env=number) as plane:
        plane.consume(30)
        pid = plane.pool.pids()[0]
        os.kill(pid, signal.SIGSTOP)
        plane.consume(10)
        before = {n: recorder.transitions for n, recorder in plane.recorders.items()}
        plane.consume(60)
        moved = [n for n, r in plane.recorders.items() if r.transitions > before[n]]
        assert moved == [4, 5, 6, 7]
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while plane.recorders[0].transitions == before[0] and time.monotonic() < deadline:
            plane.consume(1)
        assert plane.recorders[0].transitions > before[0]
        assert plane.recorders[0].lives == 1
        deadline = time.monotonic() + 120
        while plane.recorders[7].lives < 2:
            assert time.monotonic() < deadline, "nobody replaced it"
            if not plane.pool.restarts:
                pool_clock(10.0)  # of the 120 s, in which the other actor goes on
            plane.consume(12)
        assert [plane.recorders[env].lives for env in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]
        assert plane.pool.restarts == 1
        plane.consume(30)


REQUIRED = [
    "wall_s",
    "env_steps",
    "frames",
    "env_steps_per_s",
    "frames_per_s",
    "learner_steps",
    "episodes",
    "episode_return_mean",
    "lag_mean",
    "lag_max",
    "bottleneck",
    "rss_mb",
    *(f"time/{part}" for part in ("environment", "inference", "learning", "waiting")),
]


def test_training_counts_reports_evaluates_and_leaves_nothing(run_folder):
    before = set(Path("/dev/shm").iterdir())
    view = View()
    summary = train(run_folder, view, evaluate_every=1000)
    assert summary["env_steps"] >= 3000
    assert summary["evaluation/episodes"] == 2
    assert not summary["interrupted"]
    last = lines(run_folder)[-1]
    assert not [name for name in REQUIRED if name not in last]
    assert not undescribed(last)
    shares = [last[f"time/{part}"] for part in ("environment", "inference", "learning", "waiting")]
    assert abs(sum(shares) - 1.0) < 1e-3
    steps = [line["env_steps"] for line in lines(run_folder)]
    assert steps == sorted(steps)
    # 20 transitions an update, less the rows that were resets
    assert last["learner_steps"] <= last["env_steps"] * 1.3 / 20
    assert [m for m in view.messages if m.startswith("evaluation at")]
    assert not psutil.Process().children(recursive=True)
    assert set(Path("/dev/shm").iterdir()) <= before
    assert (run_folder / "checkpoints" / "best.json").exists()


@pytest.mark.slow
def test_resuming_goes_on_with_the_counters(run_folder):
    first = train(run_folder)
    before = first["env_steps"]
    # A run of this length has a count that does not fit the 32 bits that JAX folds into a key.
    move_checkpoint(run_folder, before, 2**32 + before)
    view = View()
    second = train(run_folder, view, resume=True, steps=2**32 + 6000)
    assert any("going on" in message for message in view.messages)
    assert 2**32 + 6000 <= second["env_steps"] < 2**32 + 6020
    assert second["learner_steps"] > first["learner_steps"]
    assert second["episodes"] > first["episodes"]
    assert second["wall_s"] > first["wall_s"]
    wall = [line["wall_s"] for line in lines(run_folder)]
    assert wall == sorted(wall)


def move_checkpoint(folder, before, after):
    """Makes the newest checkpoint of a run, and only that, the one of another number of steps."""
    path = folder / "checkpoints" / name_of(before)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["metadata"]["start"]["env_steps"] == before
    manifest["step"] = manifest["metadata"]["start"]["env_steps"] = after
    (path / "manifest.json").write_text(json.dumps(manifest))
    path.rename(path.with_name(name_of(after)))
    (folder / "checkpoints" / "best.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inference", "learner"), [((0, 1), (1, 2)), ((0,), (1,))], ids=["shared", "apart"]
)
def test_accelerators_act_and_learn(run_folder, accelerators, inference, learner):
    agent = CountingAgent(actions=counting.NUM_ACTIONS, epochs=2, minibatches=2)
    options = {"inference_devices": inference, "learner_devices": learner, "steps": 2000}
    summary = train(run_folder, agent=agent, **options)
    assert summary["env_steps"] >= 2000 and summary["learner_steps"] > 0
    shared = {"inference_behind_share", "learner_program_ms"}
    assert shared & summary.keys() == (shared if inference == (0, 1) else set())


@pytest.mark.parametrize("option", ["inference", "learner"])
def test_an_unknown_device_is_refused(run_folder, option):
    with pytest.raises(SeedbedError, match=f"--{option}-devices names device 99: this host has 8"):
        train(run_folder, **{f"{option}_devices": (99,)})
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_broken_environment_stops_the_run_and_loses_nothing(run_folder, fault):
    env = counting_env(fault=fault, fault_at=150)
    with pytest.raises(SeedbedError, match="counting_environment"):
        train(run_folder, env=env, steps=1_000_000)
    saved = sorted((run_folder / "checkpoints").iterdir())
    assert saved, "what was learned until then is saved"
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_a_nan_loss_stops_before_it_is_used(run_folder):
    agent = CountingAgent(actions=counting.NUM_ACTIONS, poison_after=40)
    with pytest.raises(TrainingDiverged, match="learner step 41"):
        train(run_folder, agent=agent, steps=1_000_000, checkpoint_every_s=0.1)
    summary = train(run_folder, resume=True, steps=10)
    assert summary["learner_steps"] <= 40


@pytest.mark.slow
def test_what_ended_the_run_is_raised_although_the_last_checkpoint_fails(run_folder, monkeypatch):
    write = CheckpointWriter._write

    def full(self, request):
        return "no room" if request.step else write(self, request)

    monkeypatch.setattr(CheckpointWriter, "_write", full)
    view = View()
    with pytest.raises(SeedbedError, match="observation has shape") as caught:
        env = counting_env(fault="shape", fault_at=150)
        train(run_folder, view, env=env, steps=1_000_000, checkpoint_every_s=1000.0)
    assert any("could not be written" in note for note in caught.value.__notes__)
    assert any("could not be written" in text for text in view.messages)


class Slow:
    """A learner that takes its time over an update, in place of the compiled one."""

    def __init__(self, learner):
        self._learner = learner

    def __getattr__(self, name):
        return getattr(self._learner, name)

    def update(self, batch, progress):
        time.sleep(1.0)
        return self._learner.update(batch, progress)


@pytest.mark.slow
def test_a_signal_saves_whatever_is_slow(run_folder, monkeypatch):
    """An evaluation that does not end, environments that hang, and a long update."""
    learner, start = central.Learner, Evaluation.__init__
    monkeypatch.setattr(central, "Learner", lambda *arguments: Slow(learner(*arguments)))
    hang_up = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGHUP))

    def started(self, *arguments):
        start(self, *arguments)
        hang_up.start()

    monkeypatch.setattr(Evaluation, "__init__", started)
    env, view = counting_env(length=10**6, fault="hang", fault_at=60), View()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would stay ignored
    try:
        summary = train(run_folder, view, env=env, steps=10**9, evaluate_every=100)
    finally:
        hang_up.cancel()
        signal.signal(signal.SIGHUP, before)
    assert summary["interrupted"] and summary["learner_steps"] > 1
    assert any(text.startswith("SIGHUP: stopping and saving") for text in view.messages)
    newest = max(int(path.name) for path in checkpoints(run_folder))
    assert newest == summary["env_steps"] == lines(run_folder)[-1]["env_steps"]
    assert not psutil.Process().children(recursive=True)


def test_a_signal_before_the_first_hello_and_the_deaths_until_then_are_told(run_folder):
    class Impatient(View):
        def message(self, text):
            super().message(text)
            deaths = [each for each in self.messages if "exited with status 3" in each]
            # Both actors may be told of before the signal is looked for.
            if deaths == [text]:
                os.kill(os.getpid(), signal.SIGINT)

    view = Impatient()
    with pytest.raises(StoppedEarly, match="there was nothing to save"):
        train(run_folder, view, env=FactoryEnv("counting_environment:make_never"))
    assert "actor 0 exited with status 3 after 0 steps (no such device); started again" in [
        text.replace("actor 1", "actor 0") for text in view.messages
    ]


def test_a_killed_learner_leaves_nothing_and_resumes(run_folder):
    before = set(Path("/dev/shm").iterdir())
    process = spawn(run_folder)
    wait_for(lambda: len(checkpoints(run_folder)) >= 2, process)
    with stopped(helper := helper_of(process)):
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert gone([child.pid for child in children if child != helper])
        assert set(Path("/dev/shm").iterdir()) <= before
        newest = max(int(p.name) for p in checkpoints(run_folder))
        view = Waker(helper)
        summary = train(run_folder, view, resume=True, steps=newest + 2_000)
    assert view.messages[0].startswith("waiting until") and gone([helper.pid])
    (begun,) = [text for text in view.messages if text.startswith("going on from step")]
    assert int(begun.split()[4].replace(",", "")) >= newest
    assert newest + 2_000 <= summary["env_steps"] <= newest + 2_100
    steps = [line["env_steps"] for line in lines(run_folder)]
    assert steps == sorted(steps)


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True])
def test_a_signal_stops_and_saves(run_folder, full_pipe, blocked):
    """Also where the terminal takes no more: then training, saving and stopping go on without it."""
    command = [
        sys.executable,
        *shlex.split(
            "-m seedbed train counting_environment:make_slow --agent counting_agent:CountingAgent "
            f"--run {run_folder} --steps 1_000_000_000 --actors 2 --envs-per-actor 4 "
            "--log-every-s 0.2 --checkpoint-every-s 0.5 --agent.actions 1000"
        ),
    ]
    out = full_pipe[0] if blocked else subprocess.PIPE
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: checkpoints(run_folder), process)
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM if blocked else signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == ExitStatus.STOPPED, output
    newest = max(int(path.name) for path in checkpoints(run_folder))
    assert newest == lines(run_folder)[-1]["env_steps"]
    assert gone(children)
    if not blocked:
        assert "SIGINT: stopping and saving" in output
        assert f"stopped and saved; go on with: seedbed train --resume --run {run_folder}" in output
