"""Doom: ViZDoom's scenarios from pixels, with game variables beside them and actions of several choices.

`seedbed[doom]` installs ViZDoom; the module imports it only when a game is made. Scenarios are set up as in
Sample Factory (Petrenko et al. 2020), whose figures are the known ones: 160 x 120 pixels shrunk to
128 x 72, four tics a step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seedbed import cache
from seedbed.arguments import require_fields
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.gym import GymHost, require_frames
from seedbed.nearest import did_you_mean
from seedbed.types import SeedbedError

PREFIX = "doom/"
"""How names of Doom's scenarios begin."""
SIZE = (72, 128)
"""Height and width of an observation in pixels."""
SCREEN = (240, 320)
"""Height and width of a film."""
_DRAWN = (120, 160)
"""Height and width that an observation is shrunk from."""
_TICS = 35
"""Tics in a second."""
INSTALL = "pip install 'seedbed[doom]'"
"""What installs ViZDoom."""
_TIMEOUT = 2100
"""Tics after which an episode is truncated, 60 s."""
_TURN = ("TURN_LEFT", "TURN_RIGHT")
_WALK = ("MOVE_FORWARD", "MOVE_BACKWARD")
_STEP = ("MOVE_LEFT", "MOVE_RIGHT")
_SHOOT = ("ATTACK",)
_LAUNCHER = """#!/bin/sh
# Starts the engine in this folder, because it writes into the one that it starts in. Waits for it, so that
# it ends when whoever started it is killed, and then removes its shared memory, 11 MB a game.
cd "{folder}" || exit 1
command -v setpriv > /dev/null || exec "{engine}" "$@"
if [ "$1" != --watched ]; then exec setpriv --pdeathsig TERM -- "$0" --watched "$@"; fi
shift
id= before=
for word; do
    [ "$before" = +viz_instance_id ] && id=$word
    before=$word
done
setpriv --pdeathsig KILL -- "{engine}" "$@" &
engine=$!
trap 'kill -KILL $engine; wait $engine; test -z "$id" || rm -f /dev/shm/ViZDoom*"$id"; exit 143' TERM
wait $engine
"""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A scenario of ViZDoom: what differs from its own file."""

    heads: tuple[tuple[str, ...], ...]
    """The choices of an action: each is none of its buttons, or one of them."""
    variables: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Game variables that the agent sees, with the factors that make them small."""
    pays: tuple[str, ...] = ()
    """Game variables of which an increase, whatever its size, pays 1."""
    living: float | None = None
    """Reward of each tic; None is the file's."""
    death: float | None = None
    """What a death costs; None is the file's."""
    scale: float = 1.0
    """Factor for the scenario's own rewards."""
    shown: tuple[str, ...] = ()
    """What is drawn besides the world: hud, crosshair, weapon."""


_BATTLE = {"HEALTH": 1 / 30, "SELECTED_WEAPON_AMMO": 1 / 15, "USER2": 1 / 10}
_ARMED = ("hud", "weapon")
_GATHERING = Scenario(((*_TURN, *_WALK),), pays=("HEALTH",), living=0.01, death=0.0)
SCENARIOS = {
    "battle": Scenario(
        (_WALK, _STEP, _TURN, _SHOOT, ("SPEED",)), _BATTLE, shown=("crosshair", *_ARMED)
    ),
    "deadly_corridor": Scenario((_TURN, _WALK, _STEP, _SHOOT), scale=0.01, shown=_ARMED),
    "defend_the_center": Scenario((_TURN, _SHOOT), shown=_ARMED),
    "defend_the_line": Scenario((_TURN, _SHOOT), shown=_ARMED),
    "health_gathering": _GATHERING,
    "health_gathering_supreme": _GATHERING,
    "my_way_home": Scenario((_TURN, _WALK), shown=("weapon",)),
}
"""The scenarios, by name."""
_FILES = {"battle": "D3_battle"}
"""Names of files that differ from the scenario's."""


@dataclasses.dataclass(frozen=True)
class DoomEnv:
    """A scenario of ViZDoom, set up as Sample Factory does, with 35 tics a second.

    Observations are uint8 `[72, 128, 3]`, or for scenarios with game variables a dict of `screen` and
    `variables`, float32. An action has a choice for each pair of opposite buttons, and for each other button;
    where health is gathered it is one choice. Episodes are truncated after 2,100 tics.
    """

    scenario: str
    """The name of a scenario, such as health_gathering_supreme."""
    frame_stack: int = 1
    """Number of successive observations that the agent sees, stacked along the last axis."""
    frame_skip: int = 4
    """Tics in one step."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        require_frames(self.frame_stack)
        require_fields(self)
        if self.scenario not in SCENARIOS:
            hint = did_you_mean(
                self.scenario, SCENARIOS, 3, 0.5, f"known are {', '.join(SCENARIOS)}"
            )
            raise SeedbedError(f"Doom has no scenario {self.scenario!r}{hint}")
        if self.frame_skip < 1:
            raise SeedbedError(f"frame_skip is {self.frame_skip}: a step needs 1 tic or more")

    @property
    def screen(self) -> tuple[int, int]:
        """Returns the height and width of the pictures of `make_coloured`."""
        return SCREEN

    @property
    def steps_per_s(self) -> float:
        """Returns how many steps make a second for a person who watches."""
        return _TICS / self.frame_skip

    def make_coloured(self, seed: int) -> HostEnv:
        """Makes one game that plays as that of `make(1, seed)`, to be filmed; it shows what a person sees."""
        return GymHost(lambda: _Doom(self, coloured=True), f"{PREFIX}{self.scenario}", 1, seed)

    def for_evaluation(self) -> DoomEnv:
        """Returns the same configuration: training does not shorten its episodes."""
        return self

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` games, each a process of its own; without a seed the seeds are random.

        Raises SeedbedError if ViZDoom or the scenario's map is missing, or if a game does not start.
        """
        return GymHost(lambda: _Doom(self), f"{PREFIX}{self.scenario}", num_envs, seed)


class _Doom(gymnasium.Env[Any, Any]):
    """A game; its process ends with this one."""

    def __init__(self, config: DoomEnv, coloured: bool = False) -> None:
        vizdoom = _package(config.scenario)
        self._scenario, self._skip = SCENARIOS[config.scenario], config.frame_skip
        self._buttons = [button for head in self._scenario.heads for button in head]
        self._starts = np.cumsum([0, *(len(head) for head in self._scenario.heads)])
        size = SCREEN if coloured else SIZE
        drawn = SCREEN if coloured else _DRAWN
        # The nearest pixels, as Sample Factory takes them.
        self._rows, self._columns = (
            np.arange(n) * whole // n for n, whole in zip(size, drawn, strict=True)
        )
        screen = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.observation_space: spaces.Space[Any] = screen
        self._shows_variables = bool(self._scenario.variables) and not coloured
        if self._shows_variables:
            seen = spaces.Box(-np.inf, np.inf, (len(self._scenario.variables),), np.float32)
            self.observation_space = spaces.Dict({"screen": screen, "variables": seen})
        choices = [len(head) + 1 for head in self._scenario.heads]
        self.action_space: spaces.Space[Any] = spaces.MultiDiscrete(choices)
        if len(choices) == 1:
            self.action_space = spaces.Discrete(choices[0])
        self._paid: dict[str, float] = {}
        self._last: Any = None
        self._vizdoom, self._game = vizdoom, vizdoom.DoomGame()
        self._running = False
        self._set_up(config, drawn)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Opens an episode; a seed starts the game's random numbers."""
        del options
        if seed is not None:
            self._game.set_seed(seed & 0xFFFFFFFF)
        if not self._running:
            self._game.init()
            self._running = True
        else:
            self._game.new_episode()
        self._paid = {name: self._variable(name) for name in self._scenario.pays}
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        """Presses the buttons of an action for `frame_skip` tics."""
        pressed = [0.0] * len(self._buttons)
        for start, choice in zip(self._starts, np.atleast_1d(action), strict=False):
            if choice:
                pressed[start + choice - 1] = 1.0
        reward = self._scenario.scale * self._game.make_action(pressed, self._skip)
        terminated = self._game.is_episode_finished()
        for name, before in self._paid.items():
            now = self._variable(name)
            reward += float(now > before and not terminated)
            self._paid[name] = now
        # The game's own time limit lies behind this one, so that there is a last observation.
        started = self._game.get_episode_start_time()
        over = self._game.get_episode_time() - started + self._skip > _TIMEOUT
        return self._observe(), reward, terminated, over and not terminated, {}

    def close(self) -> None:
        """Ends the game's process."""
        self._game.close()

    def _observe(self) -> Any:
        state = self._game.get_state()
        if state is None:
            # There is none after a death. What agents do not learn from is the observation before.
            return self._last
        screen = state.screen_buffer[self._rows][:, self._columns]
        self._last = screen
        if self._shows_variables:
            factors = self._scenario.variables
            seen = [factor * self._variable(name) for name, factor in factors.items()]
            self._last = {"screen": screen, "variables": np.array(seen, np.float32)}
        return self._last

    def _variable(self, name: str) -> float:
        return float(self._game.get_game_variable(getattr(self._vizdoom.GameVariable, name)))

    def _set_up(self, config: DoomEnv, drawn: tuple[int, int]) -> None:
        viz, game, scenario = self._vizdoom, self._game, self._scenario
        file = _file(config.scenario)
        if not game.load_config(str(file)):
            raise SeedbedError(f"ViZDoom cannot read {file}")
        engine, settings = launcher(Path(viz.__file__).with_name("vizdoom"))
        game.set_vizdoom_path(str(engine))
        game.set_doom_config_path(str(settings))
        game.set_doom_scenario_path(str(file.with_suffix(".wad")))
        game.set_available_buttons([getattr(viz.Button, name) for name in self._buttons])
        height, width = drawn
        game.set_screen_resolution(getattr(viz.ScreenResolution, f"RES_{width}X{height}"))
        game.set_screen_format(viz.ScreenFormat.RGB24)
        game.set_render_hud("hud" in scenario.shown)
        game.set_render_crosshair("crosshair" in scenario.shown)
        game.set_render_weapon("weapon" in scenario.shown)
        # ViZDoom's own files hide them: red when hurt, gold when something is picked up.
        game.set_render_screen_flashes(True)
        game.set_render_decals(False)
        game.set_render_particles(False)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(viz.Mode.PLAYER)
        game.set_episode_timeout(_TIMEOUT + 2 * config.frame_skip)
        if scenario.living is not None:
            game.set_living_reward(scenario.living)
        if scenario.death is not None:
            game.set_death_penalty(scenario.death)


def _package(scenario: str) -> Any:
    try:
        import vizdoom
    except ImportError as error:
        raise SeedbedError(f"{PREFIX}{scenario} lacks a package ({error}): {INSTALL}") from error
    return vizdoom


def _file(scenario: str) -> Path:
    """Returns the file of a scenario, which ViZDoom has or EnvPool; raises SeedbedError if neither has."""
    name = f"{_FILES.get(scenario, scenario)}.cfg"
    for package, folder in (("vizdoom", "scenarios"), ("envpool_assets", "vizdoom/maps")):
        found = importlib.util.find_spec(package)
        for root in (found.submodule_search_locations or ()) if found else ():
            if (path := Path(root) / folder / name).exists():
                return path
    raise SeedbedError(
        f"{PREFIX}{scenario}: ViZDoom's package has no {name}, and EnvPool's assets have: pip install "
        "envpool-assets"
    )


@functools.cache
def launcher(engine: Path) -> tuple[Path, Path]:
    """Returns a script that starts an engine in a folder of the cache, and the engine's settings there."""
    folder = cache.prepared(cache.directory("doom"))
    text = _LAUNCHER.format(folder=folder, engine=engine)
    script = folder / f"engine-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not script.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o700)
        # Others may write it at the same time.
        Path(file.name).replace(script)
    return script, folder / "settings.ini"
