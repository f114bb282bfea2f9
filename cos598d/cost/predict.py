"""Seconds of an iteration from its compute, its calls and the hosts' links, by three costs that benches tell.

1. The sync's calls come in the order in which backward computes their gradients (`calls_of`): how many, and their
   bytes, are in `formulas.FACTS`. A call of s steps has b bytes that pass the busiest link one after another, and its
   rank handles m bytes. On a link of R bits per second with d seconds from host to host it takes

       work    = s a + m p          of a processor, times the ranks that share a core
       sending = 8 b / (e R)        of the link
       waiting = w d                w: messages that wait for one another, or for a receiver that is ready

2. gloo works on two calls at a time, so call i starts when call i-2 has ended. All share the link (`seconds`):

       start = max(ready, end of call i-2)     sent = max(start, sent before) + sending
       end   = max(sent + s d, start + waiting) + work

3. seconds = before + max(backward + the work beside it, the last end) + after. A sync that does not overlap starts when
   backward has ended. Its work delays nothing but itself.

a (seconds per step), p (seconds per byte) and e (the share of its rate that a link gives) are fitted to all syncs of
all benches together (`fit`): there is no cost of a single sync.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from cos598d.comm.gloo import ring_segments
from cos598d.errors import UserError
from cos598d.formulas import FACTS, Job
from cos598d.records.bench import Bench, read_bench
from cos598d.records.conventions import FLOOR
from cos598d.records.quantities import delay_words, parse_delay, parse_rate, rate_words
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.terminal.words import number_of


class Link(NamedTuple):
    """A host's link to the others: bits per second each way (None: no known limit) and seconds from host to host."""

    rate: float | None = None
    delay: float = 0.0

    @property
    def words(self) -> str:
        """For tables: "1gbit, 10ms from host to host"."""
        rate = "unlimited rate" if self.rate is None else rate_words(self.rate)
        return rate + (f", {delay_words(self.delay)} from host to host" if self.delay else "")


class Compute(NamedTuple):
    """An iteration without any sync: seconds before backward, of backward, and after it."""

    before: float
    backward: float
    after: float


class Costs(NamedTuple):
    """Seconds of a processor per step and per byte, and the share of its rate that a link gives."""

    step: float
    byte: float
    efficiency: float


class Call(NamedTuple):
    """A collective call: when its gradients are ready, in seconds from backward's begin, and what it does then."""

    ready: float
    steps: float
    path_bytes: float
    moved_bytes: float
    waits: float


@dataclass(frozen=True)
class Rung:
    """A sync as a bench has measured it. `rows`: the share of the rows of the largest tensor that was sent."""

    label: str
    sync: str
    bucket_mb: float
    rows: float
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """A bench, as the predictor needs it.

    crowd: ranks per core of the machine that they share, at least 1. tensors: bytes of the gradients and when they are
    there, in that order. left_out: why a candidate cannot be predicted.
    """

    name: str
    work: tuple
    ranks: int
    link: Link
    batch: int
    crowd: float
    compute: Compute
    tensors: Sequence[tuple[int, float]]
    rungs: Sequence[Rung]
    left_out: Mapping[str, str]
    steals: bool

    @property
    def words(self) -> str:
        """For a table: "4 ranks, links of 1gbit, batch 8"."""
        return f"{number_of(self.ranks, 'rank')}, links of {self.link.words}, batch {self.batch}"


def load(paths: Sequence[Path]) -> list[Measurement]:
    """The benches in these folders (or files). Raises UserError for one that does not fit the first."""
    found = [_measurement(str(path), read_bench(path)[1]) for path in paths]
    for one in found:
        if one.work != found[0].work:
            wrong = next(f"{a} and {b}" for a, b in zip(one.work, found[0].work, strict=True) if a != b)
            raise UserError(
                f"{one.name} and {found[0].name} do not measure the same work ({wrong}). Give benches that differ only "
                "in rate, delay, batch and ranks."
            )
    return found


def _measurement(name: str, bench: Bench) -> Measurement:
    setting, network = bench.setting, bench.environment.network
    floor = bench.summary.get(FLOOR)
    if floor is None or bench.arrivals is None or not setting.batch:
        raise UserError(f"{name} has no baseline without communication ({FLOOR}). Measure syncs, without --alone.")
    if network and network.hosts != setting.world_size:
        raise UserError(
            f"{name} has {number_of(setting.world_size, 'rank')} on {number_of(network.hosts, 'host')}, and only one "
            "rank per host can be predicted. Measure with one rank on each host."
        )
    turns = [turn for turn in bench.samples if turn.candidate == FLOOR]
    backward = statistics.median(statistics.fmean(turn.seconds_backward_by_rank) for turn in turns)
    forward = statistics.median(statistics.fmean(turn.seconds_forward_by_rank) for turn in turns)
    backward = min(backward, floor.seconds_median)
    forward = min(forward, floor.seconds_median - backward)
    # Arrivals come from other passes than the floor's. A tensor without a gradient is sent at the end.
    stretch = backward / bench.arrivals.backward_seconds
    ready = [backward if each.seconds is None else each.seconds * stretch for each in bench.arrivals.tensors]
    tensors = sorted(zip((each.bytes for each in bench.arrivals.tensors), ready, strict=True), key=lambda one: one[1])
    size = sum(each.bytes for each in bench.arrivals.tensors)
    rungs, left_out = [], {}
    for each in bench.candidates:
        if reason := _reason(each.sync, each.options):
            left_out[each.label] = reason
            continue
        left = size - max(bench.traffic[each.label].payload_bytes) if each.sync == "sparse_rows" else 0
        rows = max(0.0, 1 - left / max(size for size, _ in tensors))
        bucket_mb = float(each.options.get("bucket_mb", Job.bucket_mb))
        rungs.append(Rung(each.label, each.sync, bucket_mb, rows, bench.summary[each.label].seconds_median))
    together = setting.world_size if network else bench.environment.ranks_on_host  # emulated hosts share this machine
    return Measurement(
        name=name,
        work=(setting.model, setting.task, setting.gradient_bytes, setting.tokens, setting.step, setting.precision)
        + (setting.backend, setting.device, setting.threads_per_rank),
        ranks=setting.world_size,
        link=Link(parse_rate(network.rate or "none"), parse_delay(network.delay or "0")) if network else Link(),
        batch=setting.batch,
        crowd=max(1.0, together * setting.threads_per_rank / (bench.environment.cores or 1)),
        compute=Compute(forward, backward, floor.seconds_median - backward - forward),
        tensors=tensors,
        rungs=rungs,
        left_out=left_out,
        steals=setting.device == "cpu",
    )


def _reason(sync: str, options: Mapping) -> str:
    """Why a candidate cannot be predicted; "" if it can."""
    if sync not in SYNCS or sync not in FACTS:
        return "what it sends is not known"
    if options.get("compress"):
        return "what its compression costs is not known"
    if sync != FLOOR and not FACTS[sync].sent(Job((1 << 20,), 4, h=4), 0):
        return "it sends nothing over a link"
    kind = get_sync(sync)
    return "" if kind.replicas_equal and not kind.shards else "an iteration does not send its gradient as others do"


def _reduced_and_broadcast(j: Job) -> float:
    """The ring and the parts that go to rank 0; then L payloads on its link, L-1 on its eldest child's, down to 1."""
    levels = ceil(log2(j.n))
    return (2 * (j.n - 1) / j.n + levels * (levels + 1) / 2) * j.S


# Bytes that pass the busiest link one after another, where it is not what the busiest rank sends.
PATHS: Mapping[str, Callable[[Job], float]] = {
    "gather_scatter": lambda j: 2 * (j.n - 1) * j.S,
    "reduce_broadcast": _reduced_and_broadcast,
    "tree": lambda j: 2 * ceil(log2(j.n)) * j.S,
}
IN_PAIRS = {"reduce_broadcast": 2}  # calls that have the messages of `Facts.waits` together
OWN_MESSAGES = ("ring", "tree", "halving_doubling")  # their receivers are ready before a message comes, or wait once


def overlaps(sync: str) -> bool:
    """Whether its calls start during backward."""
    return sync == "ddp" or get_sync(sync).ready is not GradientSync.ready  # torch's reducer has hooks of its own


def calls_of(rung: Rung, bench: Measurement, n: int, lookups: float = 1.0) -> list[Call]:
    """The calls of an iteration of `rung` on n hosts. `bench` is the one that has measured it.

    Tensors are put into calls in the order of their arrival, about the same bytes in each. `lookups`: how many times as
    many tokens as in the bench look up rows of an embedding; most look up the same ones again.
    """
    sizes = tuple(size for size, _ in reversed(bench.tensors))  # the model's order, about
    table = max(sizes) if rung.rows < 1 else 0
    # If one batch looks up a share of a table's rows, k times as many look up 1 - (1 - share)^k.
    job = Job(sizes, n, bucket_mb=rung.bucket_mb, h=n, E=table, u=1 - (1 - rung.rows) ** lookups)
    facts = FACTS[rung.sync]
    moved = [facts.sent(job, rank) for rank in range(n)] if n > 1 else [0.0]
    if not max(moved):
        return []
    path = PATHS[rung.sync](job) if rung.sync in PATHS else max(moved)
    handled = 2 * max(statistics.fmean(moved), max(moved) / bench.crowd)
    steps, found = facts.waits(n) / IN_PAIRS.get(rung.sync, 1), []
    for part, ready in _parts(bench.tensors, round(facts.calls(job))):
        if rung.sync in OWN_MESSAGES:
            waits = steps if rung.sync == "ring" else 1.5 * steps
        else:
            waits = steps * ring_segments(part * job.S, n)
        found.append(Call(ready, steps, part * path, part * handled, waits))
    return found


def _parts(tensors: Sequence[tuple[int, float]], calls: int) -> list[tuple[float, float]]:
    """For each call its share of all bytes, and when the last of its tensors is ready."""
    whole = sum(size for size, _ in tensors)
    if calls >= len(tensors):
        again = calls // len(tensors)
        return [(size / whole / again, ready) for size, ready in tensors for _ in range(again)]
    found: dict[int, tuple[float, float]] = {}
    passed = 0.0
    for size, ready in tensors:
        place = int((passed + size / 2) / whole * calls)
        found[place] = found.get(place, (0.0, 0.0))[0] + size / whole, ready
        passed += size
    return list(found.values())


def seconds(
    calls: Sequence[Call], compute: Compute, link: Link, costs: Costs, overlap: bool, crowd: float, steals: bool = True
) -> float:
    """Seconds of an iteration. `crowd`: ranks per core. `steals`: a call's work takes the processor from backward."""
    ended = [0.0, 0.0]
    sent = stolen = 0.0
    for place, call in enumerate(calls):
        work = (call.steps * costs.step + call.moved_bytes * costs.byte) * crowd
        sending = 8 * call.path_bytes / (costs.efficiency * link.rate) if link.rate else 0.0
        ready = call.ready + stolen * steals if overlap else compute.backward
        start = max(ready, ended[place % 2] if overlap else max(ended))
        sent = max(start, sent) + sending
        ended[place % 2] = max(sent + call.steps * link.delay, start + call.waits * link.delay) + work
        if overlap and call.ready < compute.backward:
            stolen += work
    return compute.before + max(compute.backward + stolen * steals, *ended) + compute.after


START = Costs(1e-4, 5e-10, 0.95)  # TCP's headers leave some 95 % of a link
WIDTHS = np.array([300.0, 300.0, 16.0])  # how far, in logarithms, a cost may be from there that no bench determines


class Fitted(NamedTuple):
    """The costs, and the benches that they are fitted to."""

    costs: Costs
    benches: Sequence[Measurement]

    def predict(self, label: str, hosts: int, link: Link, batch: int, on: Measurement | None = None) -> float:
        """Seconds per iteration of a candidate that a bench has. `on`: use that bench's compute and crowd."""
        rung, bench = next((rung, bench) for bench in self.benches for rung in bench.rungs if rung.label == label)
        base = on or max(self.benches, key=lambda each: each.ranks)  # its ranks may share a machine
        compute = Compute(*(part * batch / base.batch for part in base.compute))
        stretch = compute.backward / bench.compute.backward
        own = replace(bench, tensors=[(size, ready * stretch) for size, ready in bench.tensors])
        calls = calls_of(rung, own, hosts, hosts * batch / (bench.ranks * bench.batch))
        return seconds(calls, compute, link, self.costs, overlaps(rung.sync), base.crowd, bench.steals)


def fit(benches: Sequence[Measurement]) -> Fitted:
    """Robust least squares (soft L1) over the relative errors of all syncs in all benches.

    Costs are fitted as logarithms, so they are positive. Raises UserError if nothing was sent in any bench.
    """
    seen = [(calls_of(rung, bench, bench.ranks), rung, bench) for bench in benches for rung in bench.rungs]
    seen = [one for one in seen if one[0]]
    if not seen:
        raise UserError("no bench has a sync that sends something. Measure syncs with 2 ranks or more.")

    free = 3 if len({bench.link.rate for bench in benches}) > 1 else 2  # one rate does not tell the link's efficiency

    def costs_at(logs: np.ndarray) -> Costs:
        return Costs(*(np.array(START) * np.exp(np.pad(logs, (0, 3 - free)))).tolist())

    def errors(logs: np.ndarray) -> np.ndarray:
        costs = costs_at(logs)
        found = [
            seconds(calls, bench.compute, bench.link, costs, overlaps(rung.sync), bench.crowd, bench.steals)
            / rung.seconds
            - 1
            for calls, rung, bench in seen
        ]
        return np.concatenate([found, logs / WIDTHS[:free]])

    best = least_squares(errors, np.zeros(free), loss="soft_l1", f_scale=0.1)
    return Fitted(costs_at(best.x), benches)
