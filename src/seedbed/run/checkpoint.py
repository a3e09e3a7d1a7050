"""Checkpoints: a helper process writes them while training goes on (`restoring.py` reads them back).

A checkpoint is a folder named after its step. It holds orbax's arrays, and a manifest with the counters and
the size and checksum of every file. `best.json` names the checkpoint with the best evaluation.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed import strict_json
from seedbed.run.checkpoint_helper import (
    LENGTH,
    UNCLAIMED,
    Claim,
    name_of,
)
from seedbed.run.folder import TakenOver, require_claim
from seedbed.run.leaves import array_of, named_leaves
from seedbed.streams.supervisor import exit_text, last_line, start_module
from seedbed.types import StorageError, Tree


class _Request(NamedTuple):
    step: int
    header: bytes
    arrays: list[np.ndarray]


class CheckpointWriter:
    """A writer of checkpoints into a folder, through a helper process; keeps the last `keep` and the best.

    One thread owns it, as a context manager: leaving it closes it, except that a KeyboardInterrupt drops the
    unfinished writes. One write runs and one more may wait. A failed write leaves the earlier checkpoints
    whole, and the next call raises it as StorageError, unless a later write has succeeded by then.

    The helper takes about 250 MB of memory, so it ends after `idle_s` seconds without work; starting it
    costs a second of CPU time. It inherits `lock`, a descriptor that locks the run's folder: if this process
    is killed, the folder stays locked until the helper has ended. It writes nothing any more once another
    learner has the run of the `claim`.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        idle_s: float = 5.0,
        lock: int | None = None,
        claim: Claim = UNCLAIMED,
        task: int = 0,
    ) -> None:
        """`task` is a `restoring.task_number`: scores of another one are not compared.

        Makes the folder, if it can: a run without it has lost it, if it has learned.
        """
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
        self._folder, self._keep, self._idle_s, self._lock = folder, keep, idle_s, lock
        self._claim, self._task = claim, task
        self._requests: queue.Queue[_Request | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._helper: _Helper | None = None
        self._error: str | None = None
        self._given_up = False
        self._written = self._taken = -1  # step of the newest whole checkpoint, and of that told of

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        if failure is not None and not isinstance(failure, Exception):
            self._give_up()  # as after a second Ctrl-C
            return
        try:
            self.close()
        except (StorageError, TakenOver) as error:
            if failure is None:
                raise
            # The failure that ended the run is more important.
            failure.add_note(str(error))

    @property
    def helper_pid(self) -> int | None:
        """The helper's process id, or None if no helper runs. Any thread may read it."""
        helper = self._helper
        return None if helper is None else helper.process.pid

    def save(
        self, step: int, tree: Tree, metadata: dict[str, Any], score: float | None = None
    ) -> None:
        """Copies a tree to the host and queues it for writing; waits only if two writes are pending.

        The tree may be donated afterwards. `metadata` is JSON. A `score`, of which more is better, lets the
        checkpoint become the best one. Saving the same state of a step again only adds its score and
        metadata. Raises StorageError if an earlier write failed, after queueing this one all the same. Call
        from the owning thread.
        """
        failed, self._error = self._error, None
        named = [(name, np.array(array_of(leaf))) for name, leaf in named_leaves(tree)]
        leaves = [
            {"name": name, "dtype": str(array.dtype), "shape": array.shape, "bytes": array.nbytes}
            for name, array in named
        ]
        header = {"step": int(step), "metadata": metadata, "keep": self._keep, "leaves": leaves}
        header["claim"], header["task"] = self._claim, self._task
        header["score"] = None if score is None or not math.isfinite(score) else float(score)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="checkpoints", daemon=True)
            self._thread.start()
        arrays = [array for _, array in named]
        self._requests.put(_Request(int(step), strict_json.dumps(header).encode(), arrays))
        if failed is not None:
            raise StorageError(failed)

    def take_written(self) -> Path | None:
        """Returns the folder of the newest whole checkpoint, once, while it is there.

        Call from the owning thread.
        """
        step = self._written
        if step == self._taken:
            return None
        self._taken = step
        folder = self._folder / name_of(step)
        return folder if folder.is_dir() else None

    def wait(self) -> None:
        """Waits until all saves are done; raises StorageError if the newest could not be written.

        Raises TakenOver if that is because another learner has the run. Call from the owning thread.
        """
        self._requests.join()
        self._raise_error()

    def close(self) -> None:
        """Waits for pending writes and ends the helper; raises StorageError if the newest one failed.

        Call from the owning thread.
        """
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _give_up(self) -> None:
        """Kills the helper and drops unfinished writes; whole checkpoints stay. Waits a second at most."""
        self._given_up = True
        helper, thread = self._helper, self._thread
        if helper is not None:
            helper.process.kill()
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._requests.put_nowait(None)
            thread.join(timeout=1)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            # The helper writes nothing for who has lost the run.
            require_claim(self._folder.parent, self._claim)
            raise StorageError(error)

    def _serve(self) -> None:
        """Runs in the thread `checkpoints`: writes the queued requests, and ends an idle helper."""
        while True:
            try:
                request = self._requests.get(timeout=self._idle_s if self._helper else None)
            except queue.Empty:
                self._stop_helper()
                continue
            try:
                if request is None or self._given_up:
                    self._stop_helper()
                    return
                try:
                    reason = self._write(request)
                except Exception as error:
                    # Whatever it is: if this thread ended, training would wait for it for ever.
                    reason = f"{type(error).__name__}: {error}"
                # A newer checkpoint that is whole makes up for an older one that failed.
                self._error = None
                if reason is None:
                    # A score may come for an older one.
                    self._written = max(self._written, request.step)
                else:
                    there = "earlier checkpoints are whole. Make room there"
                    # `Path.is_dir` raises if the disk does not answer.
                    if "FileNotFoundError" in reason and not os.path.isdir(self._folder):  # noqa: PTH112
                        there = "the folder is gone. Bring it back"
                    self._error = (
                        f"the checkpoint of step {request.step} could not be written to "
                        f"{self._folder}: {reason}; {there}, or name another folder with --run"
                    )
            finally:
                self._requests.task_done()

    def _write(self, request: _Request) -> str | None:
        """Writes a request; returns None, or why it failed."""
        reason: str | None = None
        # A second try, since the helper may have been killed and the data is still here.
        for _ in range(2):
            try:
                self._helper = self._helper or _Helper(self._folder, self._lock)
                reason = self._helper.write(request)
                return None if reason is None else _short(reason)
            except OSError as error:
                tail = self._helper.tail() if self._helper else ""
                self._stop_helper()
                reason = f"its helper process ended ({error}) {tail}".strip()
                if self._given_up:
                    break
        return reason

    def _stop_helper(self) -> None:
        if self._helper is not None:
            self._helper.stop()
            self._helper = None


class _Helper:
    """A running helper process. For the thread `checkpoints`; only killing it is for any thread."""

    def __init__(self, folder: Path, lock: int | None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = start_module(
            "seedbed.run.checkpoint_helper",
            (str(folder),),
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Ctrl-C in the trainer's terminal must not reach the helper and break a write.
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )

    def write(self, request: _Request) -> str | None:
        """Sends a request and waits for the answer: None, or why the write failed.

        Raises OSError if the helper has died.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(LENGTH.pack(len(request.header)) + request.header)
        for array in request.arrays:
            stdin.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        stdin.flush()
        line = stdout.readline()
        if not line.endswith(b"\n"):
            raise OSError(exit_text(self.process.wait()))
        return strict_json.loads(line)["error"]

    def tail(self) -> str:
        """Returns the last line that the helper printed, or an empty text."""
        self._errors.seek(0)
        return last_line(self._errors.read().decode(errors="replace"))

    def stop(self) -> None:
        """Ends the process and reaps it. A helper that still runs after 10 s is killed."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # raised for bytes that a dead helper did not take
                pipe.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()


def _short(reason: str) -> str:
    return " ".join(reason.split())[:300]
