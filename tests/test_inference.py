"""Acting on groups of environments: frames, keys, padding and publications."""

import contextlib
import dataclasses
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from counting_agent import CountingAgent
from fake_pool import Fake
from inferences import GROUPS, SIZE, SPEC, STACK, Environments, make_inference
from seedbed.actors.pool import ActorPool
from seedbed.central.acting import InferenceLoop
from seedbed.central.gate import Gate
from seedbed.central.inference import Inference, batch_sizes
from seedbed.ops.keys import environment_keys, halves
from seedbed.run import devices
from seedbed.run.measures import EpisodeStatistics, Stopwatch
from seedbed.run.stacking import stack_timesteps, stacked_spec, zero_timesteps
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError, Timestep
from waiting import wait_for


class ShowingAgent(CountingAgent):
    """Returns what it sees, too."""

    def act(self, params, actor_state, timestep, keys, evaluate):
        action, extras, state = super().act(params, actor_state, timestep, keys, evaluate)
        return action, extras | {"observation": timestep.observation}, state


@pytest.mark.slow
def test_agents_see_the_newest_frames_whatever_arrives_together():
    inference, environments = make_inference(ShowingAgent).inference, Environments(7)
    rng = np.random.default_rng(0)
    blank = zero_timesteps(SPEC, (SIZE,))
    histories = [[blank] * STACK for _ in range(GROUPS)]
    for _ in range(30):
        groups = rng.permutation(GROUPS)[: rng.integers(1, GROUPS + 1)].tolist()
        steps = {group: environments.next(group) for group in groups}
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *steps.values())
        seen = np.asarray(inference.act(batch, groups).extras["observation"])
        for position, group in enumerate(groups):
            histories[group].append(steps[group])
            rows = jax.tree.map(lambda *leaves: np.stack(leaves), *histories[group][-STACK:])
            wanted = stack_timesteps(rows, STACK).observation[0]
            np.testing.assert_array_equal(seen[position], wanted)


@pytest.mark.slow
def test_padding_changes_nothing():
    inference, environments = make_inference().inference, Environments(0)
    step = environments.next(1)
    padded = jax.tree.map(lambda leaf: np.stack([leaf, np.full_like(leaf, 1)]), step)
    before = jax.tree.map(np.array, inference._memory)
    inference.act(padded, [1])
    after = jax.tree.map(np.array, inference._memory)
    for group in (0, 2):
        jax.tree.map(lambda a, b, g=group: np.testing.assert_array_equal(a[g], b[g]), before, after)
    np.testing.assert_array_equal(after.frames.reward[1, 0], step.reward)


@pytest.mark.slow
def test_actions_do_not_depend_on_arrival_order():
    draws = []
    for order in ([[0, 1, 2]], [[2], [0, 1]], [[1], [2], [0]]):
        inference, environments = make_inference().inference, Environments(5)
        steps = {group: environments.next(group) for group in range(GROUPS)}
        draws.append({})
        for groups in order:
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(steps[g] for g in groups))
            drawn = np.asarray(inference.act(batch, groups).extras["draw"])
            draws[-1] |= {group: drawn[i].tolist() for i, group in enumerate(groups)}
    assert len({draw for each in draws[0].values() for draw in each}) == GROUPS * SIZE
    assert draws[0] == draws[1] == draws[2]


@pytest.mark.slow
def test_keys_follow_the_steps_of_a_group_beyond_32_bits():
    inference, environments = make_inference().inference, Environments(5)
    inference._counter[:] = 2**32 - 1
    for step in (2**32 - 1, 2**32):
        timestep = jax.tree.map(lambda leaf: leaf[None], environments.next(1))
        drawn = np.asarray(inference.act(timestep, [1]).extras["draw"])[0]
        keys = environment_keys(jax.random.key(3), jnp.arange(SIZE, 2 * SIZE), halves(step))
        expected = [int(jax.random.bits(key, (), jnp.uint32)) for key in keys]
        assert drawn.tolist() == expected


def test_slot_memory_is_not_kept():
    """Overwriting the staged arrays after the actions are back changes nothing in the memory."""
    inference, environments = make_inference().inference, Environments(1)
    step = jax.tree.map(lambda leaf: leaf[None].copy(), environments.next(0))
    kept = jax.tree.map(np.array, step)
    np.asarray(inference.act(step, [0]).action)
    for leaf in jax.tree.leaves(step):
        leaf[...] = 1
    stored = np.asarray(inference._memory.frames.observation[0, 0])
    np.testing.assert_array_equal(stored, kept.observation[0])


@pytest.mark.parametrize("groups", [1, 2, 4, 5, 16, 37])
@pytest.mark.parametrize("pads", [False, True])
def test_batch_sizes_reach_from_one_to_all(groups, pads):
    sizes = batch_sizes(groups, pads)
    assert sizes[0] == 1 and sizes[-1] == groups and list(sizes) == sorted(set(sizes))


TREE = {
    "bytes": ArraySpec((3, 2), "uint8"),
    "image": ArraySpec((2, 3, 2), "float32"),
    "matrix": ArraySpec((2, 3), "float32"),
    "number": ArraySpec((), "int32"),
    "vector": ArraySpec((4,), "float32"),
}


@pytest.mark.quick("1", "4")
@pytest.mark.parametrize("stack", [1, 2, 3, 4, 5])
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
    made = make_inference()
    inference, params = made.inference, made.params
    assert inference.renew() and not inference.renew()
    inference.publish(params, 0)
    inference.wait_for_newer(60.0)
    assert inference.renew() and not inference.renew()


class LadderAgent(CountingAgent):
    """Shows its environments' places, from 0 to 1, among those that are present."""

    def actor_state(self, env_ids, num_envs):
        state = super().actor_state(env_ids, num_envs)
        return state._replace(per_env=env_ids.astype(jnp.float32) / (num_envs - 1))


class Notebook:
    """A `central.experience.Sink` that notes the newest extras by group, until `wanted` groups have acted."""

    def __init__(self):
        self.waited, self.extras, self.wanted = Stopwatch(), {}, 0

    @property
    def done(self):
        return len(self.extras) >= self.wanted

    def arrive(self, group, life, timestep):
        return True

    def add(self, groups, lives, timestep, output):
        for position, group in enumerate(groups):
            self.extras[group] = {
                name: np.asarray(leaf)[position].tolist() for name, leaf in output.extras.items()
            }

    def flush(self):
        pass

    def renew(self, groups):
        pass

    def finish(self):
        pass


@pytest.mark.slow
def test_the_ladder_is_over_who_is_present_and_changes_while_it_runs():
    with ActorPool(num_groups=3, group_size=2, timeout_s=80.0) as pool:
        peers = {group: Fake(pool, range(group, group + 1)) for group in (0, 2)}
        ids = np.arange(6).reshape(3, 2)
        agent = LadderAgent(spec=pool.spec, actions=5)
        # Two devices: places are those of the whole run.
        inferences = [
            Inference(agent, pool.spec, 1, jax.devices()[0], part, 6, jax.random.key(3))
            for part in np.array_split(ids, 2)
        ]
        for inference in inferences:
            inference.publish(agent.init(jax.random.key(0)).params, 0)
            inference.compile(pool.spec)
        sink = Notebook()
        loop = InferenceLoop(pool, inferences, sink, EpisodeStatistics(3, 2))

        def acted():
            """Publishes a timestep of each group that is present, and returns the places."""
            sink.extras, sink.wanted = {}, len(peers)
            for group, peer in peers.items():
                peer.publish(0, group)
                counts[group] = counts.get(group, -1) + 1
            loop.run(threading.Event())
            found = dict(sorted(sink.extras.items()))
            assert {group: each["count"] for group, each in found.items()} == {
                group: [counts[group]] * 2 for group in sorted(peers)
            }
            return [place for each in found.values() for place in each["env"]]

        counts = {}
        for present in (4, 4):
            np.testing.assert_allclose(acted(), np.arange(present) / (present - 1), rtol=1e-6)
        peers[1] = Fake(pool, range(1, 2))
        np.testing.assert_allclose(acted(), np.arange(6) / 5, rtol=1e-6)
        peers.pop(0).end("went home")
        np.testing.assert_allclose(acted(), np.arange(4) / 3, rtol=1e-6)
        peers.pop(2).end("went home too")
        np.testing.assert_allclose(acted(), np.arange(2), rtol=1e-6)
        assert all(inference._seat._cache_size() == 1 for inference in inferences)
        for inference in inferences:
            programs = [rest.compute for rests in inference._act._rests.values() for rest in rests]
            assert [program._cache_size() for program in programs] == [1] * len(inference.sizes)


class Late:
    """An array that is not there before the test says so."""

    def __init__(self, array):
        self.array, self.done = array, threading.Event()

    def is_ready(self):
        return self.done.is_set()

    def __array__(self, dtype=None, copy=None):
        assert self.done.wait(60)
        return np.asarray(self.array)


class LateInference(Inference):
    """Inference whose calls end when the test says so."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.started = []  # of each call: its groups, the time, and its actions

    def act(self, timestep, groups):
        output = super().act(timestep, groups)
        late = Late(output.action)
        self.started.append((groups, time.perf_counter(), late))
        return output._replace(action=late)


@contextlib.contextmanager
def acting(monkeypatch, deadline_s, kind=LateInference, gate=None):
    """Runs a loop over two devices with two groups each, which pass for accelerators of this deadline."""
    policy = dataclasses.replace(devices.ACCELERATOR, deadline_s=deadline_s)
    monkeypatch.setattr(devices, "policy_of", lambda device: policy)
    with ActorPool(num_groups=4, group_size=2, timeout_s=80.0) as pool:
        peers = [Fake(pool, range(group, group + 1), strict=True) for group in range(4)]
        agent = CountingAgent(spec=pool.spec, actions=5)
        inferences = [
            kind(agent, pool.spec, 1, device, part, 8, jax.random.key(3))
            for device, part in zip(jax.devices()[:2], np.arange(8).reshape(2, 2, 2), strict=True)
        ]
        for inference in inferences:
            inference.publish(agent.init(jax.random.key(0)).params, 0)
            inference.compile(pool.spec)
        sink, stop, failures = Notebook(), threading.Event(), []
        sink.wanted = 9
        loop = InferenceLoop(pool, inferences, sink, EpisodeStatistics(4, 2), gate)

        def run():
            try:
                loop.run(stop)
            except SeedbedError as failure:
                failures.append(str(failure))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield types.SimpleNamespace(
                peers=peers, inferences=inferences, acted=sink.extras, failures=failures
            )
        finally:
            stop.set()
            for inference in inferences:
                for _, _, late in getattr(inference, "started", []):
                    late.done.set()
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow
def test_each_call_has_a_deadline_of_its_own_whatever_else_is_under_way(monkeypatch):
    with acting(monkeypatch, deadline_s=0.05) as made:
        one, other = (inference.started for inference in made.inferences)
        for group, started in ((0, one), (2, other)):
            published_s = time.perf_counter()
            made.peers[group].publish(0, 1)
            wait_for(lambda: started)  # noqa: B023
            groups, started_s, _ = started[0]
            assert groups == [0] and started_s - published_s >= 0.05
        # The other device's call ends first, and its action is sent; the first device has two under way.
        other[0][2].done.set()
        wait_for(lambda: 2 in made.acted)
        made.peers[1].publish(0, 1)
        wait_for(lambda: len(one) == 2)
        assert one[1][0] == [1] and sorted(made.acted) == [2]
        # A third one has to wait, and calls of a device end in their order.
        one[1][2].done.set()
        time.sleep(0.05)
        assert sorted(made.acted) == [2]
        one[0][2].done.set()
        wait_for(lambda: sorted(made.acted) == [0, 1, 2])


@pytest.mark.slow
def test_a_call_does_not_wait_for_groups_that_cannot_come(monkeypatch):
    with acting(monkeypatch, deadline_s=600.0) as made:
        one, other = (inference.started for inference in made.inferences)
        for group in range(4):
            made.peers[group].publish(0, 1)
        wait_for(lambda: one and other)
        assert one[0][0] == other[0][0] == [0, 1]
        one[0][2].done.set()
        wait_for(lambda: len(made.acted) == 2)
        made.peers[0].publish(0, 2)
        time.sleep(0.05)
        assert len(one) == 1, "the other group may still come"
        made.peers[1].publish(0, 2)
        wait_for(lambda: len(one) == 2)
        # One of them starts anew while their call is under way, and the other one cannot come before it ends.
        peer = made.peers[0]
        peer.slots[0].open(peer.lives[0] + 1)
        peer.publish(0, 0)
        wait_for(lambda: len(one) == 3)
        assert one[2][0] == [0]


class Diary(Gate):
    """A gate that notes what the inference thread says."""

    def __init__(self, shared):
        super().__init__(shared)
        self.said = []

    def announce(self):
        self.said += [] if self._announced else ["announce"]
        super().announce()

    def withdraw(self):
        self.said += ["withdraw"] if self._announced else []
        super().withdraw()

    def started(self):
        super().started()
        self.said.append("started")

    def finished(self):
        super().finished()
        self.said.append("finished")


def test_calls_pass_the_gate_of_the_device_that_learns_before_learning(monkeypatch):
    gate, ran = Diary(jax.devices()[:1]), threading.Event()
    with acting(monkeypatch, deadline_s=600.0, gate=gate) as made:
        one, other = (inference.started for inference in made.inferences)
        # The gate is none of the other device's business.
        made.peers[2].publish(0, 1)
        made.peers[3].publish(0, 1)
        wait_for(lambda: other)
        gate.run("first", lambda: 0)
        assert not gate.said
        made.peers[0].publish(0, 1)
        wait_for(lambda: gate.said)
        learner = threading.Thread(target=gate.run, args=("second", ran.set), daemon=True)
        learner.start()
        time.sleep(0.05)
        assert not ran.is_set() and not one, (
            "acting waits for its deadline, and learning for acting"
        )
        made.peers[1].publish(0, 1)
        learner.join(60)
        assert ran.is_set() and len(one) == 1
        one[0][2].done.set()
        wait_for(lambda: "finished" in gate.said)
        assert gate.said == ["announce", "started", "withdraw", "finished"]


def test_learning_goes_on_where_acting_fails(monkeypatch):
    gate = Diary(jax.devices()[:1])
    with acting(monkeypatch, deadline_s=600.0, gate=gate) as made:
        made.peers[0].publish(0, 1)
        wait_for(lambda: gate.said)
        made.peers[3].end("broke")
        gate.run("minibatch", lambda: 0)
        assert gate.said == ["announce", "withdraw"]
        wait_for(lambda: made.failures)
        assert made.failures == ["the peer broke"]
