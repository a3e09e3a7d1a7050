"""Identifies an Ant's torso mass and friction from 2 s of noisy motion, by gradients through contacts.

    python examples/identify_ant.py [--seeds N] [--plot FILE]

MuJoCo moves an Ant whose torso mass and friction (one value for all geoms) are within 20 % of the model's.
Its 29 positions and velocities are recorded every 10 ms, with noise of 1 % of each number's standard
deviation. From half or one and a half times the truth, Gauss-Newton multiple shooting (Bock and Plitt 1984)
finds both: unknown are the two and the state at the start of each window of 20 ms, and windows must join.
docs/gradients.md has the result.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from scipy.linalg import solveh_banded

from seedbed import physics, simd

ANT = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
TORSO, NAMES = 1, ("torso mass", "friction")
SETTLING, STEPS, WINDOW = 100, 200, 2  # in steps of 10 ms
AMPLITUDE = 0.8  # of the controls, which are clipped to 1
# Windows join within so many standard deviations of the noise, in the end.
ITERATIONS, TIGHTEST = 30, 0.1
# Of Student's t: where a contact begins or ends within a window, its gap is large, and counts for less.
DOF = 4.0

model = physics.load(ANT)
SIZE = model.nq + model.nv


class Recording(NamedTuple):
    """What is known of a motion, and the truth."""

    ctrl: np.ndarray  # [STEPS, nu]
    observed: np.ndarray  # [STEPS + 1, SIZE] qpos and qvel, with noise
    noise: np.ndarray  # [SIZE] its standard deviation
    truth: np.ndarray  # [2] torso mass in kg, and friction
    guess: np.ndarray  # [2] where the search starts


def record(seed: int) -> Recording:
    """Moves MuJoCo's Ant by sums of three sines at each joint."""
    chance, ant = np.random.default_rng(seed), mujoco.MjModel.from_xml_path(str(ANT))
    truth = np.array([ant.body_mass[TORSO], 1.0]) * chance.uniform(0.8, 1.2, 2)
    ant.body_mass[TORSO], ant.geom_friction[:, 0] = truth
    seconds = ant.opt.timestep * np.arange(SETTLING + STEPS)[:, None, None]
    hertz, phase = chance.uniform(0.5, 2.5, (3, ant.nu)), chance.uniform(0, 2 * np.pi, (3, ant.nu))
    ctrl = AMPLITUDE * np.sqrt(3) * np.sin(2 * np.pi * hertz * seconds + phase).mean(1)
    ctrl = ctrl.clip(-1, 1)
    data, states = mujoco.MjData(ant), []
    for row in ctrl:
        data.ctrl[:] = row
        mujoco.mj_step(ant, data)
        states.append(np.concatenate([data.qpos, data.qvel]))
    states = np.stack(states)[SETTLING - 1 :]
    noise = 0.01 * states.std(0)
    observed = states + noise * chance.normal(size=states.shape)
    return Recording(ctrl[SETTLING:], observed, noise, truth, truth * chance.choice([0.5, 1.5], 2))


@simd.vectorize
def shoot(start: jax.Array, ctrl: jax.Array) -> jax.Array:
    """Simulates a window [WINDOW, SIZE] from a state and the logarithms of mass and friction [SIZE + 2]."""
    mass, friction = jnp.exp(start[SIZE:])
    ant = model.replace(
        body_mass=jnp.float32(model.body_mass).at[TORSO].set(mass),
        geom_friction=jnp.float32(model.geom_friction).at[:, 0].set(friction),
    )

    def one(state: physics.State, row: jax.Array) -> tuple[physics.State, jax.Array]:
        state = physics.step(ant, state, row)
        return state, jnp.concatenate([state.qpos, state.qvel])

    return jax.lax.scan(one, physics.init(ant, start[: model.nq], start[model.nq : SIZE]), ctrl)[1]


@jax.jit
def linearised(starts: jax.Array, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Simulates K windows; returns their states [K, WINDOW, SIZE], and the derivatives [..., SIZE + 2]."""
    states, push = jax.linearize(lambda starts: shoot(starts, ctrl), starts)
    units = jnp.eye(SIZE + 2, dtype=starts.dtype)
    return states, jax.vmap(lambda unit: push(jnp.broadcast_to(unit, starts.shape)), out_axes=-1)(
        units
    )


class Equations(NamedTuple):
    """Gauss-Newton's equations: block tridiagonal in the starts, with a border for mass and friction."""

    blocks: np.ndarray  # [K + 1, SIZE, SIZE]
    beside: np.ndarray  # [K, SIZE, SIZE] rows of start k + 1, columns of start k
    border: np.ndarray  # [K + 1, SIZE, 2]
    gradient: np.ndarray  # [K + 1, SIZE]
    corner: np.ndarray  # [2, 2]
    corner_gradient: np.ndarray  # [2]

    def step(self, damping: float) -> tuple[np.ndarray, np.ndarray]:
        """Solves them: returns the changes of the starts and of theta, at most 0.3 of the latter."""
        lower = np.zeros((2 * SIZE, self.gradient.size))
        for column in range(SIZE):
            block = np.concatenate([self.blocks[:-1, column:, column], self.beside[..., column]], 1)
            lower[: 2 * SIZE - column, column:-SIZE:SIZE] = block.T
            lower[: SIZE - column, column - SIZE] = self.blocks[-1, column:, column]
        lower[0] += damping
        right = np.concatenate([self.gradient[..., None], self.border], 2).reshape(-1, 3)
        solved = solveh_banded(lower, right, lower=True)
        schur = self.corner - right[:, 1:].T @ solved[:, 1:]
        theta = -np.linalg.solve(schur, self.corner_gradient - right[:, 1:].T @ solved[:, 0])
        theta = theta.clip(-0.3, 0.3)
        return -(solved[:, 0] + solved[:, 1:] @ theta).reshape(self.gradient.shape), theta


class Problem:
    """A recording as least squares, in units of the noise; `x` [K + 1, SIZE] are starts of windows."""

    def __init__(self, recording: Recording) -> None:
        """Cuts the recording into K windows."""
        self.noise = recording.noise
        self.ctrl = recording.ctrl.reshape(-1, WINDOW, model.nu).astype(np.float32)
        scaled = recording.observed / recording.noise
        self.starts, self.inside = scaled[::WINDOW], scaled[1:].reshape(-1, WINDOW, SIZE)[:, :-1]

    def given(self, x: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """Returns what `shoot` is given: states in their own units, and theta."""
        both = np.broadcast_to(theta, (len(x) - 1, 2))
        return np.concatenate([x[:-1] * self.noise, both], 1).astype(np.float32)

    def residuals(self, x: np.ndarray, states: np.ndarray, tight: float) -> np.ndarray:
        """Returns those of windows [K, WINDOW, SIZE]: against observations, and the gap at the end."""
        states = np.asarray(states, np.float64) / self.noise
        gaps = (states[:, -1:] - x[1:, None]) / tight
        return np.concatenate([states[:, :-1] - self.inside, gaps], 1)

    def cost(self, x: np.ndarray, theta: np.ndarray, tight: float) -> float:
        """Returns the negative logarithm of the likelihood."""
        rows = self.residuals(x, shoot(self.given(x, theta), self.ctrl), tight)
        return 0.5 * np.sum((x - self.starts) ** 2) + 0.5 * DOF * np.sum(np.log1p(rows**2 / DOF))

    def equations(self, x: np.ndarray, theta: np.ndarray, tight: float) -> Equations:
        """Linearises at x and theta, each row weighted by Student's t."""
        given = linearised(self.given(x, theta), self.ctrl)
        states, slopes = (np.asarray(array, np.float64) for array in given)
        # By x, which is in units of the noise.
        slopes = slopes / self.noise[:, None] * np.append(self.noise, [1, 1])
        slopes[:, -1] /= tight
        rows = self.residuals(x, states, tight)
        weights = 1 / (1 + rows**2 / DOF)
        flat = slopes.reshape(len(rows), -1, SIZE + 2)
        weighted = flat * weights.reshape(len(rows), -1, 1)
        hessian = np.einsum("kri,krj->kij", weighted, flat, optimize=True)
        slope = np.einsum("kri,kr->ki", weighted, rows.reshape(len(rows), -1))
        # A gap pulls at the next start, too: its derivative by that one is -1 / tight.
        pull = weights[:, -1] / tight
        blocks, border = np.zeros((len(x), SIZE, SIZE)), np.zeros((len(x), SIZE, 2))
        blocks[:] = np.eye(SIZE)
        blocks[:-1] += hessian[:, :SIZE, :SIZE]
        blocks[1:, range(SIZE), range(SIZE)] += pull / tight
        border[:-1] += hessian[:, :SIZE, SIZE:]
        border[1:] -= pull[..., None] * slopes[:, -1, :, SIZE:]
        gradient = x - self.starts
        gradient[:-1] += slope[:, :SIZE]
        gradient[1:] -= pull * rows[:, -1]
        beside = -pull[..., None] * slopes[:, -1, :, :SIZE]
        corner = hessian[:, SIZE:, SIZE:].sum(0), slope[:, SIZE:].sum(0)
        return Equations(blocks, beside, border, gradient, *corner)


def identify(recording: Recording) -> np.ndarray:
    """Searches from the guess; returns mass and friction after each iteration [ITERATIONS + 1, 2]."""
    problem, theta, damping = Problem(recording), np.log(recording.guess), 1e-3
    x, found = problem.starts, [theta]
    for iteration in range(ITERATIONS):
        tight = max(TIGHTEST, 0.8**iteration)
        equations, cost = problem.equations(x, theta, tight), problem.cost(x, theta, tight)
        for _ in range(5):
            dx, dtheta = equations.step(damping)
            if problem.cost(x + dx, theta + dtheta, tight) < cost:
                x, theta, damping = x + dx, theta + dtheta, max(damping / 10, 1e-6)
                break
            damping *= 10
        found.append(theta)
    return np.exp(found)


def plot(searches: list[np.ndarray], path: Path) -> None:
    """Draws each search's distance from the truth."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for i, axis in enumerate(axes):
        for seed, errors in enumerate(searches):
            axis.semilogy(np.abs(errors[:, i]).clip(1e-2), label=f"seed {seed}")
        axis.axhline(1, color="black", linestyle="--")
        axis.set(title=NAMES[i], xlabel="iteration")
    axes[0].set_ylabel("error, % (dashed: 1 %)")
    axes[1].legend(ncols=2, fontsize="x-small")
    figure.savefig(path)


def main() -> None:
    """Identifies one Ant a seed, and says how far off each search ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many Ants (10)")
    parser.add_argument("--plot", type=Path, help="file of a picture; needs matplotlib")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: give at least 1")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    begun, searches = time.monotonic(), []
    for seed in range(options.seeds):
        recording = record(seed)
        found = identify(recording)
        searches.append(100 * (found / recording.truth - 1))
        first, last = searches[-1][0], searches[-1][-1]
        told = (
            f"{name} {a:+.0f} % -> {b:+.2f} %"
            for name, a, b in zip(NAMES, first, last, strict=True)
        )
        print(f"seed {seed}: {', '.join(told)}; {time.monotonic() - begun:.0f} s", flush=True)
    within = sum(bool((np.abs(errors[-1]) < 1).all()) for errors in searches)
    print(f"{within} of {options.seeds} within 1 %")
    if options.plot:
        plot(searches, options.plot)


if __name__ == "__main__":
    main()
