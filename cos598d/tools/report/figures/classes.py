"""The figure of classes: precision, recall and F1 of each after the last epoch, a run's panel under the other's."""

from collections.abc import Sequence

from cos598d.records.run import Summary
from cos598d.terminal.colours import BLUE, SKY, VERMILLION
from cos598d.tools.report.svg import draw, legend_below, shortened

MOST_DRAWN = 20  # classes of a panel; of more the table tells
SCORES = {"precision": (SKY, "o"), "recall": (BLUE, "s"), "f1": (VERMILLION, "D")}


def classes_figure(run: str, found: Sequence[Summary], name: str) -> str | None:
    """A row for each class with its three scores, the first class at the top; None of more classes than MOST_DRAWN."""
    if not 0 < len(found) <= MOST_DRAWN:
        return None

    def paint(figure):
        axes = figure.subplots()
        places = range(len(found))
        handles = [
            axes.plot([one[score] for one in found], places, marker, color=colour, markersize=5)[0]
            for score, (colour, marker) in SCORES.items()
        ]
        axes.set_yticks(places, [shortened(one["class"], 18) for one in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlim(-0.03, 1.03)
        axes.set_title(shortened(run), loc="left")
        legend_below(figure, handles, ["precision", "recall", "F1"])

    return draw(name, f"precision, recall and F1 of each class of {run}", 45 + 15 * len(found), paint)
