"""Training loss against validation loss: if the second rises while the first still falls, the model overfits."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cos598d.terminal.colours import BLUE, DARK_GREY, GREY, VERMILLION
from cos598d.terminal.words import listed
from cos598d.tools.report.blocks import Block, Figure, Table
from cos598d.tools.report.epochs import is_cut
from cos598d.tools.report.learning import block_means, points_per_block
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import cell, is_number, names_of
from cos598d.tools.report.svg import draw, legend_below, shortened

VALIDATION_LOSS = "validation_loss"
# A loss changes only if it changes by more than this share of itself: less is noise.
LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation: its iteration and epoch, the validation loss, and the training loss around it.

    `training` is the mean over the examples of all iterations since the previous evaluation; None if there are none.
    """

    iteration: int
    epoch: int
    is_end: bool  # whether it ends the epoch
    validation: float
    training: float | None

    @property
    def when(self) -> str:
        """The time of the evaluation, as text."""
        return f"after epoch {self.epoch}" if self.is_end else f"after iteration {self.iteration} (epoch {self.epoch})"


@dataclass(frozen=True)
class Course:
    """A run's evaluations in order; `best` has the lowest validation loss."""

    run: Run
    points: list[EvaluationPoint]

    @property
    def best(self) -> EvaluationPoint:
        """The evaluation with the lowest validation loss, the first of several."""
        return min(self.points, key=lambda point: point.validation)

    @property
    def is_flat(self) -> bool:
        """Whether all validation losses are within `LEAST_CHANGE` of each other."""
        losses = [point.validation for point in self.points]
        return max(losses) - min(losses) <= LEAST_CHANGE * abs(min(losses))

    @property
    def noise(self) -> float:
        """How far the validation loss may rise by chance: `LEAST_CHANGE`, or a rise after which it fell again."""
        before = self.points[: self.points.index(self.best) + 1]
        rises = [after.validation - one.validation for one, after in zip(before, before[1:])]
        return max(LEAST_CHANGE * abs(self.best.validation), *rises, 0.0)

    @property
    def verdict(self) -> str:
        """Whether the validation loss rises by more than noise, and whether the model overfits from there on."""
        best, last = self.best, self.points[-1]
        if self.is_flat:
            return "the validation loss hardly changes (less than 1 % counts as noise)"
        if best is last:
            return f"the validation loss is lowest at the end, {best.when}: no overfitting is seen"
        if last.validation - best.validation <= self.noise:
            return f"the validation loss is lowest {best.when} and rises by no more than noise: no overfitting is shown"
        words = f"the validation loss turns {best.when}"
        if best.training is None or last.training is None:
            return words
        if last.training < (1 - LEAST_CHANGE) * best.training:
            return f"{words}, while the training loss falls: from there on it overfits"
        return f"{words}; the training loss {'hardly falls' if last.training < best.training else 'rises'} meanwhile"


def courses(runs: Sequence[Run]) -> list[Course]:
    """For each run with at least two validation losses, without that of an epoch that was cut short."""
    found = [Course(run, _points(run)) for run in runs]
    return [course for course in found if len(course.points) > 1]


def overfitting_blocks(runs: Sequence[Run]) -> list[Block]:
    """Training against validation loss of the runs with several evaluations, and where the second rises."""
    found = courses(runs)
    if not found:
        return []
    rows = [["run", "evaluated", "training loss", "validation loss", ""]]
    for course in found:
        for point in course.points:
            is_best = "lowest" if point is course.best and not course.is_flat else ""
            rows.append([course.run.name, point.when, cell(point.training, ".4f"), f"{point.validation:.4f}", is_best])
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    note = "Training loss: the mean over the examples since the evaluation before, with dropout where there is any."
    caption = [f"{course.run.name}: {course.verdict}." for course in found]
    blocks: list[Block] = [Table(note, rows), Figure("overfitting", _figure(found), caption)]
    drawn = {course.run.name for course in found}
    absent = [run.name for run in runs if run.summary["losses"] and run.name not in drawn]
    if absent:
        why = "with fewer than two evaluations (one after a cut epoch counts only where --eval_steps asks for it)"
        blocks.append(f"Left out, {why}: {names_of(absent, 'run')}.")
    return blocks


def _figure(found: Sequence[Course]) -> str:
    """A panel per run with both losses by iteration."""

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


def _mean_loss(run: Run, first: int, last: int) -> float | None:
    """The mean loss of the examples of the iterations at these indices; None without any."""
    losses = run.series.losses[first:last]
    examples = run.series.examples[first:last] or [1] * len(losses)
    return fmean(losses, examples) if losses else None


def _points(run: Run) -> list[EvaluationPoint]:
    """The evaluations ordered by iteration. Epochs that do not have their last iteration are placed by their length."""
    ends, done, steps = [], 0, run.config.get("eval_steps")
    for epoch in run.summary["epochs"]:
        done = epoch.get("last_iteration", done + epoch.get("iterations", 0))
        cut = is_cut(epoch, run.summary)
        if not cut or (steps and done % steps == 0):
            ends.append((done, epoch["epoch"], not cut, epoch.get(VALIDATION_LOSS)))
    known = {iteration for iteration, *_ in ends}
    within = [
        (row["iteration"], row.get("epoch", 0), False, row.get(VALIDATION_LOSS))
        for row in run.summary.get("evaluations", [])
        if row["iteration"] not in known
    ]
    found, before = [], 0
    for iteration, epoch, is_end, loss in sorted([*ends, *within], key=lambda one: one[0]):
        if not is_number(loss):
            continue
        # Iterations are in order.
        first, last = (bisect_right(run.series.iterations, bound) for bound in (before, iteration))
        found.append(EvaluationPoint(iteration, epoch, is_end, loss, _mean_loss(run, first, last)))
        before = iteration
    return found
