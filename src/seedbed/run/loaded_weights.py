"""What a new run begins with of another run, or of an exported policy: parameters and statistics, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.run.leaves import like, named_leaves, shape_and_dtype
from seedbed.run.weights import Weights
from seedbed.types import Agent, LearnerState, SeedbedError

OPTIMIZER = "optimizer_state"
_PARTS = ("params", "auxiliary")
_WHOLE = ("seen", "returns", "sums")
"""Statistics: their numbers are meant together."""
_ANEW = ("auxiliary.sums", "auxiliary.parts")
"""Sums of a pass that is under way, in our agents: a new run begins its own."""
_OWN = ("params.seed", "params.generation", "params.exploration")
"""Random numbers and schedules of our agents: a new run has its own."""


class LoadedWeights(NamedTuple):
    """Weights that were read and fit the learner of a new run."""

    leaves: dict[str, np.ndarray]  # by their names in `LearnerState`
    told: dict[str, Any]  # what history.json says of their source

    def text(self) -> str:
        """Returns the source in words, such as `the weights of runs/ant (step 1,000; 12 of 12 parts)`."""
        told = self.told
        at = f"step {told['env_steps']:,}; " if "env_steps" in told else ""
        begun = told.get("anew", [])
        more = f" and {len(begun) - 3} more" if len(begun) > 3 else ""
        anew = f"; begun anew: {', '.join(begun[:3])}{more}" if begun else ""
        anew += "" if told.get("optimizer") else "; the optimizer begins anew"
        return f"the weights of {told['run']} ({at}{told['parts']} of {told['of']} parts{anew})"

    def into(
        self,
        agent: Agent,
        state: LearnerState,
        members: int = 1,
        tell: Callable[[str], None] = lambda text: None,
    ) -> LearnerState:
        """Returns a new learner state with these leaves; each of several members, axis 0, gets the same.

        An exported policy has no target network: the agent's `with_params`, if it has one, makes that.
        """
        tell(f"beginning with {self.text()}")
        new = []
        for name, leaf in named_leaves(state):
            if name in self.leaves:
                shape, dtype = shape_and_dtype(leaf)
                array = self.leaves[name].astype(dtype, copy=True)
                array = np.broadcast_to(array, shape).copy() if members > 1 else array
                leaf = like(array.reshape(shape), leaf)
            new.append(leaf)
        state = jax.tree.unflatten(jax.tree.structure(state), new)
        exported = not any(name.startswith("auxiliary.") for name in self.leaves)
        if exported and (completed := getattr(agent, "with_params", None)):
            return completed(state, state.params)
        return state


class Fit(NamedTuple):
    """Which leaves of a source a learner state takes."""

    taken: dict[str, np.ndarray]  # by name
    anew: list[str]  # groups of leaves that begin anew
    wanted: int  # leaves that it could take


def fitting(
    weights: Weights, found: dict[str, np.ndarray], state: LearnerState, of: str, completes: bool
) -> Fit:
    """Returns those of the leaves `found` that a learner state takes, which may be abstract.

    Leaves of a layer, and the numbers of a statistic, are taken together or not at all. `of` names the
    source. If `completes`, the agent makes auxiliary leaves that the source lacks as a whole. Raises
    SeedbedError, naming a leaf that does not fit, unless `weights.partial`; and if no network fits.
    """
    parts = (*_PARTS, OPTIMIZER) if weights.optimizer else _PARTS
    held = {name.partition(".")[0] for name in found}
    if weights.optimizer and OPTIMIZER not in held:
        raise SeedbedError(f"{of} has no optimizer's state: leave out --from-optimizer")
    if completes and "auxiliary" not in held:
        parts = tuple(part for part in parts if part != "auxiliary")
    wanted = {
        name: shape_and_dtype(leaf) for name, leaf in named_leaves(state) if _counts(name, parts)
    }
    found = {name: leaf for name, leaf in found.items() if _counts(name, parts)}
    misfits: dict[str, str] = {}  # by group, what is said of its first
    for name in sorted({*wanted, *found}):
        if text := _misfit(name, wanted, found):
            misfits.setdefault(_group(name), text)
    taken = {name: found[name] for name in wanted if _group(name) not in misfits}
    networks = [name for name in taken if _group(name) not in ("params.seen", "params")]
    networks = [name for name in networks if name.startswith("params.")]
    if misfits and not (weights.partial and networks):
        first = next(iter(misfits.values()))
        more = f" (and {len(misfits) - 1} more such parts)" if len(misfits) > 1 else ""
        remedy = "give the agent's options that it was trained with"
        if networks:
            remedy += ", or begin such parts anew with --from-partial"
        raise SeedbedError(f"the weights of {of} do not fit: {first}{more}; {remedy}")
    anew = sorted({_group(name) for name in wanted} & misfits.keys())
    return Fit(taken, anew, len(wanted))


def _counts(name: str, parts: tuple[str, ...]) -> bool:
    group = _group(name)
    return name.partition(".")[0] in parts and group not in _ANEW and name not in _OWN


def _group(name: str) -> str:
    """Returns the group of a leaf: its layer, its statistic, or all of the optimizer's state."""
    words = name.split(".")
    if words[0] == OPTIMIZER:
        return OPTIMIZER
    if len(words) > 1 and (words[1] in _WHOLE or ".".join(words[:2]) in _ANEW):
        return ".".join(words[:2])
    return ".".join(words[:-1])


def _misfit(
    name: str, wanted: dict[str, tuple[tuple[int, ...], str]], found: dict[str, np.ndarray]
) -> str:
    """Says how a leaf does not fit; "" if it does."""
    if name not in found:
        return f"{name} is only in the new agent"
    if name not in wanted:
        return f"{name} is only there"
    if (have := shape_and_dtype(found[name])) != wanted[name]:
        (there, kind), (here, other) = have, wanted[name]
        return f"{name} is {kind}{list(there)} there and {other}{list(here)} here"
    return ""
