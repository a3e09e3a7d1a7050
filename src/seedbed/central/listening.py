"""How a central run listens for actors of other machines, and how they find it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from seedbed.actors.pool import ActorPool
from seedbed.actors.remote import Listening, RemoteActors
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.files import load_json, write_json
from seedbed.printable import pasted, printable
from seedbed.run.folder import RunFolder
from seedbed.run.options import (
    GROUPS,
    LOOPBACK,
    CentralConfig,
    listening_address,
    split_address,
)
from seedbed.streams.addresses import EVERY, joined_address
from seedbed.streams.credentials import ADDRESS, ENDED, KEY, ensure_credentials
from seedbed.types import SeedbedError


def listen(
    pool: ActorPool,
    env: HostEnvConfig,
    config: CentralConfig,
    run: RunFolder,
    tell: Callable[[str], None],
) -> RemoteActors:
    """Starts the ingest process, which serves the pool's last groups, and writes the run's address file.

    The file is written again when this machine has other addresses. Call from the pool's thread. Raises
    SeedbedError if the run's folder cannot be written; if the address cannot be taken, the pool raises it.
    """
    host, port = listening_address(config.listen)
    ensure_credentials(run.listen)

    first = config.local_actors * GROUPS
    listening = Listening(
        host=host,
        port=port,
        former_port=former_port(run.listen),
        folder=run.listen,
        insecure=config.insecure,
        term=run.term,
        env=env,
        group_size=config.envs_per_actor // GROUPS,
        groups=range(first, first + config.stream_groups),
        seed=config.seed,
        timeout_s=config.actor_timeout_s,
    )
    return RemoteActors(pool, listening, _Announcer(host, config, run, tell))


class _Announcer:
    """Tells the user and the run's folder at which addresses the learner listens. For the pool's thread."""

    def __init__(
        self, host: str, config: CentralConfig, run: RunFolder, tell: Callable[[str], None]
    ) -> None:
        self._host, self._config, self._run, self._tell = host, config, run, tell
        self._told: list[str] = []
        self._written: list[str] = []
        self._missed = False  # whether the user knows that the file cannot be written

    def __call__(self, port: int) -> None:
        """Announces what is new.

        Raises TakenOver if it would be written for another learner, SeedbedError if the machine does not tell
        its addresses.
        """
        config, path = self._config, self._run.listen / ADDRESS
        try:
            addresses = advertised(self._host, port, config.advertise)
        except OSError as error:
            if self._told:
                return
            raise SeedbedError(
                f"this machine does not tell its addresses ({error.strerror}): name one with --advertise"
            ) from error
        if addresses != self._told:
            self._told = addresses
            self._tell(f"listening at {', '.join(addresses)}")
            if config.insecure:
                self._tell("streams are NOT encrypted (--insecure)")
            else:
                key = self._run.listen / KEY
                self._tell(f"to join: seedbed actor {pasted(self._run.path)}")
                self._tell(
                    f"or, elsewhere, with a copy of {printable(key)}: "
                    f"seedbed actor {pasted(addresses[0])} --key {KEY}"
                )
        if addresses == self._written:
            return
        self._run.require_claim()
        try:
            content = {
                "term": self._run.term,
                "addresses": addresses,
                "insecure": config.insecure,
            }
            write_json(path, content)
            self._written, self._missed = addresses, False
        except OSError as error:
            if not self._missed:
                self._tell(
                    f"{printable(path)} cannot be written ({error.strerror}): until it can, actors find "
                    "this learner "
                    "by its address only"
                )
            self._missed = True


def announce_end(run: RunFolder, text: str) -> None:
    """Writes how the run has ended into its address file, for hosts that are cut off from it now.

    Without room on the disk, they find nobody, and give up.
    """
    path = run.listen / ADDRESS
    with contextlib.suppress(OSError, ValueError):
        content = load_json(path)
        if content["term"] == run.term:
            write_json(path, {**content, ENDED: text})


def former_port(listening: Path) -> int:
    """Returns the port of the run's learner or coordinator before this one, 0 if there was none.

    `listening` is the run's folder `listen`.
    """
    try:
        addresses = load_json(listening / ADDRESS)["addresses"]
        return split_address(addresses[-1])[1] or 0
    except (OSError, ValueError, KeyError, IndexError, TypeError, SeedbedError):
        return 0


def advertised(host: str, port: int, wanted: tuple[str, ...]) -> list[str]:
    """Returns the addresses HOST:PORT that actors shall try, the likeliest first.

    They are those that the user wants, or the one that is listened at; if that is every address, or every
    one of IPv4, all of this machine's, its name, and last the loopback address.
    """
    if wanted:
        return [joined_address(name, other or port) for name, other in map(split_address, wanted)]
    if host not in (*EVERY, "0.0.0.0"):
        return [joined_address(host, port)]
    families = (socket.AF_INET, socket.AF_INET6) if host in EVERY else (socket.AF_INET,)
    found = []
    for _, addresses in sorted(psutil.net_if_addrs().items()):
        for each in addresses:
            known = each.family in families and "%" not in each.address
            if known and not each.address.startswith("127.") and each.address not in LOOPBACK:
                found.append(each.address)
    names = [*sorted(found, key=lambda address: ":" in address), socket.gethostname(), "127.0.0.1"]
    return [joined_address(name, port) for name in names]
