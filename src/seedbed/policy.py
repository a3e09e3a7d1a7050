"""The policy that a run has learned: restored from a checkpoint, evaluated, and for loops of the user's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import gymnasium
import jax

from seedbed.arguments import at_least, checked, require_seed
from seedbed.config.configuration import TrainConfig
from seedbed.config.resolve import resolve_env
from seedbed.config.saved import saved_config
from seedbed.config.settle import called, env_of
from seedbed.envs.device.wrappers import changing, innermost
from seedbed.envs.host.contract import HostEnvConfig, is_on_device, made_once
from seedbed.envs.host.gym import GymEnv
from seedbed.printable import printable
from seedbed.run import evaluation
from seedbed.run.bucket import run_path
from seedbed.run.deployed import Policy as DeployedPolicy
from seedbed.run.folder import CONFIG, RunFolder
from seedbed.run.forms import PlainForms, SpaceCodec
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.restoring import restore_best, restore_newest, warn_of_newer
from seedbed.run.stacking import stacked_spec
from seedbed.spaces import Box, policy_spec
from seedbed.types import Agent, Array, Environment, EnvSpec, SeedbedError, Tree, bind

EnvLike: TypeAlias = (
    str | HostEnvConfig | Environment | gymnasium.Env[Any, Any] | Callable[..., Any]
)
"""An environment as `train` takes it: by name, by its configuration, made, or as what makes it."""


@dataclasses.dataclass(frozen=True)
class TrainedAgent:
    """The policy that a run has learned, and the environment it was trained in."""

    config: TrainConfig  # of the run
    forms: SpaceCodec
    agent: Agent  # bound: its `spec` is filled in
    params: Tree
    step: int  # transitions that were done at the checkpoint
    member: str = ""  # name of the best member of a population, such as `seed 3`

    @property
    def env(self) -> HostEnvConfig | Environment:
        """The environment that it was trained in."""
        return self.config.env

    def deployed(self, warn: Callable[[str], None]) -> DeployedPolicy:
        """Returns the agent as a policy outside of Seedbed, whose networks compute in float32.

        Calls `warn` if they do so in bfloat16 here, which has no form in ONNX or in a browser.
        """
        agent: Any = self.agent
        dtype = getattr(agent, "compute_dtype", "float32")
        if dtype != "float32":
            warn(
                f"the policy computes in float32, and not in {dtype} as in training and evaluations"
            )
            agent = dataclasses.replace(agent, compute_dtype="float32")
        spec, frame_stack = policy_spec(self.forms.spec), frame_stack_of(self.env)
        return DeployedPolicy(agent, self.params, spec, frame_stack)


@checked
def restore(
    run: str | Path,
    warn: Callable[[str], None] = lambda text: None,
    newest: bool = False,
    trust: bool = False,
    greedy: bool = False,
) -> TrainedAgent:
    """Restores the checkpoint with the run's best evaluation; the newest if `newest`, or if there is none.

    Of a population, it takes only the best member. `trust` is that of `load`. With `greedy`, evaluations
    take the agent's best action and draw none. Calls `warn` with a message
    about each damaged checkpoint, if the best checkpoint is not the newest, and if no member was evaluated
    there. Raises SeedbedError if the folder is not that of a run, or has no whole checkpoint.
    """
    folder = RunFolder.read(run_path(str(run)))
    config = saved_config(folder, trust)
    try:
        forms = forms_of(config.env)
        agent = bind(config.agent, stacked_spec(forms.spec, frame_stack_of(config.env)))
        agent = evaluation.greedily(agent) if greedy else agent
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
    variations = config.runtime.variations
    if (members := len(variations)) > 1:
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((members, *x.shape), x.dtype), template
        )
    step, params, metadata = read(folder.checkpoints, template, warn, part="learner.params")
    tell(step)
    if members == 1:
        agent = dataclasses.replace(cast(Any, agent), **variations[0])
        return TrainedAgent(config, forms, agent, params, step)
    told = metadata.get("best_seed")
    best = told if isinstance(told, int) and 0 <= told < members else 0
    member = config.runtime.member_names[best]
    if told != best:
        warn(f"no member was evaluated at this checkpoint: taking the first, {member}")
    params = jax.tree.map(lambda x: x[best], params)
    agent = dataclasses.replace(cast(Any, agent), **variations[best])
    return TrainedAgent(config, forms, agent, params, step, member)


class Policy:
    """A trained policy for the user's own loops: takes the environment's observations, returns actions."""

    def __init__(self, forms: SpaceCodec, policy: evaluation.SpecPolicy) -> None:
        self._forms, self._policy = forms, policy

    @property
    def params(self) -> Tree:
        """The parameters that acting needs, the agent's own tree of arrays."""
        return self._policy.params

    def reset(self) -> None:
        """Clears recurrent state and frame stack: the next observation opens an episode."""
        self._policy.reset()

    def act(
        self,
        observation: Any,
        first: Array | None = None,
        reward: Array | None = None,
        greedy: bool = False,
    ) -> Any:
        """Chooses the action for one observation, or actions for a batch as a vector environment gives it.

        `first` (a bool, or bools `[B]`) marks observations that open an episode. Without it, only the first
        observation after construction or `reset` does. Actions are those of the environment, `[B, ...]` for a
        batch. An agent with a memory also needs `reward` (a number, or `[B]`), the reward of the last action;
        without it, this raises SeedbedError within an episode. A change of the batch size works like `reset`.
        With `greedy`, the action is the best by the policy, and none is drawn.
        """
        seen = self._forms.encode(observation)
        return self._forms.decode(self._policy.act(seen, first, reward, greedy))

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Chooses actions as the models of Stable-Baselines3 do; returns them and `state` as it came.

        `episode_start` is `first` of `act`, and `deterministic` its `greedy`. The policy keeps a memory by
        itself; an agent that has one gets the reward 0 here, as it is not told.
        """
        return self.act(observation, episode_start, 0.0, deterministic), state


def policy_of(trained: TrainedAgent, seed: int = 0) -> Policy:
    """Returns the policy of a restored run; `seed` is that of the actions that it draws."""
    spec, frame_stack = policy_spec(trained.forms.spec), frame_stack_of(trained.env)
    return Policy(
        trained.forms,
        evaluation.SpecPolicy(trained.agent, spec, frame_stack, trained.params, seed),
    )


@checked
def evaluate(
    run: str | Path,
    *,
    episodes: int = 100,
    env: EnvLike | None = None,
    seed: int = 0,
    newest: bool = False,
    trust: bool = False,
    greedy: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Plays whole episodes with a run's best policy, or its newest; returns a summary of their returns.

    `env` is another environment, as `train` takes it, with the same actions and the same shapes for the
    policy; it stacks as many observations as the run's own, which None plays. `seed` is that of the
    environments and of actions that are drawn. `env_steps` in the result is the number of transitions that
    the policy was trained for.

    Of a population, the member plays that was best in the evaluation of that checkpoint, or the first
    member if there was no evaluation. `member` in the result names it.

    If `env` is the Gymnasium task of an on-device environment, such as Ant-v5, it is made with the
    observation options that the policy was trained with. All else is Gymnasium's default, so the return is
    that of the standard task. With `greedy`, the policy's best action is taken and none is drawn; a run's
    own evaluations draw choices. `trust` is that of `load`. Calls `warn` like `restore`. Raises SeedbedError
    if an episode does not end.
    """
    at_least("episodes", episodes, 1)
    require_seed(seed)
    trained = restore(run, warn, newest, trust, greedy)
    return evaluate_trained(trained, run, episodes, env, seed, warn)


def evaluate_trained(
    trained: TrainedAgent,
    run: str | Path,
    episodes: int,
    env: EnvLike | None,
    seed: int,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Plays whole episodes with a policy of `restore`, as `evaluate` does; `run` is for messages only."""
    config = trained.env if env is None else other_environment(trained, env, run)
    if is_on_device(config):
        from seedbed.fused import playing

        result = playing.evaluate(
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
            tell=warn,
        )
    played = {"member": trained.member} if trained.member else {}
    return {**result, "env_steps": trained.step, **played}


def other_environment(
    trained: TrainedAgent, given: EnvLike, run: str | Path
) -> HostEnvConfig | Environment:
    """Returns another environment for a trained policy; raises SeedbedError if its shapes do not fit.

    It stacks as many observations as the policy takes. `run` is for the error message only.
    """
    task: Any = trained.env
    if is_on_device(trained.env) and not changing(trained.env):
        task = innermost(trained.env)
    config: Any
    if getattr(task, "gymnasium_id", None) == given:
        config = GymEnv(task.gymnasium_id, kwargs=task.gymnasium_options())
    else:
        config = resolve_env(given) if isinstance(given, str) else env_of(given)
    stack = frame_stack_of(trained.env)
    if hasattr(config, "frame_stack"):
        config = dataclasses.replace(config, frame_stack=stack)
    found, wanted = _played(forms_of(config).spec), _played(trained.forms.spec)
    parts = (
        ("observation", found.observation, wanted.observation),
        ("action", found.action, wanted.action),
        ("frame stack", frame_stack_of(config), stack),
    )
    differs = "; ".join(
        f"its {what} is {_in_short(has)}, not {_in_short(had)}"
        for what, has, had in parts
        if has != had
    )
    if differs:
        name = given if isinstance(given, str) else called(config)
        raise SeedbedError(
            f"environment {name!r} does not fit the policy of {printable(run)}: {differs}"
        )
    return config


def _in_short(part: object) -> str:
    """Returns a part of a spec as a text; of a Box all of whose numbers have the same bounds, these only."""
    if not isinstance(part, Box) or len({*part.low}) != 1 or len({*part.high}) != 1:
        return str(part)
    return f"Box(shape={part.shape}, from {part.low[0]} to {part.high[0]})"


def _played(spec: EnvSpec) -> EnvSpec:
    """Returns the observations and actions that a policy plays with: neither critics' part nor mirror."""
    return dataclasses.replace(policy_spec(spec), mirror=None)


def forms_of(env: HostEnvConfig | Environment) -> SpaceCodec:
    """Returns the formats of an environment; makes a host environment once to see its spaces."""
    if is_on_device(env):
        return PlainForms(env.spec)
    return made_once(env)


def frame_stack_of(env: HostEnvConfig | Environment) -> int:
    """Returns how many successive observations an environment shows at once."""
    return getattr(env, "frame_stack", 1)
