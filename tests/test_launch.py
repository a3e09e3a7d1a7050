"""The learner's settings for malloc, which its children do not inherit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, pathlib, subprocess, sys
from seedbed.run.memory import set_up_malloc
set_up_malloc()
mine = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in pathlib.Path("/proc/self/environ").read_text()
child = subprocess.run([sys.executable, "-c", "import os; print(os.environ.get('GLIBC_TUNABLES'))"],
                       capture_output=True, text=True)
print(mine, child.stdout.strip())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a tunable of glibc")
@pytest.mark.parametrize(
    ("users", "found"),
    [
        ({}, "True None"),
        ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, "False glibc.malloc.perturb=0"),
    ],
)
def test_malloc_settings_are_for_this_process_alone(users, found):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **users}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == (found, "")
