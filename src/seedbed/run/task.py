"""The task in a run's configuration, to compare it with those of other runs. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seedbed.envs.host.pickled import without_code
from seedbed.run.folder import SCENE


def task_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the environment in a configuration in JSON, equal if the task is the same.

    The place of a copied MJCF file, with the hash of what is in it, stands for the file: its path is another
    one once a run goes on with its copy. Code is not among the options: an edited function is the same.
    """
    env, scene = without_code(config["env"]), config.get(SCENE)
    return _with_file(env, scene) if scene else env


def _with_file(task: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Returns an encoded task with another file in the innermost one."""
    inner = task.get("env")
    changed = {"env": _with_file(inner, file)} if isinstance(inner, dict) else {"xml_file": file}
    return {**task, **changed}
