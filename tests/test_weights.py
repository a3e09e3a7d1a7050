"""New runs that begin with the weights of another run, or of an exported policy."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import seedbed
from seedbed import starting
from seedbed.agents.dqn import Dqn
from seedbed.agents.es import Es
from seedbed.agents.ppo import Ppo
from seedbed.agents.sac import Sac
from seedbed.cli import main
from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import saved_config, to_json
from seedbed.envs.device.classic.acrobot import Acrobot
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.probes import PrivilegedProbe
from seedbed.envs.host.gym import GymEnv
from seedbed.exporting.command import export
from seedbed.policy import restore
from seedbed.run.folder import RunFolder
from seedbed.run.leaves import named_leaves
from seedbed.run.loaded_weights import LoadedWeights, fitting
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.weights import Weights
from seedbed.spaces import PRIVILEGED, Mirror, Reflection
from seedbed.types import EnvSpec, LearnerState, SeedbedError, bind
from untrained_run import write_run

SMALL = Ppo(
    hidden_sizes=(8,), unroll=8, batch=8, minibatches=1, epochs=1, normalise_observations=True
)


def silent(text: str) -> None:
    """Takes the messages of a restored run."""
    del text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of cartpole, whose best checkpoint is not its newest."""
    run = tmp_path_factory.mktemp("weights") / "source"
    config = TrainConfig(
        CartPole(), SMALL, FusedConfig(steps=2_000, evaluate_episodes=2), "cartpole"
    )
    seedbed.train(config, run=run)
    return run


def beginning(config: TrainConfig, weights: Weights) -> LoadedWeights:
    found = starting.loaded(dataclasses.replace(config, start=weights), True, silent)
    assert found is not None
    return found


def state_of(config: TrainConfig, weights: LoadedWeights, members: int = 1) -> LearnerState:
    """The state of a new run, as a runtime makes it, with one seed that is not the source's."""
    env: Any = config.env
    agent = bind(config.agent, env.spec)
    state = agent.init(jax.random.key(77))
    if members > 1:
        state = jax.tree.map(lambda x: np.stack([np.asarray(x)] * members), state)
    return weights.into(agent, state, members)


def leaves_of(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree)}


def test_a_run_begins_with_the_parameters_and_statistics_of_another(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = dataclasses.replace(SMALL, learning_rate=1e-12)
    config = TrainConfig(CartPole(), still, FusedConfig(steps=64, evaluate_episodes=2), "cartpole")
    seedbed.train(config, run=tmp_path / "run", start=source)
    told = capsys.readouterr().out
    assert f"beginning with the weights of {source} (step 2," in told
    assert "the optimizer begins anew" in told
    stint = json.loads((tmp_path / "run" / "history.json").read_text())[0]["from"]
    assert (
        stint["run"] == str(source) and stint["parts"] == stint["of"] and stint["env_steps"] > 1999
    )
    assert json.loads((tmp_path / "run" / "config.json").read_text())["start"]["run"] == str(source)
    new, old = (restore(run, newest=True).params for run in (tmp_path / "run", source))
    for name, leaf in leaves_of(old.weights).items():
        np.testing.assert_allclose(leaves_of(new.weights)[name], leaf, atol=1e-6, err_msg=name)
    assert new.seen.weight > old.seen.weight, "its statistics go on"


@pytest.mark.slow
def test_the_command_line_begins_with_weights_and_says_what_it_has_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    options = ["--agent.hidden-sizes", "8", "--agent.unroll", "8", "--agent.batch", "8"]
    options += ["--agent.minibatches", "1", "--agent.epochs", "1", "--steps", "64"]
    words = ["cartpole/ppo", "--from", "source", "--from-optimizer", "--run", str(tmp_path / "run")]
    assert main(["train", *words, *options]) == 0
    config = saved_config(RunFolder.read(tmp_path / "run"))
    assert config.start == Weights(str(source), optimizer=True), (
        "from any folder it is the same run"
    )
    assert f"--from {source} --from-optimizer" in flags.command(config)


def test_the_optimizer_goes_on_only_if_that_is_asked_for(source: Path) -> None:
    config = TrainConfig(CartPole(), SMALL, FusedConfig())
    new = state_of(config, beginning(config, Weights(source))).optimizer_state
    kept = state_of(config, beginning(config, Weights(source, optimizer=True)))
    moments = [name for name in leaves_of(new) if ".mu." in name]
    assert moments and not any(np.any(leaves_of(new)[name]) for name in moments)
    assert any(np.any(leaves_of(kept.optimizer_state)[name]) for name in moments)
    assert kept.updates == 0 and kept.progress == 0, "steps and schedules are the new run's"


@pytest.mark.parametrize(
    ("agent", "own"),
    [
        (Es(hidden_sizes=(8,)), {"params.seed", "params.generation"}),
        (Dqn(hidden_sizes=(8,), epsilon_updates=100), {"params.exploration"}),
    ],
    ids=["es", "dqn"],
)
def test_random_numbers_and_schedules_are_the_new_run_s(agent: Any, own: set[str]) -> None:
    state = jax.eval_shape(bind(agent, CartPole().spec).init, jax.random.key(0))
    found = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in named_leaves(state)}
    assert own <= found.keys()
    fit = fitting(Weights("runs/a"), found, state, "runs/a", False)
    assert fit.taken and not own & fit.taken.keys() and len(fit.taken) == fit.wanted


def test_parts_that_do_not_fit_are_refused_by_name_or_begun_anew(source: Path) -> None:
    config = TrainConfig(CartPole(), dataclasses.replace(SMALL, hidden_sizes=(8, 4)), FusedConfig())
    with pytest.raises(
        SeedbedError, match=r"PolicyHead_0\.Dense_0\.kernel is float32\[8, 2\] there and "
    ):
        beginning(config, Weights(source))
    state = state_of(config, beginning(config, Weights(source, partial=True)))
    new, old = leaves_of(state.params), leaves_of(restore(source).params)
    layer = "weights.params.Torso_0.Mlp_0.Dense_0.kernel"
    np.testing.assert_array_equal(new[layer], old[layer])
    head = "weights.params.PolicyHead_0.Dense_0.kernel"
    assert new[head].shape == (4, 2)


def test_spaces_must_agree(source: Path) -> None:
    config = TrainConfig(Acrobot(), SMALL, FusedConfig())
    with pytest.raises(SeedbedError, match="are for another environment"):
        beginning(config, Weights(source))
    found = beginning(config, Weights(source, partial=True))
    assert "params.seen" in found.told["anew"], "statistics are taken together or not at all"
    state = state_of(config, found)
    assert state.params.seen.weight == 0 and "begun anew: " in found.text()
    with pytest.raises(SeedbedError, match="do not fit"):
        wide = dataclasses.replace(SMALL, hidden_sizes=(16,))
        beginning(TrainConfig(CartPole(), wide, FusedConfig()), Weights(source, partial=True))


def test_another_agent_has_no_parts_in_common(source: Path) -> None:
    config = TrainConfig(CartPole(), Dqn(hidden_sizes=(8,)), FusedConfig())
    with pytest.raises(SeedbedError, match="do not fit: .* is only"):
        beginning(config, Weights(source))


def test_a_host_environment_with_the_same_spaces_takes_a_policy_of_the_device(source: Path) -> None:
    config = TrainConfig(GymEnv("CartPole-v1"), SMALL, CentralConfig())
    found = beginning(config, Weights(source))
    assert found.told["parts"] == found.told["of"]


def test_critics_and_temperature_go_along(tmp_path: Path) -> None:
    agent = Sac(hidden_sizes=(8,), learning_rate=1e-3)
    config = TrainConfig(Pendulum(), agent, FusedConfig())
    write_run(tmp_path / "run", config)
    state = state_of(config, beginning(config, Weights(tmp_path / "run")))
    trained = bind(agent, config.env.spec).init(jax.random.key(0))  # type: ignore[union-attr]
    jax.tree.map(np.testing.assert_array_equal, state.params, trained.params)
    jax.tree.map(np.testing.assert_array_equal, state.auxiliary, trained.auxiliary)


def test_an_exported_policy_gives_parameters_and_a_target_network_that_is_their_copy(
    tmp_path: Path,
) -> None:
    config = TrainConfig(CartPole(), Dqn(hidden_sizes=(8,)), FusedConfig(), "cartpole/dqn")
    export(write_run(tmp_path / "run", config), tmp_path / "policy", False, silent, False)
    state = state_of(config, beginning(config, Weights(tmp_path / "policy")))
    trained = bind(config.agent, config.env.spec).init(jax.random.key(0))  # type: ignore[union-attr]
    jax.tree.map(np.testing.assert_array_equal, state.params, trained.params)
    jax.tree.map(np.testing.assert_array_equal, state.auxiliary, trained.params.weights)
    with pytest.raises(SeedbedError, match="no optimizer's state: leave out --from-optimizer"):
        beginning(config, Weights(tmp_path / "policy", optimizer=True))


class Mirrored(PrivilegedProbe):
    """A task whose critics see more than its policy, and which tells a mirror."""

    @property
    def spec(self) -> EnvSpec:
        flip = Reflection((0,), (-1,))
        mirror = Mirror({"observation": flip, PRIVILEGED: flip}, flip)
        return dataclasses.replace(super().spec, mirror=mirror)


def test_an_exported_policy_of_a_task_with_a_privileged_part_fits_it(tmp_path: Path) -> None:
    agent = dataclasses.replace(SMALL, max_gradient_norm=math.inf)
    config = TrainConfig(Mirrored(), agent, FusedConfig(), "mirrored/ppo")
    export(write_run(tmp_path / "run", config), tmp_path / "policy", False, silent, True)
    found = beginning(config, Weights(tmp_path / "policy"))
    assert found.told["parts"] == found.told["of"]


def test_an_exported_policy_without_critics_is_refused_or_they_begin_anew(tmp_path: Path) -> None:
    config = TrainConfig(Pendulum(), Sac(hidden_sizes=(8,)), FusedConfig(), "pendulum/sac")
    export(write_run(tmp_path / "run", config), tmp_path / "policy", False, silent, False)
    with pytest.raises(SeedbedError, match="auxiliary.critics.* is only in the new agent"):
        beginning(config, Weights(tmp_path / "policy"))
    found = beginning(config, Weights(tmp_path / "policy", partial=True))
    assert any("critics" in group for group in found.told["anew"])


@pytest.mark.slow
def test_members_begin_with_the_same_weights_and_give_those_of_the_best(
    source: Path, tmp_path: Path
) -> None:
    several = TrainConfig(CartPole(), SMALL, FusedConfig(steps=64, seeds=3, evaluate_episodes=2))
    loaded = beginning(several, Weights(source))
    state = state_of(several, loaded, members=3)
    for name, leaf in leaves_of(restore(source).params).items():
        np.testing.assert_array_equal(leaves_of(state.params)[name], np.stack([leaf] * 3))
    seedbed.train(several, run=tmp_path / "several", start=Weights(source))
    best = restore(tmp_path / "several")
    one = TrainConfig(CartPole(), SMALL, FusedConfig())
    found = beginning(one, Weights(tmp_path / "several"))
    assert found.told["member"] == best.member
    jax.tree.map(np.testing.assert_array_equal, state_of(one, found).params, best.params)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again_with_its_weights(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(
        CartPole(),
        SMALL,
        FusedConfig(steps=64, evaluate_episodes=2),
        "cartpole",
        Weights(str(source)),
    )
    run = RunFolder.create(tmp_path / "run")
    run.write_config(to_json(config))
    run.close()
    assert main(["train", "--resume", "--run", str(tmp_path / "run")]) == 0
    assert "beginning with the weights of" in capsys.readouterr().out
    assert main(["train", "--resume", "--run", str(tmp_path / "run"), "--steps", "128"]) == 0
    told = capsys.readouterr().out
    assert "going on from step" in told and "beginning with" not in told
    stints = json.loads((tmp_path / "run" / "history.json").read_text())
    assert ["from" in stint for stint in stints] == [True, False]


@pytest.mark.slow
def test_a_configuration_that_is_resumed_in_python_keeps_its_weights(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(CartPole(), SMALL, FusedConfig(steps=64, evaluate_episodes=2), "cartpole")
    run = RunFolder.create(tmp_path / "run")
    run.write_config(to_json(dataclasses.replace(config, start=Weights(str(source)))))
    run.close()
    seedbed.train(config, run=tmp_path / "run", resume=True)
    assert "beginning with the weights of" in capsys.readouterr().out
    assert saved_config(RunFolder.read(tmp_path / "run")).start == Weights(str(source))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["cartpole/ppo", "--from", "nothing"], "nothing is not the folder of a run"),
        (["cartpole/ppo", "--from"], "--from needs a value"),
        (["cartpole/ppo", "--from-partial"], "name a run with it"),
        (["--resume", "--run", "{run}", "--from", "{run}"], "leave out --from"),
    ],
)
def test_wrong_words_about_weights_get_one_line_and_leave_no_folder(
    words: list[str],
    refusal: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *(word.format(run=source) for word in words)]) in (1, 2)
    told = capsys.readouterr().err
    assert refusal in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_weights_of_a_wrong_type_are_refused(source: Path) -> None:
    with pytest.raises(SeedbedError, match="optimizer is 'yes', a str: give a bool"):
        Weights(source, optimizer="yes")  # type: ignore[arg-type]
    with pytest.raises(SeedbedError, match="start is 3, an int"):
        seedbed.train("cartpole/ppo", start=3)  # type: ignore[arg-type]
