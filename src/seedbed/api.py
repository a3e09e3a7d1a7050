"""The Python interface: trains an agent, loads a trained one and evaluates it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax

from seedbed import resolve, scaling
from seedbed.arguments import checked, require_fields
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.gym import GymEnv
from seedbed.envs.host.registry import ON_DEVICE
from seedbed.export import loading as exported
from seedbed.paramserver.options import ParamServerConfig
from seedbed.printable import printable
from seedbed.resolve import TrainConfig
from seedbed.run import evaluation
from seedbed.run.checkpoint import restore_best, restore_newest, warn_of_newer
from seedbed.run.folder import CONFIG, RunFolder, default_path
from seedbed.run.forms import Forms, PlainForms
from seedbed.run.options import CentralConfig, FusedConfig, at_least, require_seed
from seedbed.run.programs import keep_programs
from seedbed.run.runtime import OnMetrics, View
from seedbed.run.stacking import stacked_spec
from seedbed.types import Agent, Array, Environment, SeedbedError, Tree, bind
from seedbed.viewer.background import BackgroundView, tell
from seedbed.viewer.live import make_view


@checked
def train(
    what: str | TrainConfig | HostEnvConfig | Environment,
    *,
    agent: str | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    on_metrics: OnMetrics | None = None,
    **runtime_options: Any,
) -> dict[str, Any]:
    """Trains a preset, an environment or a configuration, and returns a summary of the run.

    `what` is a name, as in `seedbed train`, a `TrainConfig`, or the configuration of an environment, such as
    `GymEnv("CartPole-v1")`. `agent` names another agent, such as ppo or `module:Class`. `run` is the folder
    of the run; by default a new one below runs/. `runtime_options` are fields of the runtime's configuration,
    such as `steps=1_000_000` (transitions). On a GPU, a preset or an environment has the sizes of `scaling`.
    The summary holds the last metrics, `interrupted` (bool) and `run` (the folder).

    `on_metrics` is called with each line of metrics as `metrics.jsonl` gets it, a dict of names and plain
    values, by the calling thread, every `log_every_s` seconds and once at the end. If it raises an
    Exception, a message says so and training goes on.

    With `resume`, the run in the folder `run` continues. If `what` is a name, it must be the run's own name
    or environment, and the run keeps its saved configuration; a configuration replaces the saved one.
    `trust` is that of `load`. Raises SeedbedError if the user can repair the failure.
    """
    if resume and run is None:
        raise SeedbedError("resume needs the folder of the run: name it with run")
    plain = None  # what the sizes for this device are told of
    resolve.require_trainable(what, agent)
    if isinstance(what, TrainConfig):
        config = what
    elif isinstance(what, str) and resume and run is not None:
        config = resolve.resumed(Path(run), what, agent, trust)
    else:
        plain = resolve.train_config(what, agent)
        config = scaling.for_this_device(plain)
    config = _with_options(config, runtime_options)
    if plain is not None and (told := scaling.note(plain, config)):
        _tell(told)
    # What is refused must leave no folder behind: also an option that cannot be saved.
    resolve.require_platform(config.runtime)
    config, told = scaling.with_compute_dtype(config, Path(run) if resume and run else None)
    if told:
        _tell(told)
    encoded = resolve.to_json(config)
    path = default_path(config.name or "run") if run is None else Path(run)
    folder = RunFolder.resume(path, _tell) if resume else RunFolder.create(path, _tell)
    folder.trusted = trust
    screen = make_view(config.runtime.steps, config.name, str(path))
    with folder.training(encoded), BackgroundView(screen) as view:
        summary = _train(config, folder, view, on_metrics)
    return {**summary, "run": str(path)}


def _tell(text: str) -> None:
    """Prints a message to stderr while the run starts, when the view does not exist yet."""
    tell(text, sys.stderr)


def _with_options(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """Returns a configuration with other options of the runtime, and with those chosen that were 0.

    Raises SeedbedError if there is no such option, or if the runtime does not fit the environment or agent.
    """
    known = {field.name for field in dataclasses.fields(config.runtime)}
    for name in given.keys() - known:
        raise SeedbedError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    steps = given.get("steps")
    if isinstance(steps, float) and steps.is_integer():
        given = {**given, "steps": int(steps)}  # 2e6, as on the command line
    options = dataclasses.replace(config.runtime, **given)
    if is_on_device(config.env) != isinstance(options, FusedConfig):
        raise SeedbedError(
            f"{type(config.env).__name__} with {type(options).__name__}: on-device environments train in the "
            "fused runtime, all others in the central one or with parameter servers"
        )
    if isinstance(options, CentralConfig):
        options = options.resolved(config.agent)
    if isinstance(options, ParamServerConfig):
        options.require_fit(config.agent)
    return dataclasses.replace(config, runtime=options)


def _train(
    config: TrainConfig, folder: RunFolder, view: View, on_metrics: OnMetrics | None
) -> dict[str, Any]:
    """Trains in the runtime that the type of `config.runtime` names, which must fit the environment."""
    env, agent, options = config.env, config.agent, config.runtime
    keep_programs()
    if is_on_device(env) and isinstance(options, FusedConfig):
        from seedbed.fused import train as fused

        return fused.train(
            env=env, agent=agent, config=options, run=folder, view=view, on_metrics=on_metrics
        )
    host: Any = env
    if isinstance(options, ParamServerConfig):
        from seedbed.paramserver import train as paramserver

        return paramserver.train(
            env=host, agent=agent, config=options, run=folder, view=view, on_metrics=on_metrics
        )
    assert isinstance(options, CentralConfig), "the type of the environment has been checked"
    from seedbed.central import train as central

    return central.train(
        env=host, agent=agent, config=options, run=folder, view=view, on_metrics=on_metrics
    )


@dataclasses.dataclass(frozen=True)
class TrainedAgent:
    """The policy that a run has learned, and the environment it was trained in."""

    config: TrainConfig  # of the run
    forms: Forms
    agent: Agent  # bound: its `spec` is filled in
    params: Tree
    step: int  # transitions that were done at the checkpoint
    member: str = ""  # name of the best member of a population, such as `seed 3`

    @property
    def env(self) -> HostEnvConfig | Environment:
        """The environment that it was trained in."""
        return self.config.env


@checked
def restore(
    run: str | Path,
    warn: Callable[[str], None] = lambda text: None,
    newest: bool = False,
    trust: bool = False,
) -> TrainedAgent:
    """Restores the checkpoint with the run's best evaluation; the newest if `newest`, or if there is none.

    Of a population, it takes only the best member. `trust` is that of `load`. Calls `warn` with a message
    about each damaged checkpoint, if the best checkpoint is not the newest, and if no member was evaluated
    there. Raises SeedbedError if the folder is not that of a run, or has no whole checkpoint.
    """
    folder = RunFolder.read(Path(run))
    config = resolve.saved_config(folder, trust)
    try:
        forms = _forms(config.env)
        agent = bind(config.agent, stacked_spec(forms.spec, _frame_stack(config.env)))
        template = jax.eval_shape(agent.init, jax.random.key(0)).params
    except SeedbedError:
        raise
    except Exception as error:  # options may be anything
        raise SeedbedError(
            f"the agent and the environment of {printable(run)} cannot be made of its {CONFIG} "
            f"({type(error).__name__}: "
            f"{error}): restore that file, or mend their code"
        ) from error
    read = restore_newest if newest else restore_best
    tell = (
        (lambda step: None)
        if newest
        else functools.partial(warn_of_newer, folder.checkpoints, warn)
    )
    if not isinstance(config.runtime, FusedConfig):
        step, params, _ = read(folder.checkpoints, template, warn, part="params")
        tell(step)
        return TrainedAgent(config, forms, agent, params, step)
    members = len(config.runtime.variations)
    if members > 1:
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((members, *x.shape), x.dtype), template
        )
    step, params, metadata = read(folder.checkpoints, template, warn, part="learner.params")
    tell(step)
    if members == 1:
        return TrainedAgent(config, forms, agent, params, step)
    told = metadata.get("best_seed")
    best = told if isinstance(told, int) and 0 <= told < members else 0
    member = config.runtime.member_names[best]
    if told != best:
        warn(f"no member was evaluated at this checkpoint: taking the first, {member}")
    params = jax.tree.map(lambda x: x[best], params)
    return TrainedAgent(config, forms, agent, params, step, member)


@checked
def make_gymnasium(
    name: str, num_envs: int | None = None, seed: int | None = None, **options: Any
) -> gymnasium.Env | gymnasium.vector.VectorEnv:
    """Makes a Gymnasium environment from an on-device one, or a vector environment if `num_envs` is given.

    `name` is a short name such as ant, or `module:Class`. `options` are fields of the environment. `seed` is
    that of the first reset that is given none. Observations and actions have the shapes of Gymnasium's
    spaces; those of a vector environment are `[num_envs, ...]`, and an ended environment resets itself in the
    next step. Raises SeedbedError for host environments and unknown options.
    """
    from seedbed.envs.device.gymnasium_api import make_gymnasium as make

    env = resolve.resolve_env(name)
    if not is_on_device(env):
        raise SeedbedError(
            f"{name!r} is an environment of the host: make it with gymnasium.make; on the device are "
            f"{', '.join(sorted(ON_DEVICE))}"
        )
    known = [field.name for field in dataclasses.fields(env)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
            raise SeedbedError(f"{name} has no option {option!r}; did you mean {near[0]!r}?")
    env = dataclasses.replace(env, **options)  # type: ignore[type-var]
    require_fields(env)
    if seed is not None:
        require_seed(seed)
    return make(env, num_envs, seed)


class Policy:
    """A trained policy for the user's own loops: takes the environment's observations, returns actions."""

    def __init__(self, forms: Forms, policy: evaluation.SpecPolicy) -> None:
        self._forms, self._policy = forms, policy

    def reset(self) -> None:
        """Clears recurrent state and frame stack: the next observation opens an episode."""
        self._policy.reset()

    def act(self, observation: Any, first: Array | None = None, reward: Array | None = None) -> Any:
        """Chooses the action for one observation, or actions for a batch as a vector environment gives it.

        `first` (a bool, or bools `[B]`) marks observations that open an episode. Without it, only the first
        observation after construction or `reset` does. Actions are those of the environment, `[B, ...]` for a
        batch. An agent with a memory also needs `reward` (a number,
        or `[B]`), the reward of the last action. A change of the batch size works like `reset`.
        """
        return self._forms.decode(self._policy.act(self._forms.encode(observation), first, reward))


def policy_of(trained: TrainedAgent, seed: int = 0) -> Policy:
    """Returns the policy of a restored run; `seed` is that of the actions that it draws."""
    spec, frame_stack = trained.forms.spec, _frame_stack(trained.env)
    return Policy(
        trained.forms,
        evaluation.SpecPolicy(trained.agent, spec, frame_stack, trained.params, seed),
    )


@checked
def load(run: str | Path, seed: int = 0, newest: bool = False, trust: bool = False) -> Policy:
    """Loads a run's best policy, or its newest; use it as `seedbed.load(run).act(observation)`.

    `run` is the folder of a run. `seed` is that of the actions, where they are drawn. With `newest` it takes
    the newest checkpoint instead of the one with the best evaluation. Observations and actions are those of
    the environment, one or a batch `[B, ...]`.

    An agent or an environment of users is imported only if the folder, and the file that names it, belong to
    this user and nobody else can write them, or with `trust`.

    `run` may also be a folder that `seedbed export` has written, of one of Seedbed's own agents. Such a
    policy takes observations and gives actions as the folder's contract describes them. Raises SeedbedError
    if the folder is neither, or is damaged.
    """
    require_seed(seed)
    if not exported.is_exported(Path(run)):
        return policy_of(restore(run, newest=newest, trust=trust), seed)
    if newest:
        raise SeedbedError(
            f"{printable(run)} is an exported policy, and has no newer one: leave out newest"
        )
    agent, spec, frame_stack, params = exported.read(Path(run))
    return Policy(PlainForms(spec), evaluation.SpecPolicy(agent, spec, frame_stack, params, seed))


@checked
def evaluate(
    run: str | Path,
    *,
    episodes: int = 100,
    env: str | None = None,
    seed: int = 0,
    newest: bool = False,
    trust: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Plays whole episodes with a run's best policy, or its newest; returns a summary of their returns.

    `env` names another environment with the same shapes; None plays the run's own. `env_steps` in the
    result is the number of transitions that the policy was trained for.

    Of a population, the member plays that was best in the evaluation of that checkpoint, or the first
    member if there was no evaluation. `member` in the result names it.

    If `env` is the Gymnasium task of an on-device environment, such as Ant-v5, it is made with the
    observation options that the policy was trained with. All else is Gymnasium's default, so the return is
    that of the standard task. `trust` is that of `load`. Calls `warn` like `restore`. Raises SeedbedError if
    an episode does not end.
    """
    at_least("episodes", episodes, 1)
    require_seed(seed)
    trained = restore(run, warn, newest, trust)
    config = trained.env if env is None else other_environment(trained, env, run)
    if is_on_device(config):
        from seedbed.fused import program

        result = program.evaluate(
            env=config, agent=trained.agent, params=trained.params, episodes=episodes, seed=seed
        )
    else:
        result = evaluation.evaluate(
            env=config,
            agent=trained.agent,
            params=trained.params,
            episodes=episodes,
            seed=seed,
            actor_timeout_s=getattr(
                trained.config.runtime, "actor_timeout_s", CentralConfig.actor_timeout_s
            ),
        )
    played = {"member": trained.member} if trained.member else {}
    return {**result, "env_steps": trained.step, **played}


def other_environment(
    trained: TrainedAgent, name: str, run: str | Path
) -> HostEnvConfig | Environment:
    """Makes the environment `name` for a trained policy; raises SeedbedError if its shapes do not fit.

    `run` is for the error message only.
    """
    if is_on_device(trained.env) and getattr(trained.env, "gymnasium_id", None) == name:
        config: HostEnvConfig | Environment = GymEnv(name, kwargs=trained.env.gymnasium_options())  # type: ignore[attr-defined]
    else:
        config = resolve.resolve_env(name)
    found, stack = _forms(config).spec, _frame_stack(config)
    if found != trained.forms.spec or stack != _frame_stack(trained.env):
        raise SeedbedError(
            f"environment {name!r} does not fit the policy of {printable(run)}: it has {found} with "
            "frame stack "
            f"{stack}, trained was {trained.forms.spec} with {_frame_stack(trained.env)}"
        )
    return config


def _forms(env: HostEnvConfig | Environment) -> Forms:
    """Returns the formats of an environment; makes a host environment once to see its spaces."""
    if is_on_device(env):
        return PlainForms(env.spec)
    host = env.make(1, 0)  # type: ignore[union-attr]
    host.close()
    return host


def _frame_stack(env: HostEnvConfig | Environment) -> int:
    return getattr(env, "frame_stack", 1)
