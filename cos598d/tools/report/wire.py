"""Network traffic over time: the bits between successive samples of rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from cos598d.records.quantities import quantity
from cos598d.terminal.colours import BLUE, DARK_GREY, VERMILLION
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.blocks import Figure
from cos598d.tools.report.load import Row, Run
from cos598d.tools.report.numbers import percent, plain
from cos598d.tools.report.svg import draw, legend_below, shortened
from cos598d.tools.report.traffic_table import is_by_sockets, is_loopback

MOST_DRAWN = 400
LEAST_SECONDS = 1e-3  # samples that are nearer to each other give no useful rate
GAP = float("nan")
# Colour and line of sent and received bits, and of the link's rate.
SENT, RECEIVED, RATE = (VERMILLION, "-"), (BLUE, "--"), (DARK_GREY, ":")
FAR = 2  # a link's rate that exceeds the traffic by more than this factor is not drawn


@dataclass(frozen=True)
class Throughput:
    """Bits per second between the samples at `moments` (seconds of the run, one more than there are values).

    A GAP is a pause, as for evaluation. `rate`: the link's, if it is known. `whose`: what was counted.
    """

    run: str
    moments: list[float]
    sent: list[float]
    received: list[float]
    rate: float | None
    whose: str


def throughputs(runs: Sequence[Run]) -> list[Throughput]:
    """For each run with more than one sample of its network."""
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
    """Bits per second between two samples."""
    if after["kind"] == "resume" or after["seconds"] <= before["seconds"]:
        return GAP
    return 8 * (after[name] - before[name]) / (after["seconds"] - before["seconds"])


def known(rates: Sequence[float]) -> list[float]:
    """All except the gaps."""
    return [rate for rate in rates if not isnan(rate)]


def mean_rate(moments: Sequence[float], rates: Sequence[float]) -> float:
    """The mean of bits per second over all time except the gaps."""
    spans = [(rate, after - before) for rate, before, after in zip(rates, moments, moments[1:]) if not isnan(rate)]
    return sum(rate * seconds for rate, seconds in spans) / sum(seconds for _, seconds in spans)


def wire_blocks(runs: Sequence[Run]) -> list[Figure]:
    """Each run's network traffic during training, over time and on average, and its share of the link's rate."""
    found, sentences = throughputs(runs), []
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
    return [Figure("wire", _figure(found), sentences)] if found else []


def _figure(found: Sequence[Throughput]) -> str:
    """A panel per run, all on one scale: rank 0's counts."""
    most = max(max(known([*one.sent, *one.received])) for one in found) or 1.0
    drawn = [one.rate for one in found if one.rate and one.rate <= FAR * most]
    top = 1.08 * max([most, *drawn]) / 1e6

    def paint(figure):
        panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for axes, one in zip(panels, found, strict=True):
            edges = one.moments[: MOST_DRAWN + 1]
            for values, (colour, style) in ((one.sent, SENT), (one.received, RECEIVED)):
                rates = [value / 1e6 for value in values[:MOST_DRAWN]]
                axes.stairs(rates, edges, color=colour, linestyle=style, baseline=None)
            if one.rate in drawn:
                axes.axhline(one.rate / 1e6, color=RATE[0], linestyle=RATE[1], linewidth=1)
            axes.set_ylim(0, top)
            axes.set_xlim(edges[0], edges[-1])
            axes.set_title(shortened(one.run), loc="left")
        panels[-1].set_xlabel("seconds of the run")
        figure.supylabel("Mbit/s", fontsize=9)
        looks, words = [SENT, RECEIVED], ["sent", "received"]
        if drawn:
            looks, words = [*looks, RATE], [*words, "link's rate"]
        handles = [panels[0].plot([], [], color=colour, linestyle=style)[0] for colour, style in looks]
        legend_below(figure, handles, words)

    label = f"bits per second of rank 0 of {listed([one.run for one in found])}"
    return draw("wire", label, 30 + 95 * len(found), paint)
