"""Replay on the device against a slow reference, fed with a stream that counts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from seedbed.agents.awr import Awr
from seedbed.agents.r2d2 import R2d2
from seedbed.replay import device
from seedbed.types import Replay, SeedbedError, Timestep

LEAST = Replay(batch=64, sequence=1, period=1, capacity=20, min_size=1, ratio=1.0)


def stream(rows: int, num_envs: int, seed: int = 0) -> device.Record:
    """Records [rows, num_envs] of random episodes; observations are (environment, episode, step)."""
    rng, envs = np.random.default_rng(seed), np.arange(num_envs)
    episode, step, ended = np.zeros(num_envs, int), np.full(num_envs, -1), np.zeros(num_envs, bool)
    kept = []
    for _ in range(rows):
        first = ended | (step < 0)
        episode, step = episode + ended, np.where(first, 0, step + 1)
        ended = ~first & (rng.random(num_envs) < 0.2)
        truncated = ended & (rng.random(num_envs) < 0.5)
        reward = np.where(first, 0, rng.normal(size=num_envs)).astype(np.float32)
        observation = {"count": np.stack([envs, episode, step], -1).astype(np.int32)}
        timestep = Timestep(observation, reward, ended & ~truncated, truncated, first)
        number = (len(kept) * num_envs + envs).astype(np.int32)
        kept.append(
            device.Record(timestep, number, number.astype(np.float32) * 2, (number + np.int32(7),))
        )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *kept)


def template(records: device.Record) -> device.Record:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), records)


def initial_priorities(timesteps: Timestep, extras: Any) -> Any:
    """Of all that may be looked at, so that a wrong window has a wrong priority."""
    assert timesteps.observation == ()
    weights = np.arange(1, 1 + len(extras), dtype=np.float32)[:, None]
    ends = timesteps.first + np.float32(2) * timesteps.terminated
    ends = ends + np.float32(4) * timesteps.truncated
    return 0.1 + (weights * (abs(timesteps.reward) + ends + extras % 10)).mean(0)


def ones(timesteps: Timestep, extras: Any) -> Any:
    """Priorities of 1."""
    del extras
    return jnp.ones(timesteps.first.shape[1])


class Reference:
    """Everything that was ever added, and the items that there are by definition."""

    def __init__(self, experience: Replay, num_envs: int, records: device.Record) -> None:
        self.experience, self.num_envs, self.records = experience, num_envs, records
        self.total = 0
        self.priorities: dict[tuple[int, int], float] = {}

    def add(self, steps: int) -> None:
        known = self.items()
        self.total += steps
        for item in set(self.items()) - set(known):
            timesteps, _, _ = self.window(*item)
            now = jax.tree.map(lambda leaf: leaf[:, None], timesteps._replace(observation=()))
            extras = self.records.extras[item[0] : item[0] + self.experience.steps, item[1], None]
            some = not timesteps.first[self.experience.burn_in + 1 :].all()
            self.priorities[item] = float(initial_priorities(now, extras)[0]) if some else 0.0

    def items(self) -> list[tuple[int, int]]:
        """(row at which it begins, environment) of each item."""
        last = self.total - self.experience.steps
        begun = [row for row in range(last + 1) if row % self.experience.period == 0]
        kept = math.ceil(self.experience.capacity / self.num_envs)
        return [(row, env) for row in begun[-kept:] for env in range(self.num_envs)]

    def window(self, row: int, env: int) -> tuple[Timestep, np.ndarray, np.ndarray]:
        """Timesteps [L], actions and extras [L - 1] of an item, as they should be."""
        rows = slice(row, row + self.experience.steps)
        timesteps, action, extras, _ = jax.tree.map(lambda x: x[rows, env].copy(), self.records)
        over = False
        for t in range(self.experience.burn_in, self.experience.steps):
            if over and not self.experience.cross_episodes:
                timesteps.first[t], timesteps.reward[t] = True, 0
                timesteps.terminated[t] = timesteps.truncated[t] = False
            over |= bool(timesteps.terminated[t] | timesteps.truncated[t])
        return timesteps, action[:-1], extras[:-1]

    def check(self, sample: device.Sample, places: np.ndarray) -> set[tuple[int, int]]:
        """Checks a batch, and returns which items are in it."""
        items = set()
        for i in np.unique(places, return_index=True)[1]:
            row, env = divmod(int(sample.action[0, i]), self.num_envs)
            got = jax.tree.map(lambda leaf, i=i: leaf[:, i], sample[:3])
            jax.tree.map(np.testing.assert_array_equal, got, self.window(row, env))
            assert sample.core[0][i] == sample.action[0, i] + 7
            items.add((row, env))
        assert items <= set(self.items())
        return items


CASES = {
    "transitions": (LEAST, 4, 1),
    "steps that do not divide the ring": (dataclasses.replace(LEAST, sequence=3), 3, 5),
    "all at once": (dataclasses.replace(LEAST, sequence=2), 2, 10),
    "sequences": (dataclasses.replace(LEAST, sequence=4, period=4, burn_in=3), 2, 7),
    "overlap": (dataclasses.replace(LEAST, sequence=6, period=2, burn_in=1), 5, 3),
    "gaps": (dataclasses.replace(LEAST, sequence=2, period=5), 2, 4),
    "across episodes": (
        dataclasses.replace(LEAST, sequence=5, period=3, burn_in=2, cross_episodes=True),
        3,
        2,
    ),
}


@functools.cache
def functions(experience: Replay, priorities: Any = initial_priorities) -> tuple:
    """Compiled add, sample and update."""
    return (
        jax.jit(lambda s, r: device.add(experience, s, r, priorities), donate_argnums=0),
        jax.jit(functools.partial(device.sample, experience)),
        jax.jit(functools.partial(device.update, experience), donate_argnums=0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_items_are_what_a_slow_reference_keeps(case: Any, exponent: float) -> None:
    experience, num_envs, steps = case
    experience = dataclasses.replace(
        experience, priority_exponent=exponent, importance_exponent=0.5, batch=256
    )
    rows = steps * (10 + math.ceil(30 / steps))
    records = stream(rows, num_envs)
    reference = Reference(experience, num_envs, records)
    state = device.initial(experience, template(records), num_envs)
    add, sample, update = functions(experience)
    rng, drawn = np.random.default_rng(1), set()
    for begin in range(0, rows, steps):
        state = add(state, jax.tree.map(lambda x, b=begin: x[b : b + steps], records))
        reference.add(steps)
        items = reference.items()
        assert int(device.size(experience, state)) == len(items)
        if not items:
            continue
        batch, places = jax.tree.map(np.asarray, sample(state, jax.random.key(begin)))
        drawn |= reference.check(batch, places)
        if not exponent:
            assert (batch.importance == 1).all()
            continue
        values = np.asarray(state.sums[0])
        # What has no transition is never drawn.
        wanted = [reference.priorities[item] ** exponent for item in items]
        wanted = [weight for weight in wanted if weight > 0]
        np.testing.assert_allclose(np.sort(values[values > 0]), np.sort(wanted), rtol=1e-5)
        which = [divmod(int(number), num_envs) for number in batch.action[0]]
        likely = np.array([reference.priorities[item] ** exponent for item in which])
        np.testing.assert_allclose(batch.importance, (likely / likely.min()) ** -0.5, rtol=1e-4)
        priorities = rng.uniform(0.1, 2, int(places.max()) + 1).astype(np.float32)[places]
        state = update(state, places, priorities)
        reference.priorities |= dict(zip(which, priorities.tolist(), strict=True))
    possible = [item for item, priority in reference.priorities.items() if priority > 0]
    assert len(drawn) > 0.8 * len(possible if exponent else reference.priorities)
    assert not exponent or drawn <= set(possible)


@pytest.mark.parametrize(
    ("agent", "length"),
    [(R2d2(sequence=16, burn_in=8, batch=8192), 64), (Awr(unroll=16, batch=8192), 24)],
    ids=["r2d2", "awr"],
)
def test_each_step_of_an_episode_is_learned_from(agent: Any, length: int) -> None:
    """Also if all episodes are as long, and items begin at few places of them; `length` is in rows."""
    experience, rows = agent.experience, 5 * 192
    records = stream(rows, 2)
    place = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None] % length, (rows, 2))
    no = np.zeros(place.shape, bool)
    steps = records.timestep._replace(
        observation=place, terminated=no, truncated=place == length - 1, first=place == 0
    )
    records = records._replace(timestep=steps)
    add, sample, _ = functions(experience, ones)
    state = add(device.initial(experience, template(records), 2), records)
    batch, _ = sample(state, jax.random.key(0))
    learned = jax.tree.map(lambda x: np.asarray(x)[experience.burn_in :], batch.timesteps)
    found = np.bincount(learned.observation[:-1][~learned.first[1:]], minlength=length - 1)
    assert len(found) == length - 1 and found.max() < 1.5 * found.min()


def test_items_without_a_transition_have_a_weight_that_is_a_number() -> None:
    experience = dataclasses.replace(LEAST, priority_exponent=0.6, importance_exponent=0.4)
    records = stream(8, 2)
    always = records.timestep._replace(first=np.ones((8, 2), bool))
    add, sample, _ = functions(experience, ones)
    state = device.initial(experience, template(records), 2)
    batch, _ = sample(add(state, records._replace(timestep=always)), jax.random.key(0))
    assert (batch.importance == 1).all()


def filled(experience: Replay, num_envs: int, rows: int) -> device.ReplayState:
    """A replay into which `rows` rows of one episode went, all with initial priority 1."""
    records = stream(rows, num_envs)
    steps, no = records.timestep, np.zeros((rows, num_envs), bool)
    records = records._replace(timestep=steps._replace(terminated=no, truncated=no, first=no))
    add, _, _ = functions(experience, ones)
    state = device.initial(experience, template(records), num_envs)
    for row in range(rows):
        state = add(state, jax.tree.map(lambda x, row=row: x[row : row + 1], records))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.6])
def test_draws_are_in_proportion_to_priorities(exponent: float) -> None:
    """A million draws of items that the ring has wrapped around."""
    experience = dataclasses.replace(
        LEAST, priority_exponent=exponent, batch=1_000_000, capacity=90
    )
    state = filled(experience, num_envs=9, rows=27)
    _, sample, update = functions(experience, ones)
    kept = np.unique(sample(state, jax.random.key(0))[1])
    assert len(kept) == 90
    priorities = np.linspace(0.05, 3, 90, dtype=np.float32)
    state = update(state, kept, priorities)
    batch, items = jax.tree.map(np.asarray, sample(state, jax.random.key(1)))
    shares = priorities.astype(np.float64) ** exponent
    shares /= shares.sum()
    counts = np.bincount(np.searchsorted(kept, items), minlength=90)
    assert scipy.stats.chisquare(counts, shares * len(items)).pvalue > 0.01
    wrong = np.roll(shares, 1) if exponent else np.linspace(0.98, 1.02, 90) / 90
    assert scipy.stats.chisquare(counts, wrong * len(items)).pvalue < 1e-6
    assert batch.importance.shape == (1_000_000,)


@pytest.mark.parametrize(
    ("alpha", "beta", "wanted"), [(1.0, 1.0, [1, 1 / 3]), (0.7, 0.3, [1, 3**-0.21])]
)
def test_importance_weights(alpha: float, beta: float, wanted: list[float]) -> None:
    """Case E6 of the facts: priorities 0.3 and 0.9, normalised by the batch's largest weight."""
    experience = dataclasses.replace(
        LEAST, capacity=2, priority_exponent=alpha, importance_exponent=beta
    )
    state = filled(experience, num_envs=1, rows=5)
    _, sample, update = functions(experience, ones)
    kept = np.unique(sample(state, jax.random.key(0))[1])
    state = update(state, kept, np.array([0.3, 0.9], np.float32))
    batch, items = jax.tree.map(np.asarray, sample(state, jax.random.key(1)))
    for item, weight in zip(kept, wanted, strict=True):
        np.testing.assert_allclose(batch.importance[items == item], weight, rtol=1e-5)
        assert (items == item).any()


@pytest.mark.parametrize("number", [1, 2, 37, 5000])
def test_the_sum_tree_does_what_a_list_does(number: int) -> None:
    """Random writes, some of them twice or of 0; every level has the sums that it should."""
    rng, sums, values = np.random.default_rng(number), device._empty_sums(number), np.zeros(number)
    write, draw = jax.jit(device._set), jax.jit(device._draw, static_argnums=2)
    for turn in range(12):
        items = rng.integers(0, number, min(number, 40))
        given = (rng.random(number) * (rng.random(number) < 0.6)).astype(np.float32)[items]
        given[0] = values[items[items == items[0]]] = 1e-3 if turn % 2 else 7
        given[items == items[0]] = given[0]
        sums, values[items] = write(sums, items, given), given
        for level in sums:
            parts = np.pad(values, (0, len(sums[0]) - number)).reshape(len(level), -1)
            np.testing.assert_allclose(level, parts.sum(1), rtol=1e-5)
        drawn, their = draw(sums, jax.random.key(turn), 4000)
        np.testing.assert_allclose(their, values[np.asarray(drawn)])
        assert (np.asarray(their) > 0).all()


def test_what_rounding_adds_leads_nowhere() -> None:
    """The sum of all is made far too large here; its parts lead to what has a value."""
    sums = jnp.array([0.0, 1, 0, 0]), jnp.array([1.0, 0]), jnp.array([1.5])
    items, values = device._draw(sums, jax.random.key(0), 100)
    assert (items == 1).all() and (values == 1).all()


@pytest.mark.slow
def test_a_million_unlikely_items_are_drawn_alike() -> None:
    """A uniform float32 has 23 bits: one alone could reach only every eighth of them."""
    number = 1 << 20
    values = np.ones(number, np.float32)
    values[0] += 63 * number
    sums = jax.jit(device._set)(device._empty_sums(number), np.arange(number), values)
    items, _ = jax.jit(device._draw, static_argnums=2)(sums, jax.random.key(3), 1 << 18)
    unlikely = np.asarray(items)[np.asarray(items) > 0]
    assert abs(len(unlikely) / (1 << 18) - 1 / 64) < 1e-3
    assert scipy.stats.chisquare(np.bincount(unlikely % 8, minlength=8)).pvalue > 0.01


def turn_over(experience: Replay) -> Any:
    """A scan of add, sample and update over records [N, T, B, ...]."""

    def step(carry: Any, records: device.Record) -> Any:
        state, key = carry
        key, drawing = jax.random.split(key)
        state = device.add(experience, state, records, initial_priorities)
        batch, items = device.sample(experience, state, drawing)
        state = device.update(experience, state, items, 1.0 + abs(batch.timesteps.reward[1]))
        return (state, key), (batch, items)

    return lambda state, key, records: jax.lax.scan(step, (state, key), records)


PRIORITISED = dataclasses.replace(
    LEAST, sequence=3, period=2, priority_exponent=0.5, importance_exponent=0.5, capacity=60
)


@pytest.mark.slow
@pytest.mark.parametrize("members", [0, 2])
def test_the_ring_is_written_in_place(members: int) -> None:
    """What the program needs besides its arguments is less than a hundredth of the ring."""
    experience = dataclasses.replace(PRIORITISED, capacity=60_000, batch=8)
    records = stream(15, 2)

    def arguments() -> Any:
        state = device.initial(experience, template(records), 2)
        parts = jax.tree.map(lambda x: jnp.reshape(x, (5, 3, *x.shape[1:])), records)
        return state, jax.random.key(0), parts

    run, given = turn_over(experience), jax.eval_shape(arguments)
    if members:
        run = jax.vmap(run)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((members, *x.shape), x.dtype), given)
    memory = jax.jit(run, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()
    ring = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given[0]))
    assert memory.alias_size_in_bytes >= ring
    assert memory.temp_size_in_bytes < ring / 100


@pytest.mark.slow
def test_members_of_a_population_are_each_as_if_alone() -> None:
    runs = [
        jax.tree.map(lambda x: x.reshape(14, 5, *x.shape[1:]), stream(70, 3, seed))
        for seed in (0, 1)
    ]
    keys = jax.random.split(jax.random.key(5), 2)
    empty = device.initial(PRIORITISED, template(stream(1, 3)), 3)
    run = turn_over(PRIORITISED)
    alone = [jax.jit(run)(empty, key, records) for key, records in zip(keys, runs, strict=True)]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
    together = jax.jit(jax.vmap(run, in_axes=(None, 0, 0)))(empty, keys, both)
    for i, one in enumerate(alone):
        (state, _), drawn = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            (one[0][0], one[1]),
            (state, drawn),
        )


@pytest.mark.parametrize("priority", [0.0, -1.0, np.nan, np.inf])
def test_a_priority_that_cannot_be_is_told(priority: float) -> None:
    experience = dataclasses.replace(LEAST, priority_exponent=0.5, capacity=10)
    state, (_, _, update) = filled(experience, num_envs=1, rows=8), functions(experience, ones)
    assert device.all_valid(state)
    items = np.array([2, 3])
    state = update(state, items, np.array([1, priority], np.float32))
    state = update(state, items, np.ones(2, np.float32))  # which hides nothing
    assert not device.all_valid(state)
    row = jax.tree.map(lambda x: x[:1], stream(1, 1))
    row = row._replace(timestep=row.timestep._replace(first=np.zeros((1, 1), bool)))
    add, _, _ = functions(experience, lambda timesteps, extras: jnp.full(1, priority))
    assert not device.all_valid(add(filled(experience, num_envs=1, rows=8), row))


def test_learning_waits_for_the_first_items() -> None:
    experience = dataclasses.replace(LEAST, min_size=9, sequence=2)
    state = device.initial(experience, template(stream(1, 2)), 2)
    add, _, _ = functions(experience)
    records, sizes = stream(8, 2), []
    for row in range(8):
        assert bool(device.ready(experience, state)) == (len(sizes) > 0 and sizes[-1] >= 9)
        state = add(state, jax.tree.map(lambda x, row=row: x[row : row + 1], records))
        sizes.append(int(device.size(experience, state)))
    assert sizes == [0, 0, 2, 4, 6, 8, 10, 12]


def test_what_does_not_fit_is_named() -> None:
    records = stream(11, 2)
    with pytest.raises(SeedbedError, match="min_size is 21; give 1 to 20, the capacity"):
        device.initial(dataclasses.replace(LEAST, min_size=21), template(records), 2)
    state = device.initial(LEAST, template(records), 2)
    with pytest.raises(
        SeedbedError, match="11 steps of 2 .*capacity of 20 items.*raise the capacity"
    ):
        device.add(LEAST, state, records, initial_priorities)
