"""`seedbed clone`: makes a run of a policy that imitates recorded episodes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed.cloning import recorded
from seedbed.cloning.learn import CloningOptions, Look, imitate, require_policy
from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import to_json
from seedbed.config.scenes import with_copy
from seedbed.config.settle import settle
from seedbed.policy import evaluate, forms_of, frame_stack_of
from seedbed.printable import pasted
from seedbed.run.bucket import kept, name_of
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.folder import RunFolder, new_folder
from seedbed.run.history import RunSegment
from seedbed.run.options import FusedConfig
from seedbed.run.runtime import Start
from seedbed.run.signals import stopping_early
from seedbed.run.sizes import require_number
from seedbed.run.stacking import stacked_spec
from seedbed.types import SeedbedError, UsageError, bind

DESCRIPTION = """\
Makes a run whose policy imitates recorded episodes; `seedbed train NAME --from RUN` goes on from it.
DATA is an npz file with observations, actions, terminations and truncations, and for agents with a memory
rewards, one row a step, or a dataset of Minari."""
_USAGE = "seedbed clone NAME DATA [OPTIONS] [OPTIONS of seedbed train]"
Tell = Callable[[str], None]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed clone`; those of `seedbed train` come besides."""
    usual = CloningOptions()
    parser.usage = _USAGE
    parser.add_argument("name", metavar="NAME", help="a preset or an environment, with --agent A")
    parser.add_argument("data", metavar="DATA", type=Path, help="the recorded episodes")
    for name, help_text in (
        ("updates", "minibatches to learn from"),
        ("batch", "steps in a minibatch"),
        ("learning_rate", "step size of Adam at the start; it falls to 0"),
    ):
        value = getattr(usual, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            help=f"{help_text} (default: {value:g})",
        )


def serve(arguments: Sequence[str], parser: argparse.ArgumentParser, tell: Tell) -> None:
    """Clones, plays what was learned, and tells how to go on."""
    declare(parser)
    if not {"-h", "--help"} & set(arguments) and any(x.startswith("-") for x in arguments[:2]):
        # The parser would take the value of an option of `seedbed train` for one of them.
        raise UsageError(f"NAME and DATA come first: {_USAGE}")
    whole = {"--updates": 0, "--batch": 0}
    own, rest = parser.parse_known_args(flags.whole_numbers(arguments, whole))
    flags.reject_near(rest, parser)
    given = flags.split_train_arguments([own.name, *rest])
    request = given.request
    if request.resume or request.start is not None or given.cluster is not None:
        raise UsageError("a policy is cloned anew: leave out --resume, --from and --cluster")
    config = settle(request, lambda found: flags.override(found, given.rest, False)).config
    require_number(config.runtime, "a clone has none yet")
    options = CloningOptions(own.updates, own.batch, own.learning_rate, config.runtime.seed)
    # A signal ends the command, and the folder that it has begun is removed.
    with stopping_early():
        run = clone(config, own.data, options, request.run, tell)
    result = evaluate(run, episodes=config.runtime.evaluate_episodes, trust=True)
    tell(
        f"cloned with a mean return of {result['episode_return_mean']:.2f} in "
        f"{result['episodes']} episodes; go on with: {flags.command(config) or 'seedbed train NAME'} "
        f"--from {pasted(name_of(run))}"
    )


def clone(
    config: TrainConfig, data: Path, options: CloningOptions, run: Path | None, tell: Tell
) -> Path:
    """Makes the folder of a run with the checkpoint of an agent that imitates `data`; returns its path.

    `run` is that path; None means a new folder below runs/. Raises SeedbedError if the agent has no policy,
    if the data does not fit, or if the folder is not empty; nothing is left then.
    """
    require_policy(config.agent)
    if isinstance(config.runtime, FusedConfig) and len(config.runtime.variations) > 1:
        raise SeedbedError("a clone is one agent: leave out --seeds and --sweep")
    forms, stack = forms_of(config.env), frame_stack_of(config.env)
    agent: Any = bind(config.agent, stacked_spec(forms.spec, stack))
    steps = recorded.read(data, forms)
    episodes = int(steps.first.sum())
    tell(
        f"imitating {len(steps.first):,} steps of {episodes:,} episodes, of which a tenth is held out"
    )

    def show(look: Look) -> None:
        tell(f"{look.updates:,} updates | loss {look.loss:.4f} | held out {look.held_out:.4f}")

    encoded = with_copy(to_json(config))
    folder = RunFolder.create(run or new_folder(f"clone-{config.name}"), tell)
    with (
        kept(folder.path, tell),
        folder.training(*encoded),
        RunSegment(folder, time.time(), 0, lambda: False, tell, {"data": str(data.absolute())}),
        CheckpointWriter(folder.checkpoints, 1, lock=folder.lock, claim=folder.claim) as writer,
    ):
        state = imitate(agent, steps, stack, options, show)
        fused = isinstance(config.runtime, FusedConfig)
        metadata = {"start": Start()._asdict(), "cloned": dataclasses.asdict(options)}
        writer.save(0, {"learner": state} if fused else state, metadata)
        writer.wait()
    return folder.path
