"""The options of `seedbed train`: a run's dataclasses as command-line flags, with errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from seedbed.config import resolve
from seedbed.config.configuration import RUNTIMES, TrainConfig
from seedbed.config.env_options import IDENTITY, told, without_words, words_of, written
from seedbed.config.saved import ENV_BOUND
from seedbed.config.settle import Request, in_runtime
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.pickled import is_pickled
from seedbed.envs.host.pooled import PREFIX
from seedbed.envs.host.registry import code_of
from seedbed.nearest import nearest
from seedbed.printable import quoted
from seedbed.run.bucket import run_path
from seedbed.run.encoding import BOUND
from seedbed.run.weights import Weights
from seedbed.types import Environment, SeedbedError, UsageError

_VALUES = (
    "--agent",
    "--runtime",
    "--config",
    "--run",
    "--from",
    "--cluster",
    "--trusted-interface",
)
_SWITCHES = ("--resume", "--from-optimizer", "--from-partial", "--trust-run", "--debug")
_SCIENTIFIC = re.compile(r"\d+(\.\d*)?[eE]\+?\d+")


class TrainArguments(NamedTuple):
    """The command line of `seedbed train`: what is asked for, and what overrides the configuration."""

    request: Request
    debug: bool
    help: bool
    rest: tuple[str, ...]
    cluster: str | None  # who has started the processes of this job, None for a run of one process
    interface: str | None  # the network interface for what is not encrypted


def split_train_arguments(arguments: Sequence[str]) -> TrainArguments:
    """Separates the options that choose a configuration from those that override parts of it."""
    values: dict[str, str | None] = dict.fromkeys(_VALUES)
    switches: dict[str, bool] = dict.fromkeys((*_SWITCHES, "--help", "-h"), False)
    target, rest, waiting = None, [], iter(_split_equals(arguments))
    for token in waiting:
        if token in values:
            values[token] = _value_after(token, next(waiting, None))
        elif token in switches:
            switches[token] = True
        elif target is None and _is_word(token) and not (rest and _is_option(rest[-1])):
            target = token
        else:
            rest.append(token)
    if target is None:
        target = _pop_target(rest, values["--agent"])
    run = None if values["--run"] is None else run_path(values["--run"])
    agent, runtime, resume = values["--agent"], values["--runtime"], switches["--resume"]
    parts = {name: switches[f"--from-{name}"] for name in ("optimizer", "partial")}
    if values["--from"] is None and any(parts.values()):
        raise UsageError(
            "--from-optimizer and --from-partial say how to read --from: name a run with it"
        )
    start = None if values["--from"] is None else Weights(values["--from"], **parts)
    trust, env = switches["--trust-run"], words_of(rest)
    file = None if values["--config"] is None else Path(values["--config"])
    request = Request(target, agent, runtime, run, resume, trust, start, env, file)
    shown = switches["--help"] or switches["-h"]
    cluster, interface = values["--cluster"], values["--trusted-interface"]
    if interface is not None and cluster is None:
        raise UsageError(
            "--trusted-interface is for the processes of a job: name --cluster with it"
        )
    return TrainArguments(request, switches["--debug"], shown, tuple(rest), cluster, interface)


def reject_near(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises UsageError for an option that is nearly one of a command's own, such as --trial for --trials."""
    own = [each for each in parser._option_string_actions if each.startswith("--")]
    for word in (each.partition("=")[0] for each in words if each.startswith("--")):
        if near := nearest(word, own, 1, 0.88):
            raise UsageError(f"unknown option {word}; did you mean {near[0]}?")


def override(config: TrainConfig, arguments: Sequence[str], show_help: bool) -> TrainConfig:
    """Returns the configuration with `--agent.x`, `--env.x` and the runtime's flags applied.

    With `show_help`, prints help and raises SystemExit. Raises UsageError for options that it cannot use.
    """
    kwargs = dict(getattr(config.env, "kwargs", ()))
    if is_pickled(config.env):
        kwargs = dict(kwargs.get("options", {}))
    named = (config.runtime.runtime,)
    arguments = [_plain_name(token, named) for token in without_words(arguments, kwargs)]
    known = dict(_known_options(config))
    arguments = whole_numbers(arguments, known)
    if not show_help:
        _reject_unknown(arguments, known)
    options, back = _options_of(config)
    captured = io.StringIO()
    try:
        with contextlib.nullcontext() if show_help else contextlib.redirect_stderr(captured):
            parsed: Any = tyro.cli(
                options,  # type: ignore[arg-type]
                prog=f"seedbed train {config.name}",
                description="\n".join(filter(None, (HELP, told(config.env) if show_help else ""))),
                args=["--help"] if show_help else arguments,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise UsageError(_one_line(captured.getvalue())) from None
    return back(parsed)


def given(arguments: Sequence[str], option: str) -> str:
    """Returns the value that a command line gives an option, "" if it gives none."""
    words = [*map(_plain_name, _split_equals(arguments)), ""]
    places = [place for place, word in enumerate(words[:-1]) if word == option]
    return words[places[-1] + 1] if places else ""


def command(config: TrainConfig) -> str:
    """Returns the command line that trains a configuration; "" if it has no name that could train.

    The name may be a stranger's: no code is imported for it, but for that of the configuration itself.
    """
    from seedbed.config.scaling import everywhere  # imports JAX

    env, _, agent = config.name.rpartition("/")
    own = {"", code_of(config.env), *map(_path, (config.env, config.agent))}
    own.add(env if env.startswith(PREFIX) else "")
    if not config.name or not {part for part in (env, agent) if ":" in part} <= own:
        return ""
    words, kwargs = ["seedbed", "train", config.name], dict(getattr(config.env, "kwargs", ()))
    try:
        usual = resolve.train_config(config.name, env=kwargs)
    except SeedbedError:
        try:
            usual = resolve.train_config(env, agent, kwargs)
        except SeedbedError:
            return ""
        words = ["seedbed", "train", env, "--agent", agent]
    if type(usual.env) is not type(config.env):
        return ""  # the name means another environment now
    if type(usual.runtime) is not type(config.runtime):
        runtime = config.runtime.runtime
        usual = in_runtime(usual, runtime)
        words += ["--runtime", runtime]
    if (start := config.start) is not None:
        parts = {"--from-optimizer": start.optimizer, "--from-partial": start.partial}
        words += ["--from", str(start.run), *(name for name, given in parts.items() if given)]
    before = [dict(_known_options(each)) for each in everywhere(usual)]  # wherever it is given
    for option, value in _known_options(config):
        known = all(value == each.get(option) for each in before)
        if known or option.rpartition(".")[2].lstrip("-").startswith("no-"):
            continue
        if isinstance(value, bool):
            head, dot, tail = option[2:].rpartition(".")
            words.append(option if value else f"--{head}{dot}no-{tail}")
        else:
            words += [option, *map(str, value if isinstance(value, tuple) else [value])]
    words += written(kwargs)
    return " ".join(map(quoted, words))


def _path(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


# tyro joins lines that are not indented, and does not fold what it has joined.
HELP = """Trains a preset, an environment's short name, a Gymnasium id, module:factory,
a robot's FILE.xml or envpool:ID.

  --agent A     takes another agent: a name or module:Class
  --runtime R   takes another runtime: central or paramserver
  --config FILE takes all of a configuration, such as a run's config.json
  --run DIR     names the folder of the run, by default below runs/, or a
                bucket: s3://..., gs://...
  --resume      goes on with the run in the folder of --run
  --from RUN    begins with the weights of another run or exported policy
  --from-optimizer  takes its optimizer's state, too
  --from-partial    begins parts anew that do not fit
  --cluster C   train on many machines: slurm, ray, ray:N or ranks (docs/clusters.md)
  --trusted-interface I  where the machines of one learner may send gradients,
                which are not encrypted
  --trust-run   import the code that this folder names, although others could have written it
  --debug       shows tracebacks"""


def _options_of(config: TrainConfig) -> tuple[Any, Any]:
    """Returns a dataclass whose fields tyro turns into flags, and a function that converts it back."""
    env_kind = _without(type(config.env), _fixed(config.env))
    agent_kind = _without(type(config.agent), BOUND)
    parts: tuple[Any, Any] = (config.env, config.agent)
    env_fields, agent_fields = (
        {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
        for part in parts
    )
    fields = [
        (
            "runtime",
            Annotated[type(config.runtime), tyro.conf.arg(name="")],
            dataclasses.field(default=config.runtime),
        ),
        ("env", env_kind, dataclasses.field(default_factory=lambda: env_kind(**env_fields))),
        (
            "agent",
            agent_kind,
            dataclasses.field(default_factory=lambda: agent_kind(**agent_fields)),
        ),
    ]
    options = dataclasses.make_dataclass("Options", fields, frozen=True)

    def back(parsed: Any) -> TrainConfig:
        agent = type(config.agent)(**{name: getattr(parsed.agent, name) for name in agent_fields})
        env = type(config.env)(**{name: getattr(parsed.env, name) for name in env_fields})
        return dataclasses.replace(config, env=env, agent=agent, runtime=parsed.runtime)

    return options, back


def _fixed(env: HostEnvConfig | Environment) -> tuple[str, ...]:
    """Returns the names of the environment's fields that are not options."""
    return ENV_BOUND if is_on_device(env) else IDENTITY


def _without(kind: type, names: tuple[str, ...]) -> Any:
    """Returns a subclass of a dataclass in which tyro hides the fields `names`; itself if it has none."""
    hidden = [
        (field.name, tyro.conf.Suppress[Any], dataclasses.field(default=field.default))
        for field in dataclasses.fields(kind)
        if field.name in names
    ]
    if not hidden:
        return kind
    return dataclasses.make_dataclass(kind.__name__, hidden, bases=(kind,), frozen=True)


def options_of(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Yields the options of a configuration with their values, without the negative forms of switches."""
    known = dict(_known_options(config))
    for option, value in known.items():
        head, dot, tail = option.lstrip("-").rpartition(".")
        if f"--{head}{dot}{tail.removeprefix('no-')}" == option or not isinstance(value, bool):
            yield option, value


def _known_options(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Yields the flags of a configuration, as `--agent.x`, with the values that they override."""
    yield from _flags("", config.runtime)
    env = ("env.", config.env, _fixed(config.env))
    for part, value, left_out in (env, ("agent.", config.agent, BOUND)):
        for name, default in _flags(part, value):
            if name.removeprefix(f"--{part}").replace("-", "_") not in left_out:
                yield name, default


def _flags(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        child, name = getattr(value, field.name), prefix + field.name
        if dataclasses.is_dataclass(child):
            yield from _flags(f"{name}.", child)
            continue
        yield f"--{name}".replace("_", "-"), child
        if isinstance(child, bool):
            head, _, tail = name.rpartition(".")
            yield f"--{head + '.' if head else ''}no-{tail}".replace("_", "-"), child


def _reject_unknown(arguments: Sequence[str], known: dict[str, Any]) -> None:
    for position, token in enumerate(arguments):
        if token.startswith("--") and token not in known:
            others = [
                name
                for name, each in RUNTIMES.items()
                if _plain_name(token, (name,)) in dict(_flags("", each()))
            ]
            if others:
                raise UsageError(
                    f"{token} is an option of another runtime ({', '.join(others)}) than this run's; see "
                    "--help"
                )
            near = nearest(token, [*known, *_VALUES, *_SWITCHES, "--help"], cutoff=0.5)
            if not near:
                # Compare only the part after the dot.
                tails = {name.rpartition(".")[2].lstrip("-"): name for name in known}
                tail = token.rpartition(".")[2].lstrip("-")
                near = [tails[each] for each in nearest(tail, tails, cutoff=0.5)]
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise UsageError(f"unknown option {token}; {hint}")
        if position == 0 and not token.startswith("-"):
            raise UsageError(f"unexpected argument {token!r}; see --help")


def whole_numbers(arguments: Sequence[str], known: dict[str, Any]) -> list[str]:
    """Replaces numbers like 2e6 by their digits if the option takes an int."""
    written, option = [], None
    for token in _split_equals(arguments):
        option = token if token.startswith("--") else option
        old = known.get(option) if option else None
        if isinstance(old, int) and _SCIENTIFIC.fullmatch(token) and float(token).is_integer():
            token = str(int(float(token)))
        written.append(token)
    return written


def _split_equals(arguments: Sequence[str]) -> Iterator[str]:
    for token in arguments:
        name, equals, value = token.partition("=")
        yield from (name, value) if token.startswith("--") and equals else (token,)


def _plain_name(token: str, runtimes: Iterable[str] = RUNTIMES) -> str:
    """Returns an option as tyro spells it: with dashes, and without the name of one of these runtimes."""
    if not token.startswith("--"):
        return token
    prefix, dot, rest = token[2:].partition(".")
    return "--" + (rest if dot and prefix in runtimes else token[2:]).replace("_", "-")


def _value_after(option: str, value: str | None) -> str:
    if value is None or value.startswith("--"):
        raise UsageError(f"{option} needs a value")
    return value


def _pop_target(rest: list[str], agent: str | None) -> str | None:
    """Removes the target from `rest` and returns it, or None: the first word that follows a switch.

    Switches are options without a value, so such a word cannot be the value of an option.
    """
    words = [
        place
        for place in range(1, len(rest))
        if _is_option(rest[place - 1]) and _is_word(rest[place])
    ]
    switches = _switches(agent) if words else ()
    for place in words:
        if _plain_name(rest[place - 1]) in switches:
            return rest.pop(place)
    return None


def _switches(agent: str | None) -> set[str]:
    """Returns the options of all presets, and of the agent, whose values are true or false."""
    configs = [preset() for preset in resolve.PRESETS.values()]
    if agent is not None:
        configs.append(dataclasses.replace(configs[0], agent=resolve.load_agent_class(agent)()))
    return {
        name
        for config in configs
        for name, value in _known_options(config)
        if isinstance(value, bool)
    }


def _is_option(token: str) -> bool:
    return token.startswith("-") and not _is_number(token)


def _is_word(token: str) -> bool:
    return not token.startswith("-") and not _is_number(token)


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _one_line(boxed: str) -> str:
    """Returns the message in tyro's box of text as one line."""
    lines = []
    for line in boxed.splitlines()[1:]:
        text = line.strip("│ \t")
        if not text or set(text) <= set("─╰╯"):
            break
        lines.append(text)
    text = " ".join(lines) or "the command line cannot be understood; see --help"
    text = text.replace("invalid literal for int() with base 10:", "give a whole number, not")
    return text.replace("could not convert string to float:", "give a number, not")
