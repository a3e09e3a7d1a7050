"""The actor pool against a counting environment, with processes killed meanwhile."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

import counting_environment
from actor_pools import PATIENCE_S, Learner, counting
from seedbed import trees
from seedbed.actors import child
from seedbed.actors.local import TIMEOUT_S, local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.actors.slots import Slot, slot_layout, spec_from_json, spec_to_json
from seedbed.envs.host.gym import FactoryEnv
from seedbed.envs.host.pickled import pickled
from seedbed.run.evaluation import play_episodes
from seedbed.streams import supervisor
from seedbed.streams.supervisor import MAX_DEATHS
from seedbed.testing.counting import NUM_ACTIONS, CountingEnvironment
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, MultiDiscrete, SeedbedError, Timestep


def start_pool(
    env: FactoryEnv,
    *,
    actors: int = 1,
    envs_per_group: int,
    groups: int = 2,
    seed: int = 0,
    niceness: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> ActorPool:
    """Starts a pool of actors."""
    launcher = Launcher(
        env=env, envs_per_group=envs_per_group, groups=groups, seed=seed, niceness=niceness
    )
    return local_pool(launcher, actors=actors, timeout_s=timeout_s)


@pytest.mark.slow
def test_every_step_arrives_once_in_order_and_in_its_group() -> None:
    with start_pool(counting(), actors=2, envs_per_group=2, seed=1, groups=3) as pool:
        assert pool.spec == EnvSpec(ArraySpec((4,), "int32"), Discrete(NUM_ACTIONS))
        assert (pool.num_groups, pool.group_size, pool.num_envs) == (6, 2, 12)
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 100)
        checkers = [checker for group in learner.checkers for checker in group]
        assert all(checker.opened > 5 for checker in checkers)
        assert len({checker._env for checker in checkers}) == pool.num_envs
        assert pool.cpu_seconds() > 0
        assert pool.restarts == 0


def test_actors_step_back_for_others_also_when_they_are_replaced() -> None:
    with start_pool(counting(), envs_per_group=1, niceness=3) as pool:
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 10)
        lower = min(19, psutil.Process().nice() + 3)
        assert psutil.Process(pool.pids()[0]).nice() == lower
        psutil.Process(pool.pids()[0]).kill()
        learner.run(lambda: pool.restarts == 1 and all(pool.pids()))
        learner.run(lambda: min(learner.steps) >= 20)
        assert psutil.Process(pool.pids()[0]).nice() == lower


def test_a_group_is_not_stepped_before_its_answer() -> None:
    with start_pool(counting(), envs_per_group=1) as pool:
        assert pool.spec
        seen: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(seen) < 2 and time.monotonic() < deadline:
            seen += pool.poll(0.1)
        assert sorted(seen) == [0, 1]
        assert pool.poll(0.2) == []
        assert [slot.step for slot in pool.slots] == [1, 1]


@pytest.mark.slow
def test_killed_actors_come_back_while_the_others_go_on() -> None:
    chance = random.Random(0)
    with start_pool(counting(), actors=3, envs_per_group=2, seed=2) as pool:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 110)
        cpu = 0.0
        for round_ in range(4):
            victim = chance.randrange(3)
            groups = range(2 * victim, 2 * victim + 2)
            lives = {group: learner.lives[group] for group in groups}
            for _ in range(chance.randrange(20)):
                learner.turn(0.001)
            os.kill(pool.pids()[victim], signal.SIGKILL)
            before = list(learner.steps)
            learner.run(lambda lives=lives: all(learner.lives[g] > lives[g] for g in lives))
            others = [g for g in range(6) if g not in groups]
            assert all(learner.steps[g] > before[g] for g in others)
            learner.run(lambda: min(learner.steps) >= 110)
            assert pool.restarts == round_ + 1
            (notice,) = pool.take_notices()
            assert re.fullmatch(
                rf"actor {victim} was killed by SIGKILL after \d{{3,}} steps; started again", notice
            )
            assert pool.cpu_seconds() >= cpu
            cpu = pool.cpu_seconds()


def test_a_start_that_the_system_refuses_for_a_while_is_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(child, "_AGAIN_S", 0.0)
    with start_pool(counting(), envs_per_group=1) as pool:
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 110)
        start, refusals = child.start_module, [BlockingIOError(11, "no process to spare")] * 2

        def refuse(*arguments: Any, **options: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return start(*arguments, **options)

        monkeypatch.setattr(child, "start_module", refuse)
        gc.collect()
        before = psutil.Process().num_fds()
        os.kill(pool.pids()[0], signal.SIGKILL)
        learner.run(lambda: min(learner.lives.values()) > 0 and min(learner.steps) >= 110)
        assert pool.restarts == 1
        assert psutil.Process().num_fds() == before
        refused = "actor 0 could not be started ([Errno 11] no process to spare); started again"
        assert pool.take_notices()[1:] == [refused] * 2
        refusals += [BlockingIOError(11, "no process to spare")] * MAX_DEATHS
        os.kill(pool.pids()[0], signal.SIGKILL)
        with pytest.raises(SeedbedError, match="actor 0 died 5 times in a row .* no process"):
            learner.run(lambda: False)


def test_new_lives_have_new_seeds() -> None:
    with start_pool(counting(), envs_per_group=1, seed=3) as pool:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 5)
        first = [checker._env for group in learner.checkers for checker in group]
        os.kill(pool.pids()[0], signal.SIGKILL)
        learner.run(lambda: sorted(learner.lives.values()) == [1, 1])
        second = [checker._env for group in learner.checkers for checker in group]
        assert not set(first) & set(second)


def test_an_answer_to_a_dead_actor_is_harmless() -> None:
    with start_pool(counting(), envs_per_group=1) as pool:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 110)
        ready = pool.poll(5.0)
        old = pool.slots[ready[0]]
        os.kill(pool.pids()[0], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while pool.slots[ready[0]].life == 0 and time.monotonic() < deadline:
            pool.poll(0.1)
        assert pool.slots[ready[0]].life == 1
        assert old.life == 0
        old.action[...] = 5  # the memory of the dead is still there
        assert not pool.slots[ready[0]].answered
        assert pool.slots[ready[0]].step == 1


@pytest.mark.slow
def test_an_actor_that_gives_no_sign_is_replaced(pool_clock: Callable[[float], None]) -> None:
    with start_pool(counting(), actors=2, envs_per_group=1, seed=4) as pool:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: min(learner.steps) >= 110)
        os.kill(pool.pids()[0], signal.SIGSTOP)
        # First as if the learner were stopped too, by Ctrl-Z, for an hour: that counts little.
        for seconds in (3600.0, *[TIMEOUT_S / 10] * 10):
            pool_clock(seconds)
            before = list(learner.steps)
            learner.run(lambda before=before: all(learner.steps[g] > before[g] for g in (2, 3)))
        learner.run(lambda: learner.lives == {0: 1, 1: 1, 2: 0, 3: 0})
        learner.run(lambda: min(learner.steps) >= 20)
        notices = [notice for notice in pool.take_notices() if "actor 0" in notice]
        assert re.fullmatch(
            r"actor 0 has given no sign for \d\d s; it is replaced after 120 s \(--actor-timeout-s\)",
            notices[0],
        )
        assert re.fullmatch(
            r"actor 0 was killed, as it gave no sign for 120 s \(--actor-timeout-s\), after \d{3,} "
            "steps; started again",
            notices[1],
        )
        assert len(notices) == 2


def test_a_start_that_takes_too_long_is_an_error(pool_clock: Callable[[float], None]) -> None:
    def forward() -> bool:
        pool_clock(5.0)
        return False

    env = FactoryEnv("counting_environment:make_never", kwargs={"hang": True})
    with (
        start_pool(env, envs_per_group=1, timeout_s=30.0) as pool,
        pytest.raises(
            SeedbedError, match="no actor answered within 30 s of its start .*--actor-timeout-s"
        ),
    ):
        pool.wait_spec(forward)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "raised RuntimeError: the counter broke"),
        ("shape", "observation has shape (3,), expected (4,)"),
        ("dtype", "observation is float64, expected int32"),
        ("nan", "reward is not finite: nan"),
    ],
)
def test_faults_of_an_environment_are_named(fault: str, text: str) -> None:
    with start_pool(counting(fault=fault), envs_per_group=1) as pool:
        with pytest.raises(SeedbedError) as caught:
            assert pool.spec
            Learner(pool).run(lambda: False)
        assert text in str(caught.value)
        assert "'counting_environment:make', index 0, step 5" in str(caught.value)
        assert "actor 0, group" in str(caught.value)
        with pytest.raises(SeedbedError):
            pool.poll(0.1)


def test_the_error_of_a_step_is_told_if_closing_fails_too() -> None:
    def make_local() -> gymnasium.Env:
        env: Any = counting_environment.make(fault="raise", fault_at=5)
        env.close = lambda: 1 // 0
        return env

    with start_pool(pickled(make_local, "make_local"), envs_per_group=1, groups=1) as pool:
        assert pool.spec
        with pytest.raises(SeedbedError) as error:
            Learner(pool).run(lambda: False)
        assert "step 5: raised RuntimeError: the counter" in str(error.value).splitlines()[0]


def test_the_error_of_a_step_is_told_before_environments_close() -> None:
    def make_local() -> gymnasium.Env:
        env: Any = counting_environment.make(fault="raise", fault_at=5)
        env.close = lambda: time.sleep(1e6)
        return env

    pool = start_pool(pickled(make_local, "make_local"), envs_per_group=1, groups=1)
    try:
        assert pool.spec
        with pytest.raises(SeedbedError, match="step 5: raised RuntimeError: the counter"):
            Learner(pool).run(lambda: False)
    finally:
        pool.close(0.2)
    (notice,) = pool.take_notices()
    assert notice.startswith("1 of 1 processes were ended before their environments had closed")


def test_evaluations_count_the_successes_that_episodes_end_with() -> None:
    class Second(counting_environment.Matching):
        episodes = 0

        def step(self, action: int) -> Any:
            *stepped, ended, cut, _ = super().step(action)
            self.episodes += ended
            return *stepped, ended, cut, {"is_success": not ended or self.episodes == 2}

    player: Any = SimpleNamespace(act=lambda timestep: np.zeros(2, np.int32))
    with start_pool(pickled(Second, "Second"), envs_per_group=2, groups=1) as pool:
        assert pool.spec
        result = play_episodes(pool, player, 4, threading.Event())
    assert result is not None and result["episode_success_mean"] == 0.5


def test_environments_have_more_than_a_moment_to_close(tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    def make_local() -> gymnasium.Env:
        env: Any = CountingEnvironment()
        env.close = lambda: (time.sleep(1.3), closed.touch())
        return env

    with start_pool(pickled(make_local, "make_local"), envs_per_group=1, groups=1) as pool:
        assert pool.spec
        pool.poll(PATIENCE_S)
    assert closed.exists() and not pool.take_notices()


@pytest.mark.parametrize("size", [100_000, 900_000])
def test_a_function_of_a_notebook_may_hold_data(size: int) -> None:
    data = np.random.default_rng(0).bytes(size)

    def make_local() -> CountingEnvironment:
        assert len(data) == size
        return CountingEnvironment()

    with start_pool(pickled(make_local, "make_local"), envs_per_group=1, groups=1) as pool:
        assert pool.spec.action == Discrete(NUM_ACTIONS)


def test_an_error_is_not_lost_where_nobody_looked_until_the_actor_had_gone() -> None:
    """Its output was readable before its message, and by then the process has ended."""
    env = counting(fault="print and raise", fault_at=5)
    with start_pool(env, envs_per_group=1, groups=1) as pool:
        assert pool.spec
        learner, process = Learner(pool), psutil.Process(pool.pids()[0])
        with pytest.raises(SeedbedError, match="the counter broke"):
            while True:
                learner.turn()
                broken = learner.steps == [5]
                until = time.monotonic() + (PATIENCE_S if broken else 0.0)
                while time.monotonic() < until and process.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)
        assert pool.restarts == 0


def test_not_finite_observations_are_named() -> None:
    env = FactoryEnv("counting_environment:make_float")
    with (
        start_pool(env, envs_per_group=1, groups=1) as pool,
        pytest.raises(SeedbedError, match=r"index 0, step 5: .*: observation\['b'\] is not finite"),
    ):
        assert pool.spec.observation == {
            "a": ArraySpec((3,), "float32"),
            "b": ArraySpec((2,), "float32"),
        }
        while True:
            for group in pool.poll(1.0):
                pool.slots[group].action[...] = 0
                pool.reply(group)


@pytest.mark.slow
def test_a_crash_loop_ends_with_the_last_words() -> None:
    with (
        start_pool(counting(fault="exit"), envs_per_group=1) as pool,
        pytest.raises(SeedbedError) as caught,
    ):
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: False)
    assert f"died {MAX_DEATHS} times in a row" in str(caught.value)
    assert "exited with status 3" in str(caught.value)
    first, *others = str(caught.value).splitlines()
    assert first.endswith("its last words: last words of the counter")
    assert "last words of the counter" in others
    assert pool.take_notices() == [
        "actor 0 exited with status 3 after 5 steps (last words of the counter); started again"
    ] * (MAX_DEATHS - 1)


def test_a_death_shows_although_a_child_holds_the_socket() -> None:
    env = counting(fault="orphan", fault_at=150)
    with start_pool(env, envs_per_group=1) as pool:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: pool.restarts == 1)
        learner.run(lambda: sorted(learner.lives.values()) == [1, 1])


def test_a_missing_module_is_named() -> None:
    env = FactoryEnv("no_such_module:make")
    with (
        start_pool(env, envs_per_group=1) as pool,
        pytest.raises(SeedbedError, match="no module 'no_such_module'"),
    ):
        assert pool.spec


def test_waiting_for_the_spec_can_be_stopped() -> None:
    with start_pool(counting(), envs_per_group=1) as pool:
        assert pool.wait_spec(lambda: True) is None
        assert pool.wait_spec(lambda: False) == pool.spec == pool.wait_spec(lambda: True)


def test_sizes_that_do_not_work_are_refused() -> None:
    for envs, groups, actors in ((0, 2, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(SeedbedError, match="at least one"):
            start_pool(counting(), actors=actors, envs_per_group=envs, groups=groups)


@pytest.mark.slow
def test_close_leaves_nothing() -> None:
    me = psutil.Process()
    gc.collect()
    children, fds, shared = me.children(), me.num_fds(), set(Path("/dev/shm").iterdir())
    for seconds in (0.0, 0.3, 1.5):  # before, amid and after the start
        pool = start_pool(counting(), actors=2, envs_per_group=2)
        pids = pool.pids()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pool.poll(0.05)
        pool.close()
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(SeedbedError, match="closed"):
            pool.poll(0.0)
    gc.collect()
    assert me.children() == children
    assert me.num_fds() == fds
    ours = {path.name for path in Path("/dev/shm").iterdir()} - {path.name for path in shared}
    assert not any("seedbed" in name for name in ours)


def test_a_hanging_environment_is_closed() -> None:
    pool = start_pool(counting(fault="hang"), envs_per_group=1)
    try:
        assert pool.spec
        learner = Learner(pool)
        learner.run(lambda: 5 in learner.steps)
        assert not learner.turn(0.2) or not learner.turn(0.2)
        pids = pool.pids()
    finally:
        pool.close(0.2)
    assert not psutil.pid_exists(pids[0])


PARENT = """
import sys
from counting_environment import make
from seedbed.envs.host.gym import FactoryEnv
from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
env = FactoryEnv("counting_environment:make", kwargs={"sleep_s": 0.01})
pool = local_pool(Launcher(env=env, envs_per_group=2, groups=2, seed=0), actors=2)
pool.spec
told = False
while True:
    for group in pool.poll(0.1):
        pool.slots[group].action[...] = 0
        pool.reply(group)
        if not told and all(slot.step > 2 for slot in pool.slots):
            told = True
            print(*pool.pids(), flush=True)
"""


FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))\n"


def test_actors_get_as_many_descriptors_as_the_system_allows() -> None:
    """Two actors need eight descriptors more than the parent has open."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)

    def start(soft: int, hard: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FEW.format(soft, hard) + PARENT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    with start(16, 1024) as parent:
        assert parent.stdout is not None
        assert len(parent.stdout.readline().split()) == 2
        parent.kill()
    with start(64, 64) as parent:
        _, said = parent.communicate()
    assert "4 groups need 216 descriptors, and this process may have 64" in said


def test_actors_die_with_a_killed_parent() -> None:
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )  # nobody may reap an orphan here
    except psutil.NoSuchProcess:
        return False


def test_slots_hold_trees_of_any_shape_on_cache_lines() -> None:
    observation = {
        "b": ArraySpec((2, 3), "float32"),
        "a": (ArraySpec((), "uint8"), ArraySpec((0,), "bool")),
    }
    actions = (
        Discrete(3),
        MultiDiscrete((2, 4)),
        Box((2,), (-1.0, float("-inf")), (1.0, float("inf"))),
    )
    for action in actions:
        spec = EnvSpec(observation, action)
        assert spec_from_json(spec_to_json(spec)) == spec
        layout = slot_layout(spec, 5)
        assert all(offset % 64 == 0 for offset in layout.offsets)
        assert layout.size % 4096 == 0
        memory = bytearray(2 * layout.size)
        ours, theirs = (Slot(layout, memory, layout.size) for _ in range(2))
        rows = np.arange(5)
        timestep = Timestep(
            {
                "b": np.ones((5, 2, 3), np.float32),
                "a": (rows.astype(np.uint8), np.zeros((5, 0), bool)),
            },
            rows.astype(np.float32),
            rows > 1,
            rows > 2,
            rows > 3,
        )
        theirs.open(4)
        leaves = trees.leaves(timestep)
        assert theirs.fits(leaves)
        assert not theirs.fits([leaf[:4] for leaf in leaves])
        theirs.publish(leaves)
        assert (ours.life, ours.step, ours.answered) == (4, 1, False)
        np.testing.assert_array_equal(ours.timestep.observation["a"][0], rows)
        np.testing.assert_array_equal(ours.timestep.truncated, rows > 2)
        assert not any(memory[: layout.size])
        ours.action[...] = 1
        ours.answer(3, 1)
        assert not theirs.answered
        ours.answer(4, 1)
        assert theirs.answered
        assert (theirs.action == 1).all()


def test_every_signal_has_words():
    assert supervisor.exit_text(3) == "exited with status 3"
    assert supervisor.exit_text(-9) == "was killed by SIGKILL"
    assert all(supervisor.exit_text(-number) for number in range(1, 65))
    assert supervisor.exit_text(-40) == "was killed by signal 40"


def test_a_process_that_hung_is_told_of_in_one_phrase():
    one = supervisor.Supervisor("the ingest process")
    silence = "the ingest process was killed, as it gave no sign for 10 s"
    for words, after, told in (
        ("", "", f"{silence}; started again"),
        ("slow\n", "", f"{silence} (slow); started again"),
        ("", " after 3 steps", f"{silence}, after 3 steps; started again"),
    ):
        one.begin()
        one.hung(10.0)
        assert one.end("was killed by SIGKILL", words, after=after) == told
    # The system may refuse to start the next one.
    assert one.end("could not be started").endswith("process could not be started; started again")


@pytest.mark.slow
def test_the_last_words_of_a_process_are_its_error_and_no_note_of_jax():
    # timeit runs a statement, and ends with its traceback.
    statement = "import jax; jax.jit(lambda x: x.nothing)(1.0)"
    process = supervisor.start_module("timeit", ("-n1", "-r1", statement), stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    last = supervisor.last_line(said.decode())
    assert last.startswith("AttributeError") and "nothing" in last
