"""An agent of a user's own, which is only configured here."""

from __future__ import annotations

import dataclasses

from seedbed.types import OnPolicy


@dataclasses.dataclass(frozen=True)
class Inner:
    rates: tuple[float, ...] = (0.1, 0.2)


@dataclasses.dataclass(frozen=True)
class Custom:
    spec: object = None
    inner: Inner = Inner()
    sizes: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))
    name: str | None = None

    epochs = minibatches = 1
    experience = OnPolicy(unroll=1, batch=1)

    def init(self): ...
    def actor_state(self): ...
    def act(self): ...
    def prepare(self): ...
    def gradients(self): ...
    def clip_gradient(self): ...
    def apply(self): ...


helper = print
