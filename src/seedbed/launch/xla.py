"""XLA's flags: what makes a tested version of jaxlib fast, set before JAX starts. Imports no JAX."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import MutableMapping

# Not LIBRARY_FUSION_TYPE_ELTWISE: jaxlib 0.10.2 then fails on a dense layer's gradient ("unsupported
# layout in YNN fusion"), which every network has.
_YNN = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
FLAGS = {"0.10.2": (_YNN,)}
"""Flags by version of jaxlib. XLA aborts the process on a flag it does not know, hence by exact version."""
_PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")


def configure(environment: MutableMapping[str, str] | None = None) -> str:
    """Adds flags to `XLA_FLAGS`, never against the user's own, and returns what to log about it."""
    environment = os.environ if environment is None else environment
    version = _version("jaxlib")
    if version not in FLAGS:
        return f"XLA flags: none, jaxlib {version} is untested (tested: {', '.join(FLAGS)})"
    for plugin in _PLUGINS:  # reads the same variable with an XLA of its own
        other = _version(plugin)
        if other not in (None, version):
            return f"XLA flags: none, {plugin} {other} differs from jaxlib {version}"
    own = environment.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in own}
    added = [flag for flag in FLAGS[version] if flag.partition("=")[0] not in names]
    if not added:
        return "XLA flags: the user's own"
    environment["XLA_FLAGS"] = " ".join([*own, *added])
    return f"XLA flags for jaxlib {version}: {' '.join(added)}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
