"""`seedbed evaluate`: its options, and what it prints. It loads JAX only when it plays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from seedbed import strict_json
from seedbed.arguments import at_least, require_seed
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
    given: argparse.Namespace, tell: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Plays and tells what came of it; raises SeedbedError.

    `warn` gets what is not the result. All episodes are of one checkpoint, also while the run goes on. Those
    to draw are played first: they are few, and show whether the environment can be drawn.
    """
    # Check what is given now: the user sees an error before JAX takes time to load.
    at_least("episodes", given.episodes, 1)
    require_seed(given.seed)
    RunFolder.read(given.run)
    if given.html is not None or given.video is not None:
        from seedbed.viewer.recording import require_writable
        from seedbed.viewer.video import find_ffmpeg

        for path, suffix in ((given.html, ".html"), (given.video, ".mp4")):
            if path is not None:
                require_writable(path, suffix)
        if given.video is not None:
            find_ffmpeg()
    from seedbed.policy import evaluate_trained, restore

    trained = restore(given.run, warn, given.newest, given.trust_run, given.greedy)
    if given.video is not None or given.html is not None:
        from seedbed.viewer.record import SHOWN, show

        count = min(given.episodes, SHOWN)
        warn(f"playing {count} episodes to draw")
        show(
            given.run,
            trained,
            env=given.env,
            episodes=count,
            seed=given.seed,
            video=given.video,
            html=given.html,
        )
        for path in filter(None, (given.video, given.html)):
            warn(f"{count} episodes written to {path}")
    result = evaluate_trained(trained, given.run, given.episodes, given.env, given.seed, warn)
    if given.json:
        tell(strict_json.dumps(result))
        return
    tell(
        f"return {result['episode_return_mean']:.2f} ± {result['episode_return_std']:.2f} "
        f"({result['episode_return_min']:.2f} to {result['episode_return_max']:.2f}) "
        f"over {result['episodes']} episodes of {result['episode_length_mean']:,.0f} steps"
        + (f" ({result['member']} of the population)" if "member" in result else "")
    )
