"""Programs composed at random of loops, arrays in memory and masks: simd.vectorize against jax.vmap."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer import EXAMPLES, ROWS, Composer, addresses
from seedbed.simd import vectorize
from seedbed.simd.cpu.codegen import emit
from seedbed.simd.frontend.trace import trace

pytestmark = pytest.mark.usefixtures("no_fallback")


def compare(tape, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-50, 50, (ROWS, 3)).astype(np.int32)
    n, shared = rng.integers(-9, 99, ROWS).astype(np.int32), np.int32(rng.integers(0, 9))

    def run(batched):
        def all_rows(x, n, shared):
            return batched(lambda x, n: Composer(tape).program(x, n, shared))(x, n)

        return jax.tree.leaves(jax.jit(all_rows)(x, n, shared))

    with addresses(seed):
        ours = run(vectorize)
    for i, (got, want) in enumerate(zip(ours, run(jax.vmap), strict=True)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want, err_msg=f"result {i}")


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.binary(min_size=60, max_size=500), st.integers(0, 99))
def test_programs_composed_at_random(tape, seed):
    compare(tape, seed)


def emitted(count):
    """Hashes of what programs become."""
    for seed in range(count):
        tape = np.random.default_rng(seed).bytes(300)
        program = jax.make_jaxpr(Composer(tape).program)(
            np.ones(3, np.int32), np.int32(1), np.int32(2)
        )
        yield hashlib.sha256(
            emit(trace(program, [False] * 2 + [True], limit=10**5), 8).encode()
        ).hexdigest()


@pytest.mark.slow
def test_the_same_program_is_the_same_code_in_every_process():
    command = "import test_simd_fuzz as t; print(*t.emitted(6))"
    texts = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", command],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert len(set(texts[0].split())) == 6
