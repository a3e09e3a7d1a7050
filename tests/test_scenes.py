"""A run keeps its robot: what is edited or moved after the training does not change it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import read_config, saved_config, to_json
from seedbed.config.scenes import with_copy
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.device.randomisation import Scale, randomise
from seedbed.envs.device.robots.legged import Legged
from seedbed.envs.device.wrappers import innermost
from seedbed.run.folder import CONFIG, RunFolder
from seedbed.run.options import FusedConfig
from seedbed.run.restoring import task_number

DOG = Path(__file__).parents[1] / "examples" / "dog.xml"
TETRAHEDRON = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.fixture
def robot(tmp_path):
    """The dog in three files: its actuators are included, and a mesh lies in a folder beside."""
    text = DOG.read_text()
    head, actuators, tail = text.partition(
        text[text.index("  <actuator>") : text.index("  <sensor>")]
    )
    for place in ("robot", "meshes"):
        (tmp_path / place).mkdir()
    (tmp_path / "robot/servos.xml").write_text(f"<mujocoinclude>{actuators}</mujocoinclude>")
    (tmp_path / "meshes/head.obj").write_text(TETRAHEDRON)
    mesh = '<compiler meshdir="../meshes"/><asset><mesh name="head" file="head.obj"/></asset>'
    path = tmp_path / "robot/dog.xml"
    path.write_text(f"{head}{mesh}<include file='servos.xml'/>{tail}")
    return path


def begun(env, path):
    config = TrainConfig(env, Ppo(), FusedConfig(), "dog/ppo")
    folder = RunFolder.create(path)
    folder.write_config(*with_copy(to_json(config)))
    folder.close()
    return folder


def stiffness(folder):
    (kp,) = {*innermost(saved_config(folder).env).compiled().actuator_gainprm[:, 0]}
    return kp


def test_a_run_goes_on_with_the_robot_that_it_was_trained_with(robot, tmp_path, capsys):
    folder = begun(
        randomise(Legged(xml_file=str(robot)), Scale("body_mass", 0.9, 1.1)), tmp_path / "run"
    )
    assert stiffness(folder) == 40 and not capsys.readouterr().err
    robot.write_text(robot.read_text().replace('kp="40"', 'kp="80"'))
    (tmp_path / "meshes/head.obj").write_text(TETRAHEDRON.replace("0 0 1", "0 0 2"))
    assert stiffness(folder) == 40
    told = capsys.readouterr().err
    assert "meshes/head.obj, robot/dog.xml changed since" in told and "with --from\n" in told
    assert stiffness(folder) == 40 and not capsys.readouterr().err  # it is told once
    shutil.rmtree(robot.parent)
    shutil.rmtree(tmp_path / "meshes")
    assert stiffness(folder) == 40 and not capsys.readouterr().err
    # A run that is resumed has the same copy.
    config = saved_config(folder)
    assert with_copy(to_json(config))[0]["scene"] == folder.read_config()["scene"]
    folder.path.rename(tmp_path / "moved")
    assert stiffness(RunFolder.read(tmp_path / "moved")) == 40
    assert read_config(tmp_path / "moved" / CONFIG).agent == Ppo()


def test_files_that_nobody_edits_are_not_copied(tmp_path):
    folder = begun(Ant(), tmp_path / "ant")
    assert "scene" not in folder.read_config() and not (folder.path / "scenes").exists()


def test_a_run_that_fails_before_it_trains_leaves_no_copy(robot, tmp_path):
    encoded, files = with_copy(
        to_json(TrainConfig(Legged(xml_file=str(robot)), Ppo(), FusedConfig()))
    )
    assert {Path(place).name for place in files} == {"head.obj", "servos.xml", "dog.xml"}
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), folder.training(encoded, files):
        assert (folder.path / encoded["scene"]).read_bytes() == robot.read_bytes()
        raise KeyboardInterrupt
    assert not folder.path.exists()


def test_a_run_that_goes_on_with_its_copy_has_the_same_task(robot, tmp_path):
    """Else its best checkpoint would count as that of another task."""
    task = Legged(xml_file=str(robot))
    folder = begun(randomise(task, Scale("body_mass", 0.9, 1.1)), tmp_path / "run")
    number = task_number(folder)
    resumed = to_json(saved_config(folder))
    assert str(tmp_path / "run") in str(resumed)
    folder.write_config(*with_copy(resumed))
    assert task_number(folder) == number
