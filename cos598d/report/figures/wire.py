"""The figure of the interface in time: bits a second, sent and received, between the samples of a run."""

from collections.abc import Sequence

from cos598d.report.svg import draw, legend_below, shortened
from cos598d.report.units import listed
from cos598d.report.wire import Throughput

# Colour and line of what is sent, what is received, and the link's rate.
SENT, RECEIVED, RATE = ("#D55E00", "-"), ("#0072B2", "--"), ("#767676", ":")


def wire_figure(found: Sequence[Throughput]) -> str | None:
    """A panel for each run, all on one scale: what rank 0's interface carried; None where nothing was sampled."""
    if not found:
        return None
    most = max(max(*one.sent, *one.received) for one in found) / 1e6

    def paint(figure):
        panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for axes, one in zip(panels, found, strict=True):
            for values, (colour, style) in ((one.sent, SENT), (one.received, RECEIVED)):
                axes.stairs(
                    [value / 1e6 for value in values], one.moments, color=colour, linestyle=style, baseline=None
                )
            if one.rate and one.rate / 1e6 <= 2 * most:
                axes.axhline(one.rate / 1e6, color=RATE[0], linestyle=RATE[1], linewidth=1)
            axes.set_ylim(0, 1.08 * most)
            axes.set_xlim(one.moments[0], one.moments[-1])
            axes.set_title(shortened(one.run), loc="left")
        panels[-1].set_xlabel("seconds of the run")
        figure.supylabel("Mbit/s", fontsize=9)
        handles = [panels[0].plot([], [], color=colour, linestyle=style)[0] for colour, style in (SENT, RECEIVED, RATE)]
        legend_below(figure, handles, ["sent", "received", "link's rate"])

    label = f"bits a second on rank 0's interface of {listed([one.run for one in found])}"
    return draw("wire", label, 30 + 95 * len(found), paint)
