"""The device-resident store against a slow reference that keeps every timestep in a list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting_agent import CountingAgent
from seedbed.central.inference import (
    Inference,
    Unroll,
    batch_sizes,
    environment_keys,
    to_trajectory,
)
from seedbed.run.keys import halves
from seedbed.run.stacking import stack_timesteps, stacked_spec
from seedbed.types import ArraySpec, Discrete, EnvSpec, Timestep

SPEC = EnvSpec(ArraySpec((3, 2), "uint8"), Discrete(7))
STACK, GROUPS, SIZE = 3, 3, 2
TO_TRAJECTORY = jax.jit(to_trajectory, static_argnums=1)


def make_inference(unroll=4):
    agent = CountingAgent(unroll=unroll, spec=stacked_spec(SPEC, STACK))
    ids = np.arange(GROUPS * SIZE).reshape(GROUPS, SIZE)
    device = jax.devices()[0]
    inference = Inference(agent, SPEC, STACK, device, ids, GROUPS * SIZE, jax.random.key(3))
    inference.publish(agent.init(jax.random.key(0)).params, 0)
    inference.compile(SPEC)
    return inference


def start_unrolls(inference):
    """Steps until every group has begun its first unroll."""
    environments = Environments(99)
    for _ in range(inference.unroll):
        steps = [environments.next(group) for group in range(GROUPS)]
        inference.act(jax.tree.map(lambda *leaves: np.stack(leaves), *steps), list(range(GROUPS)))
    for group in range(GROUPS):
        inference.restart(group)
    return inference


class Environments:
    """Random timesteps with random episode ends, in next-step auto-reset."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.ended = np.ones((GROUPS, SIZE), bool)

    def next(self, group):
        first = self.ended[group].copy()
        end = (self.rng.random(SIZE) < 0.3) & ~first
        terminated = end & (self.rng.random(SIZE) < 0.5)
        self.ended[group] = end
        observation = self.rng.integers(0, 255, (SIZE, 3, 2)).astype(np.uint8)
        reward = np.where(first, 0, self.rng.random(SIZE)).astype(np.float32)
        return Timestep(observation, reward, terminated, end & ~terminated, first)


def slow_stack(rows, t):
    """Stacks row t of a list of timesteps, one environment at a time."""
    out = np.zeros((SIZE, 3, 2, STACK), np.uint8)
    for env in range(SIZE):
        for back in range(STACK):
            if t - back < 0:
                break
            out[env, :, :, STACK - 1 - back] = rows[t - back].observation[env]
            if rows[t - back].first[env]:
                break
    return out


class Reference:
    """Cuts the history of one group into unrolls that share their end rows."""

    def __init__(self, unroll):
        self.unroll = unroll
        self.restart()

    def restart(self):
        self.rows, self.actions, self.versions, self.counts = [], [], [], []
        self.start, self.count = 0, np.zeros(SIZE, np.int64)

    def add(self, timestep, action, version):
        self.rows.append(timestep)
        self.actions.append(action)
        self.versions.append(version)
        self.counts.append(self.count.copy())
        self.count = np.where(timestep.first, 0, self.count) + 1

    def complete(self):
        return len(self.rows) == self.start + self.unroll + 1

    def check(self, unroll: Unroll):
        trajectory = TO_TRAJECTORY(unroll, STACK)
        low, high = self.start, self.start + self.unroll
        for t in range(self.unroll + 1):
            expected = self.rows[low + t]._replace(observation=slow_stack(self.rows, low + t))
            got = jax.tree.map(lambda leaf, t=t: leaf[t], trajectory.timesteps)
            jax.tree.map(np.testing.assert_array_equal, got, expected)
        np.testing.assert_array_equal(trajectory.action, np.stack(self.actions[low:high]))
        versions = np.repeat(np.array(self.versions[low:high])[:, None], SIZE, axis=1)
        np.testing.assert_array_equal(trajectory.params_version, versions)
        np.testing.assert_array_equal(trajectory.actor_state.core, self.counts[low])
        counted = [np.where(self.rows[t].first, 0, self.counts[t]) for t in range(low, high)]
        np.testing.assert_array_equal(trajectory.extras["count"], np.stack(counted))
        self.start += self.unroll


EVENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, GROUPS - 1), min_size=1, max_size=GROUPS, unique=True),
        st.tuples(st.just("restart"), st.integers(0, GROUPS - 1)),
        st.just("publish"),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=15, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 1000))
def test_unrolls_equal_those_cut_from_the_whole_history(events, seed):
    inference, environments = SHARED, Environments(seed)
    params = {"mean": jnp.zeros(())}
    inference.publish(params, 0)
    references = [Reference(4) for _ in range(GROUPS)]
    for group in range(GROUPS):
        inference.restart(group)
    version = 0
    for event in events:
        if event == "publish":
            version += 1
            inference.publish(params, version)
        elif isinstance(event, tuple):
            group = event[1]
            inference.restart(group)
            references[group].restart()
            environments.ended[group] = True
        else:
            steps = [environments.next(group) for group in event]
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
            unrolls = {g: inference.arrive(g, step) for g, step in zip(event, steps, strict=True)}
            action = np.asarray(inference.act(batch, event).action)
            for position, group in enumerate(event):
                reference = references[group]
                if not reference.rows:  # the state before row 0 is whatever the last run left
                    core = inference._store.kept.start_state.core
                    reference.count = np.asarray(core[group]).astype(np.int64)
                reference.add(steps[position], action[position], version)
                assert (unrolls[group] is not None) == reference.complete()
                if unrolls[group] is not None:
                    reference.check(unrolls[group])


SHARED = start_unrolls(make_inference())


def test_first_unrolls_complete_one_after_the_other():
    inference, environments = make_inference(unroll=6), Environments(2)
    completed = []
    for _ in range(14):
        steps = [environments.next(group) for group in range(GROUPS)]
        taken = [inference.arrive(group, step) for group, step in enumerate(steps)]
        completed.append([group for group, unroll in enumerate(taken) if unroll is not None])
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        inference.act(batch, list(range(GROUPS)))
    assert completed == [[], [], [], [], [], [], [0], [], [1], [], [2], [], [0], []]


def test_padding_changes_nothing():
    inference = make_inference()
    environments = Environments(0)
    step = environments.next(1)
    padded = jax.tree.map(lambda leaf: np.stack([leaf, np.full_like(leaf, 1)]), step)
    before = jax.tree.map(np.array, inference._store)
    inference.act(padded, [1])
    after = jax.tree.map(np.array, inference._store)
    for group in (0, 2):
        jax.tree.map(lambda a, b, g=group: np.testing.assert_array_equal(a[g], b[g]), before, after)
    np.testing.assert_array_equal(after.timesteps.reward[1, STACK - 1], step.reward)


def test_actions_do_not_depend_on_arrival_order():
    draws = []
    for order in ([[0, 1, 2]], [[2], [0, 1]], [[1], [2], [0]]):
        inference, environments = make_inference(), Environments(5)
        steps = {group: environments.next(group) for group in range(GROUPS)}
        for groups in order:
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(steps[g] for g in groups))
            inference.act(batch, groups)
        draws.append(np.asarray(inference._store.kept.extras["draw"][:, 0]))
    assert np.unique(draws[0]).size == draws[0].size
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], draws[2])


def test_keys_follow_the_steps_of_a_group_beyond_32_bits():
    inference, environments = make_inference(), Environments(5)
    inference._counter[:] = 2**32 - 1
    inference._hold[:] = 0
    for _ in range(2):
        step = jax.tree.map(lambda leaf: leaf[None], environments.next(1))
        inference.act(step, [1])
    drawn = np.asarray(inference._store.kept.extras["draw"][1, :2])
    for row, step in enumerate((2**32 - 1, 2**32)):
        keys = environment_keys(jax.random.key(3), jnp.arange(SIZE, 2 * SIZE), halves(step))
        expected = [int(jax.random.bits(key, (), jnp.uint32)) for key in keys]
        assert drawn[row].tolist() == expected


def test_slot_memory_is_not_kept():
    """Overwriting the staged arrays after the actions are back changes nothing in the store."""
    inference, environments = make_inference(), Environments(1)
    step = jax.tree.map(lambda leaf: leaf[None].copy(), environments.next(0))
    kept = jax.tree.map(np.array, step)
    acted = inference.act(step, [0])
    np.asarray(acted.action)
    for leaf in jax.tree.leaves(step):
        leaf[...] = 1
    stored = np.asarray(inference._store.timesteps.observation[0, STACK - 1])
    np.testing.assert_array_equal(stored, kept.observation[0])


@pytest.mark.parametrize("groups", [1, 2, 4, 5, 16, 37])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_batch_sizes_reach_from_one_to_all(groups, platform):
    sizes = batch_sizes(groups, platform)
    assert sizes[0] == 1 and sizes[-1] == groups and list(sizes) == sorted(set(sizes))


TREE = {
    "bytes": ArraySpec((3, 2), "uint8"),
    "image": ArraySpec((2, 3, 2), "float32"),
    "matrix": ArraySpec((2, 3), "float32"),
    "number": ArraySpec((), "int32"),
    "vector": ArraySpec((4,), "float32"),
}


@pytest.mark.parametrize("stack", [1, 2, 3])
def test_every_array_is_stacked_along_its_last_axis(stack):
    rows, size, rng = 6, 2, np.random.default_rng(stack)
    first = rng.random((stack - 1 + rows, size)) < 0.4
    observation = {
        name: rng.integers(1, 200, (*first.shape, *leaf.shape)).astype(leaf.dtype)
        for name, leaf in TREE.items()
    }
    steps = Timestep(observation, np.zeros(first.shape, np.float32), first, first, first)
    got = stack_timesteps(steps, stack)
    spec = stacked_spec(EnvSpec(TREE, Discrete(2)), stack).observation
    np.testing.assert_array_equal(got.first, first[stack - 1 :])
    for name, leaf in observation.items():
        if name == "bytes" or (name == "number" and stack > 1):
            leaf = leaf[..., None]
        assert spec[name].dtype == got.observation[name].dtype == leaf.dtype
        assert spec[name].shape == got.observation[name].shape[2:]
        for row in range(rows):
            for env in range(size):
                frames, visible = [], True
                for back in range(stack):
                    now = row + stack - 1 - back
                    frames.insert(0, leaf[now, env] * visible)
                    visible &= not first[now, env]
                wanted = np.concatenate(frames, axis=-1) if leaf.ndim > 2 else frames[0]
                np.testing.assert_array_equal(got.observation[name][row, env], wanted)


def test_any_publication_lets_groups_act_again():
    """Also that of an update that changed nothing, and so has the same version."""
    inference = make_inference()
    params = CountingAgent().init(jax.random.key(0)).params
    assert inference.renew() and not inference.renew()
    inference.publish(params, 0)
    inference.wait_for_newer(60.0)
    assert inference.renew() and not inference.renew()
