"""Pages in which robots move by themselves: their bits, what a browser does with them, and strangers."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import quadruped
from browser import Browser, needs_browser, wait_until
from gpu_host import assert_same_bits
from puck import FILE, Puck
from seedbed import cli, physics, simd
from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.envs.device.changes import delay
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.randomisation import Scale, randomise
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.wrappers import time_limit
from seedbed.llvm import host_target
from seedbed.play import command, watching
from seedbed.play.meshes import MOST_FACES, coarse, creased
from seedbed.play.page import Player, describe, tree_masses, write_page
from seedbed.play.plain import Plain
from seedbed.play.programs import played, with_params, words
from seedbed.policy import policy_of, restore
from seedbed.run.checkpoint_helper import write_checkpoint
from seedbed.run.deployed import Policy
from seedbed.run.folder import RunFolder
from seedbed.run.options import FusedConfig
from seedbed.spaces import PRIVILEGED, policy_spec, without
from seedbed.types import SeedbedError
from seedbed.viewer.surfaces import Surface
from untrained_run import write_run
from wasm_host import Module, unpack

DOG = Path(__file__).parents[1] / "examples" / "dog.xml"
needs_fma = pytest.mark.skipif(
    not host_target().fused_multiply_add, reason="this CPU rounds a product before it adds"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the puck, whose policy has learned nothing."""
    agent = Ppo(hidden_sizes=(24, 16))
    config = TrainConfig(Puck(), agent, FusedConfig(), "puck/ppo")
    path = tmp_path_factory.mktemp("runs") / "puck"
    return write_run(path, config, {640: 1.0})


@pytest.fixture(scope="module")
def trained(run):
    return restore(run, trust=True)


def player_of(trained, title="puck"):
    policy = Policy(trained.agent, trained.params, policy_spec(trained.forms.spec), 1)
    return Player(trained.env, policy, title)


@pytest.mark.slow
@needs_fma
def test_steps_are_bit_for_bit_those_of_the_kernels(trained):
    env, player = trained.env, player_of(trained)
    game = played(env, player.policy, [1], 1)
    programs = {name: part.program for name, part in game.parts.items()}
    module = Module(programs)
    assert [*programs] == ["reset", "step", "look", "command", "act"]

    def ours(name, *given):
        return unpack(module.call(name, words(given), game.parts[name].shared), programs[name])

    known = {f: simd.vectorize(f) for f in (env.reset, env.commanded, env.pulled)}

    def kernels(function, *given):
        batched = known[function](*jax.tree.map(lambda x: x[None], given))
        return jax.tree.map(lambda x: x[0], batched)

    state = kernels(env.reset, jax.random.key(7))
    assert_same_bits(ours("reset", jax.random.key(7)), jax.tree.leaves(state))
    rng, policy = np.random.default_rng(0), policy_of(trained)
    pull = np.zeros((2, 6), np.float32)
    for step in range(60):
        if step % 10 == 9:
            command = rng.uniform(-1, 1, 4).astype(np.float32)
            told = kernels(env.commanded, state, command)
            assert_same_bits(ours("command", state, command), jax.tree.leaves(told))
            state, pull[1] = told, rng.normal(size=6) * [9, 9, 0, 0, 0, 1]
        seen = without(state.timestep.observation, PRIVILEGED)
        (action,) = ours("act", state)
        wanted = policy.act(seen, greedy=True)
        np.testing.assert_allclose(action, wanted, atol=1e-5)
        moved = kernels(env.pulled, state, action, pull)
        assert_same_bits(ours("step", state, action, pull), jax.tree.leaves(moved))
        state = moved
    for _ in range(40):
        before, state = state, kernels(env.pulled, state, 0 * action, 0 * pull)
    seen = ours("look", state, before, 0 * action, 0 * pull)
    look = dict(zip(game.layout["look"], seen, strict=False))
    np.testing.assert_allclose(look["position"][0, :2], state.inner.qpos[:2], atol=1e-6)
    # The way of the force goes through the contact, below the capsule, where the ground carries it.
    assert look["force"][1, 2] == pytest.approx(2 * 9.81, rel=0.05)


@needs_fma
@pytest.mark.slow
def test_a_walking_robot_steps_bit_for_bit_as_the_kernels(tmp_path):
    """A quadruped under Go1's names for four seconds of random actions; it falls and begins again."""
    path = tmp_path / "go1.xml"
    path.write_text(quadruped.xml(names=quadruped.GO1))
    env = Go1Joystick(xml_file=str(path), push_speed=1.0)
    parts = played(env, None, [1], 1).parts
    module = Module({name: part.program for name, part in parts.items()})
    reset, step = simd.vectorize(env.reset), simd.vectorize(env.pulled)
    state, rng = reset(jax.random.key(0)[None]), np.random.default_rng(1)
    pull = np.zeros((1, env.physics_model().nbody, 6), np.float32)
    falls = 0
    for count in range(200):
        given = state, rng.uniform(-1, 1, (1, 12)).astype(np.float32), pull
        got = module.call("step", words(given))
        state = step(*given)
        moved = jax.tree.map(lambda x: x[0], state)
        assert_same_bits(unpack(got, parts["step"].program), jax.tree.leaves(moved))
        if moved.timestep.terminated:
            falls, state = falls + 1, reset(jax.random.key(count)[None])
    assert falls


def test_a_look_has_the_forces_of_what_the_actuators_were_told():
    """What they are told depends on the command, which is another one in the state after the step."""

    class Obeying(Puck):
        def control(self, kept, action):
            return action + kept.now[: action.size]

    env = Obeying()
    model, command = env.physics_model(), np.float32([0.5, -0.25, 0.75, 0.6])

    def forces(key, action):
        before = env.commanded(env.reset(key), command)
        state = env.step(before, action)
        now, _ = env.look(state, before, action, jnp.zeros((model.nbody, 6)))
        reached = physics.init(model, state.inner.qpos, state.inner.qvel)
        told = physics.forward(model, reached, ctrl=action + command[: action.size])
        other = env.control(state.inner.kept, action) - action
        return now.actuator_force, told.actuator_force, other

    action = np.full((1, model.nu), 0.1, np.float32)
    seen, told, other = simd.vectorize(forces)(jax.random.key(0)[None], action)
    assert np.abs(np.asarray(other) - command[None, : model.nu]).max() > 0.1
    np.testing.assert_allclose(seen, told, rtol=1e-5, atol=1e-6)


def test_the_task_does_not_push_what_a_person_pushes(tmp_path):
    robot, run = tmp_path / "go1.xml", tmp_path / "run"
    robot.write_text(quadruped.xml(names=quadruped.GO1))
    env = Go1Joystick(xml_file=str(robot), push_speed=1.0)
    write_run(run, TrainConfig(env, Ppo(hidden_sizes=(4,)), FusedConfig(), "go1/ppo"))
    assert command.player_of(str(run), trust=True).env == dataclasses.replace(
        env, push_speed=0.0, episode_steps=1000
    )


def test_other_parameters_of_a_policy_take_the_places_of_the_first(trained):
    part = played(trained.env, player_of(trained).policy, [1], 1).parts["act"]
    twice = jax.tree.map(lambda x: 2 * x, trained.params)
    pairs = list(zip(with_params(part, twice), part.shared, strict=True))
    assert sum(old.size for _, old in pairs) > 24 * 16
    for new, old in pairs:
        np.testing.assert_array_equal(new, 2 * old)
    # What only the critic reads is not in the page.
    leaves = jax.tree.leaves(trained.params)
    assert sum(old.size for _, old in pairs) < sum(leaf.size for leaf in leaves)


def test_a_page_is_one_file_that_asks_nobody(trained, tmp_path):
    path = tmp_path / "out.html"
    write_page([player_of(trained, "</script><b>")], path)
    page = path.read_text()
    assert "<b>" not in page and page.count("<script") == page.count("</script>") == 2
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "http" not in policy[1]
    assert "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
    assert list(tmp_path.iterdir()) == [path] and len(page) < 1_500_000


@pytest.mark.slow
def test_a_page_has_all_that_were_named(run, tmp_path, capsys):
    other = tmp_path / "other.html"
    assert cli.main(["play", str(run), str(FILE), "--trust-run", "-o", str(other)]) == 0
    assert f"{other} (" in capsys.readouterr().out
    data = re.search(
        r'<script id="robots" type="application/json">(.*?)</script>', other.read_text()
    )
    players = json.loads(data[1])["players"]
    assert [each["title"] for each in players] == ["puck", "puck"]
    assert [len(each["commands"]) for each in players] == [4, 0]
    controls = [(each["name"], each["low"], each["high"]) for each in players[1]["controls"]]
    assert controls == [("along", -1, 1), ("across", -1, 1), ("around", -1, 1)]


@needs_browser
def test_a_browser_plays(trained, tmp_path):
    path = tmp_path / "out.html"
    slow = Player(Plain(xml_file=str(FILE)), None, "by hand")
    write_page([player_of(trained), slow], path)
    browser = Browser(path.as_uri(), tmp_path / "profile")

    def steps():
        return int(browser.evaluate("document.documentElement.dataset.steps") or 0)

    def drag(kind, x, y):
        browser.call(
            "Input.dispatchMouseEvent",
            type=kind, x=x, y=y, button="left", buttons=1, clickCount=1,
        )  # fmt: skip

    try:
        ready = "document.documentElement.dataset.state === 'ready'"
        wait_until(lambda: browser.evaluate(ready), "the page is ready")
        assert browser.evaluate("document.getElementById('notice').hidden"), browser.text("notice")
        wait_until(lambda: steps() > 5, "it moves")
        # Until somebody steers, the task tells itself what to do.
        assert browser.evaluate("document.getElementById('auto').ariaPressed") == "true"
        (height,) = re.findall("height [0-9.]+ m", browser.text("told"))
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="w")
        wait_until(lambda: "forward 1.00 m/s" in browser.text("told"), "a key steers")
        assert height in browser.text("told"), "what it does not steer stays"
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="w")
        wait_until(lambda: "forward 0.00 m/s" in browser.text("told"), "it is released")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="w")
        wait_until(lambda: "forward 1.00 m/s" in browser.text("told"), "a key steers")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="w", modifiers=2)
        wait_until(lambda: "forward 0.00 m/s" in browser.text("told"), "Ctrl does not keep it")
        browser.press("m")
        wait_until(lambda: "forward 0.00 m/s" not in browser.text("told"), "the task chooses again")
        pad = "document.getElementById('pad').getBoundingClientRect()"
        x, y = (
            browser.evaluate(f"(({{left, top, width, height}}) => left + width / 2)({pad})"),
            None,
        )
        y = browser.evaluate(f"(({{left, top, width, height}}) => top + height - 1)({pad})")
        drag("mousePressed", x, y)
        wait_until(lambda: "forward \u22121.9" in browser.text("told"), "the pad steers backwards")
        drag("mouseReleased", x, y)
        played = steps()
        browser.press("r")
        wait_until(lambda: steps() < played, "it begins again")
        # Who has fallen over the edge lies still until the next episode.
        wait_until(
            lambda: "\u2013" not in browser.text("last"), "the return of the last episode stays"
        )
        # A drag of the second robot, which nobody steers, moves it.
        box = "document.querySelectorAll('#views canvas')[1].getBoundingClientRect()"
        x = browser.evaluate(f"(({{left, width}}) => left + width / 2)({box})")
        y = browser.evaluate(f"(({{top, height}}) => top + height / 2)({box})")
        drag("mousePressed", x, y)
        browser.evaluate(
            "(list => { list.value = 'speed[0]'; })(document.querySelectorAll('figure select')[1])"
        )
        shown = "document.querySelectorAll('figure output')[1].lastChild.textContent"
        ways = itertools.cycle((80, -80))

        def pulled():
            drag("mouseMoved", x + next(ways), y)  # to and fro, so that it never rests
            text = browser.evaluate(shown).strip().replace("\u2212", "-")
            return text and abs(float(text)) > 0.05

        wait_until(pulled, "a drag pulls")
        drag("mouseReleased", x + 60, y)
        browser.press(" ")
        paused = "document.getElementById('play').ariaLabel === 'Play'"
        wait_until(lambda: browser.evaluate(paused), "it rests")
        rest = steps()
        browser.press(".")
        wait_until(lambda: steps() == rest + 1, "it steps once")
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=400, height=800, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        right = (
            "Math.max(...[...document.querySelectorAll('header *, footer *, .corner *, dd, .pad')]"
            ".map(element => element.getBoundingClientRect().right))"
        )
        wait_until(lambda: browser.evaluate(right) <= 400, "all controls are in a narrow window")
        assert browser.complaints() == []
    finally:
        browser.close()


@needs_browser
def test_a_browser_plays_where_a_person_moves_the_first_robot(trained, tmp_path):
    """Keys steer the second one, also after a slider was used, and where gamepads are forbidden."""
    path = tmp_path / "out.html"
    by_hand = Player(Plain(xml_file=str(FILE)), None, "by hand")
    write_page([by_hand, player_of(trained)], path)
    browser = Browser(path.as_uri(), tmp_path / "profile")
    try:
        ready = "document.documentElement.dataset.state === 'ready'"
        wait_until(lambda: browser.evaluate(ready), "the page is ready")
        forbidden = "() => { throw new DOMException('forbidden', 'SecurityError'); }"
        browser.evaluate(f"Navigator.prototype.getGamepads = {forbidden}; 0")
        box = "document.querySelector('#sliders input').getBoundingClientRect()"
        at = browser.evaluate(f"(b => [b.left + 0.75 * b.width, b.top + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            browser.call(
                "Input.dispatchMouseEvent",
                type=kind, x=at[0], y=at[1], button="left", buttons=1, clickCount=1,
            )  # fmt: skip
        moved = "Number(document.querySelector('#sliders output').textContent) > 0.3"
        wait_until(lambda: browser.evaluate(moved), "the slider moves an actuator")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="w")
        wait_until(lambda: "forward 1.00 m/s" in browser.text("told"), "a key steers")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="w")
        wait_until(lambda: "forward 0.00 m/s" in browser.text("told"), "it is released")
        for expected in ("false", "true"):
            browser.press("f")
            pressed = "document.getElementById('follow').ariaPressed"
            wait_until(
                lambda p=pressed, to=expected: browser.evaluate(p) == to, "it follows or not"
            )
        browser.press(" ")
        paused = "document.getElementById('play').ariaLabel === 'Play'"
        wait_until(lambda: browser.evaluate(paused), "it rests")
        assert browser.evaluate("document.getElementById('notice').hidden"), browser.text("notice")
        assert browser.complaints() == []
    finally:
        browser.close()


@needs_browser
def test_a_browser_follows_a_run_that_trains(run, tmp_path):
    """Its page takes the newer policies; a stranger gets nothing."""
    # A shell in the background lets its children ignore Ctrl-C.
    heard = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heard += "runpy.run_module('seedbed', run_name='__main__')"
    command = [sys.executable, "-c", heard, "play", str(run), "--trust-run", "--watch"]
    path = os.pathsep.join([str(FILE.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    browser = None
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        browser = Browser(address, tmp_path / "profile")
        wait_until(lambda: "640 steps" in (browser.text("policy") or ""), "it has the first policy")
        weights = restore(run, trust=True)
        doubled = jax.tree.map(lambda x: np.asarray(2 * x), weights.params)
        add_checkpoint(run, 1280, doubled)
        wait_until(lambda: "1,280 steps" in browser.text("policy"), "it has the newer policy")
        assert browser.complaints() == []
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_until(lambda: "no answer" in browser.text("policy"), "the page says so")
    finally:
        process.kill()
        process.wait()
        if browser is not None:
            browser.close()


@pytest.mark.slow
def test_a_run_in_a_bucket_is_followed(trained, tmp_path, monkeypatch):
    """Newer policies are fetched; a bucket that does not answer for a while is told of once."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    config = TrainConfig(Puck(), Ppo(hidden_sizes=(24, 16)), FusedConfig(), "puck/ppo")
    there = write_run(tmp_path / "there" / "puck", config, {640: 1.0})
    gone, told, turns = there.with_name("gone"), list[str](), itertools.count()

    def wait(seconds):
        turn = next(turns)
        if turn == 0:
            there.rename(gone)
        elif turn == 2:
            gone.rename(there)
            add_checkpoint(there, 1280, trained.params)
        elif turn == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", wait)
    where = f"file://{there}"
    player = command.player_of(where, newest=True, trust=True)
    watching.watch(player, where, 0, True, told.append, told.append)
    policies = [text for text in told if text.startswith("the policy after")]
    assert policies == ["the policy after 640 steps", "the policy after 1,280 steps"]
    others = [text for text in told if text not in policies and "follows" not in text]
    assert len(others) == 1, others


def add_checkpoint(run, step, params):
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {
        f"learner.params.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf
        for path, leaf in leaves
    }
    described = [
        {"name": name, "dtype": str(leaf.dtype), "shape": leaf.shape, "bytes": leaf.nbytes}
        for name, leaf in named.items()
    ]
    folder = RunFolder.resume(run)
    header = {"step": step, "metadata": {}, "score": None, "keep": 3, "leaves": described}
    write_checkpoint(folder.checkpoints, header | {"claim": folder.claim, "task": 0}, named)
    folder.close()


def test_strangers_get_nothing(monkeypatch):
    monkeypatch.setattr(watching, "_MOST_THREADS", threading.active_count() + 4)
    answers = {"": watching.Answer("text/html", b"page"), "policy": watching.Answer("text/x", b"1")}
    with watching.serve(answers, 0) as address:
        _, _, host, token, _ = address.split("/")
        port = int(host.split(":")[1])

        def ask(path, method="GET", **headers):
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            asking.request(method, path, headers={"Host": host, **headers})
            try:
                return asking.getresponse().status
            except ConnectionError:
                return 0  # it has hung up
            finally:
                asking.close()

        assert ask(f"/{token}/") == ask(f"/{token}/policy") == 200
        for path in ("/", f"/{token}", "/policy", f"/{token[:-1]}/policy", f"/{token}/../policy"):
            assert ask(path) == (301 if path == f"/{token}" else 404), path
        # A foreign page may have its name point here.
        assert ask(f"/{token}/policy", Host="evil.example") == 404
        assert ask(f"/{token}/policy", "POST") == 501
        with pytest.raises(SeedbedError, match=f"cannot serve on port {port}"):
            watching.serve(answers, port).__enter__()
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        wait_until(lambda: any(select.select(idle, [], [], 0)[0]), "it hangs up on some")
        for each in idle:
            each.close()
        wait_until(lambda: ask(f"/{token}/policy") == 200, "it answers again")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "there is no such folder"),
        (["nothing.xml"], "there is no file nothing.xml"),
        (["{file}", "--watch"], "--watch serves the page of one run"),
        (["{file}", "--port", "9"], "--port is the port of --watch"),
        (["{file}"] * 5, "a page has room for 4 robots"),
        (["{file}", "-o", "page.txt"], "its name must end in .html"),
        (["{pendulum}"], "pendulum has no robot to draw"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(Pendulum(), Ppo(), FusedConfig(), "pendulum/ppo")
    places = {"{file}": str(FILE), "{pendulum}": "pendulum"}
    if "{pendulum}" in arguments:
        write_run(tmp_path / "pendulum", config)
    assert cli.main(["play", *(places.get(each, each) for each in arguments)]) != 0
    assert text in capsys.readouterr().err
    assert not [*tmp_path.glob("*.html")]


def test_a_robot_in_wrappers_is_played_unless_they_change_what_it_sees(tmp_path):
    varied = time_limit(randomise(Puck(), Scale("body_mass", 0.9, 1.1)), 7)
    envs = {"varied": varied, "late": delay(varied, observation=1)}
    for name, env in envs.items():
        config = TrainConfig(env, Ppo(hidden_sizes=(4,)), FusedConfig(), "puck/ppo")
        write_run(tmp_path / name, config)
    player = command.player_of(str(tmp_path / "varied"), trust=True)
    assert player.env == Puck(episode_steps=7) and player.policy is not None
    with pytest.raises(SeedbedError, match="late has no robot to draw: .*, and not Delay; seedbed"):
        command.player_of(str(tmp_path / "late"), trust=True)


@pytest.mark.slow
def test_a_plain_model_begins_in_its_keyframe(tmp_path):
    key = '<key qpos="1 2 3 0.1" act="0.7" ctrl="0.5 -0.5 2 0"/>'
    text = FILE.read_text().replace("</mujoco>", f"<keyframe>{key}</keyframe></mujoco>")
    held = '<general joint="x" dyntype="filter" dynprm="1" ctrlrange="-1 1"/>'
    held += '<position joint="y"/><velocity joint="y"/></actuator>'
    text = text.replace("</actuator>", held).replace("</sensor>", "<clock/><clock/></sensor>")
    path = tmp_path / "keyed.xml"
    path.write_text(text)
    described, _ = describe(Player(Plain(xml_file=str(path)), None, "keyed"), lambda text: None)
    controls = [(each["low"], each["start"], each["high"]) for each in described["controls"]]
    assert controls[:4] == [(-1, 0.5, 1), (-1, -0.5, 1), (-1, 2, 2), (-1, 0, 1)]
    assert [each["name"] for each in described["controls"]][-2:] == ["y (4)", "y (5)"]
    names = [channel["name"] for channel in described["layout"]["channels"]]
    assert len(names) == len({*names}) and "sensor 1" in names and "sensor 2" in names
    assert described["dt"] == 0.02
    qpos, qvel = Plain(xml_file=str(path)).initial(jax.random.key(0))
    np.testing.assert_allclose(qpos, [1, 2, 3, 0.1], rtol=1e-6)
    assert not qvel.any()
    opened = simd.vectorize(Plain(xml_file=str(path)).reset)(jax.random.key(0)[None])
    np.testing.assert_allclose(opened.inner.act, [[0.7]], rtol=1e-6)


def test_a_push_is_for_what_moves_with_the_body(tmp_path):
    """Neither a rock nor a ball counts."""
    path = tmp_path / "robot.xml"
    ball = '<body name="ball" pos="0 0 5"><freejoint/><geom size=".1" mass="7"/></body></worldbody>'
    path.write_text(quadruped.disordered(DOG.read_text()).replace("</worldbody>", ball))
    model = physics.load(path)
    own = mujoco.MjModel.from_xml_path(str(path))
    masses = tree_masses(model)
    trunk, rock, ball = (own.body(name).id for name in ("trunk", "rock", "ball"))
    assert masses[0] == masses[rock] == 0 and masses[ball] == 7
    np.testing.assert_allclose(masses[trunk:ball], own.body_subtreemass[trunk], rtol=1e-6)


def sphere(rings):
    """A sphere of triangles, anticlockwise from outside, with the points of its seam twice."""
    up, around = np.meshgrid(np.linspace(0, np.pi, rings), np.linspace(0, 2 * np.pi, rings))
    place = np.stack([np.sin(up) * np.cos(around), np.sin(up) * np.sin(around), np.cos(up)], -1)
    corner = np.arange(rings * rings).reshape(rings, rings)
    a, b, c, d = corner[:-1, :-1], corner[:-1, 1:], corner[1:, 1:], corner[1:, :-1]
    face = np.concatenate([np.stack([a, b, c], -1), np.stack([a, c, d], -1)]).reshape(-1, 3)
    place = place.reshape(-1, 3)
    return Surface(place, place, face)


def test_fine_meshes_become_coarser_and_keep_their_shape():
    fine = sphere(200)
    assert coarse([fine], [0]) == [fine]
    round_, box = coarse([fine, cube()], [2, 5])
    assert box.face.shape == (12, 3)
    assert 0.9 * MOST_FACES < 2 * len(round_.face) <= MOST_FACES
    np.testing.assert_allclose(np.linalg.norm(round_.place, axis=1), 1, atol=0.01)
    assert ((round_.normal * round_.place).sum(axis=1) > 0.97).mean() > 0.999
    corners = round_.place[round_.face]
    flat = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    assert ((flat * corners.mean(axis=1)).sum(axis=1) > 0).mean() > 0.999


def cube():
    place = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    face = np.array([part for a, b, c, d in quads for part in ((a, b, c), (a, c, d))])
    return creased(place, face)


def test_edges_stay_sharp():
    box = cube()
    # Each corner has three normals, which are those of its sides.
    assert len(box.place) == 24
    assert sorted(np.abs(box.normal).max(axis=1)) == [1.0] * 24
