"""Measures how fast Sample Factory (APPO) trains Atari Pong, or Doom with a memory, on CPU.

Run it with the Python of the environment that sample_factory_setup.sh makes:

    PEER=~/.cache/seedbed/peers/sample-factory
    $PEER/bin/python benchmarks/peers/sample_factory_runs.py pong --seconds 80

It prints one JSON object. `frames_per_s` is the rate of Sample Factory's own counter of what its
learner has trained on. With `summaries_use_frameskip` that counter adds the frameskip, 4, for every
agent step, so one of its frames is one emulator frame and `env_steps_per_s` is a quarter of it;
no-ops on reset are not counted. The rates hold for `window` seconds, from the first update later
than START_UP_S to the last; `seconds` is all of training, from the launch of the worker processes.
`cpu_seconds` is what this run's processes, children included, used within the window.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import gymnasium
import psutil
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sample_factory.utils.typing import Config
from sf_examples.atari.atari_utils import make_atari_env
from sf_examples.atari.train_atari import parse_atari_args

START_UP_S = 20.0
MIN_WINDOW_S = 5.0
GRACE_S = 180.0  # for starting and stopping the processes of a run
FRAMESKIP = 4
STICKINESS = 0.0
PACKAGES = ("sample-factory", "torch", "gymnasium", "ale-py", "numpy")

# Task, network and batches of each world. Pong's are the fastest of the settings tried on two cores; Doom's
# do the work of Seedbed's preset: two epochs of four minibatches of 256 steps.
WORLDS = {
    "pong": (
        "--env=atari_pong",
        "--env_framestack=4",
        "--use_rnn=False",
        "--batch_size=640",
        "--rollout=20",
        "--num_epochs=1",
        "--num_batches_per_epoch=1",
    ),
    "doom": (
        "--env=doom_health_gathering_supreme",
        "--use_rnn=True",
        "--rnn_type=lstm",
        "--rnn_size=256",
        "--batch_size=256",
        "--rollout=32",
        "--num_epochs=2",
        "--num_batches_per_epoch=4",
    ),
}
SETTINGS = (
    f"--env_frameskip={FRAMESKIP}",
    "--encoder_conv_architecture=convnet_atari",
    "--encoder_conv_mlp_layers=512",
    "--nonlinearity=relu",
    "--algo=APPO",
    "--device=cpu",
    "--num_workers=2",
    "--num_envs_per_worker=16",
    "--worker_num_splits=2",
    "--async_rl=True",
    "--summaries_use_frameskip=True",
    "--train_for_env_steps=1000000000000",
    "--with_wandb=False",
)


class Mark(NamedTuple):
    """Clock, Sample Factory's frame counter and the CPU-seconds used so far, all at one update."""

    clock: float
    frames: int
    cpu_seconds: float


def tree_cpu_seconds() -> float:
    """Returns the user and system CPU-seconds of this process and its live descendants."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class Meter(AlgoObserver):
    """Marks both ends of the measured window and ends training after `seconds`."""

    def __init__(self, seconds: float) -> None:
        """Sets how long to train."""
        self.seconds = seconds
        self.started = 0.0
        self.first: Mark | None = None
        self.last: Mark | None = None

    def on_start(self, runner: Runner) -> None:
        """Starts the clock once the worker processes have been launched."""
        self.started = time.perf_counter()

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        """Marks the first update after start-up and the first one after `seconds`."""
        elapsed = time.perf_counter() - self.started
        if self.last is not None or elapsed < START_UP_S:
            return
        if self.first is None:
            self.first = self.mark(runner)
        elif elapsed >= self.seconds:
            self.last = self.mark(runner)
            # Sample Factory tests this limit right after calling its observers.
            runner.cfg.train_for_env_steps = 0

    def mark(self, runner: Runner) -> Mark:
        """Returns the state of the run at this update."""
        return Mark(time.perf_counter(), runner.env_steps[0], tree_cpu_seconds())

    def report(self) -> dict[str, object]:
        """Returns the figures of the window."""
        if self.first is None or self.last is None:
            raise RuntimeError(
                "training ended before the measured window did; see Sample Factory's log"
            )
        window = self.last.clock - self.first.clock
        frames_per_s = (self.last.frames - self.first.frames) / window
        return {
            "frames_per_s": round(frames_per_s, 1),
            "env_steps_per_s": round(frames_per_s / FRAMESKIP, 1),
            "seconds": round(self.last.clock - self.started, 2),
            "window": round(window, 2),
            "cpu_seconds": round(self.last.cpu_seconds - self.first.cpu_seconds, 2),
            "versions": {
                "python": sys.version.split()[0],
                **{package: version(package) for package in PACKAGES},
            },
        }


def make_pong(
    name: str, cfg: Config | None, env_config: object, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes Sample Factory's own Pong environment over an emulator without sticky actions."""
    # This ale-py registers nothing with a gymnasium this old: the id Sample Factory wants is free.
    if "PongNoFrameskip-v4" not in gymnasium.registry:
        gymnasium.register(
            id="PongNoFrameskip-v4",
            entry_point="ale_py.env:AtariEnv",
            kwargs={
                "game": "pong",
                "frameskip": 1,
                "repeat_action_probability": STICKINESS,
                "full_action_space": False,
                "max_num_frames_per_episode": 108_000,
            },
        )
    env = make_atari_env(name, cfg, env_config, render_mode)
    stickiness = env.unwrapped.ale.getFloat("repeat_action_probability")
    if stickiness != STICKINESS:
        raise RuntimeError(f"the emulator has stickiness {stickiness}, this run needs {STICKINESS}")
    return env


def configured(world: str, folder: Path) -> Config:
    """Registers a world's environment, and returns Sample Factory's configuration of a run in `folder`."""
    words = [*WORLDS[world], *SETTINGS, f"--train_dir={folder}", f"--experiment={world}"]
    if world == "doom":
        from sf_examples.vizdoom.train_vizdoom import parse_vizdoom_cfg, register_vizdoom_components

        register_vizdoom_components()
        return parse_vizdoom_cfg(words)
    register_env("atari_pong", make_pong)
    cfg = parse_atari_args(words)
    make_pong("atari_pong", cfg, None).close()  # an error in a child would leave the runner waiting
    return cfg


def train(world: str, seconds: float, folder: Path) -> dict[str, object]:
    """Trains in this process and its children, keeping Sample Factory's files in `folder`."""
    cfg = configured(world, folder)
    _, runner = make_runner(cfg)
    meter = Meter(seconds)
    runner.register_observer(meter)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        raise RuntimeError(f"Sample Factory ended with status {status}; see its log")
    return meter.report()


def stop_session(child: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of the child's session."""
    # Python's resource tracker ignores SIGTERM: it outlives the others and frees their semaphores.
    try:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(child.pid, sign)
            deadline = time.perf_counter() + 15.0
            while time.perf_counter() < deadline:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(0.1)
    except ProcessLookupError:  # nothing is left
        child.poll()


def await_memory_manager(folder: Path) -> None:
    """Waits until torch's shared-memory daemon, a session of its own, has cleared up and left."""
    deadline = time.perf_counter() + 10.0
    while any(folder.glob("torch-shm-dir-*")) and time.perf_counter() < deadline:
        time.sleep(0.1)


def run(world: str, seconds: float, log: Path | None) -> str:
    """Trains in a session and a temporary folder of their own and returns the JSON line."""
    with tempfile.TemporaryDirectory(prefix="sample-factory-") as name:
        folder = Path(name)
        result, output = folder / "result.json", log or folder / "log.txt"
        # One OpenMP thread per process; scratch files of Sample Factory and torch in the folder.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        command = [sys.executable, str(Path(__file__).resolve()), world]
        command += ["--seconds", str(seconds), "--result", str(result)]
        with output.open("wb") as sink:
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                child.wait(timeout=seconds + GRACE_S)
            except subprocess.TimeoutExpired:
                print(f"no end {GRACE_S:.0f} s after training was due to stop", file=sys.stderr)
            finally:
                stop_session(child)
                await_memory_manager(folder)
        if child.returncode != 0 or not result.exists():
            tail = output.read_text(errors="replace").splitlines()[-40:]
            print("\n".join(tail), file=sys.stderr)
            raise SystemExit(
                f"Sample Factory failed (exit status {child.returncode}); its log ends as above"
            )
        return result.read_text()


def main() -> None:
    """Parses the command line, runs and prints the JSON line."""
    parser = argparse.ArgumentParser(description="Sample Factory: training frames per second.")
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--seconds", type=float, default=80.0, help="how long to train")
    parser.add_argument("--log", type=Path, help="keep Sample Factory's log in this file")
    parser.add_argument(
        "--result", type=Path, help="used by the program itself: train here, write the JSON there"
    )
    args = parser.parse_args()
    if args.seconds < START_UP_S + MIN_WINDOW_S:
        parser.error(
            f"--seconds {args.seconds:g} is too short: at least {START_UP_S + MIN_WINDOW_S:g}"
        )
    if args.result is not None:
        args.result.write_text(json.dumps(train(args.world, args.seconds, args.result.parent)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    print(run(args.world, args.seconds, args.log.resolve() if args.log else None))


if __name__ == "__main__":
    main()
