"""A discrete-event simulation: processes that share the cores, accelerators and network cards of machines.

It is pure: it reads no clock and draws no numbers. A process is a generator that yields requests, and goes on
when the request is met. All times are simulated seconds. For one thread.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeAlias

Resume: TypeAlias = Callable[[], None]
Request: TypeAlias = Callable[[Resume], None]
"""Takes what is to be called, in a later event, when the request is met."""
Process: TypeAlias = Generator[Request, None, Any]


class Cost(NamedTuple):
    """The time that a piece of work takes."""

    cpu_s: float  # seconds of cores
    width: float = 1.0  # cores that it keeps busy at once where nothing else runs
    device_s: float = 0.0  # seconds of an accelerator, after those of the cores

    @property
    def wall_s(self) -> float:
        """The seconds that it takes where nothing else runs."""
        return self.cpu_s / self.width + self.device_s

    def times(self, factor: float) -> Cost:
        """Returns the cost of so many times as much work."""
        return self._replace(cpu_s=factor * self.cpu_s, device_s=factor * self.device_s)


NOTHING = Cost(0.0)


class Company(NamedTuple):
    """The slowdown of a process's threads while another one works: they share Python's lock and caches."""

    acting: float = 1.0  # times as long as alone, for a turn of the inference thread
    learning: float = 1.0  # for an update
    waste: float = 1.0  # times as many core seconds, for both


ALONE = Company()


class Simulation:
    """The events of a model, in the order of their times and, at one time, of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Resume]] = []
        self._made = 0

    def after(self, delay_s: float, call: Resume) -> None:
        """Calls something so many seconds from now, in an event of its own."""
        self._made += 1
        heapq.heappush(self._events, (self.now + delay_s, self._made, call))

    def sleep(self, delay_s: float) -> Request:
        """Returns a request that is met so many seconds after it was made."""
        return lambda resume: self.after(delay_s, resume)

    def start(self, process: Process, ended: Resume | None = None) -> None:
        """Starts a process; calls `ended` when it has returned."""

        def resume() -> None:
            try:
                request = next(process)
            except StopIteration:
                if ended is not None:
                    ended()
                return
            request(resume)

        self.after(0.0, resume)

    def all_of(self, processes: Iterable[Process]) -> Request:
        """Returns a request that starts processes, of which there is one at least, and waits for all."""

        def begin(resume: Resume) -> None:
            every = list(processes)
            left = len(every)

            def ended() -> None:
                nonlocal left
                left -= 1
                if not left:
                    resume()

            for process in every:
                self.start(process, ended)

        return begin

    @property
    def idle(self) -> bool:
        """Whether there are no more events."""
        return not self._events

    def run(self, over: Callable[[], bool], most_events: int) -> bool:
        """Plays events until `over` returns True; returns False if there were too many or no more before."""
        for _ in range(most_events):
            if over():
                return True
            if not self._events:
                return False
            self.now, _, call = heapq.heappop(self._events)
            call()
        return over()


class Signal:
    """Processes that wait for something to change."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._waiting = simulation, list[Resume]()

    def wait(self, resume: Resume) -> None:
        """A request that is met when the signal is given next."""
        self._waiting.append(resume)

    def give(self, most: int | None = None) -> None:
        """Lets those that wait go on: all, or at most so many, those first that have waited longest."""
        waiting = self._waiting[:most]
        self._waiting = self._waiting[len(waiting) :]
        for resume in waiting:
            self._simulation.after(0.0, resume)


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """Work that is under way on some cores."""

    left_s: float  # core seconds
    width: float
    weight: float
    resume: Resume
    fellows: Fellows | None
    share: float = 0.0  # of the cores, now
    waste: float = 1.0  # core seconds for one of its own, now


@dataclasses.dataclass(eq=False, slots=True)
class Fellows:
    """The threads of a process, as one of them sees them."""

    process: object  # the same for all
    slow: float  # times as long as alone, while one other works
    waste: float  # times as many core seconds then


class Cores:
    """The cores of a machine. Jobs share them in proportion to their weights; none gets more than its width.

    It stands for the scheduler of the operating system, whose time slices are much shorter than most jobs.
    """

    def __init__(
        self, simulation: Simulation, count: float, speed: float = 1.0, crowding: float = 0.0
    ) -> None:
        """`speed` is that of a core, 1 on the machine where costs were measured.

        `crowding` is how much longer work takes when all cores are busy: 0.2 is a fifth.
        """
        self.count, self._speed, self._crowding = count, speed, crowding
        self.busy_s = 0.0  # core seconds so far
        self._simulation, self._since, self._used = simulation, 0.0, 0.0
        self._jobs: list[_Job] = []
        self._rate = speed  # core seconds of work that a busy core does in a second
        self._token = 0

    def work(self, cost: Cost, weight: float = 1.0, fellows: Fellows | None = None) -> Request:
        """Returns a request that is met when the cores have done this much work, of a thread of a process."""

        def begin(resume: Resume) -> None:
            self._settle()
            width = min(cost.width, self.count)
            # A job of several threads has the weight of each.
            self._jobs.append(_Job(cost.cpu_s, width, weight * width, resume, fellows))
            self._share()

        return begin

    def _settle(self) -> None:
        passed_s = self._simulation.now - self._since
        self._since = self._simulation.now
        self.busy_s += self._used * passed_s
        for job in self._jobs:
            job.left_s -= job.share / job.waste * self._rate * passed_s

    def _share(self) -> None:
        """Gives all jobs their shares, and makes the event in which the first of them ends."""
        self._token += 1
        if not self._jobs:
            self._used = 0.0
            return
        free, weight = self.count, math.fsum(job.weight for job in self._jobs)
        of = collections.Counter(job.fellows.process for job in self._jobs if job.fellows)
        widths = {}
        for job in self._jobs:
            job.waste = slow = 1.0
            if job.fellows is not None:
                # Measured of two threads: each further one costs as much again.
                others = of[job.fellows.process] - 1
                job.waste += others * (job.fellows.waste - 1.0)
                slow += others * (job.fellows.slow - 1.0)
            # Who waits for the lock uses no core.
            widths[job] = job.width * job.waste / max(job.waste, slow)
        # Those that want least for their weight first: what they leave is the others'.
        for job in sorted(self._jobs, key=lambda job: widths[job] / job.weight):
            job.share = min(widths[job], free * job.weight / weight)
            free, weight = free - job.share, weight - job.weight
        self._used = math.fsum(job.share for job in self._jobs)
        beside = max(0.0, self._used - 1.0) / max(1.0, self.count - 1.0)
        self._rate = self._speed / (1.0 + self._crowding * beside)
        first_s = min(
            max(0.0, job.left_s) * job.waste / (job.share * self._rate) for job in self._jobs
        )
        token = self._token
        self._simulation.after(first_s, lambda: self._end(token))

    def _end(self, token: int) -> None:
        if token != self._token:
            return  # the shares have changed since
        self._settle()
        ended = [job for job in self._jobs if job.left_s <= 1e-12]
        if not ended:  # by rounding
            ended = [min(self._jobs, key=lambda job: job.left_s * job.waste / job.share)]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._share()
        for job in ended:
            self._simulation.after(0.0, job.resume)


class Device:
    """An accelerator, which does one thing after another."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._free_s, self.busy_s = simulation, 0.0, 0.0

    def work(self, seconds: float) -> Request:
        """Returns a request that is met when the device has done what came before, and this."""

        def begin(resume: Resume) -> None:
            now = self._simulation.now
            self._free_s = max(self._free_s, now) + seconds
            self.busy_s += seconds
            self._simulation.after(self._free_s - now, resume)

        return begin


class Card:
    """A network card, which sends and receives at a rate, each one message after another."""

    def __init__(self, simulation: Simulation, gbit_per_s: float, latency_s: float) -> None:
        """`latency_s` is that of the network, one way, for what this card sends."""
        self._simulation, self._latency_s = simulation, latency_s
        self._bytes_per_s = gbit_per_s * 1e9 / 8
        self._sends_s = self._receives_s = 0.0  # when each direction is free
        self.sent_s = self.received_s = self.bytes = 0.0  # seconds and bytes so far

    def send(self, to: Card, size: float) -> Request:
        """Returns a request that is met when another card has received so many bytes."""

        def begin(resume: Resume) -> None:
            now, simulation = self._simulation.now, self._simulation
            out_s, in_s = size / self._bytes_per_s, size / to._bytes_per_s
            self._sends_s = max(self._sends_s, now) + out_s
            begun = self._sends_s - out_s + self._latency_s
            # The last byte cannot come before it was sent.
            last = max(self._sends_s + self._latency_s, max(to._receives_s, begun) + in_s)
            to._receives_s = last
            self.sent_s, to.received_s = self.sent_s + out_s, to.received_s + in_s
            self.bytes += size
            simulation.after(last - now, resume)

        return begin

    @property
    def busy_s(self) -> float:
        """The seconds for which its busier direction was busy."""
        return max(self.sent_s, self.received_s)


class Machine(NamedTuple):
    """The resources of a machine."""

    cores: Cores
    card: Card
    devices: tuple[Device, ...] = ()


class Worker:
    """A thread, or a process of one thread: it does one job after another on the cores of its machine."""

    def __init__(
        self,
        simulation: Simulation,
        machine: Machine,
        weight: float = 1.0,
        wake_s: float = 0.0,
        device: Device | None = None,
        fellows: Fellows | None = None,
    ) -> None:
        """`wake_s` are the core seconds with which it begins after a wait; `device` is what it uses.

        `fellows` are the other threads of its process, if it has some.
        """
        self.machine, self._simulation = machine, simulation
        self._weight, self._wake_s, self._device = weight, wake_s, device
        self._fellows = fellows
        self._waiting: collections.deque[tuple[Cost, Resume]] = collections.deque()
        self._active = False
        self._busy_s, self._since = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """The seconds so far in which it had something to do, also while it waited for a core."""
        return self._busy_s + (self._simulation.now - self._since if self._active else 0.0)

    def do(self, cost: Cost) -> Request:
        """Returns a request that is met when the worker has done what came before, and this."""

        def begin(resume: Resume) -> None:
            self._waiting.append((cost, resume))
            if not self._active:
                self._active, self._since = True, self._simulation.now
                self._simulation.start(self._run())

        return begin

    def _run(self) -> Process:
        if self._wake_s:
            yield self.machine.cores.work(Cost(self._wake_s), self._weight, self._fellows)
        while self._waiting:
            cost, resume = self._waiting.popleft()
            if cost.cpu_s:
                yield self.machine.cores.work(cost, self._weight, self._fellows)
            if cost.device_s and self._device is not None:
                yield self._device.work(cost.device_s)
            self._simulation.after(0.0, resume)
            if not self._waiting:
                # What was resumed may have more at once.
                yield self._simulation.sleep(0.0)
        self._busy_s += self._simulation.now - self._since
        self._active = False
