"""What both ends of a stream say until they trust each other (docs/protocol.md).

The server sends a nonce in its CHALLENGE, and the client proves in its HELLO that it knows the run's secret.
From elsewhere a stream comes over TLS, which proves who the server is. From this machine it comes through a
Unix socket, whose name anybody may take once its server has died: there both ends prove themselves before the
first frame, which is called a knock, and only then the client shares its memory.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed import strict_json
from seedbed.streams.credentials import ActorKey
from seedbed.streams.messages import Handshake, Message, ProtocolError, pack, require_fields
from seedbed.version import __version__ as SEEDBED

FAULT = "fault"
"""The code of a refusal after which the same may succeed: the server has failed at a message."""
PATIENCE_S = 15.0
"""Seconds for which a server may let a client wait for its CHALLENGE: others may be before it."""
LOOK_S = 0.1
"""Seconds between two looks whether to stop, where a client waits."""
_NONCE_BYTES = _PROOF_BYTES = 32


class Place(NamedTuple):
    """A server of a run, as its CHALLENGE names it."""

    role: str
    number: int  # of its start


class Challenge(NamedTuple):
    """The first message of a server."""

    role: str
    number: int  # of its start; of a learner, its term
    nonce: str  # for this stream only, in hexadecimal

    @classmethod
    def draw(cls, place: Place) -> Challenge:
        """Returns a challenge with a new nonce."""
        return cls(*place, secrets.token_hex(_NONCE_BYTES))

    def frame(self) -> bytes:
        """Returns the frame of the CHALLENGE."""
        return pack(Handshake.CHALLENGE, {"version": SEEDBED, **self._asdict()})

    @classmethod
    def read(cls, message: Message, role: str, number: int | None = None) -> Challenge:
        """Takes the CHALLENGE of this role, "" for any, and, if `number` is given, of this start of it.

        Raises ProtocolError if another message came, or if another process has sent it.
        """
        if message.kind is not Handshake.CHALLENGE:
            raise ProtocolError(f"{message.kind.name} came instead of CHALLENGE")
        said = cls(**require_fields(message.fields, role=str, number=int, nonce=str))
        if role not in ("", said.role) or number not in (None, said.number):
            raise ProtocolError(f"another process than {role} has answered")
        return said

    def _proof(self, key: ActorKey, said: dict[str, Any]) -> str:
        try:
            return key.proof(bytes.fromhex(self.nonce), self.number, said)
        except ValueError:
            raise ProtocolError(f"the nonce of {self.role} is no number") from None

    def answer(self, key: ActorKey, **said: Any) -> bytes:
        """Returns the frame of a HELLO that says this besides the version; `role` and `number` at least."""
        said = {"version": SEEDBED, **said}
        return pack(Handshake.HELLO, {**said, "proof": self._proof(key, said)})

    def require_proof(self, key: ActorKey, said: dict[str, Any], proof: str) -> None:
        """Raises ProtocolError unless `proof` says that who has sent the other fields knows the secret."""
        if not (proof.isascii() and hmac.compare_digest(proof, self._proof(key, said))):
            raise ProtocolError("the key is not this run's", "key")


def _knock_proofs(key: ActorKey, place: Place, nonce: bytes) -> tuple[bytes, bytes]:
    """Returns the proofs within a machine: the server's for a client's nonce, and then the client's."""
    mine = key.sign(b"seedbed role", strict_json.dumps([*place, nonce.hex()]).encode())
    return mine, key.sign(b"seedbed client", mine)


class Knock:
    """A client of this machine, before its frames. For the server's thread."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._expected = b""  # what the client has to send to prove itself, once the server has

    def answer(self, key: ActorKey, place: Place) -> int | None:
        """Takes what has come: proves to the client who this is, and once it has proved itself, its memory.

        Returns the descriptor of the memory, -1 if it shares none, and None if it has not proved itself yet.
        Raises OSError for what has to end the stream.
        """
        if not self._expected:
            nonce = self._stream.recv(_NONCE_BYTES)
            if len(nonce) != _NONCE_BYTES:
                raise ConnectionError("it sent no nonce")
            proof, self._expected = _knock_proofs(key, place, nonce)
            self._stream.send(proof)
            return None
        # Its memory is not touched before it has proved itself.
        proof = self._stream.recv(_PROOF_BYTES, socket.MSG_PEEK)
        if not hmac.compare_digest(proof, self._expected):
            raise ConnectionError("it lacks the run's key")
        _, fds, _, _ = socket.recv_fds(self._stream, _PROOF_BYTES, 1)
        return fds[0] if fds else -1


def knock(
    stream: socket.socket, key: ActorKey, place: Place, memory: int, stop: Callable[[], bool]
) -> bool:
    """Has the server prove that it is `place`, and then shares the memory of a descriptor if it is not -1.

    A process that has taken a dead server's name must not get the memory. Returns False if `stop` does first.
    Raises OSError if nobody answers in `PATIENCE_S`, or if somebody else does.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    theirs, mine = _knock_proofs(key, place, nonce)
    stream.sendall(nonce)
    until_s = time.monotonic() + PATIENCE_S
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while not poll.poll(1000 * LOOK_S):
        if stop():
            return False
        if time.monotonic() > until_s:
            raise ConnectionError(f"{place.role} does not answer")
    if not hmac.compare_digest(stream.recv(_PROOF_BYTES), theirs):
        raise ConnectionError(f"what answers at the socket of {place.role} lacks the run's key")
    socket.send_fds(stream, [mine], [memory] if memory >= 0 else [])
    return True
