"""Measures pages of `seedbed play` in a headless Chromium without a GPU, against MuJoCo's C code.

For each run: the pictures a second at two sizes of the window while a joystick is held forward, and how many
times faster than real time the page steps (command, policy and physics in WebAssembly, one thread). MuJoCo's
C code steps the physics alone, of the same model, natively on one thread. Needs Chromium.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from _stamp import write_result
from seedbed.play.command import player_of
from seedbed.play.page import Player, write_page

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from browser import Browser, wait_until

mujoco: Any = importlib.import_module("mujoco")
RESULT = Path(__file__).parent / "results" / "page.json"
SIZES = ((1280, 800), (400, 800))
SETTLES, WATCHED = 4.0, 6  # s until the first look, and looks a second apart


def watched(page: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Returns what a page shows of itself while it walks forward."""
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(page.resolve().as_uri(), Path(profile))
        try:
            width, height = size
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
            )  # fmt: skip
            ready = "document.documentElement.dataset.state === 'ready'"
            wait_until(lambda: browser.evaluate(ready), "the page is ready")
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="w")
            time.sleep(SETTLES)
            begin, first = time.monotonic(), steps(browser)
            looks = []
            for _ in range(WATCHED):
                time.sleep(1.0)
                looks.append([number(browser, name) for name in ("rate", "spare")])
            passed = time.monotonic() - begin
            told = browser.complaints()
            pictures, spare = (statistics.median(column) for column in zip(*looks, strict=True))
            return {
                "pictures_per_s": pictures,
                "times_real_time": spare,
                "steps_per_s": (steps(browser) - first) / passed,
                "complaints": len(told),
            }
        finally:
            browser.close()


def number(browser: Browser, name: str) -> float:
    return float(browser.evaluate(f"parseFloat(document.getElementById('{name}').textContent)"))


def steps(browser: Browser) -> int:
    return int(browser.evaluate("document.documentElement.dataset.steps"))


def native(player: Player, seconds: float = 2.0) -> float:
    """Returns how many times faster than real time MuJoCo's C code steps the model on one thread."""
    model = mujoco.MjModel.from_xml_path(str(player.env.model_path))
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    rates, rng = [], np.random.default_rng(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(100):
            data.ctrl[:] = np.where(model.nkey, model.key_ctrl[0] if model.nkey else 0, 0)
            data.ctrl[:] += rng.normal(size=model.nu) * 0.1
            mujoco.mj_step(model, data, player.env.frame_skip)
        rates.append(100 * player.env.dt / (time.perf_counter() - begin))
    return statistics.median(rates)


def main() -> None:
    """Measures the pages of runs, and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+")
    given = parser.parse_args()
    rows = []
    for run in given.runs:
        player = player_of(run, trust=True)
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "page.html")
            os.environ["SEEDBED_CACHE"] = folder
            times = [time.perf_counter()]
            for _ in ("compiled", "from the cache"):
                write_page([player], page)
                times.append(time.perf_counter())
            made, again = np.diff(times)
            windows = {f"{size[0]}x{size[1]}": watched(page, size) for size in SIZES}
            c = native(player)
            row = {"task": type(player.env).__name__, "bytes": page.stat().st_size}
            row |= {"made_s": made, "made_again_s": again}
        rows.append(row | {"mujoco_times_real_time": c, "windows": windows})
        for size, window in windows.items():
            ratio = window["times_real_time"] / c
            print(
                f"{row['task']} {size}: {window['pictures_per_s']:.0f} pictures/s, "
                f"{window['times_real_time']:.0f}x real time, {ratio:.2f} of MuJoCo's C code"
            )
    write_result(RESULT, {"rows": rows})


if __name__ == "__main__":
    main()
