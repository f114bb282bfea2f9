"""The figure of the wire in time: bits a second, sent and received, between the samples of a run."""

from collections.abc import Sequence

from cos598d.terminal.colours import BLUE, DARK_GREY, VERMILLION
from cos598d.terminal.words import listed
from cos598d.tools.report.svg import draw, legend_below, shortened
from cos598d.tools.report.wire import MOST_DRAWN, Throughput, known

# Colour and line of what is sent, what is received, and the link's rate.
SENT, RECEIVED, RATE = (VERMILLION, "-"), (BLUE, "--"), (DARK_GREY, ":")
FAR = 2  # a rate of more than as many times what was carried is not drawn


def wire_figure(found: Sequence[Throughput]) -> str | None:
    """A panel for each run, all on one scale: what rank 0 counted; None where nothing was sampled."""
    if not found:
        return None
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

    label = f"bits a second of rank 0 of {listed([one.run for one in found])}"
    return draw("wire", label, 30 + 95 * len(found), paint)
