"""Probe tasks on the device: an agent learns each in seconds, and its return reveals one class of bug."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from seedbed.spaces import ACTION_MASK, PRIVILEGED
from seedbed.types import Array, ArraySpec, Box, Discrete, EnvSpec, EnvState, Tree


class _Untimed:
    """A base of tasks whose episodes all terminate by themselves."""

    @property
    def episode_steps(self) -> int:
        """Returns 0: there is no time limit, because episodes terminate after `length` steps."""
        return 0

    @property
    def frame_skip(self) -> int:
        """Returns 1: each step is one step of the simulation."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayProbe(_Untimed):
    """A task that pays each action's reward one step late: tests whether credit reaches earlier actions.

    The observation `[3]` is (a fair random sign, the reward that the next step will pay, the share of the
    episode that has passed). Action 1 is right if the sign is 1, action 0 if it is -1. The right action
    earns 1 and the other -1; the step after pays it. An episode terminates after `length` steps. The first
    step pays nothing, and the reward that the last step earns is never paid.

    The best return is length - 1; random actions have 0 on average. With discount g, the best policy's
    value after t steps is r + g + g^2 + ... + g^(length - 1 - t), where r is the reward that the next step
    will pay. An agent that credits a reward only to the action just taken, for example because its
    discount is 0, stays at return 0.
    """

    length: int = 8
    """Steps of an episode."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[3]`, and two actions."""
        return EnvSpec(ArraySpec((3,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode in which no reward is owed yet; consumes the key."""
        return EnvState.opening(*self._show(jnp.int32(0), key, jnp.float32(0)))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays the reward that the previous step earned."""
        passed, key, sign, owed = state.inner
        earned = jnp.where((action == 1) == (sign > 0), 1.0, -1.0)
        shown = self._show(passed + 1, key, earned)
        return EnvState.after(*shown, owed, passed + 1 >= self.length)

    def _show(self, passed: Array, key: Array, owed: Array) -> tuple[Tree, Array]:
        key, drawing = jax.random.split(key)
        sign = jnp.where(jax.random.bernoulli(drawing), 1.0, -1.0)
        observation = jnp.stack([sign, owed, passed.astype(jnp.float32) / self.length])
        return (passed, key, sign, owed), observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncationProbe:
    """A task whose best episodes end by the time limit: tests bootstrapping at a truncation.

    The observation `[1]` is -1 at the start. The first action, whichever it is, costs 1; from then on the
    observation is 1. At observation 1, action 0 earns 0.2 and changes nothing; action 1 earns 0.4 and
    terminates the episode. Episodes are truncated after two steps. Clipping rewards to [-1, 1] changes
    nothing.

    With discount g > 0.5 the best policy takes action 0. Its value is v = 0.2 / (1 - g) at observation 1
    and g v - 1 at observation -1: 2 and 0.8 for g = 0.9. Its return is -0.8. An agent prefers action 1 if
    it treats a truncation as a termination, or if it bootstraps from the next episode's opening
    observation: for g = 0.9 its values are 0.4 and -0.64, and its return is -0.6.
    """

    episode_steps: int = 2
    """Steps after which an episode is truncated."""

    @property
    def frame_skip(self) -> int:
        """Returns 1: each step is one step of the simulation."""
        return 1

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[1]`, and two actions."""
        return EnvSpec(ArraySpec((1,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode, always in the same state; the key is unused."""
        return EnvState.opening(jnp.bool_(False), jnp.full(1, -1.0))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Moves from observation -1 to 1 on the first step; later stays (0) or terminates (1)."""
        arrived = state.inner
        reward = jnp.where(arrived, jnp.where(action == 1, 0.4, 0.2), -1.0)
        return EnvState.after(jnp.bool_(True), jnp.ones(1), reward, arrived & (action == 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatProbe(_Untimed):
    """A task that pays 1 for naming the symbol that was shown `delay` steps before: tests memory.

    The observation `[choices]` is a one-hot symbol; each step draws a new one with equal probabilities. An
    action names a symbol. The first `delay` steps pay nothing. An episode terminates after `length` steps.

    The best return is length - delay. With a delay of 1 or more, the observation says nothing about the
    symbol that is asked for, so every policy without memory has (length - delay) / choices on average.
    With delay 0 no memory is needed. A policy that also sees its previous action can use it as a memory,
    and do better.
    """

    delay: int = 4
    """Steps between showing a symbol and paying for its name."""
    choices: int = 4
    """Number of symbols."""
    length: int = 20
    """Steps of an episode."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[choices]`, and one action for each symbol."""
        return EnvSpec(ArraySpec((self.choices,), "float32"), Discrete(self.choices))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode and shows its first symbol; consumes the key."""
        nothing = jnp.full(self.delay + 1, -1, jnp.int32)
        return EnvState.opening(*self._show(jnp.int32(0), key, nothing))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays 1 if the action names the symbol of `delay` steps before, else 0; shows a new symbol."""
        passed, key, shown = state.inner
        reward = jnp.where(action == shown[-1], 1.0, 0.0)
        now = self._show(passed + 1, key, shown)
        return EnvState.after(*now, reward, passed + 1 >= self.length)

    def _show(self, passed: Array, key: Array, shown: Array) -> tuple[Tree, Array]:
        key, drawing = jax.random.split(key)
        symbol = (self.choices * jax.random.uniform(drawing)).astype(jnp.int32)
        shown = jnp.concatenate([symbol[None], shown[:-1]])
        observation = (jnp.arange(self.choices) == symbol).astype(jnp.float32)
        return (passed, key, shown), observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TMazeProbe:
    """A corridor with a junction at its end; a cue at the start says which turn pays: tests memory.

    The observation `[2]` is (the cue at the start and 0 elsewhere, 1 at the junction and 0 elsewhere). The
    cue is 1 or -1, with equal probabilities. Action 0 walks one place on; the junction is `length` places
    from the start. Actions 1 and 2 turn. A turn at the junction ends the episode: action 1 earns 4 if the
    cue was 1, action 2 earns 4 if it was -1, and the wrong turn costs 0.1. Turning in the corridor and
    walking on at the junction change nothing and cost 0.1. Source: Bakker (2001), "Reinforcement learning
    with long short-term memory"; here there is no way back.

    The best return is 4. At the junction, the observation is the same for both cues, and the action that
    led there is always 0. So the best policy without memory turns at random there and has 1.95 on average,
    even if it sees its previous action and reward.
    """

    length: int = 10
    """Places from the start to the junction."""

    @property
    def episode_steps(self) -> int:
        """Returns a time limit longer than a random walk takes on average, 3 * length + 1.5 steps."""
        return 5 * (self.length + 1)

    @property
    def frame_skip(self) -> int:
        """Returns 1: each step is one step of the simulation."""
        return 1

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[2]`, and three actions."""
        return EnvSpec(ArraySpec((2,), "float32"), Discrete(3))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode at the start of the corridor, with a new cue; consumes the key."""
        cue = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return EnvState.opening(*self._show(jnp.int32(0), cue))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Walks on for action 0, turns for 1 and 2."""
        place, cue = state.inner
        junction, turns = place == self.length, action > 0
        pays = junction & turns & ((action == 1) == (cue > 0))
        walks = ~junction & ~turns
        reward = jnp.where(pays, 4.0, jnp.where(walks, 0.0, -0.1))
        return EnvState.after(*self._show(place + walks, cue), reward, junction & turns)

    def _show(self, place: Array, cue: Array) -> tuple[Tree, Array]:
        shown = jnp.where(place == 0, cue, 0.0)
        observation = jnp.stack([shown, (place == self.length).astype(jnp.float32)])
        return (place, cue), observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskProbe(_Untimed):
    """A task in which the choices that look best are forbidden: tests masks of actions.

    The observation is what each of the `choices` pays, `[choices]`, and a mask that is drawn anew in each
    step and allows at least one choice. The allowed choice that pays most earns 1, another allowed one 0, and
    a forbidden one -100. Forbidden choices show the highest pay. Metric `forbidden` is 1 where one was taken.

    The best return is `length`. An agent that forgets the mask anywhere in acting is far below 0.
    """

    choices: int = 4
    """Number of actions."""
    length: int = 8
    """Steps of an episode, which then terminates."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the pay, float32 `[choices]`, the mask, bool `[choices]`, and the actions."""
        shown = {
            "observation": ArraySpec((self.choices,), "float32"),
            ACTION_MASK: ArraySpec((self.choices,), "bool"),
        }
        return EnvSpec(shown, Discrete(self.choices))

    def reset(self, key: Array) -> EnvState:
        """Draws the first pay and mask; consumes the key."""
        inner, shown = self._show(jnp.int32(0), key)
        return EnvState.opening(inner, shown, {"forbidden": jnp.float32(0)})

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays for a choice, and draws pay and mask anew."""
        passed, key = state.inner
        seen = state.timestep.observation
        pay, allowed = seen["observation"], seen[ACTION_MASK]
        best = jnp.argmax(jnp.where(allowed, pay, -1.0))
        forbidden = ~(allowed & (jnp.arange(self.choices) == action)).any()
        earned = jnp.where(forbidden, -100.0, (action == best).astype(jnp.float32))
        inner, shown = self._show(passed + 1, key)
        metrics = {"forbidden": forbidden.astype(jnp.float32)}
        return EnvState.after(inner, shown, earned, passed + 1 >= self.length, metrics)

    def _show(self, passed: Array, key: Array) -> tuple[Tree, Tree]:
        key, for_pay, for_mask, for_one = jax.random.split(key, 4)
        allowed = jax.random.bernoulli(for_mask, 0.5, (self.choices,))
        allowed |= jnp.arange(self.choices) == jax.random.randint(for_one, (), 0, self.choices)
        pay = jax.random.uniform(for_pay, (self.choices,)) + jnp.where(allowed, 0.0, 1.0)
        return (passed, key), {"observation": pay, ACTION_MASK: allowed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivilegedProbe(_Untimed):
    """A task with a secret that only a critic may see: tests that it does, and that the policy does not.

    The observation is a fair random sign `[1]`, and another one, the secret, under `privileged`. The action
    is one number from -1 to 1. A step earns the action times (sign + 2 secret), plus 3 times the secret.
    Both are drawn anew in each step.

    A policy that sees the sign alone has a mean return of at most `length`; one that sees the secret, too,
    has twice as much. A critic that does not see the secret can explain nothing of the next reward.
    """

    length: int = 8
    """Steps of an episode, which then terminates."""

    @property
    def spec(self) -> EnvSpec:
        """Returns two signs, float32 `[1]`, one of which is privileged, and the action."""
        sign = ArraySpec((1,), "float32")
        return EnvSpec({"observation": sign, PRIVILEGED: sign}, Box((1,), (-1.0,), (1.0,)))

    def reset(self, key: Array) -> EnvState:
        """Draws the first signs; consumes the key."""
        return EnvState.opening(*self._show(jnp.int32(0), key))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays for an action, and draws the signs anew."""
        passed, key = state.inner
        seen = state.timestep.observation
        sign, secret, taken = seen["observation"][0], seen[PRIVILEGED][0], action[0]
        earned = taken * (sign + 2.0 * secret) + 3.0 * secret
        return EnvState.after(*self._show(passed + 1, key), earned, passed + 1 >= self.length)

    def _show(self, passed: Array, key: Array) -> tuple[Tree, Tree]:
        key, *drawing = jax.random.split(key, 3)
        sign, secret = (jnp.where(jax.random.bernoulli(each), 1.0, -1.0)[None] for each in drawing)
        return (passed, key), {"observation": sign, PRIVILEGED: secret}
