"""Seconds of an iteration from its compute, its calls and the hosts' links, by two costs that benches tell.

1. A sync's calls take, one after another,

       communication = steps (a + d) + bytes (p + 8 / (0.95 R))

   steps: messages that wait for one another, of all calls together; bytes: what passes the busiest link, which has R
   bits per second each way and d seconds from host to host. Both counts are in `formulas.FACTS`. TCP's headers leave
   some 95 % of a link.

2. A sync that does not overlap begins when backward has ended. Else a gradient is sent when backward has computed it,
   and the last one leaves when all before it have: with `left`, the share of the bytes that are not sent yet,

       seconds = before + max(backward, the largest of (ready + communication x left)) + after

a (seconds per step) and p (seconds per byte) are fitted to all syncs of all benches together (`fit`): there is no cost
of a single sync.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

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
    """Seconds per step and per byte, besides the link's."""

    step: float
    byte: float


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

    tensors: bytes of the gradients, and when backward has them, in that order. left_out: why a candidate cannot be
    predicted.
    """

    name: str
    work: tuple
    ranks: int
    link: Link
    batch: int
    compute: Compute
    tensors: Sequence[tuple[int, float]]
    rungs: Sequence[Rung]
    left_out: Mapping[str, str]

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
    return Measurement(
        name=name,
        work=(setting.model, setting.task, setting.gradient_bytes, setting.tokens, setting.step, setting.precision)
        + (setting.backend, setting.device, setting.threads_per_rank),
        ranks=setting.world_size,
        link=Link(parse_rate(network.rate or "none"), parse_delay(network.delay or "0")) if network else Link(),
        batch=setting.batch,
        compute=Compute(forward, backward, floor.seconds_median - backward - forward),
        tensors=tensors,
        rungs=rungs,
        left_out=left_out,
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


def overlaps(sync: str) -> bool:
    """Whether its calls start during backward."""
    return sync == "ddp" or get_sync(sync).ready is not GradientSync.ready  # torch's reducer has hooks of its own


def traffic(rung: Rung, bench: Measurement, n: int, lookups: float = 1.0) -> tuple[float, float]:
    """The steps of all calls of an iteration on n hosts, and the bytes on the busiest link. `bench` measured `rung`.

    `lookups`: how many times as many tokens as in the bench look up rows of an embedding. If one batch looks up a share
    of a table's rows, k times as many look up 1 - (1 - share)^k.
    """
    sizes = tuple(size for size, _ in reversed(bench.tensors))  # the model's order, about
    table = max(sizes) if rung.rows < 1 else 0
    job = Job(sizes, n, bucket_mb=rung.bucket_mb, h=n, E=table, u=1 - (1 - rung.rows) ** lookups)
    facts = FACTS[rung.sync]
    most = max(facts.sent(job, rank) for rank in range(n)) if n > 1 else 0.0
    if not most:
        return 0.0, 0.0
    return facts.calls(job) * facts.waits(n), PATHS[rung.sync](job) if rung.sync in PATHS else most


def seconds(communication: float, compute: Compute, tensors: Sequence[tuple[int, float]], overlap: bool) -> float:
    """Seconds of an iteration whose calls take `communication` seconds."""
    if not overlap:
        return sum(compute) + communication
    left = whole = sum(size for size, _ in tensors)
    end = compute.backward
    for size, ready in tensors:
        end = max(end, ready + communication * left / whole)
        left -= size
    return compute.before + end + compute.after


PAYLOAD = 0.95  # of a link's rate


class Fitted(NamedTuple):
    """The costs, and the benches that they are fitted to."""

    costs: Costs
    benches: Sequence[Measurement]

    def predict(self, label: str, hosts: int, link: Link, batch: int, on: Measurement | None = None) -> float:
        """Seconds per iteration of a candidate that a bench has. `on`: use that bench's compute."""
        rung, bench = next((rung, bench) for bench in self.benches for rung in bench.rungs if rung.label == label)
        base = on or max(self.benches, key=lambda each: each.ranks)  # its ranks may share a machine
        compute = Compute(*(part * batch / base.batch for part in base.compute))
        stretch = compute.backward / bench.compute.backward
        tensors = [(size, ready * stretch) for size, ready in bench.tensors]
        lookups = hosts * batch / (bench.ranks * bench.batch)
        took = communication(*traffic(rung, bench, hosts, lookups), link, self.costs)
        return seconds(took, compute, tensors, overlaps(rung.sync))


def communication(steps: float, size: float, link: Link, costs: Costs) -> float:
    """Seconds of calls with so many steps, of which so many bytes pass the busiest link."""
    sending = 8 / (PAYLOAD * link.rate) if link.rate else 0.0
    return steps * (costs.step + link.delay) + size * (costs.byte + sending)


def fit(benches: Sequence[Measurement]) -> Fitted:
    """Robust least squares (soft L1) over the relative errors of all syncs in all benches.

    Costs are fitted as logarithms, so they are positive. Raises UserError if nothing was sent in any bench.
    """
    seen = [(traffic(rung, bench, bench.ranks), rung, bench) for bench in benches for rung in bench.rungs]
    seen = [one for one in seen if any(one[0])]
    if not seen:
        raise UserError("no bench has a sync that sends something. Measure syncs with 2 ranks or more.")

    def errors(logs: np.ndarray) -> list[float]:
        costs, found = Costs(*np.exp(logs).tolist()), []
        for sent, rung, bench in seen:
            took = communication(*sent, bench.link, costs)
            found.append(seconds(took, bench.compute, bench.tensors, overlaps(rung.sync)) / rung.seconds - 1)
        return found

    best = least_squares(errors, np.log([1e-4, 1e-9]), loss="soft_l1", f_scale=0.1)
    return Fitted(Costs(*np.exp(best.x).tolist()), benches)
