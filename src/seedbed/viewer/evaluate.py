"""`seedbed evaluate`: its options, and what it prints. It loads JAX only when it plays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.run.bucket import run_path
from seedbed.run.folder import RunFolder
from seedbed.run.trust import declare as declare_trust

DESCRIPTION = "Plays whole episodes with a run's policy."


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument("run", metavar="RUN", type=run_path, help="the folder of a run")
    parser.add_argument("--episodes", type=int, default=100, help="episodes to play (default: 100)")
    parser.add_argument("--env", metavar="ID", help="another environment of the same shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of environments and actions")
    newest = "play the newest checkpoint, not the one with the best evaluation"
    parser.add_argument("--newest", action="store_true", help=newest)
    greedy = "take the policy's best action, and never draw one"
    parser.add_argument("--greedy", action="store_true", help=greedy)
    declare_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--video", metavar="F.mp4", type=Path, help="film a few episodes")
    page = "write a few episodes as a page to look around in"
    parser.add_argument("--html", metavar="F.html", type=Path, help=page)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def evaluate(
    given: argparse.Namespace,
    play: Callable[..., dict[str, Any]],
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Plays as `play`, which is `api.evaluate`, and tells what came of it; raises SeedbedError.

    `warn` gets what is not the result.
    """
    # Check the path now: the user sees an error before JAX takes time to load.
    RunFolder.read(given.run)
    if given.html is not None or given.video is not None:
        from seedbed.viewer.recording import require_writable
        from seedbed.viewer.video import find_ffmpeg

        for path, suffix in ((given.html, ".html"), (given.video, ".mp4")):
            if path is not None:
                require_writable(path, suffix)
        if given.video is not None:
            find_ffmpeg()
    result = play(
        given.run,
        episodes=given.episodes,
        env=given.env,
        seed=given.seed,
        newest=given.newest,
        trust=given.trust_run,
        greedy=given.greedy,
        warn=warn,
    )
    if given.json:
        tell(strict_json.dumps(result))
    else:
        tell(
            f"return {result['episode_return_mean']:.2f} ± {result['episode_return_std']:.2f} "
            f"({result['episode_return_min']:.2f} to {result['episode_return_max']:.2f}) "
            f"over {result['episodes']} episodes of {result['episode_length_mean']:,.0f} steps"
            + (f" ({result['member']} of the population)" if "member" in result else "")
        )
    if given.video is not None or given.html is not None:
        from seedbed.policy import restore
        from seedbed.viewer.record import SHOWN, show

        count = min(given.episodes, SHOWN)
        warn(f"playing {count} episodes to draw")
        show(
            given.run,
            restore(given.run, newest=given.newest, trust=given.trust_run, greedy=given.greedy),
            env=given.env,
            episodes=count,
            seed=given.seed,
            video=given.video,
            html=given.html,
        )
        for path in filter(None, (given.video, given.html)):
            warn(f"{count} episodes written to {path}")
