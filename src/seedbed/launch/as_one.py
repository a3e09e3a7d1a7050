"""Which runs many processes train as one learner, how their batch is divided, and over which network."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import psutil

from seedbed.launch.ranks import Rank
from seedbed.streams.addresses import LOOPBACK
from seedbed.types import SeedbedError


class Parts(NamedTuple):
    """The sizes by which a batch is divided among processes, or the members of a population are."""

    batch: int
    others: int  # devices of a process x minibatches

    def most(self, there: int) -> int:
        """Returns how many of the processes that are there can divide the batch."""
        fitting = (n for n in range(there, 0, -1) if self.batch % (n * self.others) == 0)
        return next(fitting, there)


def parts_of(config: dict[str, Any]) -> Parts:
    """Returns the sizes for a run's batch, of its configuration as JSON."""
    agent, central = config.get("agent", {}), config.get("central")
    batch, minibatches = int(agent.get("batch", 0)), int(agent.get("minibatches", 1))
    if central is None:
        fused = config["fused"]
        devices, sweep = len(fused.get("devices", [0])), fused.get("sweep", "")
        members = int(fused.get("seeds", 1)) * (sweep.count(",") + 1)
        return Parts(batch, devices * minibatches) if members == 1 else Parts(members, devices)
    others = len(central.get("learner_devices", [0])) * minibatches
    envs = int(central["envs_per_actor"])
    if "unroll" in agent:
        # An agent that acts, stops and learns needs equally many unrolls of every environment.
        every = int(central["actors"]) * envs or envs
        others = math.lcm(others, envs // 2 if batch % every else every)
    return Parts(batch, others)


def learners_of(config: dict[str, Any], asked: str) -> int:
    """Returns how many processes train as one learner, 0 if all that there are, for a configuration as JSON.

    `asked` is the number of learners of a central run on the command line, "" if it names none.
    """
    if "fused" in config:
        return 0
    if "central" not in config:
        return 1
    return max(1, int(asked) if asked.isdecimal() else int(config["central"].get("learners", 1)))


def learn_as_one(config: dict[str, Any], rank: Rank, asked: str) -> bool:
    """Returns whether the processes of a job train as one learner; arguments as in `learners_of`.

    Raises SeedbedError if the job has another number of processes.
    """
    learners = learners_of(config, asked)
    if learners not in (0, 1, rank.of):
        raise SeedbedError(
            f"learners is {learners}, but the job has {rank.of} processes: give --learners {rank.of} (all "
            "learn as one), or --learners 1 (rank 0 learns, and the others are hosts for actors)"
        )
    return learners != 1


def interface_of(rank: Rank, named: str | None) -> tuple[str, str]:
    """Returns the network interface for gradients, which are not encrypted, and its address.

    Raises SeedbedError if none is named and the job has several machines, or if there is no such interface.
    """
    found = {
        name: next((each.address for each in addresses if each.family.name == "AF_INET"), None)
        for name, addresses in psutil.net_if_addrs().items()
    }
    usable = {name: address for name, address in found.items() if address}
    if named is None:
        if rank.beside < rank.of:
            raise SeedbedError(
                f"{rank.of} processes of several machines train as one learner, and gradients travel between "
                "them unencrypted: name the interface of a network that you trust with --trusted-interface; "
                f"this machine has {', '.join(usable)}"
            )
        return next(item for item in usable.items() if item[1] in LOOPBACK)
    if named not in usable:
        raise SeedbedError(
            f"--trusted-interface {named}: this machine has no such interface with an IPv4 address, but "
            f"{', '.join(usable)}"
        )
    return named, usable[named]
