"""The sink of unrolls against a slow reference that keeps every timestep in a list."""

import jax
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferences import GROUPS, SIZE, SPEC, STACK, Environments, make_inference
from seedbed.central.inference import act_output
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.run.stacking import FrameTrajectory, stack_trajectory
from seedbed.types import OnPolicy

UNROLL = 4
STACKED = jax.jit(stack_trajectory, static_argnums=1)
INFERENCE = make_inference()


def make_sink(unroll=UNROLL, batch=SIZE, synchronous=False):
    """Makes a sink, and the queue that it fills."""
    queue = UnrollQueue(100, batch // SIZE, 10**9, 0, 10**9)
    experience = OnPolicy(unroll, batch, synchronous)
    output = act_output(INFERENCE.agent, SPEC, STACK, SIZE)
    return UnrollSink(queue, experience, SPEC, STACK, output, GROUPS), queue


def act(sink, steps, lives):
    """Acts on a step of each of some groups, and adds what came of it; returns the output."""
    groups = list(steps)
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *steps.values())
    output = INFERENCE.inference.act(batch, groups)
    sink.add(groups, [lives[group] for group in groups], batch, output)
    return output


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
    """Cuts the history of one life of a group into unrolls that share their end rows."""

    def __init__(self, skipped, count):
        self.rows, self.actions, self.versions, self.counts = [], [], [], []
        self.start, self.count = skipped, count

    def add(self, timestep, action, version):
        self.rows.append(timestep)
        self.actions.append(action)
        self.versions.append(version)
        self.counts.append(self.count.copy())
        self.count = np.where(timestep.first, 0, self.count) + 1

    def check(self, unroll: FrameTrajectory):
        trajectory = STACKED(unroll, STACK)
        low, high = self.start, self.start + UNROLL
        for t in range(UNROLL + 1):
            expected = self.rows[low + t]._replace(observation=slow_stack(self.rows, low + t))
            got = jax.tree.map(lambda leaf, t=t: leaf[t], trajectory.timesteps)
            jax.tree.map(np.testing.assert_array_equal, got, expected)
        np.testing.assert_array_equal(trajectory.action, np.stack(self.actions[low:high]))
        versions = np.repeat(np.array(self.versions[low:high])[:, None], SIZE, axis=1)
        np.testing.assert_array_equal(trajectory.params_version, versions)
        np.testing.assert_array_equal(trajectory.actor_state.core, self.counts[low])
        counted = [np.where(self.rows[t].first, 0, self.counts[t]) for t in range(low, high)]
        np.testing.assert_array_equal(trajectory.extras["count"], np.stack(counted))
        self.start += UNROLL


EVENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, GROUPS - 1), min_size=1, max_size=GROUPS, unique=True),
        st.tuples(
            st.sampled_from(["dies", "dies while it is acted on"]), st.integers(0, GROUPS - 1)
        ),
        st.just("publish"),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=25, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 1000))
@example(events=[("dies", 1), *[[0, 1, 2]] * 12], seed=0)
def test_unrolls_equal_those_cut_from_the_whole_history(events, seed):
    inference, params = INFERENCE.inference, INFERENCE.params
    environments, (sink, queue) = Environments(seed), make_sink()
    inference.publish(params, 0)

    def count(group):
        """The state of the agent, which is what the last life or example left."""
        return np.asarray(inference._memory.actor_state.core[group]).astype(np.int64)

    lives, version = [0] * GROUPS, 0
    references = [Reference(group * UNROLL // GROUPS, count(group)) for group in range(GROUPS)]
    for event in events:
        if event == "publish":
            version += 1
            inference.publish(params, version)
            continue
        if isinstance(event, tuple):
            kind, group = event
            step = environments.next(group)
            lives[group] += 1
            environments.ended[group] = True
            if kind != "dies":
                batch = jax.tree.map(lambda leaf: leaf[None], step)
                old = references[group]
                full = len(old.rows) == old.start + UNROLL
                sink.arrive(group, lives[group] - 1, step)
                sink.flush()
                assert len(queue._items) == full
                if full:
                    old.rows.append(step)
                    old.check(queue.take(60.0)[0])
                output = inference.act(batch, [group])
                step = environments.next(group)
                assert sink.arrive(group, lives[group], step)
                sink.add([group], [lives[group] - 1], batch, output)
                references[group] = Reference(0, count(group))
                output = act(sink, {group: step}, lives)
                references[group].add(step, np.asarray(output.action)[0], version)
                assert not sink._complete, "what the old life did is in no unroll of the new one"
                continue
            # A group that has not shown itself yet begins where it would have begun.
            if sink._lives[group] >= 0:
                references[group] = Reference(0, count(group))
            continue
        steps = {group: environments.next(group) for group in event}
        assert all(sink.arrive(group, lives[group], steps[group]) for group in event)
        action = np.asarray(act(sink, steps, lives).action)
        for position, group in enumerate(event):
            references[group].add(steps[group], action[position], version)
        sink.flush()
        full = [g for g in event if len(references[g].rows) == references[g].start + UNROLL + 1]
        for group in full:
            # `take` would wait.
            assert queue._items
            [unroll] = queue.take(60.0)
            references[group].check(unroll)
        assert not queue._items


def test_first_unrolls_complete_one_after_the_other():
    (sink, queue), environments = make_sink(unroll=6), Environments(2)
    completed = []
    for _ in range(14):
        steps = {group: environments.next(group) for group in range(GROUPS)}
        before = len(sink._complete)
        completed.append([])
        for group, step in steps.items():
            assert sink.arrive(group, 0, step)
            if len(sink._complete) > before:
                completed[-1].append(group)
                before = len(sink._complete)
        act(sink, steps, [0] * GROUPS)
    assert completed == [[], [], [], [], [], [], [0], [], [1], [], [2], [], [0], []]
    sink.flush()
    assert len(queue._items) == 4


def test_a_synchronous_agent_rests_until_it_is_renewed():
    (sink, queue), environments = make_sink(2, 2 * GROUPS * SIZE, True), Environments(3)
    for _ in range(3):
        for _ in range(4):
            steps = {group: environments.next(group) for group in range(GROUPS)}
            assert all(sink.arrive(group, 0, step) for group, step in steps.items())
            act(sink, steps, [0] * GROUPS)
        assert not any(sink.arrive(group, 0, environments.next(group)) for group in range(GROUPS))
        sink.flush()
        assert len(queue.take(60.0)) == 2 * GROUPS and not queue._items
        sink.renew(range(GROUPS))


def test_what_was_added_may_change_afterwards():
    (sink, queue), environments = make_sink(unroll=1), Environments(1)
    first, last = environments.next(0), environments.next(0)
    kept = jax.tree.map(np.array, first)
    sink.arrive(0, 0, first)
    batch = jax.tree.map(lambda leaf: leaf[None].copy(), first)
    output = INFERENCE.inference.act(batch, [0])
    sink.add([0], [0], batch, output)
    for leaf in jax.tree.leaves(batch):
        leaf[...] = 1
    sink.arrive(0, 0, last)
    sink.flush()
    [unroll] = queue.take(60.0)
    np.testing.assert_array_equal(unroll.timesteps.observation[STACK - 1], kept.observation)
    np.testing.assert_array_equal(unroll.timesteps.observation[STACK], last.observation)
