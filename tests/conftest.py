"""What every test runs under: eight CPU devices, strict JAX, a run folder, no process left behind."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fnmatch
import gc
import os
import shutil
import sys
import tempfile
import time
import types
import warnings
from importlib.metadata import version

# Before anything imports JAX. The user's own flags stay. What tests compile runs for moments, so LLVM's
# full effort would cost more than it saves. (Fusion emitters compile slower, and abort over some
# convolutions at level 0.)
for _flag, _value in (
    ("--xla_force_host_platform_device_count", "8"),
    ("--xla_backend_optimization_level", "0"),
    ("--xla_cpu_use_fusion_emitters", "false"),
    ("--xla_cpu_parallel_codegen_split_count", "1"),
):
    # XLA has no such flag since 0.11, and ends the process over flags that it does not know.
    if _flag == "--xla_cpu_use_fusion_emitters" and not version("jaxlib").startswith("0.10."):
        continue
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
# What one test compiled the others load, in whatever process; the first process to come here makes the
# folder and takes it away, the workers of xdist and the tests' children inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="seedbed-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The workers of xdist are the parallel part; OpenBLAS's threads wait for work by turning over.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A worker's million objects are nearly all JAX's, and stay: looking through them costs time.
gc.set_threshold(100_000, 20, 50)
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Presets of robots load these models where the packages that have the real ones are missing.
STAND_INS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_ins")  # noqa: PTH100, PTH118, PTH120
sys.path.append(STAND_INS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STAND_INS]))
# Strict dtype promotion is not practical: optax's Adam mixes a Python float with an int32 count.

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOM = 150_000_000
bound = [1_250_000_000]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A path for a run's folder; the folder is not made."""
    return tmp_path / "run"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes import the modules of this folder."""
    paths = [*(entry for entry in sys.path if entry), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def pool_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that puts the clock of actor pools forward by seconds."""
    from seedbed.actors import pool

    ahead = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(pool, "time", clock)

    def forward(seconds: float) -> None:
        ahead[0] += seconds

    return forward


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the central runtime use CPU devices as it uses accelerators."""
    from seedbed.run import devices

    monkeypatch.setattr(devices, "policy_of", lambda device: devices.ACCELERATOR)


@pytest.fixture
def no_fallback(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A kernel that cannot be made fails the test, and each test starts with an empty cache."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.mktemp("cache")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a machine with a GPU, where names are resolved."""
    from seedbed.config import scaling

    monkeypatch.setattr(scaling, "start_jax", lambda: "gpu")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Agents and runtimes of fused runs, which a fake takes in place of training; works in `tmp_path`."""
    from seedbed.fused import train as fused

    calls: list[tuple[Any, Any]] = []

    def train(*, agent: Any, config: Any, run: Any, **_: Any) -> dict[str, Any]:
        calls.append((agent, config))
        return {"interrupted": False, "run": str(run.path)}

    monkeypatch.setattr(fused, "train", train)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, Callable[[], None]]]:
    """A pipe that takes no more, as that of a paused pager, and a function that lets it go on."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    release = contextlib.ExitStack()
    release.callback(os.close, ours)
    yield theirs, release.close
    release.close()
    os.close(theirs)


def children() -> list[psutil.Process]:
    """Returns the processes below this one; it looks through all processes only where there are any."""
    if sys.platform == "linux":
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Fails a test that leaves a process behind, and kills it, so that the next one has the machine."""
    before = children()
    yield
    left = [child for child in children() if child not in before]
    _, left = psutil.wait_procs(left, timeout=5)
    named = []
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            named.append(" ".join(child.cmdline()))
            child.kill()
    psutil.wait_procs(left, timeout=5)
    assert not named, f"processes were left behind: {named}"


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Drops what JAX and tests keep of earlier tests whenever a worker has grown by `ROOM` bytes.

    A worker may hold 1.5 GB; the programs of a hundred tests are more. The cache on disk has them still.
    """
    yield
    if psutil.Process().memory_info().rss > bound[0] and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        if "numpy_jaxpr" in sys.modules:
            sys.modules["numpy_jaxpr"].Program.known.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        bound[0] = max(bound[0], psutil.Process().memory_info().rss + ROOM)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the parameters slow whose id matches no pattern of the test's `quick` mark."""
    matched: dict[tuple[str, str], bool] = {}
    for item in items:
        mark = item.get_closest_marker("quick")
        if not mark:
            continue
        name, _, rest = item.nodeid.partition("[")
        found = {each: fnmatch.fnmatchcase(rest[:-1], each) for each in mark.args}
        for each, yes in found.items():
            matched[name, each] = matched.get((name, each), False) or yes
        if not any(found.values()):
            item.add_marker("slow")
    dead = [key for key, yes in matched.items() if not yes]
    if dead and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"patterns of pytest.mark.quick that match no id: {dead}")
