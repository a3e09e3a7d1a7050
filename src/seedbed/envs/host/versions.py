"""The versions of what environments are made of, which two machines must agree on (docs/protocol.md).

The module imports no JAX, and looks at no more than names, versions and files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from importlib.machinery import PathFinder
from pathlib import Path

from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.envs.host.doom import DoomEnv
from seedbed.envs.host.gym import FactoryEnv
from seedbed.envs.host.pooled import EnvPoolEnv


class VersionError(Exception):
    """Raised if two machines have different versions of something; the text names both."""


def of(env: HostEnvConfig) -> dict[str, str]:
    """Returns the versions of an environment's parts on this machine, by name; what is missing is left out.

    A name that begins with `file ` or `ROM ` has a digest, which must be equal; others have versions.
    """
    found = {}
    owners = {AtariEnv: "ale-py", EnvPoolEnv: "envpool", DoomEnv: "vizdoom"}
    package = owners.get(type(env), "gymnasium")
    if (version := package_version(package)) is not None:
        found[package] = version
    if isinstance(env, AtariEnv) and (digest := _rom_digest(env.game)) is not None:
        found[f"ROM {env.game}"] = digest
    name = env.factory if isinstance(env, FactoryEnv) else getattr(env, "id", "")
    if ":" in name:
        found |= of_module(name.partition(":")[0].partition(".")[0])
    return found


def require_same(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Raises VersionError unless `theirs` has the files of `ours`, and all that both have agrees."""
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[name], str(theirs[name])
        if name.startswith(("file ", "ROM ")):
            if mine != other:
                raise VersionError(
                    f"{name} differs: its digest is {other[:12]} here and {mine[:12]} at the learner; "
                    "copy the learner's"
                )
        else:
            require_same_release(name, mine, other)
    for name in sorted(ours.keys() - theirs.keys()):
        if name.startswith("file "):
            raise VersionError(f"{name} is at the learner and not here: copy the learner's")


def require_same_release(name: str, ours: str, theirs: str) -> None:
    """Raises VersionError unless two versions agree but for their third number."""
    if ours.split(".")[:2] != str(theirs).split(".")[:2]:
        raise VersionError(
            f"{name} is {str(theirs)[:40]} here and {ours} at the learner: install the learner's version"
        )


@functools.cache
def package_version(package: str) -> str | None:
    """Returns the version of an installed package, or None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _rom_digest(game: str) -> str | None:
    from ale_py import roms

    try:
        path = roms.get_rom_path(game)
    except OSError:
        return None
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def of_module(module: str) -> dict[str, str]:
    """Returns the version of the distribution that has a module, or the digest of its file, by name.

    The current folder comes last, as in `import_named`.
    """
    for distribution in importlib.metadata.packages_distributions().get(module, []):
        version = package_version(distribution)
        return {} if version is None else {distribution: version}
    try:
        here = [str(Path.cwd())]
        found = importlib.util.find_spec(module) or PathFinder.find_spec(module, here)
    except (ImportError, ValueError):
        return {}
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return {}
    return {f"file {module}": hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()}
