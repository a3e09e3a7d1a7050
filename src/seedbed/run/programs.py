"""Keeps programs that XLA has compiled on disk, so that later starts can load them."""

from __future__ import annotations

import os
import warnings

import jax

from seedbed.cache import directory, prepared

LARGEST = 512 << 20
"""The most bytes that the directory may hold; the least recently used programs are removed first."""


def keep_programs() -> None:
    """Makes JAX keep its programs below $SEEDBED_CACHE (by default ~/.cache/seedbed).

    Does nothing if the user has set another folder for JAX. Warns, and keeps nothing, if the folder cannot
    be used.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        folder = prepared(directory("programs"))
    except (OSError, RuntimeError) as error:
        warnings.warn(f"compiled programs are not kept: {error}", RuntimeWarning, stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
