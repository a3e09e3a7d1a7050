"""Searches hyperparameters of a preset for the best policy after a fixed budget of CPU time.

    python benchmarks/tune.py ant/ppo --budget 60 --trials 40

A trial trains for `--budget` CPU seconds, learning included and compilation excluded, and its score is
the mean return of 20 episodes. What a trial's steps cost is measured at its start, so that the learning
rate falls to 0 just when the budget ends. Trials go into `benchmarks/results/tune-PRESET.json`, best
first; the search goes on from those that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import optuna

from seedbed.config import resolve
from seedbed.fused.program import Program
from seedbed.run.options import FusedConfig
from seedbed.types import SeedbedError

RESULTS = Path(__file__).parent / "results"
EPISODES = 20
LOOKS = 4
"""Evaluations of a trial, at which it may be given up."""


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """Draws the options of PPO that matter."""
    rows = trial.suggest_categorical("rows", [8192, 16384, 32768])
    unroll = trial.suggest_categorical("unroll", [8, 16, 32])
    width = trial.suggest_categorical("hidden", [32, 64, 128])
    return {
        "unroll": unroll,
        "batch": rows // unroll,
        "minibatches": rows // trial.suggest_categorical("minibatch_rows", [1024, 2048, 4096]),
        "epochs": trial.suggest_int("epochs", 2, 6),
        "gamma": 1.0 - trial.suggest_float("one_less_gamma", 0.003, 0.05, log=True),
        "trace_decay": trial.suggest_categorical("trace_decay", [0.9, 0.95]),
        "learning_rate": trial.suggest_float("learning_rate", 2e-4, 3e-3, log=True),
        "least_scale": trial.suggest_float("least_scale", 0.05, 0.3),
        "initial_scale": trial.suggest_float("initial_scale", 0.35, 0.8),
        "reward_scale": trial.suggest_categorical("reward_scale", [0.03, 0.1, 0.3]),
        "clip": trial.suggest_categorical("clip", [0.2, 0.3]),
        "max_gradient_norm": trial.suggest_categorical("max_gradient_norm", [0.5, 1.0]),
        "activation": trial.suggest_categorical("activation", ["tanh", "swish", "relu"]),
        "hidden_sizes": (width, width),
        "value_sizes": (width, width),
    }


def train(preset: str, options: dict[str, Any], budget: float, trial: optuna.Trial | None) -> float:
    """Trains for `budget` CPU seconds and returns the mean return; raises TrialPruned."""
    base = resolve.train_config(preset)
    agent = dataclasses.replace(base.agent, **options)
    config = dataclasses.replace(base.runtime, steps=1, evaluate_episodes=EPISODES)
    assert isinstance(config, FusedConfig), f"{preset} is not of the fused runtime"
    program = Program(base.env, agent, config)
    carry = program.place(program.first())
    program.compile(carry)
    cost, made = 0.0, 0
    for share, done in ((config.euler_share, [0]), (1.0 - config.euler_share, [config.steps])):
        for _ in range(2):
            carry, _ = program.run(carry, done)
        begun = time.process_time()
        for _ in range(3):
            carry, report = program.run(carry, done)
            made += int(report.transitions)
        cost += share * (time.process_time() - begun) / 3
    config = dataclasses.replace(config, steps=round(made / 6 * budget / cost))
    program = Program(base.env, agent, config)
    carry = program.place(program.first())
    program.compile(carry)
    score, done, looked = 0.0, 0, 0
    while done < config.steps:
        carry, report = program.run(carry, [done])
        done += int(report.transitions)
        look = min(LOOKS, done * LOOKS // config.steps)
        if look > looked:
            looked = look
            score = program.evaluate(carry, seed=look)[0]["episode_return_mean"]
            if trial is not None:
                trial.report(score, look)
                if look < LOOKS and trial.should_prune():
                    raise optuna.TrialPruned
    if trial is not None:
        trial.set_user_attr("steps", config.steps)
    return score


def main() -> None:
    """Runs the search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", nargs="?", default="ant/ppo")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of a trial")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    path = RESULTS / f"tune-{given.preset.replace('/', '-')}.json"
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=given.seed, multivariate=True),
        pruner=optuna.pruners.PercentilePruner(40.0, n_startup_trials=4),
    )

    def objective(trial: optuna.Trial) -> float:
        options = suggest(trial)
        trial.set_user_attr("options", options)
        try:
            return train(given.preset, options, given.budget, trial)
        except SeedbedError as error:  # a configuration that diverges is a bad one
            print(error)
            raise optuna.TrialPruned from error

    def save(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        del trial
        done = [t for t in study.trials if t.value is not None]
        rows = [
            {
                "return": t.value,
                "state": t.state.name,
                **t.user_attrs,
                "looks": list(t.intermediate_values.values()),
            }
            for t in sorted(done, key=lambda t: -t.value)
        ]
        path.write_text(json.dumps({"budget_cpu_s": given.budget, "trials": rows}, indent=1) + "\n")

    study.optimize(objective, n_trials=given.trials, callbacks=[save])
    best = study.best_trial
    print(f"best: {best.value:.0f} with {best.user_attrs['options']}")


if __name__ == "__main__":
    main()
