"""What the parts of central training cost, each measured alone; benchmarks/central.py starts it.

    python benchmarks/_central_costs.py RUN GROUPS

It takes all sizes from the run in that folder, acts on so many groups at once, and prints JSON: CPU and wall
milliseconds of each part for one env step, and the updates of an env step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.actors.local import local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.central.experience import Share
from seedbed.central.inference import ActOutput, Inference, act_output
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.central.replaying import ReplayFeed
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.central.updater import LocalUpdater
from seedbed.config.saved import saved_config
from seedbed.envs.host.contract import HostEnv, is_on_device
from seedbed.replay.host.layout import CHUNK
from seedbed.replay.host.replay import HostReplay
from seedbed.run.folder import RunFolder
from seedbed.run.memory import set_up_malloc
from seedbed.run.options import GROUPS, CentralConfig
from seedbed.run.stacking import FrameTrajectory, stacked_spec
from seedbed.types import Agent, Discrete, Timestep, Tree, bind, learns_from_replay, on_policy

FRAMES = 1000  # of each environment, that are played over and over
APART = 61  # steps by which groups are apart in them
BLOCK = 20  # steps
ACTING, LEARNING, DRAWING = 200, 25, 200  # calls
WARM, FEWEST = 10, 40  # rounds of filling that do not count, and that there must be


class Costs(NamedTuple):
    """Of each part for one env step, `[2]`: CPU seconds of all threads, and wall seconds."""

    parts: dict[str, np.ndarray]
    updates: float  # of an env step


def clocks() -> np.ndarray:
    """Reads the CPU time of this process, and the time."""
    return np.array([time.process_time(), time.perf_counter()])


def median_cost(call: Callable[[], Any], repeats: int) -> np.ndarray:
    """Returns the median cost of a call, after one that does not count."""
    call()
    spent = []
    for _ in range(repeats):
        start = clocks()
        call()
        spent.append(clocks() - start)
    return np.median(spent, axis=0)


class RandomPlay:
    """Steps of a group of environments under random actions."""

    def __init__(self, host: HostEnv, actions: int, size: int) -> None:
        """Plays, and measures what a step of one environment costs."""
        rng, blocks = np.random.default_rng(0), []
        host.reset()
        self.steps: list[Timestep] = []
        for _ in range(FRAMES // BLOCK):
            spent = np.zeros(2)
            for _ in range(BLOCK):
                action = rng.integers(0, actions, size).astype(np.int32)
                start = clocks()
                timestep = host.step(action)
                spent += clocks() - start
                self.steps.append(Timestep(*(np.array(leaf) for leaf in timestep)))
            blocks.append(spent)
        self.cost = np.median(blocks, axis=0) / (BLOCK * size)

    def at(self, step: int, group: int) -> Timestep:
        """Returns a step of a group, leaves `[n, ...]`."""
        return self.steps[(step + APART * group) % FRAMES]


class RepeatedSource:
    """A source that gives the same batch again and again, and reads the clocks before each."""

    def __init__(self, parts: list[FrameTrajectory]) -> None:
        self._parts, self._read = parts, []
        self.env_steps, self.steps = 0, 1
        self.priorities: Tree = ()

    def cost(self) -> np.ndarray:
        """Returns the median cost of an update, but for the first: it compiles."""
        return np.median(np.diff(self._read[1:], axis=0), axis=0)

    @property
    def over(self) -> bool:
        return len(self._read) == LEARNING + 2

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        del timeout_s
        self._read.append(clocks())
        return [] if self.over else self._parts

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        del transitions, metrics
        self.priorities = priorities

    def close(self) -> None:
        pass


class Actor:
    """Acting for all groups of a run, on what was played."""

    def __init__(self, agent: Agent, pool: ActorPool, frame_stack: int, played: RandomPlay) -> None:
        device, groups = jax.devices()[0], np.arange(pool.num_envs)
        groups = groups.reshape(pool.num_groups, pool.group_size)
        key = jax.random.key(0)
        spec, self._played, self._calls = pool.spec, played, 0
        self.inference = Inference(
            agent, spec, frame_stack, device, groups, pool.num_envs, jax.random.key(0)
        )
        self.inference.publish(agent.init(key).params, 0)
        self.inference.compile(spec)
        self._sink: UnrollSink | None = None
        if (experience := on_policy(agent)) is not None:
            # A queue that never blocks, whose batch is what an update takes.
            self.queue = UnrollQueue(10**9, experience.batch // pool.group_size, 10**9, 0, 10**9)
            output = act_output(agent, spec, frame_stack, pool.group_size)
            self._sink = UnrollSink(
                self.queue, experience, spec, frame_stack, output, pool.num_groups
            )

    def act(self, groups: int) -> tuple[Timestep, ActOutput]:
        """Acts once for the first groups, and keeps the steps in unrolls if the agent learns from those.

        Returns numpy leaves `[k, n, ...]`.
        """
        rows = [self._played.at(self._calls, group) for group in range(groups)]
        timestep = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        output = jax.tree.map(np.asarray, self.inference.act(timestep, list(range(groups))))
        self._calls += 1
        if self._sink is not None:
            for group, row in enumerate(rows):
                self._sink.arrive(group, 0, row)
            self._sink.add(range(groups), [0] * groups, timestep, output)
            self._sink.flush()
            self._sink.renew(range(groups))
        return timestep, output

    def unrolls(self, count: int) -> list[FrameTrajectory]:
        """Acts until there are so many of those that wait in the queue, and takes a batch."""
        while len(self.queue._items) < count:
            self.act(self.inference.num_groups)
        return self.queue.take(60.0)


def fill(
    feed: ReplayFeed, pool: ActorPool, played: RandomPlay, output: ActOutput, batch: int
) -> Tree:
    """Appends and seals in turns until a batch can be drawn; returns the cost of each, of an env step."""
    groups = range(pool.num_groups)
    spent: list[np.ndarray] = []
    while not feed.replay.can_sample(batch):
        step = CHUNK * len(spent)
        every = [[played.at(step + later, group) for group in groups] for later in range(CHUNK)]
        timesteps = [jax.tree.map(lambda *leaves: np.stack(leaves), *steps) for steps in every]
        start = clocks()
        for timestep in timesteps:
            feed.add(groups, [0] * len(groups), timestep, output)
        appended = clocks()
        feed.replay.seal_pending()
        spent.append(np.array([appended - start, clocks() - appended]))
    if len(spent) < FEWEST:
        raise SystemExit(f"the replay was full enough after {len(spent)} rounds: raise min_size")
    # The mean: items are completed in some rounds and not in others.
    return np.mean(spent[WARM:], axis=0) / (CHUNK * pool.num_envs)


def drawn(feed: ReplayFeed) -> list[FrameTrajectory]:
    """Lets the feed's own thread draw a batch, which is not given back."""
    stop = threading.Event()
    thread = threading.Thread(target=feed.run, args=(stop,))
    thread.start()
    parts = feed.take(60.0)
    stop.set()
    thread.join()
    return parts


def learning_cost(
    agent: Agent, actor: Actor, frame_stack: int, again: RepeatedSource
) -> np.ndarray:
    """Returns what an update costs in the run's own loop, from taking a batch to publishing parameters."""
    devices = [actor.inference.device]
    updater = LocalUpdater(agent, agent.init(jax.random.key(0)), devices)
    learner = Learner(agent, frame_stack, devices, jax.random.key(1), updater)
    LearnerLoop(learner, [actor.inference], again).run(threading.Event())
    return again.cost()


def drawing_cost(replay: HostReplay, batch: int, priorities: Tree) -> np.ndarray:
    """Returns what drawing a batch and giving its items their priorities cost."""
    buffers = replay.make_sample(batch)

    def draw() -> None:
        sample = replay.sample(batch, out=buffers)
        if not isinstance(priorities, tuple):
            replay.update_priorities(sample.slots, sample.generations, priorities)

    return median_cost(draw, DRAWING)


def updates_per_step(agent: Agent) -> float:
    """Returns the batches that are learned from for each env step."""
    if learns_from_replay(agent):
        return agent.experience.ratio / (agent.experience.period * agent.experience.batch)
    experience = on_policy(agent)
    assert experience is not None
    return 1.0 / (experience.unroll * experience.batch)


def measure(run: Path, groups: int, folder: Path) -> Costs:
    """Measures every part in the sizes of a run; what replay keeps in files goes to `folder`."""
    config = saved_config(RunFolder.read(run))
    env, central = config.env, config.runtime
    assert isinstance(central, CentralConfig) and not is_on_device(env)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as the run does
    per_group = central.envs_per_actor // GROUPS
    launcher = Launcher(env=env, envs_per_group=per_group, groups=GROUPS, seed=0)
    with local_pool(launcher, actors=central.actors) as pool:
        pool.wait_spec(lambda: False)
        agent = bind(config.agent, stacked_spec(pool.spec, env.frame_stack))
        host = env.make(pool.group_size, 0)
        assert isinstance(pool.spec.action, Discrete)
        played = RandomPlay(host, pool.spec.action.n, pool.group_size)
        host.close()
        actor = Actor(agent, pool, env.frame_stack, played)
        acting = median_cost(lambda: actor.act(groups), ACTING) / (groups * pool.group_size)
        parts = {"environment": played.cost, "inference": acting}
        updates = updates_per_step(agent)
        if not learns_from_replay(agent):
            again = RepeatedSource(actor.unrolls(agent.experience.batch // pool.group_size))
            parts["learning"] = updates * learning_cost(agent, actor, env.frame_stack, again)
            return Costs(parts, updates)
        share = Share.of(agent, central, RunFolder(folder), 0)
        feed = ReplayFeed(agent, pool, env.frame_stack, share)
        _, output = actor.act(pool.num_groups)
        filled = fill(feed, pool, played, output, agent.experience.batch)
        again = RepeatedSource(drawn(feed))
        learning = learning_cost(agent, actor, env.frame_stack, again)
        drawing = drawing_cost(feed.replay, agent.experience.batch, again.priorities)
        parts |= {"appending": filled[0], "sealing": filled[1]}
        parts |= {"drawing": updates * drawing, "learning": updates * learning}
        return Costs(parts, updates)


def main() -> None:
    """Measures and prints."""
    set_up_malloc()  # as a run does
    run, groups = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=run) as folder:
        costs = measure(Path(run), int(groups), Path(folder))
    parts = {
        name: dict(zip(("cpu_ms", "wall_ms"), (1e3 * spent).tolist(), strict=True))
        for name, spent in costs.parts.items()
    }
    print(json.dumps({"parts": parts, "updates_per_env_step": costs.updates}))


if __name__ == "__main__":
    main()
