"""The base of tasks on robots whose joints have position servos, after MuJoCo Playground's.

An action moves the targets of the servos. The policy sees what the robot measures, with noise, under `state`;
what only a simulator knows is under `privileged`, for critics. The reward is a weighted sum of terms.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.given_model import require_like
from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.mujoco import MujocoTask, Verdict
from seedbed.envs.device.robots.edits import Edits, compiled_with, limits, model_with
from seedbed.envs.device.robots.ride import Scales
from seedbed.envs.device.robots.tiles import Tiles
from seedbed.spaces import PRIVILEGED
from seedbed.types import Array, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServoedTask(MujocoTask, abc.ABC):
    """A base of the tasks in which actions move the targets of joints' servos."""

    kp: float = 0.0
    """Stiffness of the joints' servos in N m/rad; 0 is the file's."""
    kd: float = 0.0
    """Damping of the joints that servos drive, in N m s/rad; 0 is the file's."""
    action_scale: float
    """How far an action of 1 moves a servo's target, in rad."""
    noise_level: float = 1.0
    """Factor of the noise on what is observed; 0 is none."""
    scales: Scales
    """Weights of the reward's terms."""
    solver_iterations: int = 0
    """Iterations of the solver of contacts in each step of the physics; 0 is until it has converged."""
    lowest_reward: ClassVar[float] = 0.0
    """The least that a step pays."""
    action_moves: ClassVar[Literal["posture", "target", "joints", "motion"]] = "posture"
    """What an action moves the servos from: the posture, the target before, the joints, or a motion's."""
    motor_hz: ClassVar[float] = 0.0
    """If not 0, the frequency at which servos would swing with their motors' inertia alone, damped twice
    critically, in place of the file's gains; targets are then not held within the servos' range."""
    critical_servos: ClassVar[bool] = False
    """Whether servos damp critically, by the inertia of each joint in qpos0, and not as the file says."""
    bounded_targets: ClassVar[bool] = False
    """Whether the targets of the servos are held within the servos' range."""
    apart: ClassVar[tuple[str, ...]] = ()
    """Bodies that never reach each other, whose contacts the file asks for and nobody needs."""
    tiles: ClassVar[Tiles | None] = None
    """What the ground is made of, in place of the file's floor."""

    @abc.abstractmethod
    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns what the robot measures, in parts: each [n] with the size of its noise, or sizes [n]."""

    @abc.abstractmethod
    def state(self, kept: Tree) -> list[Array]:
        """Returns the parts of the observation of the policy."""

    @abc.abstractmethod
    def privileged(self, now: physics.Data, kept: Tree) -> list[Array]:
        """Returns what only critics see besides the observation; `[]` if they see nothing else."""

    @abc.abstractmethod
    def centre(self, kept: Tree) -> Array:
        """Returns the targets [nu] in rad about which an action moves the servos."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        self.require_no_less("noise_level", "kp", "kd", "solver_iterations", "action_scale")
        require_like(self, "kp", "kd", "solver_iterations")

    @functools.cached_property
    def _model(self) -> physics.Model:
        file = Version.of(self.model_path)
        return model_with(file, self.integrator, self.edits, self.solver_iterations)

    def compiled(self) -> Any:
        """Returns what is simulated as MuJoCo's MjModel, with all that pictures show."""
        return compiled_with(self.model_path, self.edits)

    @property
    def edits(self) -> Edits:
        """Returns what the task changes in its file."""
        servos = (self.critical_servos, self.apart, self.tiles, self.motor_hz)
        return Edits(self.kp, self.kd, *servos)

    @property
    def delay(self) -> int:
        """Returns the steps until an action reaches the servos."""
        return 0

    def action_bounds(self) -> np.ndarray:
        """Returns -1 and 1 for each action, [nu, 2]."""
        return np.tile([-1.0, 1.0], (self.physics_model().nu, 1))

    def control(self, kept: Tree, action: Array) -> Array:
        """Returns the targets of the servos [nu], in rad."""
        targets = self.centre(kept) + self.action_scale * action
        if not self.bounded_targets:
            return targets
        return jnp.clip(targets, *self.target_bounds.T)

    @property
    def target_bounds(self) -> np.ndarray:
        """Returns the bounds [nu, 2] of the servos' targets, in rad."""
        model = self.physics_model()
        bounds = limits(model.actuator_ctrllimited, model.actuator_ctrlrange)
        return bounds.astype(np.float32)

    def observe(self, now: physics.Data) -> Array:
        """Returns what the robot measures, without noise."""
        return jnp.concatenate([part for part, _ in self.measured(now)])

    def shown(self, now: physics.Data, kept: Tree) -> Tree:
        """Returns what the policy sees, under `state`, and what critics see besides."""
        state, unseen = self.state(kept), self.privileged(now, kept)
        shown = {"state": jnp.concatenate(state)}
        return shown | ({PRIVILEGED: jnp.concatenate(unseen)} if unseen else {})

    def noisy(self, now: physics.Data, key: Array, number: Array) -> jax.Array:
        """Returns what the robot measures with noise [m], in the step of this number; consumes no key."""
        clean = self.observe(now)
        if not self.noise_level:
            return clean
        drawn = jax.random.fold_in(key, 0x6E6F6973 ^ number)
        spread = jax.random.uniform(drawn, clean.shape, jnp.float32, -1.0, 1.0)
        return clean + self.noise_level * self._sizes * spread

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """Returns the sizes of the noise on what is measured [m]."""
        model = self.physics_model()
        sizes: list[Any] = []

        def parts(now: physics.Data) -> list[Array]:
            found = self.measured(now)
            sizes[:] = [size for _, size in found]
            return [part for part, _ in found]

        state = physics.init(model, model.qpos0.astype(np.float32))
        shapes = jax.eval_shape(parts, physics.make_data(model, state))
        spread = [
            np.broadcast_to(np.float32(size), part.shape)
            for size, part in zip(sizes, shapes, strict=True)
        ]
        return np.concatenate(spread)

    def paid(self, terms: dict[str, Array], ended: Array) -> Verdict:
        """Returns the verdict on a step with these terms, unweighted, after which the episode may be over."""
        weighted = {name: getattr(self.scales, name) * term for name, term in terms.items()}
        reward = jnp.maximum(sum(weighted.values()) * self.dt, self.lowest_reward)
        metrics = {f"reward_{name}": jnp.float32(term) for name, term in weighted.items()}
        return Verdict(reward, ended, metrics)


class Effort(NamedTuple):
    """The state of an episode without commands, besides the physics."""

    key: Array
    step: Array  # int32
    centre: (
        Array  # [nu] rad, about which the next action moves the servos, if it is not the posture
    )
    action: Array  # [nu] of the last step
    earlier: Array  # [nu] of the one before
    measured: Array  # [m] with noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncommanded(ServoedTask):
    """A base of the tasks in which nobody tells the robot what to do.

    The policy sees what is measured and its last action but one. When an episode opens, the servos hold the
    joints where they are.
    """

    @abc.abstractmethod
    def joints(self, qpos: Array) -> Array:
        """Returns the positions [nu] in rad of the joints that have servos, of qpos [nq]."""

    def begin(self, key: Array) -> Effort:
        """Returns what is kept before the first step, of which the key is a part."""
        still = jnp.zeros(self.physics_model().nu, jnp.float32)
        blank = jnp.zeros(self._sizes.size, jnp.float32)
        return Effort(key, jnp.int32(0), still, still, still, blank)

    def keep(self, now: physics.Data, kept: Effort, action: Array | None = None) -> Effort:
        """Returns what is kept after a step: its action, and about what the next one moves the servos."""
        if action is None:
            measured = self.noisy(now, kept.key, kept.step)
            return kept._replace(centre=self.joints(now.qpos), measured=measured)
        targets = self.control(kept, action)
        return Effort(
            key=kept.key,
            step=kept.step + 1,
            centre=targets if self.action_moves == "target" else self.joints(now.qpos),
            action=action,
            earlier=kept.action,
            measured=self.noisy(now, kept.key, kept.step + 1),
        )

    def opening_control(self, kept: Effort, qpos: Array) -> Array:
        """Returns the positions of the joints [nu], where the servos hold them."""
        return self.joints(qpos)

    def centre(self, kept: Effort) -> Array:
        """Returns the targets of the step before, or the positions of the joints [nu], in rad."""
        return kept.centre

    def state(self, kept: Effort) -> list[Array]:
        """Returns what is measured, and the last action but one."""
        return [kept.measured, kept.earlier]
