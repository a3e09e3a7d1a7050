"""The command line: `seedbed train | config | actor | host | key | evaluate | report | export | ...`.

JAX, and what else only one command needs, is loaded by that command: actors do without most of it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.exit_status import ExitStatus, status_of
from seedbed.nearest import did_you_mean
from seedbed.printable import pasted, printable, resume_command
from seedbed.run.member import VARIABLE
from seedbed.run.signals import end_program_with
from seedbed.scheduler import obey_scheduler
from seedbed.terminal import tell
from seedbed.types import SeedbedError, UsageError
from seedbed.version import __version__

USAGE = """usage: seedbed [-h] [--version] COMMAND ...

Trains reinforcement-learning agents as fast as the hardware allows.

commands:
  train PRESET_OR_ENV [--agent A] [--runtime R] [--steps N] [--run DIR] ...
                  train an agent; `seedbed train pong --help` lists every option
  config PRESET_OR_ENV [--json] ...
                  show what `train` would run, and where each value comes from
  actor RUN_OR_ADDRESS [--key FILE] [--processes N] [--envs N] [--allow MODULE]
                  step environments of this machine for a run that listens (train --listen)
  host RUN_OR_ADDRESS [--key FILE] [--only KIND,...] [--cores N]
                  run a part of a run on this machine: actors, learners, shards
  key RUN         make the key of a run that has not begun, for its other machines
  evaluate RUN [--episodes N] [--env ID] [--seed S] [--newest] [--greedy] [--json] ...
                  play whole episodes with the best policy of a run
  report RUN [RUN ...] [-o F.html]
                  write one page with curves, settings and episodes of runs
  play RUN_OR_XML [...] [-o F.html] [--watch]
                  write a page in which robots move by themselves, in any browser
  export RUN -o DIR [--newest] [--json]
                  write the best policy of a run as ONNX, without anything executable
  clone NAME DATA  make a run that imitates recorded episodes, for train --from
  tune NAME --space FILE [--trials N] [--jobs J] [--study DIR] ...
                  search options; trials are runs, and those that fall behind are given up
  plan NAME [--hosts FILE] [--json] ...
                  predict speed and cost of a run here or on other machines
  check MODEL.xml  tell what a robot's model has, or why it cannot be simulated
  list [--json]   list presets, agents and environments
  list --runs [DIR] [--json]
                  list runs with their state, steps, score and age
  bench [NAME] ...
                  list the benchmarks, or run one, with its own options

exit status: 0 finished, 1 failed, 2 wrong usage, 75 try again later, 143 stopped by a signal with
everything saved, 130 ended by a signal before it saved (docs/troubleshooting.md)
"""

_TASK_GUIDE = "docs/train-your-robot.md"


def program() -> int:
    """Runs the `seedbed` program; returns its exit status, or ends at once with it after a signal."""
    end_program_with(ExitStatus.GIVEN_UP)
    if any(word.partition("=")[0] == "--cluster" for word in sys.argv):
        obey_scheduler()  # before JAX has threads, which would take its signal
    if sys.argv[1:2] in (["train"], ["plan"]):
        from seedbed.run.memory import set_up_malloc

        set_up_malloc()
    status = main()
    if status in (ExitStatus.STOPPED, ExitStatus.GIVEN_UP) or VARIABLE in os.environ:
        # JAX would wait for the other members of a group, which may be gone.
        # Python would unwind threads that come back from JAX through C++ (an abort: python/cpython#87135),
        # and destroy what XLA's own threads may be compiling with.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. `arguments` defaults to those of the process.

    Statuses are those of `ExitStatus`, except that `bench` passes on that of the benchmark. Errors go to
    stderr in one line; `--debug` shows the traceback.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "config": _config,
        "actor": _actor,
        "host": _host,
        "key": _key,
        "evaluate": _evaluate,
        "report": _report,
        "play": _play,
        "export": _export,
        "check": _check,
        "tune": _tune,
        "clone": _clone,
        "plan": _plan,
        "list": _list,
        "bench": _bench,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _print(USAGE)
        return ExitStatus.FINISHED if arguments else ExitStatus.USAGE
    if arguments[0] == "--version":
        _print(f"seedbed {__version__}")
        return ExitStatus.FINISHED
    try:
        if arguments[0] not in commands:
            hint = did_you_mean(arguments[0], commands)
            raise UsageError(f"unknown command {arguments[0]!r}{hint}")
        return commands[arguments[0]](arguments[1:])
    except SystemExit as end:
        if end.code:
            raise
        return ExitStatus.FINISHED  # help was printed
    except (SeedbedError, KeyboardInterrupt) as error:
        return _fail(str(error) or "interrupted", arguments, status_of(error))
    except BrokenPipeError:
        # The reader of our output is gone, as after `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitStatus.FAILED
    except Exception as error:
        text = f"{type(error).__name__}: {error} (a bug, or an environment's or agent's"
        return _fail(f"{text}; see --debug)", arguments, status_of(error))


def _fail(error: object, arguments: list[str], status: int) -> int:
    text = str(error).strip() or type(error).__name__
    if "--debug" in arguments:
        tell(traceback.format_exc().rstrip(), sys.stderr)
    else:
        # Below the first line is a list, which is indented, or the traceback of an actor.
        text = re.match(r".*(\n  .*)*", text)[0]  # type: ignore[index]
    tell(f"seedbed: {text}", sys.stderr)
    return status


def _train(arguments: list[str]) -> int:
    from seedbed.config import flags

    given = flags.split_train_arguments(arguments)
    if given.help and given.request.what is None and given.request.run is None:
        _print(f"usage: seedbed train PRESET_OR_ENV [OPTIONS]\n\n{flags.HELP}\n")
        _print(
            "`seedbed train pong --help` lists the options of a preset, `seedbed list` the presets."
        )
        return ExitStatus.FINISHED
    request = given.request
    if given.help and request.run is None:
        request = request._replace(resume=False)
    if request.what is None and request.file is None and not request.resume:
        raise UsageError("name what to train first: seedbed train pong (see `seedbed list`)")
    if given.cluster is not None and not given.help:
        from seedbed.launch import cluster, ray_cluster

        kind = ray_cluster if given.cluster.startswith("ray") else cluster
        return kind.train(given, _train_settled)
    return _train_settled(request, lambda config: flags.override(config, given.rest, given.help))[0]


def _config(arguments: list[str]) -> int:
    from seedbed.config import explain, flags
    from seedbed.launch.job import more_for

    as_json = "--json" in arguments
    given = flags.split_train_arguments([word for word in arguments if word != "--json"])
    request, usage = (
        given.request,
        "seedbed config PRESET_OR_ENV [--json] [OPTIONS of seedbed train]",
    )
    if given.help:
        _print(f"usage: {usage}\n\n{explain.DESCRIPTION}")
        return ExitStatus.FINISHED
    if request.what is None and request.file is None and not request.resume:
        raise UsageError(f"name what to show first: {usage}")
    # What modules print that are imported for it is none of the JSON.
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        config, rows = explain.explained(given, more_for(given))
    _print(strict_json.dumps(config, indent=1) if as_json else explain.table(rows))
    return ExitStatus.FINISHED


def _train_settled(request: Any, change: Callable[[Any], Any]) -> tuple[int, dict[str, Any]]:
    """Trains what is asked for; returns the exit status and the summary of the run."""
    from seedbed import api
    from seedbed.config import settle

    summary = api.train_settled(request, settle.settle(request, change))
    run = summary["run"]
    if summary.get("interrupted"):
        tell(f"stopped and saved; go on with: {resume_command(run)}", sys.stdout)
        return ExitStatus.STOPPED, summary
    score = summary.get("evaluation/episode_return_mean")
    end = "" if score is None else f" with a mean return of {score:.2f} in evaluation"
    if "evaluation/best_member" in summary:
        end += f" (median; best: {summary['evaluation/best_return']:.2f})"
    tell(f"trained{end}; play it with: seedbed evaluate {pasted(run)}", sys.stdout)
    return ExitStatus.FINISHED, summary


def _parsed(name: str, module: Any, arguments: list[str]) -> argparse.Namespace:
    """Parses the arguments of a command that a module describes and declares."""
    parser = _Parser(prog=f"seedbed {name}", description=module.DESCRIPTION)
    module.declare(parser)
    return parser.parse_args(arguments)


def _actor(arguments: list[str]) -> int:
    from seedbed.actors import command

    return _joined("actor", command.serve(_parsed("actor", command, arguments), _say))


def _host(arguments: list[str]) -> int:
    from seedbed.launch import joining

    given = _parsed("host", joining, arguments)
    return _joined("host", joining.serve(joining.options_of(given), _say))


def _key(arguments: list[str]) -> int:
    from seedbed.launch import key

    _print(key.make(_parsed("key", key, arguments).run))
    return ExitStatus.FINISHED


def _joined(name: str, how: str | None) -> int:
    """Tells how a command that joins a run has ended; returns the exit status."""
    _say(f"{name} ended: {how or 'stopped'}")
    return ExitStatus.STOPPED if how is None else ExitStatus.FINISHED


def _say(text: str) -> None:
    """Tells what a long command does, which goes on without a terminal."""
    tell(text, sys.stdout)


def _warn(text: str) -> None:
    tell(text, sys.stderr)


def _evaluate(arguments: list[str]) -> int:
    from seedbed.viewer import evaluate

    evaluate.evaluate(_parsed("evaluate", evaluate, arguments), _print, _warn)
    return ExitStatus.FINISHED


def _report(arguments: list[str]) -> int:
    from seedbed.viewer import report

    given = _parsed("report", report, arguments)
    report.write_report(given.runs, given.output, _warn)
    size = given.output.stat().st_size / 1e6
    count = len(given.runs)
    _print(f"{given.output} ({size:.1f} MB): {count} run{'s' if count > 1 else ''}")
    return ExitStatus.FINISHED


def _export(arguments: list[str]) -> int:
    from seedbed.exporting import extra

    given = _parsed("export", extra, arguments)
    from seedbed.run.folder import RunFolder

    # What can be refused at once is, before JAX is loaded.
    RunFolder.read(given.run)
    extra.require(*extra.EXTRA)
    from seedbed.exporting import command

    robot = given.robot
    scene = None if robot is None else command.scene_of(given.run, robot, given.trust_run)
    contract = command.export(given.run, given.output, given.newest, _warn, given.trust_run)
    _print(strict_json.dumps(contract) if given.json else command.told(contract, given.output))
    if scene is not None:
        _print(command.drive(given.output, scene, _warn))
    return ExitStatus.FINISHED


def _clone(arguments: list[str]) -> int:
    from seedbed.cloning import command

    command.serve(arguments, _parser_of("clone", command), _print)
    return ExitStatus.FINISHED


def _parser_of(name: str, module: Any) -> argparse.ArgumentParser:
    """Makes the parser of a command that also takes the options of `seedbed train`."""
    return _Parser(
        prog=f"seedbed {name}",
        description=module.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _tune(arguments: list[str]) -> int:
    from seedbed.tuning import command

    return command.serve(arguments, _parser_of("tune", command), _say)


def _plan(arguments: list[str]) -> int:
    from seedbed.plan import command

    command.serve(arguments, _parser_of("plan", command), _print)
    return ExitStatus.FINISHED


def _check(arguments: list[str]) -> int:
    parser = _Parser(prog="seedbed check", description="Tells what a robot's model has.")
    parser.add_argument(
        "model",
        metavar="MODEL.xml",
        help="an MJCF or URDF file, also of the extras robots and dm: dm_control/quadruped.xml",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    given = parser.parse_args(arguments)
    from seedbed.envs.device import packaged
    from seedbed.envs.device.robots.standing import verdict
    from seedbed.physics.summary import summary

    model = given.model
    if packaged.is_packaged(model):
        model = packaged.packaged_file(model)
    for line in summary(model):
        _print(line)
    _print(f"it can be simulated; next: {_TASK_GUIDE}")
    _print(verdict(Path(model)))
    return ExitStatus.FINISHED


def _list(arguments: list[str]) -> int:
    from seedbed import listing

    listing.show(_parsed("list", listing, arguments), _print)
    return ExitStatus.FINISHED


def _play(arguments: list[str]) -> int:
    from seedbed.play import command

    command.play(_parsed("play", command, arguments), _print, _warn)
    return ExitStatus.FINISHED


def _bench(arguments: list[str]) -> int:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem[0] != "_"}
    if not scripts:
        raise SeedbedError(
            "the benchmarks are in the repository's folder benchmarks/, which the installed package lacks: "
            "clone the repository, run `make setup` there, then `.venv/bin/seedbed bench`"
        )
    name, *options = [token for token in arguments if token != "--debug"] or ["--help"]
    if name in ("-h", "--help"):
        from rich.console import Console
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for script, path in scripts.items():
            described = ast.get_docstring(ast.parse(path.read_text())) or ""
            table.add_row(f"  {script}", described.partition("\n")[0])
        usage = "usage: seedbed bench NAME [OPTIONS of that benchmark; --help lists them]\n"
        Console(highlight=False, emoji=False, markup=False).print(usage, table, sep="\n")
        return ExitStatus.FINISHED
    if name not in scripts:
        raise UsageError(f"no benchmark {name!r}{did_you_mean(name, scripts)}")
    status = subprocess.run([sys.executable, str(scripts[name]), *options]).returncode
    # Below 0 is the number of the signal that ended it.
    return status if status >= 0 else 128 - status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raises UsageError, instead of printing usage and exiting."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _print(text: str) -> None:
    print(printable(text, keep="\n"), flush=True)  # noqa: T201
