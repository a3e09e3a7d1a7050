"""The protocol of streams: both ends against each other over a link that breaks, and its messages."""

from __future__ import annotations

import collections
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedbed.actors import admission, link, wire
from seedbed.actors.lives import KEPT_S, Act, ActorEnd, Arrival, Begin, LearnerEnd
from seedbed.actors.slots import slot_layout
from seedbed.actors.wire import Kind, StepCodec
from seedbed.streams import door, handshake, messages
from seedbed.streams.messages import HEADER_BYTES, Handshake, ProtocolError
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"


class Environments:
    """A group of environments: a timestep is (incarnation, steps, the action that led to it)."""

    born = 0

    def __init__(self) -> None:
        self.timestep: tuple[int, int, int] | None = None  # none while they step or reset
        self.asked: int | None = None  # the action that is being taken
        self.resetting = False
        self.begin_anew()

    def begin_anew(self) -> None:
        Environments.born += 1
        self.incarnation, self.steps, self.asked, self.resetting = Environments.born, -1, -1, False
        self.timestep = None

    def work(self) -> tuple[int, int, int]:
        """Finishes what was begun."""
        if self.resetting:
            self.begin_anew()
        assert self.asked is not None
        self.steps += 1
        self.timestep = (self.incarnation, self.steps, self.asked)
        self.asked = None
        return self.timestep


class Streams(RuleBasedStateMachine):
    """A group's two ends, and a link that loses what is on its way when it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.learner, self.actor, self.environments = LearnerEnd(4), ActorEnd(), Environments()
        self.up: collections.deque = collections.deque()  # to the learner
        self.down: collections.deque = collections.deque()  # to the actor
        self.learner_sees = self.actor_sees = False  # whether that end believes in the stream
        self.slot: tuple[int, int, tuple[int, int, int]] | None = None  # while the learner has it
        self.held: tuple[int, int, tuple[int, int, int]] | None = None
        self.answers: dict[tuple[int, int], int] = {}
        self.published: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.actions = 0

    # What the actor's machine does.

    def act(self, act: Act) -> None:
        """Does what the actor's end says."""
        if act is Act.SEND:
            self.up.append(("STEP", self.actor.life, self.actor.step, self.environments.timestep))
        elif act is Act.ANEW:
            self.up.append(("ANEW",))
        elif act is Act.RESET:
            assert self.environments.timestep is not None, "they are at rest"
            self.environments.timestep, self.environments.resetting = None, True

    @precondition(lambda self: self.environments.timestep is None)
    @rule()
    def environments_finish(self) -> None:
        timestep = self.environments.work()
        self.act(self.actor.timestep(opening=timestep[1] == 0))

    @rule()
    def environments_die(self) -> None:
        self.environments.begin_anew()
        self.act(self.actor.timestep(opening=self.environments.work()[1] == 0))

    @precondition(lambda self: not self.actor_sees)
    @rule()
    def connect(self) -> None:
        """The handshake; its BEGIN is still on its way."""
        self.up.clear()
        self.down.clear()
        begin = self.learner.enter(self.actor.life, self.actor.step, self.now_s)
        self.down.append(("BEGIN", begin))
        self.learner_sees = self.actor_sees = True

    @precondition(lambda self: self.actor_sees)
    @rule()
    def actor_loses_the_stream(self) -> None:
        self.actor_sees = False
        self.actor.leave()
        self.down.clear()

    @precondition(lambda self: self.learner_sees)
    @rule()
    def learner_loses_the_stream(self) -> None:
        self.learner_sees = False
        self.learner.leave(self.now_s)
        self.up.clear()

    @rule(seconds=st.sampled_from([1.0, KEPT_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.actor_sees and self.down)
    @rule()
    def actor_receives(self) -> None:
        message = self.down.popleft()
        if message[0] == "BEGIN":
            self.act(self.actor.begin(message[1]))
            return
        _, life, step, action = message
        if self.actor.answer(life, step) is Act.STEP:
            assert self.environments.timestep is not None, "an answer is for who waits"
            self.environments.timestep, self.environments.asked = None, action

    # What the learner's machine does.

    @precondition(lambda self: self.learner_sees and self.up)
    @rule()
    def learner_receives(self) -> None:
        message = self.up.popleft()
        if message[0] == "ANEW":
            self.held = None
            self.down.append(("BEGIN", self.learner.begin_anew()))
            return
        _, life, step, timestep = message
        arrival = self.learner.arrive(life, step)
        if arrival is Arrival.PUBLISH:
            self.publish((life, step, timestep))
        elif arrival is Arrival.HOLD:
            self.held = (life, step, timestep)
        elif arrival is Arrival.ANSWER:
            self.down.append(("ANSWER", life, step, self.answers[life, step]))

    def publish(self, publication: tuple[int, int, tuple[int, int, int]]) -> None:
        """Puts a timestep into the slot, and compares it with the one that must come."""
        assert self.slot is None, "the slot is the learner's"
        self.slot = publication
        life, step, timestep = publication
        assert (life, step) not in self.published, "nothing counts twice"
        before = self.published.get((life, step - 1))
        if step == 1:
            assert timestep[1] == 0, "a life begins with an opening timestep"
            assert timestep[0] not in {other[0] for other in self.published.values()}
        else:
            assert before is not None, "nothing is lost"
            assert timestep == (before[0], before[1] + 1, self.answers[life, step - 1])
        assert life >= max((life for life, _ in self.published), default=0)
        self.published[life, step] = timestep

    @precondition(lambda self: self.slot is not None)
    @rule()
    def learner_answers(self) -> None:
        assert self.slot is not None
        life, step, _ = self.slot
        self.slot, self.actions = None, self.actions + 1
        self.answers[life, step] = self.actions
        what = self.learner.answered(life, step)
        if what is Arrival.PUBLISH:
            assert self.held is not None
            publication, self.held = self.held, None
            self.publish(publication)
        elif what is Arrival.ANSWER and self.learner_sees:
            self.down.append(("ANSWER", life, step, self.actions))

    @invariant()
    def the_learner_knows_what_it_has(self) -> None:
        assert (self.slot is not None) == self.learner._slot_taken

    def teardown(self) -> None:
        """Once nothing breaks any more, the group goes on."""
        if self.actor_sees and not self.learner_sees:
            self.actor_loses_the_stream()
        if not self.actor_sees:
            self.connect()
        before, after = len(self.published), 0
        for _ in range(60):
            if self.environments.timestep is None:
                self.environments_finish()
            if self.up:
                self.learner_receives()
            if self.slot is not None:
                self.learner_answers()
            if self.down:
                self.actor_receives()
            after = len(self.published)
        assert after > before + 3, "the group stands still"


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


# Messages.

SPECS = (
    EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6)),
    EnvSpec(
        {"a": ArraySpec((3,), "float32"), "b": ArraySpec((), "int32")},
        Box((2,), (-1.0,) * 2, (1.0,) * 2),
    ),
    EnvSpec((ArraySpec((0,), "float32"), ArraySpec((5,), "bool")), Discrete(2)),
)


def arrays(codec: StepCodec, seed: int, noise: bool) -> list[np.ndarray]:
    """Makes the leaves of a timestep."""
    rng, leaves = np.random.default_rng(seed), []
    for spec in codec._layout.arrays[:-1]:
        dtype, most = np.dtype(spec.dtype), 256 if noise else 2
        value = rng.integers(0, 2 if dtype.kind == "b" else most, spec.shape)
        leaves.append(value.astype(dtype))
    return leaves


def body(frame: bytes, kind: Kind, limit: int) -> memoryview:
    """Takes a frame apart as a reader does."""
    header = messages.read_header(frame, limit, wire.Kind)
    content = memoryview(frame)[HEADER_BYTES:]
    assert (header.kind, header.length) == (kind, len(content))
    messages.require_checksum(header, content)
    return content


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("noise", [False, True])
def test_a_timestep_and_its_answer_come_back_as_they_were(spec: EnvSpec, noise: bool) -> None:
    codec = StepCodec(slot_layout(spec, 4))
    for seed in range(3):
        sent = arrays(codec, seed, noise)
        frame = codec.step(7, 1 << 40, sent)
        life, step, packed = codec.read_step(body(frame, Kind.STEP, codec.limit))
        assert (life, step) == (7, 1 << 40)
        for ours, theirs in zip(sent, codec.leaves(packed), strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)
    spec_of_action = codec._layout.arrays[-1]
    action = np.arange(np.prod(spec_of_action.shape)).reshape(spec_of_action.shape)
    action = action.astype(spec_of_action.dtype)
    answer = codec.answer(3, 4, action)
    life, step, got = codec.read_answer(body(answer, Kind.ANSWER, codec.limit))
    assert (life, step) == (3, 4)
    np.testing.assert_array_equal(action, got, strict=True)


def test_images_are_compressed_and_noise_is_not() -> None:
    codec = StepCodec(slot_layout(SPECS[0], 16))
    raw = codec.raw_bytes
    assert len(codec.step(1, 1, arrays(codec, 0, noise=False))) < 0.6 * raw
    noisy = [len(codec.step(1, 1, arrays(codec, 0, noise=True))) for _ in range(3)]
    assert all(raw < size < raw + 64 for size in noisy)


def hostile_steps(codec: StepCodec) -> dict[str, bytes]:
    """Bodies that no honest actor sends, by what is wrong with them."""
    import lz4.block

    head, raw = struct.Struct("<qq?"), codec.raw_bytes
    bomb = lz4.block.compress(bytes(64 * raw), store_size=False)
    return {
        "cut short": b"abc",
        "bytes where its spec": head.pack(1, 1, False) + bytes(raw + 1),
        "cannot be decompressed": head.pack(1, 1, True) + bomb,
        "has 10 bytes": head.pack(1, 1, True) + lz4.block.compress(bytes(10), store_size=False),
        "of a life -1": head.pack(-1, 1, False) + bytes(raw),
        "no timestep|there is no timestep 0": head.pack(1, 0, False) + bytes(raw),
    }


def test_what_no_honest_actor_sends_is_refused() -> None:
    codec = StepCodec(slot_layout(SPECS[1], 4))
    for text, sent in hostile_steps(codec).items():
        with pytest.raises(ProtocolError, match=text):
            codec.read_step(memoryview(sent))
    good = codec.step(1, 1, arrays(codec, 0, noise=False))
    damaged = bytearray(good)
    damaged[-1] ^= 1
    header = messages.read_header(damaged, codec.limit, wire.Kind)
    with pytest.raises(ProtocolError, match="damaged"):
        messages.require_checksum(header, memoryview(damaged)[HEADER_BYTES:])
    leaves = arrays(codec, 0, noise=False)
    leaves[0][1, 1] = np.nan
    packed = codec.read_step(body(codec.step(1, 1, leaves), Kind.STEP, codec.limit))[2]
    with pytest.raises(ProtocolError, match="not finite"):
        codec.leaves(packed)
    flags = bytearray(codec.raw_bytes)
    flags[-1] = 2
    with pytest.raises(ProtocolError, match="flag"):
        codec.leaves(memoryview(flags))


@given(st.binary(max_size=300), st.integers(0, 4096))
def test_no_bytes_break_a_decoder(data: bytes, limit: int) -> None:
    codec = StepCodec(slot_layout(SPECS[1], 1))
    readers = (
        lambda: messages.read_header(data.ljust(HEADER_BYTES, b"S"), limit, wire.Kind),
        lambda: messages.read_fields(Kind.READY, memoryview(data), text=str, life=int),
        lambda: wire.read_begin(memoryview(data)),
        lambda: wire.read_beat(memoryview(data)),
        lambda: codec.leaves(codec.read_step(memoryview(data))[2]),
        lambda: codec.read_answer(memoryview(data)),
    )
    for read in readers:
        try:
            read()
        except ProtocolError as error:
            assert str(error)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.floats())
def test_a_beat_tells_what_can_be(steps: int, cpu_s: float, p50_s: float) -> None:
    beat = wire.Beat(steps, cpu_s, p50_s, 0.0)
    content = body(wire.beat_frame(beat), Kind.BEAT, 64)
    if steps >= 0 and cpu_s >= 0 and p50_s >= 0 and np.isfinite([cpu_s, p50_s]).all():
        assert wire.read_beat(content) == beat
    else:
        with pytest.raises(ProtocolError):
            wire.read_beat(content)


def test_the_document_tells_the_times_and_bounds_of_the_code() -> None:
    rows = re.findall(r"^\| [^|]+ \| (?:at most )?(\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    times = [door.HELLO_S, handshake.PATIENCE_S, wire.BEAT_S, wire.SILENCE_S, link.RETRY_S, KEPT_S]
    assert [float(row) for row in rows] == times
    text = " ".join(DOCUMENT.read_text().split())
    assert f"{messages.HELLO_BYTES // 1024} KiB of memory" in text
    assert f"At most {door.MOST_STRANGERS} such clients" in text
    assert f"at most {admission.MOST_WAITING} are kept besides two for each group" in text
    assert f"and {door.NEW_A_SECOND:.0f} a second are let in" in text


def test_the_document_names_every_message() -> None:
    table = re.findall(r"^\| `([A-Z]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert table == [kind.name for kind in (*Handshake, *Kind)]
    assert f"header of {HEADER_BYTES} bytes" in DOCUMENT.read_text()
    assert wire.read_begin(memoryview(wire.begin_frame(3, 9))[HEADER_BYTES:]) == Begin(3, 9)
