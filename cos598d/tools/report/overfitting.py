"""Training loss against validation loss: where the second turns while the first still falls, the model overfits."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cos598d.terminal.words import number_of
from cos598d.tools.report.epochs import is_cut
from cos598d.tools.report.load import Run, is_number

VALIDATION_LOSS = "validation_loss"
# A loss changes only where it changes by more than this share of itself: less is noise.
LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation: after which iteration and in which epoch, the validation loss, and the training loss around it.

    `training` is the mean over the examples of all iterations since the evaluation before, None where there are none.
    """

    iteration: int
    epoch: int
    is_end: bool  # of the epoch
    validation: float
    training: float | None

    @property
    def when(self) -> str:
        """In words."""
        return f"after epoch {self.epoch}" if self.is_end else f"after iteration {self.iteration} (epoch {self.epoch})"


@dataclass(frozen=True)
class Course:
    """A run's evaluations in their order, of which `best` has the lowest validation loss."""

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
        """How far the validation loss may rise by chance: `LEAST_CHANGE`, or a rise from which it fell again."""
        before = self.points[: self.points.index(self.best) + 1]
        rises = [after.validation - one.validation for one, after in zip(before, before[1:])]
        return max(LEAST_CHANGE * abs(self.best.validation), *rises, 0.0)

    @property
    def turns(self) -> bool:
        """Whether the validation loss was higher at last than at its lowest, by more than noise."""
        return self.points[-1].validation - self.best.validation > self.noise


def courses(runs: Sequence[Run]) -> list[Course]:
    """Of each run with at least two validation losses; that of an epoch that was cut is not regular, and left out."""
    found = [Course(run, _points(run)) for run in runs]
    return [course for course in found if len(course.points) > 1]


def overfitting_caption(found: Sequence[Course]) -> list[str]:
    """Of each run the epoch from which on the validation loss rises, and what the training loss does meanwhile."""
    return [f"{course.run.name}: {_words(course)}." for course in found]


def _words(course: Course) -> str:
    best, last = course.best, course.points[-1]
    losses = [point.validation for point in course.points]
    if course.is_flat:
        return (
            f"the validation loss hardly changes, {min(losses):.4f} to {max(losses):.4f} in "
            f"{number_of(len(losses), 'evaluation')}: a change of less than 1 % is taken for noise"
        )
    if best is not last and not course.turns:
        is_little = last.validation - best.validation <= LEAST_CHANGE * abs(best.validation)
        why = (
            "of less than 1 %, which is taken for noise" if is_little else "no larger than one from which it fell again"
        )
        return (
            f"the validation loss is lowest {best.when}, {best.validation:.4f}, and {last.validation:.4f} {last.when}: "
            f"a rise {why}, so no overfitting is shown"
        )
    if best is last:
        return (
            f"the validation loss is lowest at the end, {best.validation:.4f} {best.when}: "
            f"no overfitting is seen in {number_of(len(course.points), 'evaluation')}"
        )
    words = f"the validation loss turns {best.when}: from {best.validation:.4f} "
    words += f"it comes to {last.validation:.4f} {last.when}"
    if best.training is None or last.training is None:
        return words
    change = f"from {best.training:.4f} to {last.training:.4f}"
    if last.training < (1 - LEAST_CHANGE) * best.training:
        return f"{words}, while the training loss falls {change}: from there on it overfits"
    if last.training < best.training:
        return f"{words}; the training loss hardly falls, {change}"
    return f"{words}; the training loss does not fall either, {change}"


def _mean_loss(run: Run, first: int, last: int) -> float | None:
    """The mean loss of the examples of the iterations at these places; None without any."""
    losses = run.series.losses[first:last]
    examples = run.series.examples[first:last] or [1] * len(losses)
    return fmean(losses, examples) if losses else None


def _points(run: Run) -> list[EvaluationPoint]:
    """The evaluations in the order of their iterations; of epochs that do not say where they ended, by their length."""
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
        # Iterations stand in their order.
        first, last = (bisect_right(run.series.iterations, bound) for bound in (before, iteration))
        found.append(EvaluationPoint(iteration, epoch, is_end, loss, _mean_loss(run, first, last)))
        before = iteration
    return found
