"""Environments that break Gymnasium's contract: one line names each, what it returned and what it must."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from seedbed.config.defaults import task_of
from seedbed.envs.host.gym import FactoryEnv
from seedbed.envs.host.pickled import pickled
from seedbed.policy import forms_of
from seedbed.types import Discrete, SeedbedError

BOX = spaces.Box(-1, 1, (4,), np.float32)
DICT = spaces.Dict({"a": spaces.Discrete(3), "b": BOX})
PAIR = spaces.Tuple([spaces.Discrete(3), BOX])
GOOD = np.zeros(4, np.float32)
MUST_STEP = "it must return observation, reward, terminated, truncated, info"
MUST_RESET = "it must return observation, info"


class Env(gymnasium.Env):
    """Returns what it is told to."""

    def __init__(
        self, opened: Any = (GOOD, {}), stepped: Any = (GOOD, 0.0, False, False, {})
    ) -> None:
        self.observation_space, self.action_space = BOX, spaces.Discrete(2)
        self.opened, self.stepped = opened, stepped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.opened

    def step(self, action: Any) -> Any:
        return self.stepped


def env(**parts: Any) -> Callable[[], Env]:
    """Returns a function that makes an environment with some of its parts replaced."""

    def make() -> Env:
        made = Env()
        for name, part in parts.items():
            bound = types.MethodType(part, made) if isinstance(part, types.FunctionType) else part
            setattr(made, name, bound)
        return made

    return make


def opened(observation: Any, space: spaces.Space = BOX) -> Callable[[], Env]:
    return env(opened=(observation, {}), observation_space=space)


def stepped(*values: Any) -> Callable[[], Env]:
    """Returns a function that makes an environment whose step has some other of the five values."""
    usual = (GOOD, 0.0, False, False, {})
    return env(stepped=values + usual[len(values) :])


def raises(error: Exception) -> Any:
    def method(self: Env, *args: Any, **kwargs: Any) -> Any:
        raise error

    return method


class NoSpaces(gymnasium.Env):
    """Has neither space."""


class OldReset(Env):
    """Opens episodes as Gym did before 0.26."""

    def reset(self) -> Any:  # type: ignore[override]
        return GOOD


class OnlySeed(Env):
    """Takes no options."""

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return GOOD, {}

    def step(self) -> Any:  # type: ignore[override]
        return self.stepped


class NoMethods(gymnasium.Env):
    """Has spaces only."""

    observation_space, action_space = BOX, spaces.Discrete(2)


class NoStep(NoMethods):
    """Cannot step."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return GOOD, {}


class Foreign:
    """A space of another package."""

    n = 2


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    # what reset returns
    "old reset, an array": (
        env(opened=GOOD),
        rf"reset returned float32\[4\], .*: {MUST_RESET} \(an obs",
    ),
    "reset, None": (env(opened=None), f"reset returned None: {MUST_RESET}"),
    "reset, a dict": (env(opened={"a": 1}), rf"reset returned \{{'a': 1\}}, a dict: {MUST_RESET}"),
    "reset, three values": (
        env(opened=(GOOD, {}, 0)),
        rf"reset returned 3 values \(.*: {MUST_RESET}",
    ),
    "reset, a text": (env(opened="ab"), f"reset returned 'ab', a str: {MUST_RESET}"),
    "reset without seed": (OldReset, r"it must take both: def reset\(self, \*, seed=None"),
    "reset that raises": (env(reset=raises(KeyError("x"))), "raised KeyError: 'x'"),
    "reset that raises lines": (env(reset=raises(OSError("a\n  b"))), "raised OSError: a b$"),
    "no methods": (NoMethods, f"reset returned None: {MUST_RESET}"),
    "no step": (NoStep, "raised NotImplementedError; it must have both reset and step"),
    # observations
    "a short observation": (opened(np.zeros(1)), r"observation has shape \(1,\), expected \(4,\)"),
    "a batch": (opened(np.zeros((1, 4))), r"observation has shape \(1, 4\), expected \(4,\)"),
    "no observation": (opened(None), r"observation is None, expected an array of float32 of shape"),
    "a text": (opened("left"), "observation is 'left', a str, expected an array of float32"),
    "texts": (opened(["a"] * 4), "observation is .*, a list, expected an array of float32"),
    "a ragged list": (
        opened([[1], [1, 2], [], []]),
        "observation is .*, expected an array of float32",
    ),
    "complex": (opened(np.zeros(4, complex)), "observation is complex128, expected float32"),
    "NaN": (opened(np.array([0, np.nan, 0, 0])), r"observation is not finite: nan at \[1\]"),
    "infinity": (opened(np.full(4, np.inf)), r"observation is not finite: inf at \[0\]"),
    "floats for integers": (
        opened(np.zeros(4), spaces.Box(0, 9, (4,), np.uint8)),
        "observation is float64, expected uint8",
    ),
    "an integer too large": (
        opened(np.full(4, 300), spaces.Box(0, 9, (4,), np.uint8)),
        "holds 300, which does not fit into uint8",
    ),
    "outside a Discrete": (
        opened(3, spaces.Discrete(3)),
        r"is 3, which lies outside its space, \[0\] to \[2\]",
    ),
    "half a choice": (opened(0.5, spaces.Discrete(3)), "is 0.5, a float, expected integers"),
    "no choice": (opened(None, spaces.Discrete(3)), "is None, expected integers"),
    "a key is missing": (
        opened({"a": 1}, DICT),
        r"lacks a part .* expected a dict with \['a', 'b'\]",
    ),
    "a part is missing": (opened((1,), PAIR), "lacks a part of its space: .* expected 2 parts"),
    "no dict": (opened(None, DICT), r"it is None, expected a dict with \['a', 'b'\]"),
    "a wrong part": (
        opened({"a": 7, "b": GOOD}, DICT),
        r"observation\['a'\] is 7, which lies outside",
    ),
    # what step returns
    "old step": (
        env(stepped=(GOOD, 0.0, False, {})),
        rf"step returned 4 values \(.*: {MUST_STEP} \(four",
    ),
    "step, six values": (
        env(stepped=(GOOD, 0.0, False, False, {}, 1)),
        f"6 values .*: {MUST_STEP}",
    ),
    "step, None": (env(stepped=None), f"step returned None: {MUST_STEP}"),
    "step, an array": (env(stepped=np.zeros(5)), rf"step returned float64\[5\], .*: {MUST_STEP}"),
    "step, a text": (env(stepped="abcde"), f"step returned 'abcde', a str: {MUST_STEP}"),
    "step that raises": (
        env(step=raises(ZeroDivisionError("why"))),
        "raised ZeroDivisionError: why",
    ),
    "step without an action": (OnlySeed, "raised TypeError: .*step"),
    "a short observation of a step": (
        stepped(np.zeros(1)),
        r"step returned a wrong observation: .*\(1,\)",
    ),
    "NaN reward": (
        stepped(GOOD, np.nan),
        "reward is not finite: nan in float32; step must return a fin",
    ),
    "large reward": (stepped(GOOD, 1e39), r"reward is not finite: 1e\+39 in float32"),
    "huge reward": (stepped(GOOD, 10**400), "the reward .*, an int: it must be a finite number"),
    "no reward": (stepped(GOOD, None), "the reward None: it must be a finite number"),
    "a text as reward": (
        stepped(GOOD, "1.0"),
        "the reward '1.0', a str: it must be a finite number",
    ),
    "two rewards": (
        stepped(GOOD, np.zeros(2)),
        r"the reward float64\[2\], .*: it must be a finite",
    ),
    "a complex reward": (stepped(GOOD, 1j), "the reward 1j, a complex: it must be a finite number"),
    "reward and terminated swapped": (
        stepped(GOOD, False, 0.5),
        "0.5, a float as terminated: it must be",
    ),
    "no terminated": (stepped(GOOD, 0.0, None), "None as terminated: it must be a bool"),
    "a text as terminated": (
        stepped(GOOD, 0.0, "no"),
        "'no', a str as terminated: it must be a bool",
    ),
    "info as truncated": (
        stepped(GOOD, 0.0, False, {}),
        r"\{\}, a dict as truncated: it must be a bool",
    ),
    "two flags": (
        stepped(GOOD, 0.0, np.zeros(2, bool)),
        r"bool\[2\], .* as terminated: it must be a",
    ),
    # spaces, and what makes it
    "no spaces": (
        NoSpaces,
        "its observation_space is None: set it in __init__ to a space of gymnasium",
    ),
    "no action space": (env(action_space=None), "its action_space is None: set it in __init__"),
    "a shape as space": (
        env(observation_space=(4,)),
        r"observation_space is \(4,\), a tuple of builtins",
    ),
    "a number as space": (env(action_space=2), "its action_space is 2, an int of builtins: set it"),
    "a foreign space": (
        env(action_space=Foreign()),
        f"a Foreign of {__name__}: set it in __init__",
    ),
    "a space without an array form": (
        env(observation_space=spaces.Text(3)),
        "a Text space, which has no",
    ),
    "no environment": (lambda: 3, "returned a int, not a gymnasium.Env: return an instance"),
    "a class": (lambda: Env, "returned a type, not a gymnasium.Env: return an instance"),
    "a maker that raises": (lambda: 1 // 0, "raised ZeroDivisionError: integer division"),
    "close that raises": (env(close=raises(OSError("gone"))), "close raised OSError: gone"),
}
made: list[Callable[[], Any]] = []


def make() -> Any:
    """Makes what the test has left in `made`."""
    return made[-1]()


def play(maker: Callable[[], Any]) -> tuple[Any, Any]:
    """Makes an environment, opens an episode, steps and closes; returns both timesteps."""
    made.append(maker)
    host = FactoryEnv(f"{__name__}:make").make(1, 0)
    timesteps = host.reset(), host.step(np.zeros(1, np.int32))
    host.close()
    return timesteps


def test_spaces_are_read_although_closing_fails() -> None:
    made = pickled(env(close=raises(OSError("gone"))), "broken")
    with pytest.warns(RuntimeWarning, match="step 0: close raised OSError: gone"):
        assert task_of(made).action == "Discrete"
    with pytest.warns(RuntimeWarning):
        assert forms_of(made).spec.action == Discrete(2)


def test_every_environment_is_closed_whatever_the_others_raise() -> None:
    closed: list[int] = []

    def close(self: Env) -> None:
        closed.append(len(closed))
        raise OSError(f"gone {3 - len(closed)}")

    made.append(env(close=close))
    host = FactoryEnv(f"{__name__}:make").make(3, 0)
    with pytest.raises(SeedbedError, match="index 0, .*gone 0"):
        host.close()
    assert closed == [0, 1, 2]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_told_in_one_line(name: str) -> None:
    maker, complaint = BROKEN[name]
    with pytest.raises(SeedbedError, match=complaint) as told:
        play(maker)
    (line,) = str(told.value).splitlines()
    assert line.startswith(f"environment '{__name__}:make'")


@pytest.mark.parametrize(
    ("values", "reward", "terminated"),
    [
        ((GOOD, np.array([1.0])), 1.0, False),
        ((GOOD, np.array([[2]])), 2.0, False),
        ((GOOD, [3.0]), 3.0, False),
        ((GOOD, np.float32(4), np.array([True])), 4.0, True),
        ((GOOD, 5, 1), 5.0, True),
        ((GOOD, True, np.bool_(True), np.bool_(False)), 1.0, True),
        (([0, 0, 0, 1], 0.0), 0.0, False),
    ],
)
def test_what_can_be_converted_is_accepted(values: Any, reward: float, terminated: bool) -> None:
    _, after = play(stepped(*values))
    assert (after.reward.tolist(), after.terminated.tolist()) == ([reward], [terminated])


def test_lists_are_as_good_as_tuples() -> None:
    play(env(opened=[GOOD, {}], stepped=[GOOD, 0.0, False, False, {}]))
