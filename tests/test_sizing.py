"""`--actors auto`: the number that the model finds best, of a made-up machine."""

from __future__ import annotations

import json
import signal

import pytest

import seedbed
from plan_costs import acting, calibration
from seedbed import cli
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.central import train as central
from seedbed.config.configuration import TrainConfig
from seedbed.config.settle import Request, settle
from seedbed.envs.host.gym import GymEnv
from seedbed.exit_status import ExitStatus
from seedbed.files import write_json
from seedbed.plan import calibration as calibrating
from seedbed.plan import predict as predicting
from seedbed.plan import sizing
from seedbed.plan.calibration import key_of, path_of
from seedbed.plan.costs import to_json
from seedbed.plan.hosts import HostKind
from seedbed.run import options
from seedbed.run.options import CentralConfig
from seedbed.run.sizes import AUTO
from seedbed.types import Agent, SeedbedError


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(predicting, "_BATCHES", 20)
    monkeypatch.setattr(predicting, "_EACH", 20)
    monkeypatch.setattr(predicting, "_CHUNKS", 1)


def chosen(
    monkeypatch: pytest.MonkeyPatch, cores: float, agent: Agent | None = None, **costs: float
) -> sizing.Sized:
    found = calibration(acting(**costs))
    monkeypatch.setattr(sizing, "calibrated", lambda *_: found)
    agent = agent or Impala()
    runtime = CentralConfig(actors=AUTO).fitted(agent)
    config = TrainConfig(GymEnv("CartPole-v1"), agent, runtime)
    return sizing.sized(config, [HostKind("here", cores)], False, lambda _: None)


def actors_of(found: sizing.Sized) -> int:
    assert isinstance(found.config.runtime, CentralConfig)
    return found.config.runtime.local_actors


def test_slow_environments_get_as_many_actors_as_there_are_cores_for_them(monkeypatch):
    found = chosen(monkeypatch, 4.0, step_s=0.05)
    assert [*found.foretold] == [1, 2, 3, 4, 6, 8]
    rates = found.foretold
    assert rates[3] == pytest.approx(3 * rates[1], rel=0.15)
    # The learner and inference take a little of four cores.
    assert actors_of(found) in (3, 4, 6)
    assert rates[actors_of(found)] >= 0.95 * max(rates.values())


def test_a_slow_learner_gets_no_more_actors_than_it_needs(monkeypatch):
    assert actors_of(chosen(monkeypatch, 2.0, update_s=1.0)) == 1
    replay = Dqn(min_size=100, ratio=8.0)
    assert actors_of(chosen(monkeypatch, 2.0, replay, update_s=1.0)) == 1


def test_the_line_about_the_choice_has_all_rates(monkeypatch):
    found = chosen(monkeypatch, 1.0, update_s=1.0)
    one, two = (f"{rate:,.0f}" for rate in found.foretold.values())
    assert found.note == (
        f"actors 1, as a plan finds best (steps/s foretold of 1: {one}, 2: {two}; measured earlier, anew by "
        "seedbed plan --fresh)"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cartpole/impala", "--listen", "127.0.0.1:0"], "one learner whose actors are all of its"),
        (["cartpole/impala", "--learners", "2"], "one learner whose actors are all of its machine"),
        (["CartPole-v1", "--agent", "ppo"], "Ppo acts, stops and learns: leave --actors out"),
        (["cartpole/impala", "--envs-per-actor", "3"], "give an even --envs-per-actor"),
        (["cartpole/gorila"], "give a whole number, not 'auto'"),
    ],
)
def test_runs_of_which_a_model_cannot_choose_are_refused_at_once(words, says, tmp_path, capsys):
    for command in (["train", "--run", str(tmp_path / "run")], ["plan"], ["config"]):
        assert cli.main([command[0], *words, *command[1:], "--actors", "auto"]) in (1, 2)
        told = capsys.readouterr()
        assert says in told.err and "measuring" not in told.err
    assert not list(tmp_path.iterdir())


def test_a_clone_has_no_actors_to_choose(tmp_path, capsys):
    words = ["clone", "cartpole/impala", str(tmp_path / "data.npz"), "--actors", "auto"]
    assert cli.main(words) == 1
    assert "a clone has none yet: name a number" in capsys.readouterr().err


def test_machines_that_would_need_streams_are_refused_before_anything_is_measured(tmp_path, capsys):
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[hosts]]\nname = "a"\ncores = 2\ncount = 2')
    words = ["plan", "cartpole/impala", "--actors", "auto", "--hosts", str(hosts)]
    assert cli.main(words) == 1
    assert "the run does not listen: add --listen" in capsys.readouterr().err


def test_a_number_whose_environments_are_too_few_for_a_batch_is_left_out(monkeypatch):
    monkeypatch.setattr(options, "usable_cores", lambda: 2.0)
    assert [*chosen(monkeypatch, 2.0, Impala(batch=128)).foretold] == [2, 3, 4]


def test_a_number_that_makes_no_progress_is_left_out(monkeypatch):
    real = sizing.predict

    def predict(subject, costs, kinds):
        if subject.runtime.actors < 3:
            raise SeedbedError("it makes no update")
        return real(subject, costs, kinds)

    monkeypatch.setattr(sizing, "predict", predict)
    assert [*chosen(monkeypatch, 2.0).foretold] == [3, 4]
    with pytest.raises(SeedbedError, match="no update"):
        chosen(monkeypatch, 1.0)


@pytest.mark.parametrize("wrong", ["some", -1, 2.0, None, True])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(SeedbedError, match="actors is"):
        CentralConfig(actors=wrong)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A calibration of CartPole that is kept already."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    config = settle(Request("cartpole/impala"), lambda found: found).config
    costs = to_json(calibration(acting(update_s=1.0)))
    write_json(path_of(key_of(config, far=False)), costs)


def test_a_run_has_the_number_that_was_chosen(kept, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(central, "train", lambda *, config, **_: config)
    config = seedbed.train("cartpole/impala", run=tmp_path / "run", actors="auto")
    assert config.actors == 1
    assert "actors 1, as a plan finds best" in capsys.readouterr().err
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["central"]["actors"] == 1


def test_a_resumed_run_may_choose_anew(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(central, "train", lambda *, config, **_: config)
    run = tmp_path / "run"
    assert seedbed.train("cartpole/impala", run=run, actors=3).actors == 3
    assert seedbed.train(None, run=run, resume=True, actors="auto").actors == 1
    assert json.loads((run / "config.json").read_text())["central"]["actors"] == 1


def test_a_signal_while_parts_are_measured_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizing, "calibrated", lambda *_: signal.raise_signal(signal.SIGTERM))
    words = ["train", "cartpole/impala", "--actors", "auto", "--run", str(tmp_path / "run")]
    assert cli.main(words) == ExitStatus.STOPPED
    assert "there was nothing to save" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "calibrated", lambda *_: pytest.fail("it measures"))
    (tmp_path / "mine").touch()
    with pytest.raises(SeedbedError, match="is not empty"):
        seedbed.train("cartpole/impala", run=tmp_path, actors="auto")


def test_a_cache_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans").chmod(0o777)
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    costs = calibration(acting())
    monkeypatch.setattr(calibrating, "_measure", lambda *_: costs)
    config = settle(Request("cartpole/impala"), lambda found: found).config
    with pytest.warns(RuntimeWarning, match="is not kept for the next one: others may write"):
        assert calibrating.calibrated(config, False, False, lambda _: None) == costs


def test_the_command_tells_the_rates_of_all_numbers(kept, capsys):
    assert cli.main(["plan", "cartpole/impala", "--actors", "auto"]) == 0
    told = capsys.readouterr().out
    assert "by the number of actors" in told and told.count("<- chosen") == 1
    assert max(map(len, told.splitlines())) <= 80
    assert cli.main(["plan", "cartpole/impala", "--actors", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = found["actors"]["env_steps_per_s"]
    assert found["actors"]["chosen"] == 1
    assert found["predicted"]["env_steps_per_s"] == pytest.approx(rates["1"])


@pytest.mark.slow
def test_a_run_is_measured_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    words = ["train", "cartpole/impala", "--actors", "auto", "--run", str(tmp_path / "run")]
    assert cli.main([*words, "--steps", "20000", "--evaluate-episodes", "2"]) == 0
    told = capsys.readouterr().err
    assert "measuring inference ..." in told and "as a plan finds best" in told
