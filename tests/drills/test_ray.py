"""docs/clusters.md followed on a Ray of two raylets (`ray_nodes.py`)."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import RECORDS, RUNS, Machine, Process, World, missing, wait_until
from watched_run import Watched

from seedbed.exit_status import ExitStatus
from seedbed.launch.together import step_of

ROOT = Path(__file__).parents[2]
ROLES = [f"{kind}-{i}" for kind in ("parameters", "replay", "learner") for i in range(2)]
SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "1"))
COUNTING = (
    "counting_environment:make_slow --agent counting_agent:CountingReplayAgent --runtime paramserver "
    "--envs-per-actor 4 --agent.capacity 100000 --agent.min-size 20 --steps 1_000_000 --log-every-s 0.5 "
    "--evaluate-every 0 --checkpoint-every-s 20 --trust-run"
)
BACK_S, NODE_BACK_S = 30.0, 60.0
CARTPOLE = (
    "seedbed.envs.device.classic.cartpole:CartPole --agent.unroll 8 --agent.batch 48 --agent.minibatches 1 "
    "--agent.hidden-sizes 8 --evaluate-every 0 --evaluate-episodes 2"
)
AS_ONE = "--trusted-interface lo --log-every-s 0.5 --checkpoint-every-s 2"
LIST = "import ray; ray.init(logging_level='ERROR'); print(ray.util.list_named_actors(True))"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"drills need {missing()}"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


class RayRun(Watched):
    """A machine with two raylets, and a run on it. For one thread."""

    def __init__(self, world: World) -> None:
        super().__init__(world.runs / "run")
        self.machine, self._commands = Machine(world, "ray"), world.records / "commands"
        self._commands.touch()
        self.machine.call("mkdir -p /tmp/ray")
        self._environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": "/tmp",
        }
        program = [sys.executable, str(ROOT / "tests/drills/ray_nodes.py"), f"{RECORDS}/commands"]
        self.nodes = self.machine.start("nodes", program, **self._environment)
        self._await("ready ")
        address = self.nodes.said().rpartition("ready ")[2].split()[0]
        self._environment["RAY_ADDRESS"] = address

    def _await(self, text: str, count: int = 1) -> None:
        def said() -> bool:
            assert self.nodes.code() is None, self.nodes.said()
            return self.nodes.said().count(text) >= count

        wait_until(said, text, 60)

    def node(self, command: str) -> None:
        """Has another raylet begun, or the last one killed."""
        before = self.nodes.said().count("done ")
        with self._commands.open("a") as file:
            file.write(f"{command}\n")
        self._await("done ", before + 1)

    def begin(self, arguments: str, environment: dict[str, str] | None = None) -> Process:
        words = ["train", *arguments.split(), "--run", f"{RUNS}/run"]
        self.train = self.machine.seedbed(
            "train", *words, **self._environment, **(environment or {})
        )
        return self.train

    def actors(self) -> list[str]:
        """Returns the names of all actors of ours in Ray."""
        listing = self.machine.start("actors", [sys.executable, "-c", LIST], **self._environment)
        wait_until(lambda: listing.code() is not None, "a list of actors", 60)
        (line,) = [line for line in listing.said().splitlines() if line.startswith("[")][-1:]
        return [each["name"] for each in json.loads(line.replace("'", '"'))]

    def require_nothing_left(self, lost: int = 0) -> None:
        """Asserts that nothing of the run is left in Ray, among processes, or among temporary files.

        Nobody can remove those of `lost` nodes.
        """
        assert self.actors() == []
        assert self._ask("pgrep -af seedbed.*(host|train|role)") == ""
        left = [name for name in self._ask("ls /tmp").split() if "seedbed-tests" not in name]
        assert left[:1] == ["ray"] and len(left) == 1 + lost

    def _ask(self, command: str) -> str:
        """Returns what a command on the machine prints."""
        words = [*self.machine.enter, *command.split()]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def pid(self, role: str) -> int:
        """Returns the process of a role or a host, as its machine counts."""
        return json.loads((self.run / "roles" / role / "address.json").read_text())["pid"]

    def parent(self, pid: int) -> int:
        return int(self._ask(f"ps -o ppid= -p {pid}"))

    def host_of(self, role: str) -> tuple[int, list[str]]:
        """Returns the process of the host that runs a role, and all roles that it runs."""
        host = self.parent(self.pid(role))
        return host, [each for each in ROLES if self.parent(self.pid(each)) == host]

    def end(self, pid: int) -> None:
        self.machine.call(f"kill -9 {pid}")


class RanksOfRay(RayRun):
    """A run that all nodes learn as one. For one thread."""

    def other(self) -> tuple[int, int]:
        """Returns the process that supervises another rank, and its member."""
        pids = [int(pid) for pid in self._ask("pgrep -f cluster.ranks").split()]
        parents = {pid: self.parent(pid) for pid in pids}
        return next((parent, pid) for pid, parent in parents.items() if parent in pids)

    def learn(self, ranks: int, seconds: float) -> None:
        """Waits until a round of so many ranks makes steps."""
        seen, file = self.steps(), self.run / "listen/round.json"

        def grown() -> bool:
            assert self.train.code() is None, self.train.said()
            taken = json.loads(file.read_text())["ranks"] if file.exists() else []
            return len(taken) == ranks and self.steps() > seen

        wait_until(grown, f"{ranks} ranks", seconds)
        saved = step_of(self.run)
        wait_until(lambda: step_of(self.run) > saved, "a checkpoint", seconds)

    def steps(self) -> int:
        return max([int(line.get("env_steps") or 0) for line in self.lines()], default=0)

    def again(self, lose: Callable[[], object], ranks: int, seconds: float) -> float:
        """Loses something, and waits until another round of so many ranks makes steps."""
        begun, before = time.monotonic(), self._round()
        lose()
        wait_until(lambda: self._round() != before, "another round", seconds)
        self.learn(ranks, seconds)
        return time.monotonic() - begun

    def _round(self) -> list[object]:
        now = json.loads((self.run / "listen/round.json").read_text())
        return [now["token"], now["number"]]


@pytest.fixture
def ray_ranks(tmp_path) -> Iterator[RanksOfRay]:
    with World(tmp_path) as world:
        yield RanksOfRay(world)


@pytest.fixture
def ray_run(tmp_path) -> Iterator[RayRun]:
    with World(tmp_path) as world:
        yield RayRun(world)


def test_central_inference_has_actors_on_the_hosts_that_ray_starts(ray_run):
    train = ray_run.begin("cartpole/impala --cluster ray --steps 600_000 --log-every-s 1")
    joined = lambda: any(line.get("streams/streams") for line in ray_run.lines())  # noqa: E731
    wait_until(joined, "a host's actors", 120)
    # One node has the command, and the other one a host.
    assert len(ray_run.actors()) == 2
    wait_until(lambda: train.code() is not None, "the end", 300)
    assert train.code() == ExitStatus.FINISHED, train.said()
    ray_run.require_nothing_left()


def test_gorila_learns_on_the_hosts_that_ray_starts(ray_run):
    train = ray_run.begin("cartpole/gorila --cluster ray:2 --steps 30_000 --log-every-s 1")
    wait_until(lambda: "host-2 has joined" in train.said(), "the hosts", 90)
    names = sorted(name.partition("/")[2] for name in ray_run.actors())
    assert names == ["", "host-0", "host-1"]
    wait_until(lambda: train.code() is not None, "the end", 200)
    assert train.code() == ExitStatus.FINISHED, train.said()
    ray_run.require_nothing_left()
    # Every role was elsewhere: the coordinator's machine has started none.
    assert not [role for role in ROLES if (ray_run.run / "roles" / role / "log.txt").exists()]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_roles_hosts_nodes_and_the_driver_come_back(ray_run, seed):
    ray_run.begin(f"{COUNTING} --cluster ray:2 --seed {seed}")
    ray_run.moves(120)
    found = {
        role: ray_run.back([role], lambda role=role: ray_run.end(ray_run.pid(role)), BACK_S)
        for role in ("parameters-0", "replay-1", "learner-0")
    }
    host, roles = ray_run.host_of("learner-0")
    found["host"] = ray_run.back(roles, lambda: ray_run.end(host), BACK_S)
    wait_until(lambda: "host-3 has joined" in ray_run.train.said(), "the host again", 60)
    # What Ray has started is killed, and its host with it.
    host, roles = ray_run.host_of("learner-1")
    parent = ray_run.parent(host)
    found["parent"] = ray_run.back(roles, lambda: ray_run.end(parent), BACK_S)
    wait_until(lambda: "host-4 has joined" in ray_run.train.said(), "the host again", 60)

    def lose_driver() -> None:
        ray_run.train.kill()
        ray_run.begin(f"{COUNTING} --cluster ray:2 --seed {seed}")

    found["driver"] = ray_run.back([], lose_driver, BACK_S)
    assert "taking them over" in ray_run.train.said()

    def lose_node() -> None:
        before = ray_run.train.said().count(" is gone")
        ray_run.node("kill")
        gone = lambda: ray_run.train.said().count(" is gone") > before  # noqa: E731
        wait_until(gone, "the host of the node", NODE_BACK_S)

    found["node"] = ray_run.back([], lose_node, NODE_BACK_S)
    print({name: round(seconds, 1) for name, seconds in found.items()})
    assert ray_run.train.terminate() == ExitStatus.STOPPED, ray_run.train.said()
    ray_run.require_nothing_left(lost=1)


@pytest.mark.parametrize(
    ("what", "run"), [(CARTPOLE, "fused"), ("cartpole/impala --learners 2", "central")]
)
def test_all_nodes_learn_as_one(ray_ranks, what, run):
    train = ray_ranks.begin(f"{what} {AS_ONE} --cluster ray --steps 300_000")
    ray_ranks.learn(2, 120)
    assert len(ray_ranks.actors()) == 2
    wait_until(lambda: train.code() is not None, "the end", 300)
    assert train.code() == ExitStatus.FINISHED, train.said()
    ray_ranks.require_nothing_left()
    assert run in json.loads((ray_ranks.run / "config.json").read_text())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_learns_as_one_goes_on_without_what_is_lost(ray_ranks, seed):
    command = f"{CARTPOLE} {AS_ONE} --cluster ray:2 --steps 10_000_000_000 --seed {seed}"
    ray_ranks.begin(command)
    ray_ranks.learn(3, 120)
    found: dict[str, float] = {}
    supervisor, member = ray_ranks.other()
    found["member"] = ray_ranks.again(lambda: ray_ranks.end(member), 3, BACK_S)
    found["supervisor"] = ray_ranks.again(lambda: ray_ranks.end(supervisor), 3, BACK_S)
    parent = ray_ranks.parent(ray_ranks.other()[0])
    found["parent"] = ray_ranks.again(lambda: ray_ranks.end(parent), 3, BACK_S)

    def lose_driver() -> None:
        ray_ranks.train.kill()
        ray_ranks.begin(command)

    found["driver"] = ray_ranks.again(lose_driver, 3, NODE_BACK_S)
    found["node"] = ray_ranks.again(lambda: ray_ranks.node("kill"), 2, NODE_BACK_S)
    assert " is gone: 2 of 3 processes go on" in ray_ranks.train.said()
    assert "from step 0" not in ray_ranks.train.said()
    print({name: round(seconds, 1) for name, seconds in found.items()})
    assert ray_ranks.train.terminate() == ExitStatus.STOPPED, ray_ranks.train.said()
    ray_ranks.require_nothing_left(lost=1)
