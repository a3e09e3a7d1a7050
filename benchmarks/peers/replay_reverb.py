"""Items a second through Reverb: a server in a process of its own, one writer and one dataset over gRPC.

    python replay_reverb.py ITEMS.npz --seconds 5

Writer and dataset run at the same time, each as fast as it can; items a second are the mean of both. Runs in
the environment of replay_setup.sh. Prints one JSON object.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil
import replay_common as common
import reverb

SERVE = f"""
import sys
import reverb
table = reverb.Table(
    "items", reverb.selectors.Prioritized({common.PRIORITY_EXPONENT}), reverb.selectors.Fifo(),
    max_size={common.CAPACITY}, rate_limiter=reverb.rate_limiters.MinSize({common.BATCH}),
)
server = reverb.Server([table])
print(server.port, flush=True)
sys.stdin.read()
"""
FLUSH, IN_FLIGHT = 32, 16


class Writer(threading.Thread):
    """Inserts blocks of items, one step after the other, until told to end; `inserted` counts items."""

    def __init__(self, client: reverb.Client, items: common.Items) -> None:
        super().__init__(daemon=True)
        self._client, self._items = client, items
        self._over, self.inserted, self.error = threading.Event(), 0, None

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:  # shown by the main thread
            self.error = error

    def _write(self) -> None:
        fields, blocks = self._items._asdict(), len(self._items.observation)
        with self._client.trajectory_writer(num_keep_alive_refs=common.STEPS) as writer:
            for name in fields:  # an item is one chunk
                writer.configure(
                    (name,), num_keep_alive_refs=common.STEPS, max_chunk_length=common.STEPS
                )
            while not self._over.is_set():
                block, lane = divmod(self.inserted, common.BATCH)
                item = {k: v[block % blocks, lane] for k, v in fields.items()}
                for t in range(common.STEPS):
                    writer.append({k: v[t] for k, v in item.items()})
                whole = {k: writer.history[k][-common.STEPS :] for k in fields}
                writer.create_item("items", priority=1.0, trajectory=whole)
                self.inserted += 1
                if self.inserted % FLUSH == 0:
                    writer.flush(block_until_num_items=IN_FLIGHT)

    def stop(self) -> None:
        self._over.set()
        self.join()


def measure(port: int, server: int, args: Any) -> dict[str, float]:
    """Writes and draws at the same time; `server` is its process."""
    items = common.load(args.items)
    address = f"localhost:{port}"
    client = reverb.Client(address)
    writer = Writer(client, items)
    writer.start()
    while writer.inserted < 2 * common.CAPACITY and writer.is_alive():
        time.sleep(0.05)
    if writer.error:
        raise writer.error
    import tensorflow as tf

    specs = {k: tf.TensorSpec(v.shape[2:], v.dtype) for k, v in items._asdict().items()}
    dataset = reverb.TrajectoryDataset(
        address,
        "items",
        dtypes={k: spec.dtype for k, spec in specs.items()},
        shapes={k: spec.shape for k, spec in specs.items()},
        max_in_flight_samples_per_worker=2 * common.BATCH,
        num_workers_per_iterator=1,
    )
    batches = dataset.batch(common.BATCH, drop_remainder=True).as_numpy_iterator()
    rng = np.random.default_rng(0)

    def sample() -> Any:
        drawn = next(batches)
        priorities = rng.uniform(0.1, 1.0, common.BATCH)
        client.mutate_priorities(
            "items", dict(zip(drawn.info.key.tolist(), priorities, strict=True))
        )
        return drawn.data

    for _ in range(8):
        sample()
    both = (psutil.Process(), psutil.Process(server))

    def cpu() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in both)

    inserted, sampled, used, start = writer.inserted, 0, cpu(), time.perf_counter()
    while time.perf_counter() < start + args.seconds:
        sample()
        sampled += common.BATCH
    wall, used, inserted = time.perf_counter() - start, cpu() - used, writer.inserted - inserted
    writer.stop()
    if writer.error:
        raise writer.error
    drawn = sample()
    common.check(items, drawn["observation"], drawn["action"])
    return common.report(inserted, sampled, wall, used) | {
        "insert_items_per_s": inserted / wall,
        "sample_items_per_s": sampled / wall,
    }


def main() -> None:
    """Measures and prints."""
    args = common.arguments().parse_args()
    command = [sys.executable, "-c", SERVE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **pipes) as server:  # pyright: ignore[reportCallIssue]
        try:
            figures = measure(int(server.stdout.readline()), server.pid, args)
        finally:
            server.kill()
    packages = ("dm-reverb", "tensorflow", "numpy")
    common.finish(figures, {name: version(name) for name in packages})


if __name__ == "__main__":
    main()
