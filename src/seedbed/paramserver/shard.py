"""A parameter shard: it owns a part of the learner state, applies gradients to it, and is pulled from."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.paramserver.caller import BOOKS
from seedbed.paramserver.directory import SAVE
from seedbed.paramserver.job import Job
from seedbed.paramserver.leases import Leases, Tally
from seedbed.paramserver.ledger import BookError, PushOutcome, ShardLedger, Version
from seedbed.paramserver.messages import Kind, require_counts
from seedbed.paramserver.plan import ShardLayout
from seedbed.paramserver.role import COORDINATOR, Broken, Role, end_on_signals, parse, run_role
from seedbed.paramserver.saves import Saver, ShardSave
from seedbed.run.devices import keep_to_the_host
from seedbed.run.leaves import not_finite
from seedbed.run.programs import keep_programs
from seedbed.run.update import require_finite_state
from seedbed.streams.addresses import Listening
from seedbed.streams.messages import Message, ProtocolError, require_fields
from seedbed.streams.server import Client
from seedbed.terminal import tell
from seedbed.types import Agent, Array, LearnerState, Output, Replay, Tree

LEARNER = "learner"
"""What a learner calls itself."""
SAVE_S = 10.0
"""The most seconds between two saves of a shard that has changed."""
LEASE_S = 60.0
"""Seconds without a PULL after which a learner's lease is for others, though its stream has not ended."""
_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def role_of(shard: int) -> str:
    """Returns the name of a parameter shard's role."""
    return f"parameters-{shard}"


class ParameterShard:
    """The state of a shard, its books and its saves: a `role.Work`. For one thread."""

    def __init__(self, role: Role, job: Job, shard: int) -> None:
        """Goes on from the save in the role's folder, and compiles the update.

        The role's number is the new epoch. Raises SeedbedError if the save is damaged, or of another plan.
        """
        self._role = role
        plan, agent = job.plan, job.agent
        path = role.directory.path / role.name / SAVE
        save = ShardSave.read(path)
        self.layout = ShardLayout(plan, shard)
        like = plan.part(plan.state, shard)
        self._state: LearnerState = jax.tree.map(jnp.array, save.state(like))
        self._whole = plan.state_layout(shard)
        self.ledger = ShardLedger.restore(save.books["pushes"], role.number, job.config.most_lag)
        self.leases: Leases | None = None
        if shard == 0:
            experience = agent.experience
            self.leases = Leases(
                experience if isinstance(experience, Replay) else None,
                job.config.steps,
                learners=job.config.learners,
            )
            self.leases.restore(save.books["leases"])
        self._pulled_s: dict[int, float] = {}  # when each learner with a lease has pulled last
        self._auxiliary = Auxiliary(self._state.auxiliary, self.ledger.version.number)
        self._saver, self._saved_s, self._changed = Saver(path), time.monotonic(), False
        gradient = plan.part(plan.gradient, shard)
        apply = jax.jit(functools.partial(_apply, agent), donate_argnums=0)
        self._apply = apply.lower(self._state, gradient, _SCALAR, _SCALAR).compile()
        self._bytes = 0
        self._not_finite = 0  # gradients that were discarded because of that
        self._told_not_finite = 0  # of which the user knows

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Opens the books of a learner.

        Raises ProtocolError if its blocks are of another plan, or if it is of an earlier session.
        """
        role, version = said["role"], list(self.ledger.version)
        sizes = require_fields(said, up_bytes=int, down_bytes=int)
        blocks = sizes["up_bytes"], sizes["down_bytes"]
        if role == COORDINATOR and blocks == (0, self._whole.size):
            client.share(*blocks)
            return {"version": version}
        if role != LEARNER or blocks != (self.layout.up_bytes, self.layout.down_bytes):
            raise ProtocolError(
                "this process divides its parameters in another way: it is of another agent, or of another "
                "number of shards",
                "plan",
            )
        try:
            ended = require_fields(said, ended=int)["ended"]
            books, last = self.ledger.greet(said["number"], ended)
        except BookError as error:
            raise ProtocolError(str(error), BOOKS) from error
        client.share(*blocks)
        return {
            "version": version,
            "books": [books.applied, books.discarded, books.rolled_back],
            "last": None if last is None else [last.push, last.fate.value, list(last.version)],
        }

    def leave(self, client: Client) -> None:
        """Takes back a learner's lease; its books stay open, as it may come back."""
        if self.leases is not None and client.role == LEARNER:
            self.leases.expire(client.number)
            self._pulled_s.pop(client.number, None)

    def books(self) -> dict[str, Any]:
        """Returns the books of pushes and of leases, as JSON types."""
        leases = None if self.leases is None else self.leases.save()
        return {"pushes": self.ledger.save(), "leases": leases}

    def take(self, client: Client, message: Message) -> None:
        """Takes a message; raises ProtocolError and ConnectionError."""
        if message.kind is Kind.PULL and client.role == LEARNER:
            self._pull(client, message.fields)
        elif message.kind is Kind.PUSH and client.role == LEARNER:
            self._push(client, message)
        elif message.kind is Kind.CLOSE and client.role == COORDINATOR:
            closed = require_fields(message.fields, learner=int, push=int)
            self.ledger.close(closed["learner"], closed["push"])
            self._changed = True
            client.send(Kind.CLOSED)
        elif message.kind is Kind.HELD and client.role == COORDINATOR and self.leases is not None:
            self.leases.lower_held(require_fields(message.fields, items=int)["items"])
            self._changed = True
        elif message.kind is Kind.STATE and client.role == COORDINATOR:
            assert client.blocks is not None
            require_finite_state(self._state, self.ledger.version.number)
            self._whole.write(jax.tree.leaves(self._state), client.blocks.down)
            client.send_down(Kind.STATE, self._whole.size, books=self.books())
        else:
            raise ProtocolError(f"{message.kind.name} came out of turn")

    def _pull(self, client: Client, fields: dict[str, Any]) -> None:
        """Sends what has changed since the version that the learner has."""
        blocks, version = client.blocks, self.ledger.version
        assert blocks is not None
        epoch, number = require_counts(fields, "have", 2)
        same = epoch == version.epoch
        params = not same or number != version.number
        # Called in any case, as it takes what is sent.
        changed_at = self._auxiliary.changed_at(self._state.auxiliary, version.number)
        auxiliary = not same or number < changed_at
        if params:
            self.layout.write_params(self._state.params, blocks.down)
        if auxiliary:
            self.layout.write_auxiliary(self._auxiliary.leaves, blocks.down)
        size = self.layout.down_bytes if auxiliary else self.layout.params_bytes if params else 0
        self._bytes += size
        lease = self._lease(client.number, fields)
        client.send_down(
            Kind.PARAMETERS,
            size,
            version=list(version),
            lease=lease,
            params=params,
            auxiliary=auxiliary,
        )

    def _lease(self, learner: int, fields: dict[str, Any]) -> list[int] | None:
        """Counts what a learner has done, and returns its lease, if this shard keeps them."""
        if self.leases is None:
            return None
        tally = Tally(*require_counts(fields, "tally", len(Tally._fields)))
        self._changed |= any(tally)
        self._pulled_s[learner] = time.monotonic()
        self.leases.report(learner, tally)
        return list(self.leases.lease(learner))

    def _push(self, client: Client, message: Message) -> None:
        """Decides about a gradient, and applies it."""
        fields, blocks = message.fields, client.blocks
        assert blocks is not None
        block = blocks.take(message, blocks.up)
        self._bytes += block.nbytes
        base = Version(*require_counts(fields, "base", 2))
        said = require_fields(fields, push=int, progress=float, weight=float)
        grads = self.layout.gradient(block)
        # A learner does not send what is not finite, but it is not the only thing that writes memory.
        finite = not_finite(grads) is None
        self._changed = True
        try:
            verdict, fresh = self.ledger.judge(client.number, said["push"], base, finite)
        except BookError as error:
            raise ProtocolError(str(error), BOOKS) from error
        self._not_finite += fresh and not finite
        if fresh and verdict.fate is PushOutcome.APPLIED:
            self._apply_gradient(grads, np.float32(said["progress"]), np.float32(said["weight"]))
        client.send(
            Kind.VERDICT,
            push=verdict.push,
            fate=verdict.fate.value,
            version=list(verdict.version),
        )

    def _apply_gradient(self, grads: Tree, progress: np.float32, weight: np.float32) -> None:
        try:
            # Until it is applied, the learner must not write its next gradient into the block.
            self._state = jax.block_until_ready(self._apply(self._state, grads, progress, weight))
        except Exception as error:
            raise Broken("the state was given up for a gradient, which was not applied") from error

    def tick(self, now_s: float) -> bool:
        """Takes back leases that are too old, and saves beside the work if that is due.

        Returns True: a shard always has more to do.
        """
        for learner, pulled_s in list(self._pulled_s.items()):
            if self.leases is not None and now_s > pulled_s + LEASE_S:
                self.leases.expire(learner)
                del self._pulled_s[learner]
        if self._unsaved and now_s > self._saved_s + SAVE_S and not self._saver.busy:
            self._save(now_s)
        return True

    @property
    def _unsaved(self) -> bool:
        """Whether the last save lacks something, or could not be written."""
        return self._changed or bool(self._saver.error)

    def _save(self, now_s: float) -> None:
        """Begins to write a copy of the state and the books, unless another start has this place now.

        Raises TrainingDiverged if the state is not finite: what was saved before it stays.
        """
        self._saved_s, self._changed = now_s, False
        if self._role.current():
            require_finite_state(self._state, self.ledger.version.number)
            leaves = [np.array(leaf) for leaf in jax.tree.leaves(self._state)]
            self._saver.offer(ShardSave(self.books(), leaves))

    def report(self) -> dict[str, Any]:
        """Returns figures: versions, saves and the books of all learners."""
        return {
            "version": list(self.ledger.version),
            "bytes": self._bytes,
            "books": self.ledger.save()["books"],
            "total_steps": 0 if self.leases is None else self.leases.total_steps,
            "owed": 0.0 if self.leases is None else self.leases.owed,
            "saves": self._saver.written,
            "not_finite": self._not_finite,
            "notices": [*self._saver.take_notices(), *self._notices()],
        }

    def _notices(self) -> list[str]:
        """Returns a message if gradients were not finite since the last call."""
        if self._not_finite == self._told_not_finite:
            return []
        self._told_not_finite = self._not_finite
        return [f"{self._not_finite} gradients were not finite so far, and were discarded"]

    def close(self) -> None:
        """Saves for the last time."""
        self._saver.close()
        if self._unsaved:
            self._save(time.monotonic())
        self._saver.close()
        for notice in self._saver.take_notices():
            tell(notice, sys.stderr)


class Auxiliary:
    """The state that only learning needs, as of its last change; most updates leave it as it is."""

    def __init__(self, auxiliary: Tree, version: int) -> None:
        """Copies it, as it is at a version."""
        self.leaves = [np.array(leaf) for leaf in jax.tree.leaves(auxiliary)]
        self._changed_at = self._seen_at = version

    def changed_at(self, auxiliary: Tree, version: int) -> int:
        """Returns a version of which on it is as in `leaves`; takes it as it is at `version`, the newest."""
        if version != self._seen_at:
            self._seen_at = version
            for kept, leaf in zip(self.leaves, jax.tree.leaves(auxiliary), strict=True):
                if not np.array_equal(kept, leaf):
                    np.copyto(kept, leaf)
                    self._changed_at = version
        return self._changed_at


def _apply(
    agent: Agent, state: LearnerState, grads: Tree, progress: Array, weight: Array
) -> LearnerState:
    """Applies a part of a gradient."""
    return agent.apply(state._replace(progress=progress), grads, Output({}, weight))


def main() -> None:
    """Serves a parameter shard of a run. Call from the main thread."""
    given = parse("A parameter shard")
    keep_to_the_host()
    keep_programs()

    def make() -> tuple[Role, ParameterShard, Listening | None]:
        job = Job.read(given.run, trusted=given.trusted)
        role = Role(given.run, role_of(given.number), given.start)
        end_on_signals(role)
        at = job.listening(given.hosted)
        return role, ParameterShard(role, job, given.number), at

    run_role(make)


if __name__ == "__main__":
    main()
