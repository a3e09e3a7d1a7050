"""One sentence for each metric that a run can write; docs/reference/metrics.md is made of it.

Metrics of a user's own agents and environments are not here: they appear under the names that these give.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

PROGRESS = {
    "wall_s": "Seconds of training so far, with evaluations; a resumed run goes on counting.",
    "env_steps": "Transitions that count so far; of a population, those of the member with the fewest.",
    "frames": "The same in simulator frames: an Atari step is four.",
    "env_steps_per_s": "Transitions a second since the line before, of all members together.",
    "frames_per_s": "Simulator frames a second since the line before.",
    "learner_steps": "Gradients applied so far.",
    "rss_mb": "Resident memory of the run's processes on this machine, in 10^6 bytes.",
}
EPISODES = {
    "episodes": "Episodes that have ended in training; of a population, those of all members.",
    "episode_return_mean": "Mean return of about the last 100 episodes of training, in raw rewards.",
    "episode_length_mean": "Mean length of the same episodes, in transitions.",
    "episode_success_mean": "Share of successes in the last 100 episodes whose `info` told `is_success`.",
}
EVALUATIONS = {
    "evaluation/env_steps": "Transitions that the evaluated parameters were trained for.",
    "evaluation/episodes": "Episodes that the evaluation played.",
    "evaluation/episode_return_mean": "Mean of their raw returns; of a population, the median.",
    "evaluation/episode_return_std": "Standard deviation of their returns.",
    "evaluation/episode_return_min": "Smallest of their returns.",
    "evaluation/episode_return_max": "Largest of their returns.",
    "evaluation/episode_length_mean": "Mean length of these episodes, in transitions.",
    "evaluation/episode_success_mean": "Share of those that succeeded, where `info` tells `is_success`.",
    "evaluation/episode_*_mean": "Mean over episodes of this metric's sum over each.",
    "evaluation/seeds": "Mean return of each member of a population, in order.",
    "evaluation/best_return": "Mean return of the best member.",
    "evaluation/best_member": "Name of the best member, such as `seed 3`.",
}
TIME = {
    "time/environment": "Share of the machine's time that environments took (fused: of the wall time).",
    "time/inference": "Share that choosing actions took.",
    "time/learning": "Share that learning took.",
    "time/waiting": "Share in which nothing of the run worked.",
    "bottleneck": "The stage that limits the speed: environment, inference or learning.",
}
CENTRAL = {
    "inference_rows_mean": "Mean number of environments that one inference call acted for.",
    "inference_behind_share": "Accelerators: share of the wall time in which a call waited for learning.",
    "learner_program_ms": "Accelerators: the longest program of learning that calls may wait for, in ms.",
    "inference_blocked_share": "Share of the wall time in which acting waited for the learner.",
    "learner_waiting_share": "Share of the wall time in which the learner waited for a batch.",
    "actor_restarts": "Actor processes that died or hung and were started again.",
    "queued_unrolls": "Unrolls that wait to be learned from.",
    "lag_mean": "Mean number of updates between choosing an action and learning from it.",
    "lag_max": "Largest such number in the last batch.",
}
REPLAY = {
    "replay/items": "Items that replay holds.",
    "replay/inserted": "Items that were put into replay so far.",
    "replay/sampled": "Items that were drawn from replay so far.",
    "replay/bytes": "Memory of stored rows, images and items, in bytes.",
    "replay/bytes_per_frame": "Bytes of a stored row, images compressed.",
    "replay/compression": "Raw size of the stored images over their compressed size.",
    "replay/busy_share": "Share of the wall time in which replay sealed chunks, entered priorities and drew.",
    "replay/short_share": "Share in which the learner waited because acting had not brought enough steps.",
}
STREAMS = {
    "streams/hosts": "Machines with actors that are connected.",
    "streams/streams": "Streams that are connected; each carries one group of environments.",
    "streams/reconnects": "Streams that came back after a broken link.",
    "streams/refused": "Connections that were refused.",
    "streams/steps": "Timesteps that came from other machines.",
    "streams/received_bytes": "Bytes received from other machines.",
    "streams/sent_bytes": "Bytes sent to other machines.",
    "streams/cpu_seconds": "CPU seconds of the actors on other machines.",
    "streams/answer_p50_s": "Median seconds from a timestep's arrival here until its action is sent.",
    "streams/answer_p99_s": "Their 99th percentile.",
    "streams/action_p50_s": "Median over streams of the seconds that an actor waits for an action.",
    "streams/action_p99_s": "Largest 99th percentile of the same over the streams.",
    "streams/away_share": "Share of the wall time in which these groups did not wait for the learner.",
}
CLUSTER = {
    "cluster/learners": "Learners that are connected.",
    "cluster/restarts": "Roles that were started again: learners, parameter shards and replay shards.",
    "cluster/updates_per_s": "Updates that parameter shard 0 applied a second.",
    "cluster/bytes_per_s": "Bytes a second between learners and parameter shards.",
    "cluster/discarded_share": "Share of the pushed gradients that a shard discarded.",
    "cluster/pushes_applied": "Pushes that shards applied, summed over the shards.",
    "cluster/pushes_discarded": "Pushes that shards discarded: they were too old, or not finite.",
    "cluster/pushes_not_finite": "Those of them that were not finite.",
    "cluster/pushes_rolled_back": "Pushes that were lost when a shard went back to its last save.",
    "cluster/outliers": "Gradients that learners kept back because of their loss.",
    "cluster/staleness_mean": "Mean number of gradients applied between a gradient's pull and its push.",
    "cluster/staleness_max": "Largest such number.",
    "cluster/staleness/*": "Gradients whose staleness was this number, or in this range.",
    "cluster/steps/*": "Transitions of this learner.",
    "cluster/load/*": "CPU seconds a second of this shard.",
}
AGENTS = {
    "loss/total": "Loss of the last batch: what the gradient is taken of (V-MPO: without the temperature's).",
    "loss/policy": "Its part that improves the policy.",
    "loss/value": "Its part that fits the value: half the squared error.",
    "loss/critic": "SAC: half the squared error of both critics, summed.",
    "entropy": "Entropy of the policy, in nats; of real actions in bounds of -1 and 1 (APG: before them).",
    "explained_variance": "Share of the variance of the value's targets that the values explain; at most 1.",
    "rho_mean": "IMPALA: mean probability of the actions now over that when they were chosen.",
    "kl": "Divergence of the new policy from the one that acted, in nats; PPO estimates it from the actions.",
    "penalty": "V-MPO: weight of the divergence; for real actions, of that of the means.",
    "return/mean": "ES and ARS: mean return of the generation's episodes, with noise on the parameters.",
    "return/deviation": "ES and ARS: standard deviation of the same.",
    "step": "ES and ARS: norm of the step's direction, before the optimizer; a mean over devices' parts.",
    "slope": "APG: norm of the policy's gradient before it is clipped.",
    "likeness": "AWR: mean weight with which actions are imitated.",
    "gradient_norm": "Norm of the gradient before it is clipped; a mean over devices' parts.",
    "clipped": "PPO: share of the rows whose probability ratio is clipped.",
    "q_mean": "DQN and R2D2: mean value of the actions that were taken (R2D2: rescaled).",
    "error_mean": "DQN and R2D2: mean size of the temporal-difference error.",
    "q": "SAC: mean value of the actions that were taken, over both critics.",
    "temperature": "SAC: weight of the entropy in the reward. V-MPO: evenness of the better half's weights.",
}
ENVIRONMENTS = {
    "env/solver_error": "Estimated error of the physics' solver, the largest in a step, a mean over"
    " environments: above 0.01 the simulation cannot be trusted.",
    "env/reward_forward": "Reward for moving forward, a mean over the environments' last steps.",
    "env/reward_survive": "Reward for being healthy, in the same sense.",
    "env/reward_ctrl": "Minus the cost of controls.",
    "env/reward_contact": "Minus the cost of contact forces.",
    "env/reward_dist": "Minus the weighted distance to the target or goal.",
    "env/reward_near": "Minus the weighted distance of Pusher's tip to the object.",
    "env/hits": "Share of the environments whose last step reached a target (Fetch, Grasp, Ur5e).",
    "env/weighted_hits": "The same, each weighed by how well Fetch faces its target, -1 to 1.",
    "env/moving_to_target": "Reward for coming nearer to the target (Fetch, Ur5e).",
    "env/torso_is_up": "Fetch's reward for being upright.",
    "env/torso_height": "Fetch's reward for height.",
    "env/moving_to_object": "Grasp's reward for the thumb's speed towards the object.",
    "env/close_to_object": "Grasp's reward for the palm's nearness to the object, along the ground.",
    "env/touching_object": "Grasp's reward for finger tips that touch.",
    "env/moving_object_to_target": "Grasp's reward for the object's speed towards the target.",
    "env/reward_linup": "HumanoidStandup's reward for height.",
    "env/reward_quadctrl": "HumanoidStandup's cost of controls, negative.",
    "env/reward_impact": "HumanoidStandup's cost of contact forces, negative.",
    "env/distance_penalty": "InvertedDoublePendulum's cost of the tip's distance from its place, negative.",
    "env/velocity_penalty": "InvertedDoublePendulum's cost of angular velocity, negative.",
}
SECTIONS = (
    ("Progress", "In every run.", PROGRESS),
    ("Episodes of training", "In every run.", EPISODES),
    ("Evaluations", "In every run, from the first evaluation on.", EVALUATIONS),
    (
        "Where the time goes",
        "Since the line before. [Architecture](../architecture.md#where-the-time-goes) tells how it is "
        "measured.",
        TIME,
    ),
    ("Central runtime", "Shares and means are since the line before.", CENTRAL),
    ("Replay of the host", "Central runtime; with parameter servers items and bytes only.", REPLAY),
    ("Actors of other machines", "With `--listen`; counts are since the start.", STREAMS),
    (
        "Parameter servers",
        "Rates, shares and staleness are since the line before, the rest since the start. `*` stands for a "
        "role such as `learner-0`, or a range such as `2-3`.",
        CLUSTER,
    ),
    ("Agents", "Means over the last batch or iteration with updates.", AGENTS),
    ("Environments on the device", "Of those that have them.", ENVIRONMENTS),
)
"""A title, a remark and the metrics, name to sentence, of each part of the reference."""


def undescribed(names: Iterable[str]) -> set[str]:
    """Returns those names of metrics that no sentence is about."""
    patterns = [pattern for _, _, metrics in SECTIONS for pattern in metrics]
    return {name for name in names if not any(fnmatch.fnmatchcase(name, each) for each in patterns)}
