"""Atari 2600 games, played through ALE's own vector environment."""

from __future__ import annotations

import dataclasses

import numpy as np

from seedbed.arguments import require_fields
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.gym import require_frames
from seedbed.envs.host.spaces import encoded, spec_leaves
from seedbed.nearest import did_you_mean
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, SeedbedError, Timestep

SIZE = 84
"""Height and width of an observation in pixels."""
SCREEN = (210, 160)
"""Height and width of the game's own picture."""
FRAME_SKIP = 4
"""Emulated frames in one step."""
_TWO_PLAYERS_ONLY = ("combat", "joust", "maze_craze", "warlords")


@dataclasses.dataclass(frozen=True)
class AtariEnv:
    """An Atari game, set up as in Mnih et al. (2015).

    With `stickiness` 0.25, `noop_max` 0 and no `fire_reset` it is set up as in Machado et al. (2018).
    Observations are grey uint8 `[84, 84]`, the maximum of the last two of four emulated frames. Rewards
    are the game's own; agents clip them.
    """

    game: str
    """ALE's name of the game, such as "ms_pacman"."""
    # The runtime stacks frames, so that each frame crosses the process boundary only once.
    frame_stack: int = 4
    """Number of successive frames that the agent sees, stacked along the last axis."""
    stickiness: float = 0.0
    """Probability that a frame repeats the previous action."""
    noop_max: int = 30
    """Each episode opens with a random number of idle frames, fewer than this."""
    fire_reset: bool = True
    """Whether an episode opens by pressing fire, in games that use this button."""
    max_frames: int = 108_000
    """Emulated frames after which an episode is truncated; 108,000 are 30 minutes."""
    full_action_space: bool = False
    """Whether the agent has all 18 actions, instead of those that the game uses."""
    life_loss: bool = False
    """Whether a lost life ends a training episode. The game goes on; evaluations play whole games."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        require_frames(self.frame_stack)
        require_fields(self)

    @property
    def frame_skip(self) -> int:
        """Returns the number of emulated frames in one step."""
        return FRAME_SKIP

    @property
    def screen(self) -> tuple[int, int]:
        """Returns the height and width of the pictures of `make_coloured`."""
        return SCREEN

    @property
    def steps_per_s(self) -> float:
        """Returns how many steps make a second on the console."""
        return 60.0 / FRAME_SKIP

    def for_evaluation(self) -> AtariEnv:
        """Returns a configuration that plays whole games: without `life_loss`."""
        return dataclasses.replace(self, life_loss=False)

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` emulators, each with its own seed; without a seed the seeds are random.

        Raises SeedbedError if the game is unknown or its ROM is missing.
        """
        return _AtariHost(self, num_envs, seed)

    def make_coloured(self, seed: int) -> HostEnv:
        """Makes one emulator that plays as that of `make(1, seed)`, to be filmed.

        Its observations are uint8 `[210, 160, 3]`: the game's own picture in colour.
        """
        return _AtariHost(self, 1, seed, coloured=True)


def games() -> list[str]:
    """Returns the sorted names of the games that one player can play."""
    from ale_py import roms

    return sorted(set(roms.get_all_rom_ids()) - set(_TWO_PLAYERS_ONLY))


def require_game(game: str) -> None:
    """Raises SeedbedError unless one player can play the game and its ROM is there."""
    from ale_py import roms

    if game in _TWO_PLAYERS_ONLY:
        raise SeedbedError(f"the Atari game {game!r} needs two players; ALE cannot play it alone")
    known = games()
    if game not in known:
        hint = did_you_mean(game.lower(), known, 3, 0.5, "see `seedbed list`")
        raise SeedbedError(f"unknown Atari game {game!r}{hint}")
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise SeedbedError(
            f"the ROM of {game!r} is missing or damaged ({error}); "
            "reinstall ale-py or unset ALE_ROMS_DIR"
        ) from error


class _AtariHost:
    """A group of emulators in lock-step, with the next-step auto-reset that ALE provides."""

    def __init__(
        self, config: AtariEnv, num_envs: int, seed: int | None, coloured: bool = False
    ) -> None:
        require_game(config.game)
        # Imported here because it takes 20 MB, which other environments do not need.
        from ale_py.vector_env import AtariVectorEnv

        height, width = SCREEN if coloured else (SIZE, SIZE)
        self._vector = AtariVectorEnv(
            config.game,
            num_envs,
            batch_size=num_envs,
            # Actor processes already run in parallel. More threads in a group would only wait.
            num_threads=1,
            thread_affinity_offset=-1,
            max_num_frames_per_episode=config.max_frames,
            repeat_action_probability=config.stickiness,
            full_action_space=config.full_action_space,
            continuous=False,
            autoreset_mode="NextStep",
            img_height=height,
            img_width=width,
            grayscale=not coloured,
            stack_num=1,
            frameskip=FRAME_SKIP,
            maxpool=True,
            noop_max=config.noop_max,
            episodic_life=False,
            life_loss_info=config.life_loss,
            reward_clipping=False,
            use_fire_reset=config.fire_reset,
        )
        self._num_actions = len(self._vector.ale.get_action_set())
        shape = (height, width, 3) if coloured else (height, width)
        self.spec = EnvSpec(ArraySpec(shape, "uint8"), Discrete(self._num_actions))
        self._seeds = None
        if seed is not None:
            # ALE takes 31 bits. They are hashed, because consecutive seeds would overlap between groups.
            words = np.random.SeedSequence(seed).generate_state(num_envs)
            self._seeds = words.astype(np.int64) & 0x7FFFFFFF
        # If set, the next step opens an episode.
        self._ended = np.zeros(num_envs, bool)

    def reset(self) -> Timestep:
        """Opens an episode in every emulator; only the first call uses the seeds."""
        # If it gets a seed, ALE loads each game again, which takes as long as making the emulator did.
        # Without a seed, ALE goes on from the entropy with which it was made.
        frames, _ = self._vector.reset(seed=self._seeds)
        self._seeds = None
        zeros = np.zeros_like(self._ended)
        self._ended = zeros.copy()
        return Timestep(frames[:, 0], zeros.astype(np.float32), zeros, zeros, ~zeros)

    def step(self, action: Array) -> Timestep:
        """Steps every emulator by four frames; one whose episode has ended opens its next one instead.

        Raises SeedbedError if an action is out of range.
        """
        first = self._ended
        if action.min() < 0 or action.max() >= self._num_actions:
            # ALE would throw an exception in its worker thread and wait for ever.
            raise SeedbedError(f"Atari actions {action} are not all in 0..{self._num_actions - 1}")
        frames, reward, terminated, truncated, _ = self._vector.step(action)
        self._ended = terminated | truncated
        # After a lost life, ALE goes on with the game instead of a reset and may return a reward. It is
        # dropped, because the agent does not learn from the action of this step.
        reward = np.where(first, np.float32(0), reward.astype(np.float32))
        return Timestep(frames[:, 0], reward, terminated, truncated, first)

    def close(self) -> None:
        """Closes ALE's environment, which joins its thread."""
        self._vector.close()

    def encode(self, observation: Array) -> Array:
        """Returns frames as they are; raises SeedbedError if they do not fit."""
        return encoded(spec_leaves(self.spec.observation), observation)

    def decode(self, action: Array) -> Array:
        """Returns actions unchanged: ALE takes the spec's form."""
        return action
