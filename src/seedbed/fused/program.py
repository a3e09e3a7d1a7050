"""The compiled program of a fused run: its iterations and its evaluations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seedbed.envs.device.changes import normalises_observations
from seedbed.envs.device.wrappers import (
    episode_statistics,
    innermost,
    resets_itself,
    training,
    with_integrator,
)
from seedbed.fused import rollout
from seedbed.fused.carry import Carry, Iteration, Plan
from seedbed.fused.playing import Play, compile_play, varied
from seedbed.run.checking import checked
from seedbed.run.devices import choose_shared_devices
from seedbed.run.group import Group, placed
from seedbed.run.options import FusedConfig
from seedbed.run.sizes import require_sizes
from seedbed.run.update import AXIS, progress_of
from seedbed.types import (
    Agent,
    Array,
    Environment,
    SeedbedError,
    bind,
    learns_from_replay,
    on_policy,
    plays_episodes,
)

_MEMBERS = "members"
"""The mapped axis that divides the members of a population among devices."""


class Program:
    """The compiled iterations and evaluations of a run. For one thread at a time."""

    def __init__(self, env: Environment, agent: Agent, config: FusedConfig) -> None:
        """Checks the options and wraps the environment; compiles nothing yet.

        `env` must be without auto-reset and `agent` may be unbound. Raises SeedbedError if a device is
        missing, if sizes do not fit, if one run with replay is to use several devices, if `sweep` names an
        option that cannot vary, or if `env` resets itself, normalises observations or has no integrator to
        choose.
        """
        self.task = type(innermost(env)).__name__
        devices = choose_shared_devices(config.devices, "--devices")
        # This raises if the environment does not suit the agent. Its message is clearer than those on sizes.
        bind(agent, env.spec)
        self.members = len(config.variations)
        self.plan = plan_of(agent, config, len(devices) if self.members == 1 else 1)
        if self.members > 1 and self.members % len(devices):
            raise SeedbedError(
                f"{self.members} runs at once on {len(devices)} devices, of which each has equally many: "
                "change --seeds, the values of --sweep, or --devices"
            )
        _check_sweep(agent, config)
        if plays_episodes(agent) and not env.episode_steps:
            raise SeedbedError(
                f"{type(env).__name__} has no time limit (episode_steps is 0), and {type(agent).__name__} "
                "learns from whole episodes, which may never end: give --env.episode-steps"
            )
        if resets_itself(env):
            raise SeedbedError(
                f"{type(env).__name__}: the environment resets itself; leave out auto_reset or training, "
                "which the runtime adds"
            )
        if normalises_observations(env):
            raise SeedbedError(
                f"{self.task} is in normalise_observation, whose statistics neither evaluations nor policies "
                "have: leave it out, and give --agent.normalise-observations"
            )
        self.config, self.env = config, episode_statistics(training(env))
        self._euler_env = _euler_env(env, config.euler_share)
        # The number of steps of each member that train with Euler's integrator.
        self.euler_steps = math.ceil(config.euler_share * config.steps) if self._euler_env else 0
        self.agent = checked(agent, env.spec)
        self.group = Group.joined
        # What divides a batch among devices, or among them the members of a population, which is no batch.
        name = AXIS if self.members == 1 else _MEMBERS
        self._mesh, self._axis = (
            Mesh(np.array(devices), (name,)),
            name if len(devices) > 1 else None,
        )
        self._run: Callable[[Carry, np.ndarray, bool], tuple[Carry, Array]] | None = None
        self._unpack: Callable[[np.ndarray], Iteration] | None = None
        self._play: Play | None = None

    @property
    def carry_specs(self) -> Carry:
        """The partition of a carry: environments and actor states are divided among the devices.

        Everything else is replicated on each device. With several members, these are divided instead.
        """
        whole, divided = P(), P(self._mesh.axis_names[0])
        if self.members > 1:
            return Carry(*[divided] * len(Carry._fields))  # type: ignore[arg-type]
        return Carry(
            learner=whole,  # type: ignore[arg-type]
            env=divided,  # type: ignore[arg-type]
            actor=divided,  # type: ignore[arg-type]
            steps=whole,
            key=whole,
            replay=whole,  # type: ignore[arg-type]
            owed=whole,
        )

    def first(self) -> Carry:
        """Makes the carry of a new run. With several members, all leaves have a leading axis `[members]`.

        All randomness comes from the members' seeds. The carry is not placed on the run's devices yet.
        """

        @jax.jit
        def one(seed: Array, options: dict[str, Array]) -> Carry:
            agent, key = varied(self.agent, options), jax.random.key(seed)
            return rollout.first_carry(agent, self.env, self.plan, key)

        # One after the other: an agent of the user's may draw orthogonal matrices by batches of
        # factorisations, which can wait for one another for ever (`nets/orthogonal.py`).
        with self._of_numbers():
            members = [
                one(np.uint32(seed), {name: np.float32(value) for name, value in options.items()})
                for seed, options in zip(
                    self.config.member_seeds, self.config.variations, strict=True
                )
            ]
        if self.members == 1:
            return members[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)

    @property
    def _options(self) -> dict[str, np.ndarray]:
        """The swept options by name: float32 `[members]`, or scalars if there is one member."""
        variations = self.config.variations
        every = {
            name: np.array([each[name] for each in variations], np.float32)
            for name in variations[0]
        }
        return every if self.members > 1 else {name: array[0] for name, array in every.items()}

    def place(self, carry: Carry) -> Carry:
        """Puts a carry onto the run's devices, as `carry_specs` divides it."""
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self.carry_specs)
        return Carry(
            *(
                jax.tree.map(functools.partial(placed, sharding=sharding), part)
                for part, sharding in zip(carry, shardings, strict=True)
            )
        )

    def compile(self, carry: Carry) -> None:
        """Compiles an iteration for carries with the shapes of `carry`, which is not changed.

        Call it before `run`, from one thread at a time. Raises SeedbedError if a swept option changes
        the program itself.
        """
        compiled = self.traced(carry).lower().compile()
        self._run = lambda carry, progress, use_euler: compiled(
            carry, self._options, progress, np.bool_(use_euler)
        )

    def traced(self, carry: Carry) -> jax.stages.Traced:
        """Traces an iteration for carries with the shapes of `carry`, which may be abstract.

        Raises SeedbedError if a swept option changes the program itself.
        """

        def step(
            carry: Carry, options: dict[str, Array], progress: Array, use_euler: Array
        ) -> tuple[Carry, Array]:
            env, euler_env = self.env, self._euler_env
            if euler_env is not None and self.config.euler_share == 1:
                env, euler_env = euler_env, None  # the own step is not compiled
            move = rollout.moves(env, euler_env, use_euler)
            axis = self._axis if self.members == 1 else None
            carry, report = rollout.iterate(
                varied(self.agent, options), move, self.plan, axis, carry, progress
            )
            packed, self._unpack = _packed(report)
            return carry, packed

        if self.members > 1:
            step = self._own_members(jax.vmap(step, in_axes=(0, 0, 0, None)))
        if self._axis is not None:
            specs, check = self.carry_specs, self.members == 1
            ins, outs = (specs, P(), P(), P()), (specs, P())
            step = jax.shard_map(
                step, mesh=self._mesh, in_specs=ins, out_specs=outs, check_vma=check
            )
        begun, use_euler = self._progress([0] * self.members), np.bool_(False)
        with self._of_numbers():
            return jax.jit(step, donate_argnums=0).trace(carry, self._options, begun, use_euler)

    @contextlib.contextmanager
    def _of_numbers(self) -> Iterator[None]:
        """Raises SeedbedError if what is traced within needs the number of a swept option."""
        try:
            yield
        except jax.errors.ConcretizationTypeError as error:
            if not self.config.sweep:
                raise
            raise SeedbedError(
                f"--sweep {self.config.sweep}: this option changes the program itself, so its values "
                "cannot train at once; train them one after the other"
            ) from error

    def _own_members(self, step: Callable[..., tuple[Carry, Array]]) -> Callable[..., Any]:
        """Returns an iteration of this device's members, whose report is that of all."""
        if self._axis is None:
            return step
        share = self.members // self._mesh.size

        def own(
            carry: Carry, options: dict[str, Array], progress: Array, use_euler: Array
        ) -> tuple[Carry, Array]:
            begin = share * jax.lax.axis_index(_MEMBERS)
            options, progress = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), begin, share),
                (options, progress),
            )
            carry, report = step(carry, options, progress, use_euler)
            every = jnp.zeros((self.members, report.shape[1]), report.dtype)
            every = jax.lax.dynamic_update_slice_in_dim(every, report, begin, 0)
            return carry, jax.lax.psum(every, _MEMBERS)

        return own

    def run(self, carry: Carry, done: Sequence[int]) -> tuple[Carry, Iteration]:
        """Runs one iteration and waits for it; returns the new carry and the report.

        The report is on the host; with several members its leaves are `[members]`. Donates `carry`. `done`
        holds the transitions of each member so far, which schedules follow. All members train with Euler's
        integrator until the last of them has done its `euler_steps`. Call from one thread at a time.
        """
        assert self._run is not None and self._unpack is not None, "compile comes first"
        carry, report = self._run(carry, self._progress(done), min(done) < self.euler_steps)
        return carry, self._unpack(np.asarray(report))

    def _progress(self, done: Sequence[int]) -> np.ndarray:
        """Returns the progress of the members, float32 `[members]`, or a scalar if there is one member."""
        progress = np.array([progress_of(each, self.config.steps) for each in done])
        return progress if self.members > 1 else progress[0]

    def evaluate(
        self, carry: Carry, seed: int, stop: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Any]] | None:
        """Plays episodes with the policy of each member; returns a summary for each, or None if stopped.

        All members get the same episodes, which `seed` draws. The first call compiles. `stop` is called every
        100 steps, usually at least once a second; if it returns True, this returns None. Raises SeedbedError
        if an episode does not end. The carry is not changed. Call from one thread at a time.
        """
        if self._play is None:
            episodes = self.config.evaluate_episodes
            self._play = compile_play(self.agent, self.env, episodes, self.members, self._options)
        params = jax.device_put(carry.learner.params, self._mesh.devices.flat[0])
        return self._play(params, seed, stop)


def plan_of(agent: Agent, config: FusedConfig, devices: int) -> Plan:
    """Returns the sizes of an iteration; raises SeedbedError if the options do not fit one another."""
    require_sizes(agent)
    batch, unrolls = agent.experience.batch, on_policy(agent)
    if unrolls is not None:
        parts = devices * agent.minibatches
        if batch % parts:
            raise SeedbedError(
                f"agent.batch is {batch} environments: it must divide by {devices} devices x "
                f"{agent.minibatches} minibatches, {parts}"
            )
        return Plan(batch, unrolls.unroll, agent.epochs * agent.minibatches)
    if devices > 1:
        raise SeedbedError(
            f"{devices} devices: an agent that learns from replay trains on one device; name one"
        )
    assert learns_from_replay(agent), "an agent's experience is one of the two"
    experience = agent.experience
    items = config.envs * config.unroll / experience.period
    updates = items * experience.ratio / batch
    if updates < 1 or abs(updates - round(updates)) > 1e-6:
        steps = experience.period * batch / (config.envs * experience.ratio)
        least = next((n for n in range(1, 9) if abs(n * steps - round(n * steps)) < 1e-6), None)
        hint = f", as with --unroll {round(least * steps)}" if least else ""
        raise SeedbedError(
            f"{config.envs} envs x unroll {config.unroll} make {items:g} items an iteration, and "
            f"with agent.ratio {experience.ratio:g} and agent.batch {batch} that is {updates:g} updates: "
            f"choose them so that it is a whole number{hint}"
        )
    return Plan(config.envs, config.unroll, round(updates))


def _euler_env(env: Environment, share: float) -> Environment | None:
    """Returns the wrapped environment, with Euler's integrator, that trains the first `share` of a run.

    Returns None if `share` is 0 or if `env` uses this integrator itself. Raises SeedbedError if the
    environment has no integrator to choose.
    """
    if not share:
        return None
    try:
        other = with_integrator(env, "euler")
    except SeedbedError as error:
        raise SeedbedError(
            f"euler_share is {share:g}, but {error}; train with --euler-share 0"
        ) from error
    return None if other == env else episode_statistics(training(other))


def _check_sweep(agent: Agent, config: FusedConfig) -> None:
    """Raises SeedbedError unless the swept option is a float of the agent and its values are in range.

    It also raises SeedbedError if a value changes how experience is kept.
    """
    for options in config.variations if config.sweep else ():
        for name in options:
            known = [
                field.name
                for field in dataclasses.fields(agent)  # type: ignore[arg-type]
                if isinstance(getattr(agent, field.name), float)
            ]
            if name not in known:
                raise SeedbedError(
                    f"--sweep {config.sweep}: {name} is no float of {type(agent).__name__}, so it cannot "
                    f"vary within one program; these can: {', '.join(known)}"
                )
        varied = dataclasses.replace(agent, **options)  # type: ignore[type-var]
        if varied.experience != agent.experience:
            raise SeedbedError(
                f"--sweep {config.sweep}: this option changes how experience is kept, so its values cannot "
                "train at once; train them one after the other"
            )


def _packed(report: Iteration) -> tuple[Array, Callable[[np.ndarray], Iteration]]:
    """Packs a report of N scalars of 32 bits or bools into uint32 `[N]`.

    The second result is a function that unpacks `[..., N]` on the host into leaves `[...]`. To fetch each
    scalar by itself would take a tenth of a short iteration.
    """
    leaves, structure = jax.tree.flatten(report)
    flags = [leaf.dtype.kind == "b" for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    words = [
        leaf.astype(jnp.uint32) if flag else jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        for leaf, flag in zip(leaves, flags, strict=True)
    ]

    def unpack(packed: np.ndarray) -> Iteration:
        columns = [packed[..., i] for i in range(len(dtypes))]
        return structure.unflatten(
            column.astype(bool) if flag else column.view(dtype)
            for column, flag, dtype in zip(columns, flags, dtypes, strict=True)
        )

    return jnp.stack(words), unpack
