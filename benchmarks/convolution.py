"""Times training and inference of the Nature CNN or the deep ResNet with our convolution and with XLA's.

Each variant runs in its own process, because XLA reads its flags once; rounds are interleaved
so that a noisy machine disturbs all variants alike. On a CPU that is faster with bfloat16, that is
measured too.

    python benchmarks/convolution.py [--rounds 8] [--frames 640] [--network nature] [--variants ours xla]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _stamp import write_result
from seedbed.nets.native.bfloat16.instructions import host_instructions

_YNN = "--xla_cpu_experimental_ynn_fusion_type="
_KINDS = [f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("DOT", "ELTWISE", "REDUCE")]
VARIANTS = {
    "ours": ("ours", ""),
    "ours+ynn": ("ours", _YNN + ",".join(_KINDS)),
    "ours+ynn-dot": ("ours", _YNN + _KINDS[0]),
    "ours+ynn-rest": ("ours", _YNN + ",".join(_KINDS[1:])),
    "bfloat16": ("bfloat16", ""),
    "xla": ("xla", ""),
    "xla+ynn": ("xla", _YNN + ",".join(_KINDS)),
}
_LAYERS = ((8, 4, 32, 4), (4, 32, 64, 2), (3, 64, 64, 1))  # size, channels, features, stride
_RESNET = (16, 32, 32)  # channels
_INFERENCE = (16, 32, 64, 128)


def _shapes(network: str) -> dict[str, tuple[int, ...]]:
    """Kernels of the convolutions, in order, and of the dense layers after them."""
    if network == "nature":
        shapes = {f"conv{i}": (s, s, c, f) for i, (s, c, f, _) in enumerate(_LAYERS)}
        return shapes | {"dense": (3136, 512), "policy": (512, 6), "value": (512, 1)}
    shapes = {}
    for i, (c, f) in enumerate(itertools.pairwise((4, *_RESNET))):
        shapes[f"entry{i}"] = (3, 3, c, f)
        shapes |= {f"block{i}{part}": (3, 3, f, f) for part in ("aa", "ab", "ba", "bb")}
    return shapes | {"dense": (3872, 256), "policy": (256, 6), "value": (256, 1)}


def _initial_params(key, network: str):
    import jax
    import jax.numpy as jnp

    params = {}
    for name, shape in _shapes(network).items():
        key, subkey = jax.random.split(key)
        scale = (2.0 / jnp.prod(jnp.array(shape[:-1]))) ** 0.5
        kernel = scale * jax.random.normal(subkey, shape)
        params[name] = (kernel, jnp.zeros(shape[-1]))
    return params


def _convolve(x, weights, implementation: str, *, stride=1, padding=0, relu=True):
    import jax
    import jax.numpy as jnp

    from seedbed.nets.convolution import conv2d

    kernel, bias = weights
    if implementation != "xla":
        # bytes are divided by 255 through the kernel
        kernel = kernel / 255.0 if x.dtype == jnp.uint8 else kernel
        activation = "relu" if relu else None
        dtype = jnp.bfloat16 if implementation == "bfloat16" else jnp.float32
        return conv2d(
            x, kernel, bias, stride=stride, padding=padding, activation=activation, dtype=dtype
        )
    x = x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x
    margin = ((padding, padding), (padding, padding)) if padding else "VALID"
    x = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), margin, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x + bias) if relu else x + bias


def _features(params, x, implementation: str, network: str):
    import jax

    from seedbed.nets.pooling import max_pool
    from seedbed.nets.residual import residual_block

    if network == "nature":
        for i, (*_, stride) in enumerate(_LAYERS):
            x = _convolve(x, params[f"conv{i}"], implementation, stride=stride)
        return x
    for i in range(len(_RESNET)):
        x = _convolve(x, params[f"entry{i}"], implementation, padding=1, relu=False)
        x = max_pool(x, padding="SAME")
        for block in "ab":
            first, second = (params[f"block{i}{block}{part}"] for part in "ab")
            if implementation != "xla":
                x = residual_block(x, first, second)
                continue
            y = _convolve(jax.nn.relu(x), first, implementation, padding=1)
            x = x + _convolve(y, second, implementation, padding=1, relu=False)
    return jax.nn.relu(x)


def _network(params, frames, implementation: str, network: str):
    """Logits [N, 6] and values [N] of uint8 frames [N, 84, 84, 4]."""
    import jax

    from seedbed.nets.products import multiply

    x = _features(params, frames, implementation, network)
    x = x.reshape(x.shape[0], -1)
    kernel, bias = params["dense"]
    x = jax.nn.relu(multiply(x, kernel, x.dtype) + bias)
    logits = x @ params["policy"][0] + params["policy"][1]
    return logits, (x @ params["value"][0] + params["value"][1])[:, 0]


def _train_step(implementation: str, network: str):
    import jax
    import jax.numpy as jnp

    def loss(params, frames, action, advantage, target):
        logits, value = _network(params, frames, implementation, network)
        log_policy = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_policy, action[:, None], 1)[:, 0]
        entropy = -(jnp.exp(log_policy) * log_policy).sum(-1)
        return (0.5 * (value - target) ** 2 - advantage * chosen - 0.01 * entropy).mean()

    def step(state, *batch):
        params, mean, square = state
        gradient = jax.grad(loss)(params, *batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
        params = jax.tree.map(
            lambda p, m, s: p - 1e-4 * m / (jnp.sqrt(s) + 1e-5), params, mean, square
        )
        return params, mean, square

    return jax.jit(step, donate_argnums=0)


def _measure(function, *arguments) -> tuple[object, float, float]:
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function(*arguments))
    return result, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def _worker(implementation: str, frames: int, network: str) -> None:
    """Answer each line on stdin with one JSON line of [wall, CPU] milliseconds per task."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (frames, 84, 84, 4), dtype=np.uint8))
    action = jnp.asarray(rng.integers(0, 6, frames))
    advantage, target = jnp.asarray(rng.normal(size=(2, frames)), jnp.float32)
    params = _initial_params(jax.random.key(0), network)
    infer = jax.jit(lambda p, x: _network(p, x, implementation, network))
    step = _train_step(implementation, network)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (jax.tree.map(jnp.copy, params), zeros, jax.tree.map(jnp.copy, zeros))
    for line in itertools.chain(["compile\n"], sys.stdin):
        times = {}
        state, *times["train"] = _measure(step, state, images, action, advantage, target)
        for n in _INFERENCE:
            _, *times[f"inference {n}"] = _measure(infer, params, images[:n])
        print(json.dumps({"compile": times["train"]} if line == "compile\n" else times), flush=True)


def _start(variant: str, frames: int, network: str) -> subprocess.Popen:
    implementation, flags = VARIANTS[variant]
    command = [sys.executable, __file__, "--worker", implementation, "--frames", str(frames)]
    command += ["--network", network]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _report(samples: dict[str, list[dict]]) -> dict[str, dict]:
    """Print and return medians of [wall, CPU] milliseconds, and ratios to the first variant."""
    medians, reference = {}, next(iter(samples))
    for variant, rows in samples.items():
        medians[variant] = {
            task: [round(statistics.median(r[task][i] for r in rows), 2) for i in (0, 1)]
            + [round(min(r[task][1] for r in rows), 2)]
            for task in rows[0]
        }
        for task, (wall, cpu, least) in medians[variant].items():
            ratio = cpu / medians[reference][task][1]
            print(
                f"{variant:14s} {task:14s} wall {wall:8.1f} ms   CPU {cpu:8.1f} ms "
                f"(least {least:8.1f})   CPU / {reference} {ratio:5.2f}"
            )
    return medians


def main() -> None:
    """Run the workers round by round and save the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--frames", type=int, default=640)
    parser.add_argument("--network", choices=("nature", "resnet"), default="nature")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["ours", "bfloat16", "xla", "xla+ynn"]
    )
    parser.add_argument("--worker", choices=("ours", "bfloat16", "xla"))
    args = parser.parse_args()
    if args.worker:
        _worker(args.worker, args.frames, args.network)
        return
    if "bfloat16" in args.variants and host_instructions() is None:
        print("bfloat16 is no faster than float32 on this CPU: it is not measured")
        args.variants.remove("bfloat16")
    workers = {variant: _start(variant, args.frames, args.network) for variant in args.variants}
    samples: dict[str, list[dict]] = {variant: [] for variant in workers}
    for variant, worker in workers.items():
        wall, cpu = json.loads(worker.stdout.readline())["compile"]
        print(f"{variant:14s} first step, compilation included: wall {wall:.0f}, CPU {cpu:.0f} ms")
    for _ in range(args.rounds):
        for variant, worker in workers.items():
            worker.stdin.write("go\n")
            worker.stdin.flush()
            samples[variant].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    result = {
        "network": args.network,
        "frames": args.frames,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
    }
    result["median wall, median CPU, least CPU (ms)"] = _report(samples)
    name = "convolution" if args.network == "nature" else "convolution_resnet"
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_result(path, result)


if __name__ == "__main__":
    main()
