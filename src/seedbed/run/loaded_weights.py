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


class LoadedWeights(NamedTuple):
    """Weights that were read and fit the learner of a new run."""

    leaves: dict[str, np.ndarray]  # by their names in `LearnerState`
    told: dict[str, Any]  # what history.json says of their source

    def text(self) -> str:
        """Returns the source in words, such as `the weights of runs/ant (step 1,000; 12 of 12 parts)`."""
        told = self.told
        at = f"step {told['env_steps']:,}; " if "env_steps" in told else ""
        anew = "" if told.get("optimizer") else "; the optimizer begins anew"
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


def fitting(
    weights: Weights, found: dict[str, np.ndarray], state: LearnerState, of: str
) -> tuple[dict[str, np.ndarray], int]:
    """Returns those of the leaves `found` that a learner state takes, and how many it could take.

    `state` may be abstract. The auxiliary leaves may be missing as a whole, as in an exported policy. `of`
    names the source. Raises SeedbedError, naming a leaf that does not fit, unless `weights.partial`; and if
    none fits.
    """
    parts = (*_PARTS, OPTIMIZER) if weights.optimizer else _PARTS
    held = {name.partition(".")[0] for name in found}
    if weights.optimizer and OPTIMIZER not in held:
        raise SeedbedError(f"{of} has no optimizer's state: leave out --from-optimizer")
    wanted = {
        name: shape_and_dtype(leaf)
        for name, leaf in named_leaves(state)
        if name.partition(".")[0] in parts
    }
    found = {name: leaf for name, leaf in found.items() if name.partition(".")[0] in parts}
    taken, misfits = {}, []
    for name in sorted({*wanted, *found}):
        if name not in found:
            if name.partition(".")[0] in held:
                misfits.append(f"{name} is only in the new agent")
        elif name not in wanted:
            misfits.append(f"{name} is only there")
        elif shape_and_dtype(found[name]) != wanted[name]:
            (here, kind), (there, other) = wanted[name], shape_and_dtype(found[name])
            misfits.append(f"{name} is {other}{list(there)} there and {kind}{list(here)} here")
        else:
            taken[name] = found[name]
    networks = [name for name in taken if name.startswith("params.") or name == "params"]
    if misfits and not (weights.partial and networks):
        more = f" (and {len(misfits) - 1} more such parts)" if len(misfits) > 1 else ""
        remedy = "give the agent's options that it was trained with"
        if networks:
            remedy += ", or begin such parts anew with --from-partial"
        raise SeedbedError(f"the weights of {of} do not fit: {misfits[0]}{more}; {remedy}")
    return taken, len(wanted)
