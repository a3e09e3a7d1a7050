"""Atari 2600 games through ALE's own vector environment."""

from __future__ import annotations

import dataclasses
import difflib

import numpy as np

from seedbed.envs.gym import require_frames
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, HostEnv, SeedbedError, Timestep

SIZE = 84
FRAME_SKIP = 4
_TWO_PLAYERS_ONLY = ("combat", "joust", "maze_craze", "warlords")


@dataclasses.dataclass(frozen=True)
class AtariEnv:
    """An Atari game as in Mnih et al. (2015); `stickiness` 0.25 is Machado et al. (2018).

    Observations are gray uint8 `[84, 84]`, the maximum of the last two of four emulated frames.
    Rewards are the game's own; agents clip them.
    """

    game: str  # ALE's name, such as "ms_pacman"
    frame_stack: int = 4  # stacked by the runtime: a frame crosses the process boundary once
    stickiness: float = 0.0  # probability that a frame repeats the action before it
    noop_max: int = 30  # an episode opens with fewer idle frames than this
    fire_reset: bool = True  # press fire at the opening, in games that have the button
    max_frames: int = 108_000  # emulated frames until an episode is truncated (30 minutes)
    full_action_space: bool = False  # all 18 actions instead of those the game uses
    life_loss: bool = False  # a lost life ends an episode; the game, and an evaluation, goes on

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        require_frames(self.frame_stack)

    @property
    def frame_skip(self) -> int:
        """Emulated frames of a step."""
        return FRAME_SKIP

    def for_evaluation(self) -> AtariEnv:
        """Whole games."""
        return dataclasses.replace(self, life_loss=False)

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` emulators, each with a seed of its own."""
        return _AtariHost(self, num_envs, seed)


def games() -> list[str]:
    """Names the games that one player can play."""
    from ale_py import roms

    return sorted(set(roms.get_all_rom_ids()) - set(_TWO_PLAYERS_ONLY))


def require_game(game: str) -> None:
    """Raises unless ALE knows the game and has its ROM."""
    from ale_py import roms

    if game in _TWO_PLAYERS_ONLY:
        raise SeedbedError(f"the Atari game {game!r} needs two players; ALE cannot play it alone")
    known = games()
    if game not in known:
        near = difflib.get_close_matches(game.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "see `seedbed list`"
        raise SeedbedError(f"unknown Atari game {game!r}; {hint}")
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise SeedbedError(
            f"the ROM of {game!r} is missing or damaged ({error}); "
            "reinstall ale-py or unset ALE_ROMS_DIR"
        ) from error


class _AtariHost:
    """Emulators in lock-step; ALE's next-step auto-reset is ours."""

    def __init__(self, config: AtariEnv, num_envs: int, seed: int | None) -> None:
        require_game(config.game)
        # 20 MB that other environments need not load
        from ale_py.vector_env import AtariVectorEnv

        self._vector = AtariVectorEnv(
            config.game,
            num_envs,
            batch_size=num_envs,
            num_threads=1,  # processes are the parallelism; threads of a group would wait
            thread_affinity_offset=-1,
            max_num_frames_per_episode=config.max_frames,
            repeat_action_probability=config.stickiness,
            full_action_space=config.full_action_space,
            continuous=False,
            autoreset_mode="NextStep",
            img_height=SIZE,
            img_width=SIZE,
            grayscale=True,
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
        self.spec = EnvSpec(ArraySpec((SIZE, SIZE), "uint8"), Discrete(self._num_actions))
        self._seeds = None
        if seed is not None:
            # ALE takes 31 bits; consecutive seeds would overlap between groups
            words = np.random.SeedSequence(seed).generate_state(num_envs)
            self._seeds = words.astype(np.int64) & 0x7FFFFFFF
        self._ended = np.zeros(num_envs, bool)  # the next call opens an episode

    def reset(self) -> Timestep:
        """Opens the first episodes."""
        # A seed makes ALE load each game anew, for as much time as making the emulator took. Without one
        # it goes on from the entropy that it was made with.
        frames, _ = self._vector.reset(seed=self._seeds)
        zeros = np.zeros_like(self._ended)
        self._ended = zeros.copy()
        return Timestep(frames[:, 0], zeros.astype(np.float32), zeros, zeros, ~zeros)

    def step(self, action: Array) -> Timestep:
        """Steps every emulator by four frames, or opens its next episode."""
        first = self._ended
        if action.min() < 0 or action.max() >= self._num_actions:
            # ALE would throw in its worker thread and wait for ever
            raise SeedbedError(f"Atari actions {action} are not all in 0..{self._num_actions - 1}")
        frames, reward, terminated, truncated, _ = self._vector.step(action)
        self._ended = terminated | truncated
        # After a lost life the game goes on, with an action that nobody will learn from.
        reward = np.where(first, np.float32(0), reward.astype(np.float32))
        return Timestep(frames[:, 0], reward, terminated, truncated, first)

    def close(self) -> None:
        """Joins ALE's thread."""
        self._vector.close()

    def encode(self, observation: Array) -> Array:
        """Returns frames as they are."""
        return observation

    def decode(self, action: Array) -> Array:
        """Returns actions as they are."""
        return action
