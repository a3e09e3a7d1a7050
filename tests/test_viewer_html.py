"""The replay page: one file, true poses, and a browser that shows it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

from browser import Browser, needs_browser, wait_until
from saved import ASSETS, roll
from seedbed.types import SeedbedError
from seedbed.viewer.html import QUATERNION_SCALE, WEB, describe, describe_scene, write_html
from seedbed.viewer.recording import Episode, Recording, compute_poses, find_view
from small_disk import SmallDisk, on_small_disk

MODELS = ("ant", "humanoid", "reacher", "pusher_v5", "inverted_double_pendulum", "half_cheetah")


def read_replay(path: Path) -> dict:
    """Reads back what a page carries."""
    text = re.search(
        r'<script id="replay" type="application/json">(.*?)</script>', path.read_text()
    )
    assert text is not None
    return json.loads(text[1])


def test_page_is_one_file_that_fetches_nothing(tmp_path):
    path = tmp_path / "out.html"
    write_html(roll("ant", 5), path)
    assert list(tmp_path.iterdir()) == [path]
    page = path.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "http" not in policy[1]
    markup = re.sub(r"<script\b[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|//\w|@import|<(iframe|object|embed)", markup)
    assert re.findall(r'(?:src|href)="([^"]*)"', markup) == ["data:,"]
    assert page.count("<script") == page.count("</script>") == 2
    assert "{{" not in markup


@pytest.mark.parametrize(("folder", "bundle"), [("src", "replay.js"), ("report", "report.js")])
def test_bundles_are_built_from_the_sources(folder, bundle):
    digest = hashlib.sha256()
    for path in [*sorted((WEB / folder).iterdir()), WEB / "package.json"]:
        digest.update(path.read_bytes())
    first, *_ = (WEB / bundle).read_text().splitlines()
    assert first == f"/* sources {digest.hexdigest()} */", "run make web"


@pytest.mark.parametrize("name", MODELS)
def test_poses_are_those_of_mujoco(tmp_path, name):
    recording, path = roll(name, 40), tmp_path / "out.html"
    write_html(recording, path)
    replay = read_replay(path)
    packed, bodies = replay["episodes"][0], replay["scene"]["bodies"]
    raw = gzip.decompress(base64.b64decode(packed["data"]))
    count = 41 * (3 * len(bodies) + 3) + 40
    floats = np.frombuffer(raw, "<f4", count)
    quaternion = np.frombuffer(raw, "<i2", offset=4 * count).reshape(len(bodies), 4, 41)
    position = floats[: 41 * 3 * len(bodies)].reshape(len(bodies), 3, 41)
    np.testing.assert_allclose(floats[-40:], recording.episodes[0].reward, atol=1e-6)

    model, data = recording.model, mujoco.MjData(recording.model)
    shown = [index for index in range(model.ngeom) if model.geom_rgba[index, 3] > 0]
    assert len(shown) == len(replay["scene"]["geoms"])
    for frame in (0, 17, 40):
        data.qpos[:] = recording.episodes[0].qpos[frame]
        mujoco.mj_kinematics(model, data)
        for index, geom in zip(shown, replay["scene"]["geoms"], strict=True):
            place, rotation = np.array(geom["position"]), np.empty(9)
            mujoco.mju_quat2Mat(rotation, np.array(geom["quaternion"]))
            if geom["body"]:
                row, turn = bodies.index(geom["body"]), np.empty(9)
                mujoco.mju_quat2Mat(turn, quaternion[row, :, frame] / QUATERNION_SCALE)
                turn = turn.reshape(3, 3)
                place = position[row, :, frame] + turn @ place
                rotation = (turn @ rotation.reshape(3, 3)).ravel()
            np.testing.assert_allclose(place, data.geom_xpos[index], atol=1e-4)
            np.testing.assert_allclose(rotation, data.geom_xmat[index], atol=2e-4)


MOCAP = """<mujoco><worldbody>
  <body name="target" mocap="true" pos="1 0 0"><geom size="0.1"/>
    <body pos="0 0 1"><geom size="0.2"/></body></body>
  <body name="post" pos="0 3 0"><geom size="0.3"/></body>
  <body><joint axis="0 0 1"/><geom size="0.1" pos="1 0 0"/></body>
</worldbody></mujoco>"""


@pytest.mark.parametrize("given", [True, False])
def test_mocap_bodies_and_what_they_carry_are_where_they_were_put(tmp_path, given):
    model = mujoco.MjModel.from_xml_string(MOCAP)
    path = np.array([[[1.0, 0, 0]], [[2.0, 5, 0]], [[3.0, 0, 7]]])
    turned = np.tile([np.sqrt(0.5), np.sqrt(0.5), 0, 0], (3, 1, 1))
    poses = {"mocap_pos": path, "mocap_quat": turned} if given else {}
    episode = Episode(np.zeros((3, 1)), np.zeros(2), 0.1, **poses)
    recording = Recording(model, (episode,), "mocap")
    found = compute_poses(model, episode, find_view(recording))
    np.testing.assert_allclose(found.position[:, 1], path[:, 0] if given else [[1, 0, 0]] * 3)
    # Turned by 90 degrees about x, what was above is at the side.
    carried = path[:, 0] + [0, -1, 0] if given else np.array([[1, 0, 1]] * 3)
    np.testing.assert_allclose(found.position[:, 2], carried, atol=1e-12)
    write_html(recording, tmp_path / "out.html")
    geoms = read_replay(tmp_path / "out.html")["scene"]["geoms"]
    # Only the post never moves: it is drawn in the world.
    assert [geom["body"] for geom in geoms] == [1, 2, 0, 4]
    wrong = Episode(np.zeros((3, 1)), np.zeros(2), 0.1, mocap_pos=path[:, :, :2])
    with pytest.raises(SeedbedError, match=r"mocap_pos has shape .3, 1, 2., it must be .3, 1, 3"):
        Recording(model, (wrong,), "mocap")


def test_a_robot_whose_trunk_has_no_geom_is_followed(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(
        """<mujoco><worldbody><body name="trunk" pos="0 0 1"><freejoint/>
        <inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/>
        <body><joint name="hip"/><geom size="0.1"/></body></body></worldbody>
        <actuator><motor joint="hip"/></actuator></mujoco>"""
    )
    still = Episode(np.tile([0, 0, 1, 1, 0, 0, 0, 0.0], (2, 1)), np.zeros(1), 0.1)
    view = find_view(recording := Recording(path, (still,), ""))
    assert view.body == 1 and describe_scene(recording.model, view)["bodies"] == [1, 2]
    assert describe(recording)["episodes"]


def test_colours_are_those_of_mujoco(tmp_path):
    colours = {}
    for name in ("half_cheetah", "humanoid"):
        write_html(roll(name, 1), tmp_path / "out.html")
        described = read_replay(tmp_path / "out.html")["scene"]["geoms"]
        colours[name] = {tuple(geom["rgba"][:3]) for geom in described}
    # Without a material a geom has its own colour; with one, that times the mean of the texture.
    assert {(0.8, 0.6, 0.4), (0.9, 0.6, 0.6)} < colours["half_cheetah"]
    body = colours["humanoid"] - {(0.32, 0.36, 0.32)}  # the floor, half black
    np.testing.assert_allclose(list(body), [[0.64, 0.36, 0.16]], atol=5e-3)


def test_text_is_escaped(tmp_path):
    path = tmp_path / "out.html"
    title = "</script><b>& {{data}}"
    write_html(roll("reacher", 2, title=title), path)
    assert read_replay(path)["title"] == title
    assert "<b>" not in path.read_text() and "&lt;b&gt;&amp;" in path.read_text()


def test_extra_series_are_carried(tmp_path):
    episode = Episode(np.zeros((4, 2)), np.ones(3), 0.1, {"entropy": np.arange(3)})
    path = tmp_path / "out.html"
    write_html(Recording(ASSETS / "inverted_pendulum.xml", (episode,), "pendulum"), path)
    packed = read_replay(path)["episodes"][0]
    raw = gzip.decompress(base64.b64decode(packed["data"]))
    assert packed["series"] == ["entropy"] and packed["return"] == 3.0
    bodies = len(read_replay(path)["scene"]["bodies"])
    start = 4 * (4 * (3 * bodies + 3) + 3)
    np.testing.assert_equal(np.frombuffer(raw, "<f4", 3, start), np.arange(3))


SURFACES = """<mujoco><asset><hfield name="hills" nrow="4" ncol="3" size="1 2 .5 1"
  elevation="0 1 2 3 4 5 6 7 8 9 0 1"/>
<mesh name="roof" vertex="0 0 0 1 0 0 0 1 0 0 0 1 1 1 0"/></asset>
<worldbody><geom name="moor" type="hfield" hfield="hills" pos="3 0 0"/>
<body><freejoint/><geom type="mesh" mesh="roof" rgba="1 0 0 1"/>
<geom type="mesh" mesh="roof" pos="0 0 1" rgba="1 0 0 1"/></body></worldbody></mujoco>"""


def unpacked(surface: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points, normals and faces, as web/src/data.js reads them."""
    raw = gzip.decompress(base64.b64decode(surface["data"]))
    faces, points = surface["faces"], surface["points"]
    place = np.frombuffer(raw, "<u2", 3 * points, 12 * faces).reshape(-1, 3) / 65535
    normal = np.frombuffer(raw, "<i1", 3 * points, 12 * faces + 6 * points).reshape(-1, 3) / 127
    face = np.frombuffer(raw, "<u4", 3 * faces).reshape(-1, 3)
    return surface["low"] + place * surface["size"], normal, face


def surfaced(path: Path) -> tuple[mujoco.MjModel, dict]:
    model = mujoco.MjModel.from_xml_string(SURFACES)
    episode = Episode(np.eye(2, 7, 3), np.ones(1), 0.1)
    write_html(Recording(model, (episode,), "moor"), path)
    return model, read_replay(path)


def test_meshes_and_height_fields_are_carried(tmp_path):
    model, replay = surfaced(tmp_path / "out.html")
    assert [geom["surface"] for geom in replay["scene"]["geoms"]] == [0, 1, 1]
    hills, roof = map(unpacked, replay["scene"]["surfaces"])
    place, normal, face = roof
    wanted = model.mesh_vert[model.mesh_face]
    np.testing.assert_allclose(place[face], wanted, atol=2e-5)
    np.testing.assert_allclose(normal[face], model.mesh_normal[model.mesh_facenormal], atol=5e-3)
    place, normal, face = hills
    height = model.hfield_data.reshape(4, 3) * 0.5
    assert place[:, 2].max() == 0.5 and len(face) == 2 * 3 * 2
    for x, y, z in place:
        row, column = round((y + 2) / 4 * 3), round((x + 1) / 2 * 2)
        assert z == pytest.approx(height[row, column], abs=1e-5)
    # Triangles turn to the side on which the normals are, which is up.
    a, b, c = (place[face[:, k]] for k in range(3))
    assert (np.cross(b - a, c - a)[:, 2] > 0).all() and (normal[:, 2] > 0).all()


@needs_browser
def test_a_browser_draws_meshes(tmp_path):
    path = tmp_path / "out.html"
    surfaced(path)
    browser = Browser(f"{path.as_uri()}#step=0", tmp_path / "profile")
    try:
        ready = "document.documentElement.dataset.state === 'ready'"
        wait_until(lambda: browser.evaluate(ready), "the page is ready")
        assert browser.evaluate("document.getElementById('notice').hidden")
        image = base64.b64decode(browser.call("Page.captureScreenshot")["data"])
    finally:
        browser.close()
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).astype(int)
    assert (pixels[..., 0] - pixels[..., 1:].max(-1) > 60).mean() > 0.005


@on_small_disk
def test_a_full_disk_leaves_no_page(disk: SmallDisk) -> None:
    disk.path.mkdir()
    disk.fill()
    with pytest.raises(SeedbedError, match=r"cannot write .*out\.html"):
        write_html(roll("reacher", 2), disk.path / "out.html")
    assert list(disk.path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"), [("out.txt", "must end in .html"), ("none/out.html", "there is no folder")]
)
def test_bad_path_is_refused(tmp_path, name, text):
    with pytest.raises(SeedbedError, match=text):
        write_html(roll("reacher", 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("qpos", "reward", "env_dt", "text"),
    [
        (np.zeros((1, 2)), np.zeros(0), 0.1, "T >= 1"),
        (np.zeros((3, 2)), np.zeros(3), 0.1, "reward has shape"),
        (np.zeros((3, 2)), np.zeros(2), 0.0, "env_dt"),
        (np.full((3, 2), np.nan), np.zeros(2), 0.1, "not finite"),
        (np.zeros((3, 2)), np.zeros(2), 0.1, "nq = 15"),
    ],
)
def test_wrong_recording_is_refused(qpos, reward, env_dt, text):
    with pytest.raises(SeedbedError, match=text):
        Recording(ASSETS / "ant.xml", (Episode(qpos, reward, env_dt),), "ant")


def test_camera_follows_smoothly():
    qpos = np.zeros((101, 15))
    qpos[:, 0], qpos[:, 3] = 0.25 * np.arange(101), 1.0  # a straight walk
    qpos[50, 2] = 1.0  # and a jolt
    episode = Episode(qpos, np.ones(100), 0.05)
    recording = Recording(ASSETS / "ant.xml", (episode,), "ant")
    view = find_view(recording)
    target = compute_poses(recording.model, episode, view).target
    np.testing.assert_allclose(np.diff(target[:, 0]), 0.25, atol=1e-9)
    assert 0.0 < target[:, 2].max() < 0.1
    assert view.body == 1 and 0.8 < view.radius < 2.0


@needs_browser
def test_browser_shows_the_replay(tmp_path):
    path = tmp_path / "out.html"
    write_html(roll("ant", 30, episodes=2), path)
    browser = Browser(f"{path.as_uri()}#episode=2&step=20", tmp_path / "profile")
    try:
        ready = "document.documentElement.dataset.state === 'ready'"
        wait_until(lambda: browser.evaluate(ready), "the page is ready")
        assert browser.evaluate("document.getElementById('notice').hidden"), "no WebGL"
        wait_until(lambda: browser.text("step") == "20 of 30", "the step is shown")
        reward = read_replay(path)["episodes"][1]["return"]
        shown = browser.evaluate("document.getElementById('episode').selectedOptions[0].text")
        assert shown == f"2 of 2: return {reward:.2f}"
        assert browser.evaluate("document.querySelectorAll('figure canvas').length") == 2
        image = base64.b64decode(browser.call("Page.captureScreenshot")["data"])
        browser.press("ArrowRight")
        wait_until(lambda: browser.text("step") == "21 of 30", "the arrow steps")
        browser.press(" ")
        wait_until(lambda: browser.text("step") == "30 of 30", "it plays to the end")
        browser.press("p")
        wait_until(lambda: browser.text("step") == "0 of 30", "the other episode is shown")
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=400, height=800, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        right = (
            "Math.max(...[...document.querySelectorAll('header *, footer *, .corner *, dd')]"
            ".map(element => element.getBoundingClientRect().right))"
        )
        wait_until(lambda: browser.evaluate(right) <= 400, "all controls are in a narrow window")
        # An address that was mistyped opens at the beginning.
        browser.call("Page.navigate", url=f"{path.as_uri()}?again#episode=1.5&step=x")
        wait_until(lambda: browser.evaluate(ready), "the page is ready again")
        wait_until(lambda: (browser.text("step") or "").endswith(" of 30"), "it has an episode")
    finally:
        browser.close()
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).astype(int)
    height, width, _ = pixels.shape
    scene = pixels[50 : height - 50, : width - 262]
    brown = scene[..., 0] - scene[..., 2] > 60  # the ant's 0.8 0.6 0.4 under a light
    assert 0.02 < brown.mean() < 0.5
    middle = np.argwhere(brown).mean(0) / scene.shape[:2]
    assert np.abs(middle - 0.5).max() < 0.2
