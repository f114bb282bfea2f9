"""The wire in time: what rank 0's samples say of the bits that passed between one and the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from cos598d.records.quantities import quantity
from cos598d.terminal.words import number_of
from cos598d.tools.report.bytes_from import is_by_sockets, is_loopback
from cos598d.tools.report.load import Row, Run
from cos598d.tools.report.numbers import percent, plain

MOST_DRAWN = 400
LEAST_SECONDS = 1e-3  # samples nearer to one another than that say little of a rate
GAP = float("nan")


@dataclass(frozen=True)
class Throughput:
    """Bits a second between the samples at `moments` (seconds of the run, one more than there are values).

    A GAP is a pause, as for evaluation. `rate`: the link's, if it is known. `whose` names what was counted.
    """

    run: str
    moments: list[float]
    sent: list[float]
    received: list[float]
    rate: float | None
    whose: str


def throughputs(runs: Sequence[Run]) -> list[Throughput]:
    """Of each run whose wire was sampled more than once."""
    found = [_throughput(run) for run in runs]
    return [one for one in found if one is not None]


def _throughput(run: Run) -> Throughput | None:
    rows: list[Row] = []
    for row in run.wire:
        # The row after a pause belongs to what follows it, however soon that comes.
        if not rows or row["kind"] == "resume" or row["seconds"] - rows[-1]["seconds"] >= LEAST_SECONDS:
            rows.append(row)
    sent, received = ([_rate(a, b, name) for a, b in zip(rows, rows[1:])] for name in ("bytes_sent", "bytes_received"))
    if not known(sent) or is_loopback(rows[0].get("interface", "")):
        return None
    rate = quantity((run.summary["network"] or {}).get("rate"))
    ranks = int(rows[0]["shared_by_ranks"])
    whose = "rank 0's interface" if ranks == 1 else f"the interface that {ranks} ranks share"
    whose = "rank 0's own sockets" if is_by_sockets(rows[0]) else whose
    return Throughput(run.name, [row["seconds"] for row in rows], sent, received, rate, whose)


def _rate(before: Row, after: Row, name: str) -> float:
    """Bits a second between two samples."""
    if after["kind"] == "resume" or after["seconds"] <= before["seconds"]:
        return GAP
    return 8 * (after[name] - before[name]) / (after["seconds"] - before["seconds"])


def known(rates: Sequence[float]) -> list[float]:
    """All but the gaps."""
    return [rate for rate in rates if not isnan(rate)]


def mean_rate(moments: Sequence[float], rates: Sequence[float]) -> float:
    """Bits a second over all time but the gaps."""
    spans = [(rate, after - before) for rate, before, after in zip(rates, moments, moments[1:]) if not isnan(rate)]
    return sum(rate * seconds for rate, seconds in spans) / sum(seconds for _, seconds in spans)


def wire_caption(found: Sequence[Throughput]) -> list[str]:
    """What each run's wire carried on average while it trained, and the share of the link's rate."""
    sentences = []
    for one in found:
        words = []
        for way, values in (("sent", one.sent), ("received", one.received)):
            mean = mean_rate(one.moments, values)
            words.append(f"{plain(mean / 1e6)} Mbit/s {way} on average")
            if one.rate:
                words[-1] += f" ({percent(mean / one.rate)} of the link's rate)"
        sentences.append(f"{one.run}, {one.whose}, while training: {'; '.join(words)}.")
        later = len(one.sent) - MOST_DRAWN
        if later > 0:
            sentences[-1] += f" Not drawn: {number_of(later, 'later sample')}."
    return sentences
