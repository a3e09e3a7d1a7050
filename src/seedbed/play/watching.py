"""Serves the page of a run that trains to the browsers of this machine, with its newest policy.

The server listens on the loopback address alone. Whoever asks must know the token in the page's address, and
must ask under that address: a foreign page in the same browser knows neither.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from seedbed import strict_json
from seedbed.exit_status import TemporaryError
from seedbed.play.page import Player, describe, packed, page_of
from seedbed.play.programs import with_params
from seedbed.policy import restore
from seedbed.printable import printable
from seedbed.run.bucket import is_address, run_path
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import RunFolder
from seedbed.types import SeedbedError

_LOOPBACK = "127.0.0.1"
_LOOKS_S = 2.0  # between two looks at the checkpoints
_FETCHES_S = 15.0  # of a bucket, which gets what is new as often
_MOST_THREADS = 40


class Answer(NamedTuple):
    """A file that the server sends."""

    kind: str
    body: bytes


def watch(
    player: Player,
    where: str,
    port: int,
    trust: bool,
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serves the page of a run, by its folder or address, on `port` (0: a free one) until it is interrupted.

    Calls `tell` with the address, and `warn` with what happens. Raises SeedbedError if the port is taken.
    """
    described, game = describe(player, warn)
    answers = {"": Answer("text/html", page_of([described], watched=True).encode())}

    def put(run: Path) -> None:
        trained = restore(run, warn, newest=True, trust=trust)
        warn(f"the policy after {trained.step:,} steps")
        arrays = with_params(game.parts["act"], trained.params)
        found = {"step": trained.step, "member": trained.member, "data": packed(arrays)}
        answers["policy"] = _json(found)
        answers["step"] = _json(trained.step)

    run, told = run_path(where), ""
    seen = _newest(run)
    put(run)
    with serve(answers, port) as address, contextlib.suppress(KeyboardInterrupt):
        tell(f"{address} follows {printable(where)}; end it with Ctrl-C")
        while True:
            time.sleep(_FETCHES_S if is_address(where) else _LOOKS_S)
            try:
                run = run_path(where)  # of a bucket, with what is new there
                if (newest := _newest(run)) != seen:
                    seen, before = newest, seen
                    try:
                        put(run)
                    except (TemporaryError, OSError):
                        seen = before  # it may be read later
                        raise
                told = ""
            except (SeedbedError, OSError) as error:
                # A checkpoint was removed while it was read, or a disk or bucket does not answer.
                if str(error) != told:
                    warn(str(error))
                told = str(error)


def _json(value: Any) -> Answer:
    return Answer("application/json", strict_json.dumps(value).encode())


def _newest(run: Path) -> int:
    return max(list_steps(RunFolder.read(run).checkpoints), default=-1)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A server that drops connections while it has too many."""

    daemon_threads = True

    def __init__(self, port: int, token: str, answers: dict[str, Answer]) -> None:
        super().__init__((_LOOPBACK, port), _Handler)
        self.token, self.answers = token, answers
        self.names = tuple(f"{host}:{self.server_port}" for host in (_LOOPBACK, "localhost"))
        if self.server_port == http.client.HTTP_PORT:  # browsers leave it out
            self.names += (_LOOPBACK, "localhost")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, or hangs up."""
        if threading.active_count() > _MOST_THREADS:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: whoever hung up does not concern the player."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10.0  # s, of a request

    def do_GET(self) -> None:
        """Sends what is asked for, if token and host are right."""
        server = self.server
        assert isinstance(server, _Server)
        token, slash, name = self.path.removeprefix("/").partition("/")
        answer = server.answers.get(name)
        known = hmac.compare_digest(token.encode(), server.token.encode())
        if not known or self.headers.get("Host") not in server.names or answer is None:
            self.send_error(404)
            return
        if not slash:  # relative addresses would point elsewhere
            self.send_response(301)
            self.send_header("Location", f"/{token}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Does nothing: the terminal is for checkpoints."""


@contextlib.contextmanager
def serve(answers: dict[str, Answer], port: int) -> Iterator[str]:
    """Serves answers, by their names below a token, in threads; yields the address of the one without a name.

    What is put into `answers` later is served from then on. Raises SeedbedError if the port is taken.
    """
    token = secrets.token_urlsafe(24)
    try:
        server = _Server(port, token, answers)
    except (OSError, OverflowError) as error:
        raise SeedbedError(
            f"cannot serve on port {port}: {error}; name another with --port, or none"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://{_LOOPBACK}:{server.server_port}/{token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
