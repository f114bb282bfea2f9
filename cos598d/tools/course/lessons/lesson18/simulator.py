"""Traces of training steps as torch.profiler writes them, drawn from a seed, with one fault in them or none."""

import random
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STARVED, STRAGGLER, BLOCKING, LATE, SMALL, NONE = FAULTS = (
    "starved loader",
    "straggler",
    "blocking call",
    "late bucket",
    "too many small calls",
    "none",
)
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
FORWARD, BACKWARD, BEGINS, CALL = "forward", "backward", "c10d::allreduce_", "gloo:all_reduce"
LAYERS = ("embedding", "encoder", "attention", "norm", "mixer", "gate", "pooler", "experts", "decoder", "head")
ISSUE = 4e-5  # seconds that it takes to begin a call
GAP = 1e-6  # seconds between the ends of two events, so that no rounding changes which contains which
# Of a starved loader or a straggler: how the other ranks differ in the region at fault.
EVEN, SECOND_SLOW, ONE_FAST = VARIANTS = ("even", "a second slow rank", "one fast rank")
Trace = dict[str, Any]


@dataclass(frozen=True)
class TraceFault:
    """What is wrong in the traces of all ranks. `rank` is None where it is on all, `seconds` are per step."""

    kind: str
    rank: int | None = None
    call: str | None = None
    seconds: float = 0.0


@dataclass
class DrawnRun:
    """A run under simulation: its clocks, and the events of every rank so far, in seconds."""

    draw: random.Random
    kind: str
    variant: str = EVEN
    clock: list[float] = field(default_factory=list)
    events: list[list[tuple[str, float, float, bool]]] = field(default_factory=list)  # name, start, end, is main thread
    free: float = 0.0  # when the last call ended
    extra: list[float] = field(default_factory=list)  # seconds that the fault cost, by step

    def __post_init__(self) -> None:
        draw = self.draw
        # The median of three others leaves out one that differs. Their mean does not, nor does the median of all four.
        self.ranks = {SECOND_SLOW: 4, ONE_FAST: draw.randint(4, 5)}.get(self.variant, draw.randint(3, 6))
        self.clock, self.events = [0.0] * self.ranks, [[] for _ in range(self.ranks)]
        self.layers = draw.sample(LAYERS, draw.randint(5, 8))
        self.seconds = {layer: draw.uniform(0.004, 0.010) for layer in self.layers}
        count, length = draw.randint(3, 4), len(self.layers)
        cuts = [round(length * number / count) for number in range(count + 1)]
        self.buckets = [self.layers[::-1][a:b] for a, b in zip(cuts, cuts[1:])]
        computed = [2 * sum(self.seconds[layer] for layer in bucket) for bucket in self.buckets]
        self.transfer = [draw.uniform(0.5, 0.8) * each for each in (*computed[1:], computed[-1])]
        word = draw.choice(("bucket", "gradients", "chunk"))
        self.names = [f"{word} {number}" for number in range(len(self.buckets))]
        self.rank, self.bucket = draw.randrange(self.ranks), draw.randrange(len(self.buckets) - 1)
        self.added = draw.uniform(0.4, 0.9) * sum(self.seconds.values())
        slow = draw.choice(self.layers)
        self.slow = {STARVED: LOADER, STRAGGLER: draw.choice((slow, f"{BACKWARD} of {slow}"))}.get(self.kind, "")
        self.noisy = (
            slow if self.kind == NONE else ""
        )  # it takes one rank up to 1 % of a step longer, which is no fault
        self.steps = draw.randint(5, 8)
        self.other = (self.rank + draw.randrange(1, self.ranks)) % self.ranks  # that differs from all others
        self.uneven = draw.uniform(0.75, 0.9) if self.variant == SECOND_SLOW else draw.uniform(0.3, 0.4)
        self.hiccup = (draw.randrange(1, self.steps), draw.randrange(self.ranks), draw.choice(self.layers))
        self.latency, self.tensors = draw.uniform(2e-4, 6e-4), draw.randint(6, 10)

    def fault(self) -> TraceFault:
        """What is wrong, once the steps are simulated."""
        if self.kind == NONE:
            return TraceFault(NONE)
        named = {SMALL: CALL, LATE: self.names[self.bucket], BLOCKING: self.names[self.bucket]}
        rank = None if self.kind == SMALL else self.rank
        return TraceFault(self.kind, rank, named.get(self.kind, self.slow), median(self.extra))

    def compute(self, step: int, rank: int, name: str, seconds: float) -> None:
        """A rank is busy with what has that name."""
        seconds *= self.draw.uniform(0.97, 1.03) * (3 if step == 0 else 1)
        if self.hiccup == (step, rank, name):
            seconds *= 4
        if name == self.slow and self.variant != EVEN and (rank == self.other) == (self.variant == SECOND_SLOW):
            seconds += self.uneven * self.added * self.draw.uniform(0.99, 1.01)
        if name == self.noisy and rank == self.rank:
            seconds += 0.024 * sum(self.seconds.values())
        if name == self.slow and rank == self.rank:
            added = self.added * self.draw.uniform(0.97, 1.03)
            seconds += added
            self.extra.append(added)
        self.events[rank].append((name, self.clock[rank], self.clock[rank] + seconds, True))
        self.clock[rank] += seconds + GAP

    def call(self, begun: list[float], seconds: float) -> float:
        """An all-reduce that each rank has `begun` then; when it ends, which is the same moment on all."""
        end = max(self.free, *begun) + seconds
        for rank, moment in enumerate(begun):
            self.events[rank].append((CALL, max(moment, self.free), end, False))
        self.free = end
        return end

    def begin(self, rank: int) -> float:
        """When a region begins that contains what the rank does next."""
        self.clock[rank] += GAP
        return self.clock[rank] - GAP

    def span(self, rank: int, name: str, start: float) -> None:
        """What a rank has done since `start`, until now."""
        self.events[rank].append((name, start, self.clock[rank] + GAP, True))
        self.clock[rank] += 2 * GAP

    def step(self, number: int) -> None:
        """One step of all ranks."""
        ranks = range(self.ranks)
        began = [self.begin(rank) for rank in ranks]
        for rank in ranks:
            self.compute(number, rank, LOADER, 0.002)
            start = self.begin(rank)
            for layer in self.layers:
                self.compute(number, rank, layer, self.seconds[layer])
            self.span(rank, FORWARD, start)
        began_backward = [self.begin(rank) for rank in ranks]
        late: list[tuple[int, list[float], float]] = []
        for bucket, layers in enumerate(self.buckets):
            for rank in ranks:
                for layer in layers:
                    self.compute(number, rank, f"{BACKWARD} of {layer}", 2 * self.seconds[layer])
            if self.kind == SMALL:
                continue
            begun, is_here = list(self.clock), self.bucket == bucket
            seconds = self.transfer[bucket] * self.draw.uniform(0.97, 1.03)
            if self.kind == LATE and bucket >= self.bucket:
                late.append((bucket, begun, seconds))
            else:
                end = self.call(begun, seconds)
            for rank in ranks:
                if self.kind == LATE and rank == self.rank and bucket >= self.bucket:
                    continue
                is_blocked = self.kind == BLOCKING and is_here and rank == self.rank
                self.clock[rank] = end if is_blocked else begun[rank] + ISSUE
                self.span(rank, self.names[bucket], begun[rank])
                if is_blocked:
                    self.extra.append(end - begun[rank] - ISSUE)
        for rank in ranks:
            self.span(rank, BACKWARD, began_backward[rank])
        for bucket, begun, seconds in late:
            self.clock[self.rank] += ISSUE
            begun[self.rank] = self.clock[self.rank]
            self.clock[self.rank] += ISSUE
            self.span(self.rank, self.names[bucket], begun[self.rank])
            self.call(begun, seconds)
        if late:
            self.extra.append(sum(seconds for *_, seconds in late[:-1]))
        if self.kind == SMALL:
            self.small_calls()
        for rank in ranks:
            waited = self.begin(rank)
            self.clock[rank] = max(self.clock[rank], self.free)
            self.span(rank, "wait for the calls", waited)
            self.compute(number, rank, "Optimizer.step#SGD.step", 0.001)
            self.span(rank, f"ProfilerStep#{number}", began[rank])

    def small_calls(self) -> None:
        """A call for each tensor, each waited for."""
        names = [f"{layer}.{number}" for layer in self.layers for number in range(self.tensors)]
        for place, name in enumerate(names):
            begun = list(self.clock)
            size = self.draw.uniform(0.5, 4.0) if place % 3 else 0.0  # every third one is a bias
            end = self.call(begun, self.latency * (1 + size) * self.draw.uniform(1.0, 1.05))
            for rank in range(self.ranks):
                self.clock[rank] = end
                self.span(rank, f"gradient of {name}", begun[rank])
        self.extra.append((len(names) - 1) * self.latency)

    def trace(self, rank: int) -> Trace:
        """One rank's events as JSON in the form of Chrome's traces. Each rank's clock has a zero of its own."""
        draw, process = self.draw, self.draw.randrange(2_000, 60_000)
        zero, worker = draw.uniform(1e6, 9e12), process + draw.randrange(1, 300)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": zero, "args": {"name": "python"}},
            {"ph": "i", "s": "t", "name": "Record Window End", "pid": "", "tid": "", "ts": zero},
        ]
        for number, (name, start, end, is_main) in enumerate(self.events[rank]):
            about = {"pid": process, "tid": process if is_main else worker}
            times = {"ts": round(zero + 1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
            rows.append(
                {"ph": "X", "cat": "user_annotation", "name": name, **about, **times, "args": {"External id": number}}
            )
            if is_main and name in self.layers:
                inner = {"name": "aten::addmm", "ts": round(times["ts"] + 1, 3), "dur": round(times["dur"] * 0.8, 3)}
                rows.append({"ph": "X", "cat": "cpu_op", **about, **inner, "args": {}})
            if is_main and (name in self.names or name.startswith("gradient of")):
                inner = {"name": BEGINS, "ts": round(times["ts"] + 5, 3), "dur": 25.0}
                rows.append({"ph": "X", "cat": "cpu_op", **about, **inner, "args": {}})
        draw.shuffle(rows)
        group = {"backend": "gloo", "rank": rank, "world_size": self.ranks}
        return {"schemaVersion": 1, "distributedInfo": group, "displayTimeUnit": "ms", "traceEvents": rows}


def drawn(seed: int, kind: str, variant: str = EVEN) -> tuple[list[Trace], TraceFault]:
    """The traces of all ranks, in any order, and the fault of that kind in them."""
    run = DrawnRun(random.Random(seed), kind, variant if kind in (STARVED, STRAGGLER) else EVEN)
    for number in range(run.steps):
        run.step(number)
    traces = [run.trace(rank) for rank in range(run.ranks)]
    run.draw.shuffle(traces)
    return traces, run.fault()
