"""`--cluster ray` as far as it can be seen without Ray; with it: drills/test_ray.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedbed import cli
from seedbed.exit_status import TemporaryError
from seedbed.launch import ray_cluster
from seedbed.launch.job import SETTLED, settled
from seedbed.launch.ranks import PARENT
from seedbed.launch.ray_cluster import RayHosts, bundles_of
from seedbed.types import SeedbedError
from waiting import wait_for


def node(number: int, cpus: float, gpus: int = 0, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {"NodeID": str(number), "Alive": alive, "Resources": resources}


def test_each_other_node_has_a_host_and_the_coordinators_only_if_it_must():
    nodes = [node(0, 8), node(1, 4), node(2, 16, 2), node(3, 64, alive=False), node(4, 0)]
    others = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 4.0}]
    assert bundles_of(nodes, "0", 0) == bundles_of(nodes, "0", 2) == others
    assert bundles_of(nodes, "0", 1) == others[:1]
    # A CPU is left for the process that asks.
    assert bundles_of(nodes, "0", 3) == [others[0], {"CPU": 7.0}, others[1]]
    assert bundles_of(nodes[:1], "0", 0) == [{"CPU": 7.0}]
    # More nodes may come.
    assert bundles_of(nodes, "0", 5)[3:] == [others[1]] * 2
    assert bundles_of([], "0", 2) == [{"CPU": 1.0}] * 2
    with pytest.raises(ValueError, match="no node of the cluster has a CPU"):
        bundles_of(nodes[3:], "0", 0)


@given(st.lists(st.tuples(st.floats(0, 256), st.integers(0, 8)), max_size=6), st.integers(1, 9))
def test_a_host_takes_no_more_than_some_node_has(sizes, wanted):
    nodes = [node(number, *size) for number, size in enumerate(sizes)]
    found = bundles_of(nodes, "0", wanted)
    assert len(found) == wanted
    for bundle in found:
        fits = [
            each["Resources"]["CPU"] >= bundle["CPU"]
            and each["Resources"].get("GPU", 0) >= bundle.get("GPU", 0)
            for each in nodes
        ]
        assert any(fits) or not any(each["Resources"]["CPU"] >= 1 for each in nodes)


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ("ray:0", "take ray, or ray:N"),
        ("ray:x", "--cluster ray:x: take"),
        ("rays", "--cluster rays: take ray"),
    ],
)
def test_what_is_no_number_of_hosts_is_refused(cluster, text, capsys, tmp_path):
    run = tmp_path / "run"
    assert cli.main(["train", "cartpole/impala", "--cluster", cluster, "--run", str(run)]) == 2
    assert text in capsys.readouterr().err and not run.exists()


def test_without_ray_the_line_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        cli.main(["train", "cartpole/impala", "--cluster", "ray", "--run", str(tmp_path / "run")])
        == 1
    )
    assert "pip install 'seedbed[ray]'" in capsys.readouterr().err


def test_a_run_that_ray_refuses_leaves_no_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(ray_cluster, "_MODULE", "helper_of_ray")
    monkeypatch.setattr(ray_cluster, "require_packages", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    words = ["train", "cartpole/impala", "--cluster", "ray:9"]
    monkeypatch.setattr(sys, "argv", ["seedbed", *words])
    assert cli.main(words) == 1
    assert "Ray: no node" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("", "this job has no name: add --run DIR, a folder that all its machines see"),
        ("--run RUN", "gradients travel between them unencrypted: name the interface"),
        ("--run RUN --trusted-interface lo", "Ray: no node"),
        (
            "--run RUN --trusted-interface lo --cluster=ray:2",
            "learners is 2, but the job has 3 processes: give --learners 3",
        ),
    ],
)
def test_what_is_to_learn_as_one_is_refused_before_it_starts_and_leaves_nothing(
    more, text, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(ray_cluster, "_MODULE", "helper_of_ray")
    monkeypatch.setattr(ray_cluster, "require_packages", lambda *_: None)
    monkeypatch.setattr(ray_cluster, "settled", lambda run: {"central": {"learners": 1}})
    cluster_of = [] if "--cluster" in more else ["--cluster", "ray:9"]
    more = more.replace("RUN", str(tmp_path / "run")).split()
    assert cli.main(["train", "cartpole/impala", "--learners", "2", *cluster_of, *more]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ranks_learn_what_rank_0_has_settled_and_nothing_is_left(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with ray_cluster._settled_in(run, {"fused": {}}) as start:
        assert json.loads((run / SETTLED).read_text())["start"] == start
        monkeypatch.setenv(PARENT, "1")
        assert settled(run) == {"fused": {}}
    assert not run.exists()
    run.joinpath("listen").mkdir(parents=True)
    with ray_cluster._settled_in(run, {"fused": {}}) as again:
        assert again != start
    assert list(run.rglob("*.json")) == [] and run.is_dir()


def test_what_a_killed_command_has_left_only_ranks_of_ray_believe(tmp_path, monkeypatch):
    path = tmp_path / SETTLED
    path.parent.mkdir()
    path.write_text('{"start": "a", "config": {"fused": {}}}')
    monkeypatch.setattr(sys, "argv", ["seedbed", "train", "cartpole/impala"])
    assert "central" in settled(tmp_path)


def test_a_second_start_does_not_touch_the_ranks_of_the_first(tmp_path):
    run = tmp_path / "run"
    with ray_cluster._settled_in(run, {}) as first:
        with (
            pytest.raises(TemporaryError, match="another process has Ray start ranks of"),
            ray_cluster._settled_in(run, {}),
        ):
            pytest.fail("two start at once")
        assert json.loads((run / SETTLED).read_text())["start"] == first


def test_nodes_that_learn_as_one_have_gpus_or_none():
    nodes = [node(0, 8, 1), node(1, 8, 1), node(2, 8, 1), node(3, 8)]
    bundles = bundles_of(nodes[:3], "0", 0)
    ray_cluster.require_alike(nodes[:3], "0", bundles)
    ray_cluster.require_alike([nodes[3], node(4, 4)], "3", [{"CPU": 4.0}])
    # One that has no GPU may share its node.
    ray_cluster.require_alike([nodes[3]], "3", [{"CPU": 7.0}])
    with pytest.raises(
        ValueError, match="3 ranks beside this one need as many other nodes.* are 2"
    ):
        ray_cluster.require_alike(nodes[:3], "0", bundles_of(nodes[:3], "0", 3))
    for me, others in (("3", nodes), ("0", [nodes[0], nodes[3]])):
        with pytest.raises(ValueError, match="it or another one has no GPUs"):
            ray_cluster.require_alike(others, me, bundles_of(others, me, 0))


def test_the_process_with_ray_is_told_the_end_and_what_it_says_is_passed_on(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(ray_cluster, "_MODULE", "helper_of_ray")
    with RayHosts(tmp_path / "file", 3) as hosts:
        assert hosts.count == 3
        wait_for(lambda: "Ray: waiting" in capsys.readouterr().err)
    assert (tmp_path / "file").read_text() == r"ended by 'end\n'"
    assert "keeps this run's hosts no more" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (7, "Ray: no cluster at RAY_ADDRESS=192.0.2.1:1 .it has not answered within 1 s.: start"),
        (8, "Ray: it has failed to start: see above"),
        (9, "Ray: no node"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_told_before_training(monkeypatch, tmp_path, case, text):
    monkeypatch.setattr(ray_cluster, "_MODULE", "helper_of_ray")
    monkeypatch.setattr(ray_cluster, "_JOIN_S", 1.0 if case == 7 else 20.0)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")
    with pytest.raises(SeedbedError, match=text):
        RayHosts(tmp_path, case)
