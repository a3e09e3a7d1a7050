"""A learner's end of the parameter server: it pulls parameters from all shards, and pushes gradients."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from seedbed.central.updater import Gradient, Learned, Step
from seedbed.paramserver.caller import Caller
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.leases import Lease, Tally
from seedbed.paramserver.ledger import LearnerLedger, PushCounts, PushOutcome, Verdict, Version
from seedbed.paramserver.messages import BlockLayout, BlockPool, Kind
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.plan import Plan, ShardLayout
from seedbed.paramserver.shard import LEARNER, role_of
from seedbed.run.update import require_finite_gradient
from seedbed.streams.messages import Message
from seedbed.types import Array, LearnerState, Output, SeedbedError, Tree

FIELDS = ("params", "auxiliary")
"""The fields of a learner state that a learner gets."""
LOSS = "loss/total"
"""The metric by which a gradient is an outlier."""


class Leased(Protocol):
    """A source of batches that goes no further than shards allow."""

    @property
    def tally(self) -> Tally:
        """The counts of the learner's work."""
        ...

    def extend(self, lease: Lease) -> None:
        """Takes a new lease: how far the learner may go. Call from the learner thread only."""
        ...


class _Shard:
    """A learner's end at one shard."""

    def __init__(self, plan: Plan, shard: int, caller: Caller) -> None:
        self.layout, self.caller = ShardLayout(plan, shard), caller
        self.ledger = LearnerLedger()
        self.have = Version(0, 0)  # of the parameters that were pulled last; no shard has epoch 0
        self.params: Tree = ()  # in memory that the next pull overwrites
        self.auxiliary: Tree = ()
        self.fresh: set[str] = set()  # the fields of the learner state that the last pull changed
        self.wanted = self.asked = False  # whether a PULL is to be answered, and was sent
        self.lease = Lease()
        self._push: dict[str, Any] = {}  # the fields of the last PUSH
        caller.make_room(self.layout.up_bytes, self.layout.down_bytes)

    def greet(self, learner: int) -> None:
        """Connects, and sends again what had no answer."""
        self.asked = False
        ended = self.ledger.books.ended
        said = self.caller.connect(lambda: {"role": LEARNER, "number": learner, "ended": ended})
        last = said["last"]
        verdict = last and Verdict(last[0], PushOutcome(last[1]), Version(*last[2]))
        if self.ledger.greeted(PushCounts(*said["books"]), verdict, Version(*said["version"])):
            self.caller.send_up(Kind.PUSH, **self._push)

    def push(self, grads: Tree, progress: float, weight: float) -> None:
        """Sends a gradient now, or if that cannot be, in `greet`. No other may be without answer."""
        self.layout.write_gradient(grads, self.caller.blocks.up)
        self._push = {
            "push": self.ledger.push(),
            "base": list(self.have),
            "progress": progress,
            "weight": weight,
        }
        if self.caller.connected:
            self.caller.send_up(Kind.PUSH, **self._push)

    def ask(self, tally: Tally) -> None:
        """Sends a PULL, if one is wanted; raises ConnectionError."""
        if self.wanted and not self.asked and self.caller.connected:
            self.caller.send(Kind.PULL, have=list(self.have), tally=list(tally))
            self.asked = True

    def take(self, message: Message) -> Verdict | None:
        """Takes a message; returns a verdict that is new. Raises ConnectionError for what cannot be."""
        fields = message.fields
        if message.kind is Kind.VERDICT:
            verdict = Verdict(
                fields["push"], PushOutcome(fields["fate"]), Version(*fields["version"])
            )
            return verdict if self.ledger.answer(verdict) else None
        if message.kind is not Kind.PARAMETERS or not self.asked:
            raise ConnectionError(f"{message.kind.name} came out of turn")
        layout, params, auxiliary = self.layout, fields["params"], fields["auxiliary"]
        size = layout.down_bytes if auxiliary else layout.params_bytes if params else 0
        self.caller.take_block(message, size)
        self.params = layout.params(self.caller.blocks.down)
        self.auxiliary = layout.auxiliary(self.caller.blocks.down)
        self.fresh = {name for name, sent in zip(FIELDS, (params, auxiliary), strict=True) if sent}
        self.have = Version(*fields["version"])
        if fields["lease"] is not None:
            self.lease = Lease(*fields["lease"])
        self.wanted = self.asked = False
        return None


class ShardedUpdater:
    """The learner state as its shards have it: a `central.updater.Updater`. For one thread at a time.

    Where a shard does not answer, every method waits until it does; it raises `caller.Stopped` if `stop`
    returns True meanwhile, and SeedbedError if a shard refuses this learner.
    """

    def __init__(
        self,
        plan: Plan,
        learner: int,
        directory: Directory,
        credentials: Path,
        outliers: Outliers,
        source: Leased,
        stop: Callable[[], bool],
    ) -> None:
        """`learner` is a number that no other learner of the run has or had. Pulls the parameters.

        `source` is where the learner's batches come from.
        """
        self._source = source
        self._plan, self._learner, self._outliers = plan, learner, outliers
        self._shards = [
            _Shard(plan, shard, Caller(directory, credentials, role_of(shard), stop))
            for shard in range(plan.shards)
        ]
        self._like = plan.state._replace(optimizer_state=())
        self._state = self._like  # shapes, until the first pull
        self._places: dict[str, tuple[BlockLayout, BlockPool]] = {}
        for name in FIELDS:
            layout = BlockLayout(jax.tree.leaves(getattr(self._like, name)))
            self._places[name] = layout, BlockPool(layout.size)
        self._progress = np.float32(0)
        self._dirty = True  # whether something was pushed since the last pull
        self.lags: collections.Counter[int] = (
            collections.Counter()
        )  # gradients before each applied one
        self._refresh()

    @property
    def state(self) -> LearnerState:
        """The learner state without the optimizer's, which this process does not have."""
        return self._state

    @property
    def books(self) -> list[PushCounts]:
        """How the pushes have ended, by shard."""
        return [shard.ledger.books for shard in self._shards]

    @property
    def sent(self) -> int:
        """The number of the last push."""
        return self._shards[0].ledger.sent

    def begin(self, progress: np.float32) -> None:
        """Pulls the newest parameters and a new lease, before a batch; schedules follow `progress`."""
        self._progress = progress
        self._refresh()

    def refresh(self, progress: np.float32) -> bool:
        """Does as `begin`, and returns True: other learners may have pushed."""
        self.begin(progress)
        return True

    def pull(self) -> LearnerState:
        """Returns the newest learner state since the last push or `begin`; its arrays stay valid."""
        if self._dirty:
            self._refresh()
        return self._state

    def compile(self, gradient: Gradient) -> Step:
        """Returns what computes the gradient of a minibatch, and pushes it.

        The first step raises SeedbedError if outliers are to be discarded and the agent tells no loss.
        """

        def learned(*operands: Any) -> tuple[Tree, Output, Learned]:
            grads, output = gradient(*operands)
            if self._outliers.deviations and LOSS not in output.metrics:
                raise SeedbedError(
                    f"outlier_deviations is {self._outliers.deviations:g}, but the agent has no metric "
                    f"{LOSS!r}, which tells outliers: add it to Output.metrics, or leave "
                    "--outlier-deviations out"
                )
            loss = {name: output.metrics[name] for name in [LOSS] if name in output.metrics}
            return grads, Output(loss, output.weight), Learned.of(output)

        program = jax.jit(learned)

        def step(batch: Tree, key: Array, index: np.int32) -> Learned:
            grads, output, learned = program(self.pull(), batch, key, index)
            self.push(grads, output)
            return learned

        return step

    def push(self, grads: Tree, output: Output) -> None:
        """Sends each shard its part of a gradient, unless its loss is an outlier.

        It waits for the answers to the push before, but not for those to this one. Raises
        TrainingDiverged if the gradient is not finite.
        """
        host = jax.tree.map(np.asarray, grads)
        require_finite_gradient(host, int(self._state.updates) + 1)
        if self._outliers.discards(float(output.metrics.get(LOSS, 0.0))):
            return
        self.settle()
        for number, shard in enumerate(self._shards):
            part = self._plan.division.part(host, number)
            try:
                shard.push(part, float(self._progress), float(output.weight))
            except ConnectionError:
                continue  # it is sent again when the stream is back
        self._dirty = True

    def settle(self) -> None:
        """Waits until every push has its answer."""
        for shard in self._shards:
            self._await(shard)

    def _refresh(self) -> None:
        """Pulls what has changed from all shards."""
        for shard in self._shards:
            shard.wanted = True
            try:
                shard.ask(self._source.tally)
            except ConnectionError:
                continue  # `_await` asks again
        for shard in self._shards:
            self._await(shard)
        self._dirty = False
        fresh = set[str]().union(*(shard.fresh for shard in self._shards))
        self._state = self._state._replace(
            **{name: self._joined(name) for name in fresh},
            updates=np.int32(self._shards[0].have.number),
            progress=np.float32(self._progress),
        )
        self._source.extend(self._shards[0].lease)

    def _joined(self, name: str) -> Tree:
        """Joins the parts of the shards of a field of the learner state, into arrays of their own."""
        like, (layout, pool) = getattr(self._like, name), self._places[name]
        # JAX takes memory that is so aligned as it is, and holds it as long as the arrays are used.
        leaves = layout.views(pool.lend())
        self._plan.division.join_into(
            [getattr(shard, name) for shard in self._shards], like, leaves
        )
        return jax.tree.unflatten(jax.tree.structure(like), jax.device_put(leaves))

    def _await(self, shard: _Shard) -> None:
        """Waits for the answers that a shard owes; connects again as often as need be."""
        while shard.ledger.waits or shard.wanted:
            try:
                if not shard.caller.connected:
                    shard.greet(self._learner)
                    continue  # the greeting may have brought all that was missing
                shard.ask(self._source.tally)
                message = shard.caller.receive()
                verdict = None if message is None else shard.take(message)
                if verdict is not None and verdict.fate is PushOutcome.APPLIED:
                    self.lags[verdict.version.number - 1 - shard.have.number] += 1
            except ConnectionError:
                shard.caller.close()

    def close(self) -> None:
        """Ends all streams."""
        for shard in self._shards:
            shard.caller.release()
