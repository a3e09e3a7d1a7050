"""Action distributions: the meaning of a policy head's output for each kind of action.

Each distribution is a frozen dataclass of parameters `[..., P]`. `...` is any batch shape, and results have
the same batch shape.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from seedbed.types import ActionSpec, Box, Discrete, MultiDiscrete, SeedbedError


class Scales(NamedTuple):
    """Standard deviations of a normal's draws, in units in which the action's bounds are -1 and 1."""

    initial: float  # when the network's output is 0; must be above `least`
    least: float  # lower bound


class Distribution(Protocol):
    """The interface of every distribution in this module."""

    def sample(self, key: Array) -> Array:
        """Draws once for each batch element; consumes the key."""
        ...

    def mode(self) -> Array:
        """Returns the most probable draw."""
        ...

    def log_prob(self, action: Array) -> Array:
        """Returns the log-probability or log-density `[...]` of an action."""
        ...

    def entropy(self) -> Array:
        """Returns the entropy in nats `[...]`."""
        ...

    def kl(self, other: Any) -> Array:
        """Returns KL(self || other) in nats `[...]`; `other` is of the same class."""
        ...


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A distribution over n choices; logits `[..., n]`, actions int32 `[...]`."""

    logits: Array

    def sample(self, key: Array) -> Array:
        """Draws by the Gumbel-max trick; consumes the key."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> Array:
        """Returns the most probable choice; the first of them if several are equal."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Returns the log-probability of the choice."""
        log_probs = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self) -> Array:
        """Returns the entropy in nats; a choice of probability 0 adds 0."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -_expectation(log_probs, log_probs)

    def kl(self, other: Categorical) -> Array:
        """Returns KL(self || other) in nats."""
        log_probs = jax.nn.log_softmax(self.logits)
        return _expectation(log_probs, log_probs - jax.nn.log_softmax(other.logits))


@dataclasses.dataclass(frozen=True)
class MultiCategorical:
    """Several independent choices; logits `[..., sum(nvec)]`, actions int32 `[..., len(nvec)]`."""

    logits: Array
    nvec: tuple[int, ...]

    def parts(self) -> list[Categorical]:
        """Splits the logits into one distribution for each choice."""
        ends = np.cumsum(self.nvec)[:-1].tolist()
        return [Categorical(part) for part in jnp.split(self.logits, ends, axis=-1)]

    def sample(self, key: Array) -> Array:
        """Draws every choice; consumes the key."""
        keys = jax.random.split(key, len(self.nvec))
        draws = [part.sample(keys[i]) for i, part in enumerate(self.parts())]
        return jnp.stack(draws, axis=-1)

    def mode(self) -> Array:
        """Returns the most probable option of each choice; the first of them if several are equal."""
        return jnp.stack([part.mode() for part in self.parts()], axis=-1)

    def log_prob(self, action: Array) -> Array:
        """Returns the log-probability of all choices together."""
        return sum(part.log_prob(action[..., i]) for i, part in enumerate(self.parts()))  # type: ignore[return-value]

    def entropy(self) -> Array:
        """Returns the entropy in nats."""
        return sum(part.entropy() for part in self.parts())  # type: ignore[return-value]

    def kl(self, other: MultiCategorical) -> Array:
        """Returns KL(self || other) in nats."""
        pairs = zip(self.parts(), other.parts(), strict=True)
        return sum(mine.kl(theirs) for mine, theirs in pairs)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Normal:
    """Independent normal distributions; mean, scale (standard deviation) and draws are `[..., D]`."""

    mean: Array
    scale: Array

    def sample(self, key: Array) -> Array:
        """Draws `[..., D]` through which gradients flow; consumes the key."""
        return self.mean + self.scale * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def mode(self) -> Array:
        """Returns the mean `[..., D]`."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """Returns the log-density `[...]` of draws `[..., D]`."""
        z = (action - self.mean) / self.scale
        density = -0.5 * jnp.square(z) - jnp.log(self.scale) - 0.5 * math.log(2.0 * math.pi)
        return density.sum(-1)

    def entropy(self) -> Array:
        """Returns the differential entropy in nats."""
        return (0.5 * math.log(2.0 * math.pi * math.e) + jnp.log(self.scale)).sum(-1)

    def kl(self, other: Normal) -> Array:
        """Returns KL(self || other) in nats."""
        ratio = self.scale / other.scale
        z = (self.mean - other.mean) / other.scale
        return (0.5 * (jnp.square(ratio) + jnp.square(z) - 1.0) - jnp.log(ratio)).sum(-1)


def squash(action: Box, x: Array, by: Literal["tanh", "clip"]) -> Array:
    """Maps x `[..., D]` into the bounds of a Box; returns actions `[..., *shape]`.

    tanh: an element with two bounds becomes its tanh, scaled to the bounds. An element with one bound lies
    a softplus away from the bound.
    clip: -1 becomes the lower bound and 1 the upper bound, and the rest is clipped. An element with one
    bound is shifted and clipped, but not scaled.
    Elements without bounds do not change.
    """
    b = _bounds(action.low, action.high, x.ndim)
    if by == "clip":
        y = b.middle + b.half * x
    else:
        y = jnp.where(b.both, b.middle + b.half * jnp.tanh(x), x)
        if b.single.any():
            y = jnp.where(b.single, b.edge + b.side * jax.nn.softplus(b.side * x), y)
    # Rounding may put the sum just outside the bounds.
    y = jnp.clip(y, _aligned(action.low, x.ndim), _aligned(action.high, x.ndim))
    return y.reshape(*y.shape[:-1], *action.shape)


def log_slope(action: Box, x: Array) -> Array:
    """Returns the log of the slope of `squash` by tanh at draws x `[..., D]`, summed over D, `[...]`.

    It is what squashing adds to the entropy of a draw. Actions are in units in which two bounds are -1 and 1.
    """
    b = _bounds(action.low, action.high, x.ndim)
    slope = jnp.zeros_like(x)
    if b.single.any():
        slope = jnp.where(b.single, -jax.nn.softplus(-b.side * x), slope)
    if b.both.any():
        # This is log(1 - tanh(x)^2) without cancellation.
        slope = jnp.where(b.both, 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x)), slope)
    return slope.sum(-1)


def squashed_entropy(action: ActionSpec, policy: Distribution, draw: Array, by: str) -> Array:
    """Returns the entropy `[...]` of actions, in nats; a Box is scaled to bounds of -1 and 1.

    What squashing `by` tanh adds to the entropy of a normal is taken at draws `[..., D]` of another policy,
    moved with this one. Without it, an entropy bonus would reward draws so wide that all actions are at a
    bound. The entropy of clipped draws is that before clipping. It has a gradient; its second derivatives
    lack those of squashing.
    """
    entropy = policy.entropy()
    if not (isinstance(policy, Normal) and isinstance(action, Box) and by == "tanh"):
        return entropy
    if not np.isfinite([*action.low, *action.high]).any():
        return entropy
    noise = lax.stop_gradient((draw - policy.mean) / policy.scale)
    moved = policy.mean + policy.scale * noise
    # `moved` is `draw` but for rounding. With the slope and its derivative taken at `draw`, XLA's loops on
    # CPUs read whole arrays; one that also splits the network's output into mean and scale has no vectors.
    slope, back = jax.vjp(lambda x: log_slope(action, x), lax.stop_gradient(draw))
    (change,) = back(jnp.ones_like(slope))
    return entropy + slope + (change * (moved - lax.stop_gradient(moved))).sum(-1)


def action_errors(action: ActionSpec, draw: Array, wanted: Array, by: str) -> Array:
    """Returns how far a policy is from wanted actions `[..., *shape]`, `[...]`.

    For a Box that is the squared distance, in units with bounds of -1 and 1, of what `squash` makes of draws
    `[..., D]` by tanh. With clip, draws are compared as they are: those out of bounds have a gradient, too.
    For choices, `draw` has the logits, and the result is minus the log-probability.
    """
    if not isinstance(action, Box):
        return -distribution(action, draw, Scales(1.0, 0.5)).log_prob(wanted)
    taken = draw if by == "clip" else action_vector(action, squash(action, draw, "tanh"))
    return jnp.square(taken - action_vector(action, wanted)).sum(-1)


def action_vector(action: ActionSpec, x: Array) -> Array:
    """Turns actions in the form of the spec, `[..., *shape]`, into the input of a network, `[..., A]`.

    Choices become one-hot; several choices follow one another. A Box is scaled so that its bounds are -1
    and 1. An element with one bound is shifted but not scaled; elements without bounds do not change.
    """
    if isinstance(action, Discrete):
        return jax.nn.one_hot(x, action.n)
    if isinstance(action, MultiDiscrete):
        parts = [jax.nn.one_hot(x[..., i], n) for i, n in enumerate(action.nvec)]
        return jnp.concatenate(parts, axis=-1)
    x = x.reshape(*x.shape[: x.ndim - len(action.shape)], -1)
    b = _bounds(action.low, action.high, x.ndim)
    return (x - b.middle) / b.half


class _Bounds(NamedTuple):
    """The bounds of a Box, by element; each array is `[1, ..., 1, D]`."""

    both: np.ndarray  # the element has two finite bounds
    single: np.ndarray  # the element has exactly one finite bound
    middle: np.ndarray  # centre of two bounds; one unit inside a single bound; otherwise 0
    half: np.ndarray  # half the distance between two bounds; otherwise 1
    side: np.ndarray  # 1 for a single lower bound, -1 for a single upper bound, otherwise 0
    edge: np.ndarray  # the single bound; otherwise 0


def _bounds(low: tuple[float, ...], high: tuple[float, ...], rank: int) -> _Bounds:
    least, most = _aligned(low, rank), _aligned(high, rank)
    below, above = np.isfinite(least), np.isfinite(most)
    both = below & above
    side = below.astype(np.float32) - above.astype(np.float32)
    edge = np.where(both, 0, np.where(below, least, 0) + np.where(above, most, 0))
    least, most = np.where(both, least, edge + side - 1), np.where(both, most, edge + side + 1)
    return _Bounds(
        both=both,
        single=below != above,
        middle=(least / 2 + most / 2).astype(np.float32),
        half=(most / 2 - least / 2).astype(np.float32),
        side=side,
        edge=edge.astype(np.float32),
    )


def _aligned(bound: tuple[float, ...], rank: int) -> np.ndarray:
    """Returns a bound as float32 `[1, ..., 1, D]` with `rank` axes."""
    return np.asarray(bound, np.float32).reshape((1,) * (rank - 1) + (-1,))


def parameter_size(action: ActionSpec) -> int:
    """Returns the number of outputs that a policy head must have for an action."""
    if isinstance(action, Discrete):
        return action.n
    if isinstance(action, MultiDiscrete):
        return sum(action.nvec)
    return 2 * math.prod(action.shape)


def distribution(action: ActionSpec, parameters: Array, scales: Scales) -> Distribution:
    """Turns a policy head's output `[..., parameter_size(action)]` into a distribution of draws.

    For discrete actions a draw is the action itself. For a Box a draw is a vector `[..., D]` that `squash`
    turns into an action; the first half of the parameters are means and the second half set the scales.

    Raises:
        SeedbedError: the bounds of a Box are empty.
    """
    if isinstance(action, Discrete):
        return Categorical(parameters)
    if isinstance(action, MultiDiscrete):
        return MultiCategorical(parameters, action.nvec)
    check_bounds(action)
    mean, raw_scale = jnp.split(parameters, 2, axis=-1)
    # An untrained network's outputs are near 0. With this offset the softplus of 0 is initial - least.
    offset = math.log(math.expm1(scales.initial - scales.least))
    return Normal(mean, jax.nn.softplus(raw_scale + offset) + scales.least)


def named(policy: Distribution) -> Distribution:
    """Names a distribution's parameters after their fields, so that exports find them."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
    arrays = {name: value for name, value in fields.items() if isinstance(value, Array)}
    return dataclasses.replace(
        policy,  # type: ignore[type-var]
        **{name: checkpoint_name(value, name) for name, value in arrays.items()},
    )


def check_bounds(action: Box) -> None:
    """Raises SeedbedError unless low < high in every element. Bounds may be infinite."""
    low, high = (np.asarray(bound, np.float32) for bound in (action.low, action.high))
    if not (low < high).all():
        raise SeedbedError(
            f"action bounds low={action.low}, high={action.high} are empty; give every element "
            "low < high, where -inf and inf are no bounds"
        )


def require_bounded(agent: str, action: ActionSpec) -> Box:
    """Returns an action that is a Box with finite bounds, else raises SeedbedError; `agent` needs it so."""
    if not isinstance(action, Box):
        raise SeedbedError(
            f"{agent} needs actions that are real vectors but the environment takes {action}; "
            "choose agent dqn or ppo"
        )
    if not np.isfinite([*action.low, *action.high]).all():
        raise SeedbedError(
            f"{agent} needs bounded actions but the environment's have low={action.low}, "
            f"high={action.high}; choose agent ppo, or bound them"
        )
    check_bounds(action)
    return action


def _expectation(log_probs: Array, x: Array) -> Array:
    """Returns the sum of p x over the last axis; a logit of -inf adds 0 to the value and the gradient."""
    possible = jnp.isfinite(log_probs)
    probs = jnp.where(possible, jnp.exp(log_probs), 0.0)
    return (probs * jnp.where(possible, x, 0.0)).sum(-1)
