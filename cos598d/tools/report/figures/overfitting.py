"""The figure of training loss against validation loss, with the evaluation at which the second is lowest."""

from collections.abc import Sequence

from cos598d.terminal.colours import BLUE, DARK_GREY, GREY, VERMILLION
from cos598d.terminal.words import listed
from cos598d.tools.report.figures.learning import block_means, points_per_block
from cos598d.tools.report.overfitting import Course
from cos598d.tools.report.svg import draw, legend_below, shortened


def overfitting_figure(found: Sequence[Course]) -> str | None:
    """A panel for each run, of both losses against the iteration; None where none was validated twice."""
    if not found:
        return None

    def paint(figure):
        panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for axes, course in zip(panels, found, strict=True):
            series, size = course.run.series, points_per_block(course.run)
            iterations, losses = block_means(series.iterations, size), block_means(series.losses, size)
            handles = axes.plot(iterations, losses, color=GREY, linewidth=0.8)
            trained = [(point.iteration, point.training) for point in course.points if point.training is not None]
            handles += axes.plot(*zip(*trained), color=BLUE, marker="o", linestyle="--") if trained else []
            validated = [(point.iteration, point.validation) for point in course.points]
            handles += axes.plot(*zip(*validated), color=VERMILLION, marker="s")
            handles.append(axes.axvline(course.best.iteration, color=DARK_GREY, linestyle=":"))
            lowest = "" if course.is_flat else f": lowest {course.best.when}"
            axes.set_title(shortened(f"{course.run.name}{lowest}"), loc="left")
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("iteration")
        words = ["an iteration's loss", "training loss, mean", "validation loss", "lowest validation loss"]
        legend_below(figure, handles, words if len(handles) == len(words) else [words[0], *words[2:]])

    label = f"training loss and validation loss of {listed([course.run.name for course in found])}"
    return draw("overfitting", label, 40 + 150 * len(found), paint)
