"""What calls cost between these ranks, measured over their process group in some seconds.

    delay       half of the fastest of some round trips of a few bytes from rank 0 to another host
    step        an all-reduce of 1 KiB takes 2(n-1) steps, and waits for two delays in each
    bytes       every rank sends to the next and receives from the previous one, all at once, with sizes growing by a
                factor of 4; of the time per additional byte, the CPU's part is its CPU time, and the rest is the link's
    spread      the same number of bytes, but every rank sends equal parts to all others: by what factor it is slower
    memory      every rank copies from memory to memory, all at once

Each is the slowest rank's, because all wait for it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cos598d.comm.communicator import Communicator
from cos598d.cost.model import Costs, Link
from cos598d.records.conventions import AGREEMENT

SMALL_BYTES, FIRST_BYTES, FACTOR, LARGEST_BYTES = 1 << 10, 1 << 16, 4, 1 << 24
COPIED_BYTES = 1 << 23
PHASE_SECONDS = 0.2  # roughly how long something is repeated
LEAST_REPEATS, MOST_REPEATS = 3, 40
LONG_SECONDS = 0.5  # work that takes this long is not done a third time
MOST_HOSTS = 3  # to measure round trips
# Shorter round trips consist of the ranks' own steps; then bytes cost CPU time, and no link's.
LEAST_DELAY = 3e-4
LINK_SHARE = 0.2


@dataclass(frozen=True)
class Probe:
    """The measurements, the same on every rank.

    rate: bits per second of a host's link when a rank sends to one other; None if no link is visible. spread: by what
    factor the same bytes of a rank are slower when it sends to all others at once, at least 1. Connections share a
    link; and then all ranks of a host send over it, not only the one with a neighbour elsewhere. 1 without a link.
    """

    delay: float
    rate: float | None
    step_seconds: float
    processor_seconds_per_byte: float
    memory_seconds_per_byte: float
    seconds: float
    spread: float = 1.0

    @property
    def link(self) -> Link:
        """A host's link to the others."""
        return Link(self.rate, self.delay)

    @property
    def costs(self) -> Costs:
        """The costs of calls among these ranks, with their ranks per core. The rate is what a link achieves."""
        return Costs(
            call_seconds=0.0,
            step_seconds=self.step_seconds,
            processor_seconds_per_byte=self.processor_seconds_per_byte,
            efficiency=1.0,
            memory_seconds_per_byte=self.memory_seconds_per_byte,
        )


def measure(comm: Communicator, hosts: Sequence[Sequence[int]], crowd: float) -> Probe:
    """Measure. Every rank calls it. hosts: the ranks of each host; crowd: ranks per core of a host."""
    began = time.perf_counter()
    delay = _delay(comm, [ranks[0] for ranks in hosts][:MOST_HOSTS])
    small = _repeated(comm, lambda: comm.all_reduce(torch.zeros(SMALL_BYTES // 4), "small", purpose=AGREEMENT))
    steps = 2 * (comm.world_size - 1)
    per_byte, of_processor, spread = _bytes(comm)
    # Ranks that share a core wait for one another's work.
    of_processor = min(per_byte, of_processor * crowd)
    of_link = per_byte - of_processor
    has_link = len(hosts) > 1 and of_link > LINK_SHARE * per_byte
    copied = torch.zeros(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)
    memory = _repeated(comm, lambda: copied[1].copy_(copied[0])) / (2 * COPIED_BYTES)
    found = Probe(
        delay=delay,
        rate=8 / of_link if has_link else None,
        step_seconds=max(1e-6, small / steps - 2 * delay),
        # Both sender and receiver process a byte that is sent.
        processor_seconds_per_byte=(of_processor if has_link else per_byte) / 2,
        memory_seconds_per_byte=memory,
        seconds=time.perf_counter() - began,
        spread=spread if has_link else 1.0,
    )
    return Probe(**comm.exchange(vars(found))[0])


def _delay(comm: Communicator, firsts: Sequence[int]) -> float:
    """Seconds from host to host: the longest from rank 0 to the first ranks of some others."""
    longest = 0.0
    for other in firsts[1:]:
        quickest = comm.exchange(_round_trip(comm, other))[0]
        for _ in range(_repeats(quickest)):
            quickest = min(quickest, _round_trip(comm, other))
        longest = max(longest, comm.exchange(quickest)[0] / 2)
    return longest if longest > LEAST_DELAY else 0.0


def _round_trip(comm: Communicator, other: int) -> float:
    """Seconds of a short message from rank 0 to another rank and back; 0 on ranks that take no part."""
    if comm.rank not in (0, other):
        return 0.0
    call = comm.compose("ping", torch.zeros(1), "round trip", purpose=AGREEMENT)
    peer = 0 if comm.rank else other
    out, back = [(torch.zeros(1), peer)], [(torch.zeros(1), peer)]
    started = time.perf_counter()
    if comm.rank == 0:  # the receive for the answer is posted before sending, so each way takes one delay
        call.swap(out, back)
    else:
        call.swap([], back)
        call.swap(out)
    return time.perf_counter() - started


def _bytes(comm: Communicator) -> tuple[float, float, float]:
    """Seconds per byte that a rank sends while it receives another, in total and of this rank's CPU. Third, the factor
    by which they grow if it sends to all others at once."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    size, taken = FIRST_BYTES, []
    while True:
        taken.append((size, *_swapped(comm, size, [after], [before])))
        if size >= LARGEST_BYTES or (len(taken) > 1 and taken[-1][1] > PHASE_SECONDS):
            break
        size *= FACTOR
    (less, quick, few), (more, slow, many) = taken[-2:]
    per_byte, of_processor = (slow - quick) / (more - less), (many - few) / (more - less)
    others, spread = [rank for rank in range(comm.world_size) if rank != comm.rank], 1.0
    if len(others) > 1:  # repeating the same exchange would only show how much its time varies
        to_all, _ = _swapped(comm, more // len(others), others, others)
        spread = max(1.0, to_all / slow)
    return max(1e-12, per_byte), max(1e-12, of_processor), spread


def _swapped(comm: Communicator, size: int, to: Sequence[int], of: Sequence[int]) -> tuple[float, float]:
    """Seconds in which the slowest rank sends `size` bytes to each rank of `to`, while it receives as many from each of
    `of`; and its CPU seconds. The faster of two runs: an accidental delay must not look like a link."""
    sent, landings, taken = torch.zeros(size // 4), [torch.empty(size // 4) for _ in of], []
    _worst(comm, 0.0)  # all begin together, each time
    for _ in range(3):  # the first touches the memory, and opens the connections' windows
        call = comm.compose("exchange", sent, "bytes", purpose=AGREEMENT)
        started, worked = time.perf_counter(), time.process_time()
        call.swap([(sent, rank) for rank in to], list(zip(landings, of, strict=True)))
        taken.append(_worst(comm, time.perf_counter() - started, time.process_time() - worked))
        if len(taken) > 1 and taken[-1][0] > LONG_SECONDS:
            break
    seconds, processor = min(taken[1:])
    return seconds, processor


def _repeated(comm: Communicator, work: Callable[[], object]) -> float:
    """Seconds that `work` takes on the slowest rank, with all at it at once: the mean of a few runs."""
    work()
    started = time.perf_counter()
    work()
    count = _repeats(*_worst(comm, time.perf_counter() - started))
    started = time.perf_counter()
    for _ in range(count):
        work()
    (seconds,) = _worst(comm, (time.perf_counter() - started) / count)
    return seconds


def _repeats(seconds: float) -> int:
    """How often to repeat work that takes this long."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(PHASE_SECONDS / max(seconds, 1e-9))))


def _worst(comm: Communicator, *numbers: float) -> list[float]:
    """The element-wise maximum of the ranks' numbers, on every rank."""
    worst = torch.tensor(numbers, dtype=torch.float64)
    comm.all_reduce(worst, "the slowest rank's seconds", purpose=AGREEMENT, op=dist.ReduceOp.MAX)
    return worst.tolist()
