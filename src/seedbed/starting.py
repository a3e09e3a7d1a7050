"""Reads the weights that a new run begins with: of a run, or of an exported policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import saved_config, to_json
from seedbed.exporting import loading
from seedbed.policy import forms_of, frame_stack_of
from seedbed.printable import printable
from seedbed.run.bucket import run_path
from seedbed.run.devices import dispatch_in_place, share_accelerators
from seedbed.run.folder import RunFolder
from seedbed.run.leaves import named_leaves
from seedbed.run.loaded_weights import LoadedWeights, fitting
from seedbed.run.options import FusedConfig, ParamServerConfig
from seedbed.run.restoring import best_leaves
from seedbed.run.stacking import stacked_spec
from seedbed.run.weights import Weights
from seedbed.types import EnvSpec, SeedbedError, bind


def loaded(config: TrainConfig, trust: bool, warn: Callable[[str], None]) -> LoadedWeights | None:
    """Reads the weights that a configuration begins with; None if it names none.

    Makes an environment of the host once, and of the source, if it was trained in another one. `trust` is
    that of `load`, for the source's folder. Raises SeedbedError if the spaces differ or parts do not fit, and
    the weights are not `partial`; if nothing fits; or if the source cannot be read.
    """
    weights = config.start
    if weights is None:
        return None
    # Before JAX starts here and not in the runtime.
    if isinstance(config.runtime, ParamServerConfig):
        share_accelerators()
    dispatch_in_place()
    source = run_path(str(weights.run))
    name = printable(source)
    spec, stack = forms_of(config.env).spec, frame_stack_of(config.env)
    if loading.is_exported(source):
        policy = loading.read(source)
        trained: tuple[EnvSpec, int] = (policy.spec, policy.frame_stack)
        leaves = {name: np.asarray(x) for name, x in named_leaves(policy.params, "params")}
        told: dict[str, Any] = {"run": str(weights.run)}
    else:
        trained, leaves, told = _of_run(source, weights, config, trust, warn)
    if trained != (spec, stack) and not weights.partial:
        raise SeedbedError(
            f"the weights of {name} are for another environment: it has {trained[0]} with frame stack "
            f"{trained[1]}, this one {spec} with {stack}; name a run of such spaces, or begin parts that do "
            "not fit anew with --from-partial"
        )
    agent = bind(config.agent, stacked_spec(spec, stack))
    state = jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)))
    try:
        fit = fitting(weights, leaves, state, name, hasattr(agent, "with_params"))
    except SeedbedError as error:
        other = {} if loading.is_exported(source) else _other_options(source, config, trust)
        had = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise SeedbedError(f"{error}; its agent had {had}" if had else str(error)) from error
    told |= {"parts": len(fit.taken), "of": fit.wanted, **_flags(weights)}
    if fit.anew:
        told["anew"] = fit.anew
    return LoadedWeights(fit.taken, told)


def _other_options(path: Path, config: TrainConfig, trust: bool) -> dict[str, Any]:
    """Returns the options of a run's agent that the same kind of agent has not in a configuration."""
    former, agent = saved_config(RunFolder.read(path), trust).agent, config.agent
    if type(former) is not type(agent):
        return {}
    names = [field.name for field in dataclasses.fields(former) if field.name != "spec"]  # type: ignore[arg-type]
    pairs = {name: (getattr(former, name), getattr(agent, name)) for name in names}
    return {name: was for name, (was, now) in pairs.items() if was != now}


def _of_run(
    path: Path, weights: Weights, config: TrainConfig, trust: bool, warn: Callable[[str], None]
) -> tuple[tuple[EnvSpec, int], dict[str, np.ndarray], dict[str, Any]]:
    """Returns the spaces and frame stack of a run, the leaves of its best checkpoint, and its description."""
    folder = RunFolder.read(path)
    trained = saved_config(folder, trust)
    same = to_json(trained)["env"] == to_json(config)["env"]
    env = config.env if same else trained.env
    fused = isinstance(trained.runtime, FusedConfig)
    step, leaves, metadata = best_leaves(folder.checkpoints, warn, "learner" if fused else "")
    told = {"run": str(weights.run), "env_steps": step}
    if isinstance(trained.runtime, FusedConfig) and len(trained.runtime.variations) > 1:
        best = metadata.get("best_seed")
        members = len(trained.runtime.variations)
        best = best if isinstance(best, int) and 0 <= best < members else 0
        leaves = {name: leaf[best] for name, leaf in leaves.items()}
        told["member"] = trained.runtime.member_names[best]
    return (forms_of(env).spec, frame_stack_of(env)), leaves, told


def _flags(weights: Weights) -> dict[str, bool]:
    flags = {"optimizer": weights.optimizer, "partial": weights.partial}
    return {name: True for name, given in flags.items() if given}
