"""What `pip install seedbed[...]` brings exists."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_jax_has_the_extras_that_ours_ask_for():
    asked = {name: re.findall(r"^jax\[(\w+)\]", " ".join(EXTRAS[name])) for name in EXTRAS}
    asked = {name: wanted for name, wanted in asked.items() if wanted}
    assert asked == {"cuda": ["cuda13"], "cuda12": ["cuda12"]}
    offered = metadata("jax").get_all("Provides-Extra") or []
    assert {wanted for found in asked.values() for wanted in found} <= set(offered)
