"""What actors and hosts import loads no JAX and little memory."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.envs.host.atari import AtariEnv

SCRIPT = """
import sys
import seedbed.types, seedbed.trees
import seedbed.envs.host.gym, seedbed.envs.host.atari, seedbed.envs.host.registry
import seedbed.actors.slots, seedbed.actors.actor, seedbed.actors.process
import seedbed.actors.local, seedbed.replay.host.replay
seedbed.envs.host.registry.resolve("pong").make(1, 0).close()
import seedbed.actors.command, seedbed.launch.joining
heavy = {"jax", "jaxlib", "flax", "torch", "tensorflow", "scipy", "matplotlib", "cv2"}
print(sorted(heavy & set(sys.modules)))
"""


def test_actors_and_hosts_import_no_jax() -> None:
    path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:0] = {path!r}\n{SCRIPT}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


@pytest.mark.slow
def test_an_idle_atari_actor_is_small() -> None:
    launcher = Launcher(env=AtariEnv("pong"), envs_per_group=1, groups=2, seed=0)
    with local_pool(launcher, actors=1) as pool:
        assert pool.spec
        opened: set[int] = set()
        deadline = time.monotonic() + 60
        while len(opened) < 2 and time.monotonic() < deadline:
            opened.update(pool.poll(0.1))
        assert opened == {0, 1}
        assert psutil.Process(pool.pids()[0]).memory_info().rss < 60e6
