"""The contract between host environments and what steps them; on-device ones are `types.Environment`.

The module imports no JAX.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol

from seedbed.types import Array, Environment, EnvSpec, Timestep, Tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class HostEnvConfig(Protocol):
    """A frozen dataclass that describes a host environment and can make it."""

    @property
    def frame_stack(self) -> int:
        """The number of observations that the runtime stacks, along the last axis of each array."""
        ...

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in one step; reports of frames count with it."""
        ...

    def for_evaluation(self) -> HostEnvConfig:
        """Returns the options for the same environments with whole episodes, as evaluations need them."""
        ...

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` environments in lock-step. Without a seed they use the system's entropy."""
        ...


class HostEnv(Protocol):
    """Environments in lock-step on the host, with next-step auto-reset; arrays are numpy `[n, ...]`."""

    spec: EnvSpec  # of single frames

    def reset(self) -> Timestep:
        """Opens an episode in every environment, also if others have not ended.

        The first call uses the seeds that were given at construction, and no later one does.
        """
        ...

    def step(self, action: Array) -> Timestep:
        """Steps every environment, or opens its next episode if the last one has ended."""
        ...

    def close(self) -> None:
        """Releases processes, threads and files. `encode` and `decode` still work afterwards."""
        ...

    def encode(self, observation: Any) -> Tree:
        """Converts the environment's own form of an observation, or a batch of them, to the spec's form."""
        ...

    def decode(self, action: Array) -> Any:
        """Converts an action in the spec's form, or a batch of them, to the environment's own form."""
        ...


def made_once(env: HostEnvConfig) -> HostEnv:
    """Returns an environment that is closed already, to read its spec and its forms.

    Warns if closing it has failed.
    """
    host = env.make(1, 0)
    try:
        host.close()
    except Exception as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return host


def is_on_device(env: HostEnvConfig | Environment) -> TypeIs[Environment]:
    """Returns whether an environment runs on the device; a host environment's options give False."""
    # Only the class is looked at: an instance's spec may take a second to make.
    return hasattr(type(env), "step")
