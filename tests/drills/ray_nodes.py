"""A Ray cluster of several raylets on one machine; a program that reads what to do from a file that grows.

A line `add` begins another raylet of two CPUs, and `kill` kills the last one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

_SMALL = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


def main() -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args=_SMALL)
    nodes = [cluster.add_node(**_SMALL)]
    print(f"ready {cluster.address}", flush=True)
    with Path(sys.argv[1]).open() as commands:
        while True:
            line = commands.readline().strip()
            if line == "add":
                nodes.append(cluster.add_node(**_SMALL))
            elif line == "kill":
                # Not gracefully: as a machine that is off.
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            else:
                time.sleep(0.1)
                continue
            print(f"done {line}", flush=True)


if __name__ == "__main__":
    main()
