"""Noise and broken copies of real messages, sent to a learner that listens: no crash, no growth."""

from __future__ import annotations

import contextlib
import random
import ssl

import numpy as np
import psutil
import pytest

from actor_pools import Learner, counting
from attackers import Client, IngestPort, Refused
from hosts import Net, progress
from seedbed import trees
from seedbed.actors import wire
from seedbed.actors.wire import Kind
from seedbed.streams.messages import HEADER_BYTES, Handshake, frame, pack


def broken(whole: bytes, chance: random.Random) -> bytes:
    """A copy of a frame with one thing wrong, and sometimes with a checksum that is right."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.randint(1, 40)]
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 40))
        else:
            data[at : at + 4] = chance.randbytes(4)
        if not data:
            return b"x"
    if chance.random() < 0.5 and len(data) > HEADER_BYTES:
        return frame(chance.choice([*Handshake, *Kind]), bytes(data[HEADER_BYTES:]))
    return bytes(data)


def attack(one: Net, chance: random.Random) -> None:
    """Opens a stream, goes as far as a chance decides, and then sends what is broken."""
    client = Client(IngestPort(one))
    with contextlib.suppress(ConnectionError, ssl.SSLError, OSError, Refused):
        depth = chance.randrange(3)
        if depth == 2:
            life, codec = client.enter()
            leaves = [np.zeros_like(leaf) for leaf in trees.leaves(one.pool.slots[0].timestep)]
            good = [codec.step(life, 1, leaves), wire.beat_frame(), frame(Kind.ANEW)]
        elif depth == 1:
            client.hello()
            good = [pack(Kind.READY, {"spec": {"shape": [2]}, "versions": {"a": "1"}})]
        else:
            fields = {"version": "1", "role": "a" * 32, "number": 0, "life": 0, "step": 0}
            good = [pack(Handshake.HELLO, {**fields, "proof": "ab"})]
        for _ in range(chance.randint(1, 5)):
            client.send(broken(chance.choice(good), chance))
            one.learner.turn(0.0)
    client.socket.close()


def fuzz(one: Net, attacks: int, seed: int) -> None:
    """Attacks; the honest host goes on, and the ingest process does not grow after the first 20."""
    chance, ingest, size = random.Random(seed), psutil.Process(one.pool.pids()[0]), 0
    for count in range(attacks):
        attack(one, chance)
        if count == 19:
            size = ingest.memory_info().rss
    assert one.pool.pids() == [ingest.pid], "the ingest process lives"
    steps = list(one.learner.steps)
    progress(one, range(2), max(steps[:2]) + 20)
    assert ingest.memory_info().rss < size + 10e6, "it does not grow"
    assert ingest.num_fds() < 400


class Patient(Learner):
    """Answers whatever comes; only what the honest host's two groups send has to be right."""

    def _handle(self, group: int) -> None:
        if group < 2:
            super()._handle(group)
        else:
            self.pool.slots[group].action[...] = 0
            self.pool.reply(group)


@pytest.fixture
def target(tmp_path):
    one = Net(tmp_path, counting(), groups=64)
    one.learner = Patient(one.pool)
    try:
        one.start_host()
        progress(one, range(2))
        yield one
    finally:
        one.close()


def test_broken_messages_do_no_harm(target):
    fuzz(target, 40, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_broken_messages_do_no_harm_for_long(target):
    fuzz(target, 20_000, seed=random.randrange(1 << 30))
