"""`seedbed play`: its options, and the pages it writes or serves. It loads JAX only when it compiles."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedbed.printable import printable
from seedbed.run.bucket import run_path
from seedbed.run.folder import RunFolder
from seedbed.run.trust import declare as declare_trust
from seedbed.types import SeedbedError, UsageError

if TYPE_CHECKING:
    from seedbed.play.page import Player

DESCRIPTION = (
    "Writes one page in which robots move by themselves: their physics and their policies run in the "
    "browser, which needs no server and no network."
)
MODELS = (".xml", ".urdf")
MOST_PLAYERS = 4


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument(
        "what",
        metavar="RUN_OR_XML",
        nargs="+",
        help="the folder of a run, or an MJCF or URDF file, whose actuators get sliders",
    )
    page = "the page to write (default: play.html)"
    parser.add_argument("-o", "--output", metavar="F.html", type=Path, help=page)
    newest = "play the newest checkpoint, not the one with the best evaluation"
    parser.add_argument("--newest", action="store_true", help=newest)
    watch = "serve the page of a run that trains to this machine, and follow its checkpoints"
    parser.add_argument("--watch", action="store_true", help=watch)
    parser.add_argument("--port", type=int, default=0, help="port of --watch (default: a free one)")
    declare_trust(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def play(
    given: argparse.Namespace, tell: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Writes the page, or serves it until it is interrupted; raises SeedbedError.

    `tell` gets the result, `warn` what happens on the way.
    """
    _check(given)
    # Only now, because these load JAX.
    from seedbed.play.page import write_page

    players = [_player(what, given, warn) for what in given.what]
    if given.watch:
        from seedbed.play.watching import watch

        watch(players[0], given.what[0], given.port, given.trust_run, tell, warn)
        return
    output = given.output or Path("play.html")
    write_page(players, output, warn)
    tell(f"{printable(output)} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser")


def _is_model(what: str) -> bool:
    return what.lower().endswith(MODELS)


def _check(given: argparse.Namespace) -> None:
    """Refuses what can be refused before JAX is loaded."""
    if len(given.what) > MOST_PLAYERS:
        raise UsageError(f"a page has room for {MOST_PLAYERS} robots: name fewer")
    for what in given.what:
        if not _is_model(what):
            RunFolder.read(run_path(what))
        elif not Path(what).is_file():
            raise SeedbedError(f"there is no file {printable(what)}")
    if given.watch and (len(given.what) > 1 or _is_model(given.what[0]) or given.output):
        raise UsageError("--watch serves the page of one run: name that alone, without -o")
    if given.port and not given.watch:
        raise UsageError("--port is the port of --watch: give both")


def _player(what: str, given: argparse.Namespace, warn: Callable[[str], None]) -> Player:
    """Returns the robot of a run or a file."""
    from seedbed.play.page import Player
    from seedbed.play.plain import Plain

    if _is_model(what):
        path = Path(what).absolute()
        return Player(Plain(xml_file=str(path)), None, printable(path.stem))
    newest = given.newest or given.watch
    player = player_of(what, newest=newest, trust=given.trust_run, warn=warn)
    # The best member of a population may be another one later: the page says whose policy it plays.
    if not given.watch:
        return player
    return dataclasses.replace(player, title=printable(run_path(what).name))


def player_of(
    what: str,
    *,
    newest: bool = False,
    trust: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> Player:
    """Returns the robot of a run, as its file has it, with its best policy or its newest.

    Raises SeedbedError as `restore` does, and if the run's environment is no MuJoCo task on the device, or a
    wrapper may change what its policy sees.
    """
    from seedbed.envs.device.mujoco import MujocoTask
    from seedbed.envs.device.wrappers import changing, innermost
    from seedbed.play.page import Player
    from seedbed.policy import restore

    run = run_path(what)
    trained = restore(run, warn, newest=newest, trust=trust)
    env: Any = trained.env
    task: Any = innermost(env)
    hiding = changing(env)
    if hiding or not isinstance(task, MujocoTask):
        what = ", ".join(hiding) or type(task).__name__
        raise SeedbedError(
            f"{printable(run)} has no robot to draw: a page plays a MuJoCo task on our own physics, without "
            f"wrappers that may change what its policy sees, and not {what}; seedbed report shows its "
            "episodes"
        )
    # Who plays pushes; the task's own pushes would come unseen.
    pushes: dict[str, Any] = {"push_speed": 0.0} if hasattr(task, "push_speed") else {}
    task = dataclasses.replace(task, episode_steps=env.episode_steps, **pushes)
    member = f" ({trained.member})" if trained.member else ""
    return Player(task, trained.deployed(warn), printable(Path(run).name) + member)
