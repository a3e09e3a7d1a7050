"""All JSON that is written is JSON, and what strangers wrote is read without harm."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest

from saved import strictly
from seedbed import strict_json
from seedbed.actors.slots import spec_from_json, spec_to_json
from seedbed.actors.wire import Kind
from seedbed.config import resolve
from seedbed.config.saved import to_json
from seedbed.envs.host import registry
from seedbed.envs.host.gym import GymEnv
from seedbed.files import load_json, write_json
from seedbed.run.encoding import encode
from seedbed.streams.messages import pack
from seedbed.types import ArraySpec, Box, EnvSpec, SeedbedError
from seedbed.viewer.html import json_in_page

SOURCE = Path(strict_json.__file__).parent


def test_numbers_that_json_lacks_are_texts_and_come_back():
    value = {"a": [math.inf, -math.inf, {"b": (math.nan, 1.5, True, None, "x")}]}
    text = strict_json.dumps(value)
    assert strictly(text) == {"a": ["Infinity", "-Infinity", {"b": ["NaN", 1.5, True, None, "x"]}]}
    again = strict_json.revived(strict_json.loads(text))
    assert again["a"][:2] == [math.inf, -math.inf]
    assert math.isnan(again["a"][2]["b"][0])
    assert again["a"][2]["b"][1:] == [1.5, True, None, "x"]
    assert strict_json.revived(strict_json.loads('[Infinity, 1e999, "-Infinity"]')) == [
        math.inf,
        math.inf,
        -math.inf,
    ]  # as earlier versions wrote them


@pytest.mark.slow
def test_only_one_module_writes_json():
    """Another one could write NaN; `messages` only reads, more strictly than others."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name == "json" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("json", "orjson", "simplejson"))
    }
    assert found == {"strict_json.py", "streams/messages.py"}
    assert "json.dump" not in (SOURCE / "streams" / "messages.py").read_text().replace(
        "strict_json.", ""
    )


def test_an_infinite_range_is_saved_with_a_run(tmp_path):
    config: Any = resolve.train_config("hopper/ppo")
    assert math.inf in config.env.healthy_angle_range or math.inf in config.env.healthy_z_range
    write_json(tmp_path / "config.json", to_json(config))
    assert '"Infinity"' in (tmp_path / "config.json").read_text()
    strictly((tmp_path / "config.json").read_text())
    env = GymEnv("Hopper-v5", kwargs={"healthy_z_range": (0.7, math.inf)})
    data = strictly(strict_json.dumps(registry.to_json(env)))
    assert dict(registry.from_json(data).kwargs) == {"healthy_z_range": [0.7, math.inf]}  # type: ignore[attr-defined]


def test_unbounded_actions_pass_a_stream():
    spec = EnvSpec(ArraySpec((3,), "float32"), Box((2,), (-math.inf, -1.0), (math.inf, 1.0)))
    frame = pack(Kind.READY, {"spec": spec_to_json(spec)})
    assert spec_from_json(strictly(bytes(frame)[bytes(frame).index(b"{") :])["spec"]) == spec


def test_the_data_of_pages_is_json():
    page = json_in_page({"x": [1.0, math.nan, math.inf], "</script>": "<"})
    assert "<" not in page
    assert strictly(page)["x"] == [1.0, "NaN", "Infinity"]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_texts_that_would_come_back_as_numbers_are_refused(text):
    @dataclasses.dataclass(frozen=True)
    class Task:
        name: str

    with pytest.raises(SeedbedError, match="stands for a number"):
        encode(Task(text))
    with pytest.raises(SeedbedError, match="stands for a number"):
        registry.to_json(GymEnv("CartPole-v1", kwargs={"name": text}))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "levels deep"),
        ("[" * 100 + "]" * 100, "levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "levels deep"),
        (f"[{'9' * 400}]", "an integer of 400 digits"),
        ("[1", "delimiter"),
        (b"\xff\xfe[", "codec|Expecting"),
        ("", "Expecting"),
    ],
)
def test_what_strangers_write_is_refused_as_what_it_is(text, reason):
    with pytest.raises(ValueError, match=reason):
        strict_json.loads(text)


def test_only_regular_files_of_a_sane_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "loop", "device", ".", "missing"):
        with pytest.raises(OSError, match=r"no regular file|No such file|symbolic"):
            load_json(tmp_path / name)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="more than 16 MB"):
        load_json(tmp_path / "huge")
