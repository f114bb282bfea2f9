"""The interface in time: what rank 0's samples say of the bits that passed between one and the next."""

from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.report.load import Row, Run
from cos598d.report.units import number_of, percent, plain, quantity

MOST_SAMPLES = 400
LEAST_SECONDS = 1e-3  # samples nearer to one another than that say little of a rate


@dataclass(frozen=True)
class Throughput:
    """Bits a second between the samples at `moments` (seconds of the run, one more than there are values).

    `rate`: the link's, where it is known. `ranks`: how many count on this interface. `left_out`: later samples.
    """

    run: str
    moments: list[float]
    sent: list[float]
    received: list[float]
    rate: float | None
    ranks: int
    left_out: int


def throughputs(runs: Sequence[Run]) -> list[Throughput]:
    """Of each run whose wire was sampled more than once, as long as it does not pause to evaluate."""
    found = [_throughput(run) for run in runs]
    return [one for one in found if one is not None]


def _throughput(run: Run) -> Throughput | None:
    rows: list[Row] = []
    for row in run.wire:
        if not rows or row["seconds"] - rows[-1]["seconds"] >= LEAST_SECONDS:
            rows.append(row)
    shown = rows[: MOST_SAMPLES + 1]
    if len(shown) < 2:
        return None
    spans = [(a, b, b["seconds"] - a["seconds"]) for a, b in zip(shown, shown[1:])]
    sent, received = ([8 * (b[name] - a[name]) / s for a, b, s in spans] for name in ("bytes_sent", "bytes_received"))
    rate = quantity((run.summary["network"] or {}).get("rate"))
    moments = [row["seconds"] for row in shown]
    return Throughput(run.name, moments, sent, received, rate, int(shown[0]["shared_by_ranks"]), len(rows) - len(shown))


def wire_caption(found: Sequence[Throughput]) -> list[str]:
    """What each interface carried on average and in its busiest sample, and the share of the link's rate."""
    sentences = []
    for one in found:
        lengths = [after - before for before, after in zip(one.moments, one.moments[1:])]
        words = []
        for way, values in (("sent", one.sent), ("received", one.received)):
            mean = sum(value * length for value, length in zip(values, lengths)) / sum(lengths)
            words.append(
                f"{plain(mean / 1e6)} Mbit/s {way} on average, {plain(max(values) / 1e6)} in its busiest sample"
            )
            if one.rate:
                words[-1] += f" ({percent(mean / one.rate)} and {percent(max(values) / one.rate)} of the link's rate)"
        whose = "rank 0's interface" if one.ranks == 1 else f"the interface that {one.ranks} ranks share"
        sentences.append(f"{one.run}, {whose}: {'; '.join(words)}.")
        if one.left_out:
            sentences[-1] += f" {number_of(one.left_out, 'later sample')} not drawn."
    return [*sentences, "Evaluation is not counted: where a run pauses for it, nothing is drawn but 0."]
