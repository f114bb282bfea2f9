"""What to be wary of before reading a number, and which run was the fastest: the only sentences of a table of runs."""

from collections.abc import Sequence

from cos598d.errors import WARNING
from cos598d.records.schema import Classes
from cos598d.terminal.printable import printable
from cos598d.terminal.words import listed
from cos598d.tools.report.busy import DISTURBED
from cos598d.tools.report.cells import fastest_of, shown
from cos598d.tools.report.compare import Group, alone_of, are_apart, in_groups, is_busy, mean_of, name_of, speed_up
from cos598d.tools.report.records import Run, differing, last_classes

MOST_NAMES = 8
# The number of iterations in which losses are compared, and the largest relative difference that rounding explains.
COMPARED = 20
LOSSES_APART = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


def warnings(runs: Sequence[Run]) -> list[str]:
    """A sentence for each reason to distrust the table, with what to do about it."""
    groups = in_groups(runs)
    unfinished = [
        f"{run.name} {run.summary.unfinished}. Its figures are of those." for run in runs if run.summary.unfinished
    ]
    others = (busy_warning(runs), _settings(runs), _losses(groups), _one_class(runs), _impossible(groups))
    return [*unfinished, *filter(None, others)]


def said(runs: Sequence[Run]) -> list[str]:
    """The lines above a table on the screen."""
    return [*(f"{WARNING}{one}" for one in warnings(runs)), *filter(None, [fastest(runs)])]


def fastest(runs: Sequence[Run]) -> str:
    """Which of the runs that average is the fastest. "" if the record does not justify a name: a machine was busy, a
    run is not finished, or they differ in more than how gradients travel, or in their losses."""
    groups = in_groups(runs)
    found = [group for group in groups if group[0].summary.world_size > 1 and not group[0].drifts]
    averaging = [run for group in found for run in group]
    if len(found) < 2 or is_busy(*found) or differing(averaging) or _losses(groups):
        return ""
    if any(run.summary.unfinished or run.mean is None for run in averaging):
        return ""
    first, *others = sorted(found, key=lambda group: mean_of(group) or 0.0)
    near = [first, *(group for group in others if not are_apart(group, first))]
    words = [f"{name_of(group)} ({shown(mean_of(group))} s per step)" for group in (*near, others[0])]
    return fastest_of(words[:-1], words[-1])


def names_of(names: Sequence[str]) -> str:
    """The names; of very many the first ones, and how many more there are."""
    more = len(names) - MOST_NAMES
    return listed([*names[:MOST_NAMES], f"{more} more"] if more > 0 else names)


def busy_warning(runs: Sequence[Run]) -> str:
    """A sentence that names the runs that were disturbed by other programs; "" where none was."""
    busy = {run.name: run.busy for run in runs if run.busy}
    if not busy:
        return ""
    much = " to ".join(dict.fromkeys(f"{100 * end(busy.values()):.0f} %" for end in (min, max)))
    return (
        f"the machine was busy: other programs took {much} of its processors during {names_of([*busy])}, so these "
        "times are disturbed, and not compared. Run again on an idle machine."
    )


def only_class(evaluation: Classes | None) -> tuple[str, float] | None:
    """The class for which every example is taken, and its share; None if there is none, or if the data have but one."""
    classes = evaluation.by_class if evaluation else []
    total = sum(one.examples for one in classes)
    if sum(one.examples > 0 for one in classes) < 2:
        return None
    # All that was taken for a class of which all was found: as many of it as there are in the data.
    found = (one for one in classes if one.recall == 1 and abs(one.precision - one.examples / total) < 1e-9)
    return next(((printable(one.name, 40), one.examples / total) for one in found), None)


def _settings(runs: Sequence[Run]) -> str:
    found = differing(runs)
    if not found:
        return ""
    words = (
        f"{name} ({', '.join(f'{value} in {names_of(names)}' for value, names in values.items())})"
        for name, values in found.items()
    )
    return (
        f"not the same work: {'; '.join(words)}. Seconds and losses are compared only between runs that agree in "
        "these. Set them alike to compare others."
    )


def _losses(groups: Sequence[Group]) -> str:
    """Runs whose losses part although nothing differs but how gradients travel: a gradient must be another one.

    Not those with dropout, whose masks depend on the ranks, and those that drift on purpose.
    """
    exact = [group for group in groups if not group[0].drifts and group[0].summary.dropout == 0]
    for group in exact:
        alike = (other for other in exact if not differing([group[0], other[0]]))
        base = alone_of(groups, group) or next(alike)
        most = LOSSES_APART.get(group[0].summary.precision, max(LOSSES_APART.values()))
        pairs = list(zip(group[0].summary.losses, base[0].summary.losses))[:COMPARED]
        for iteration, (mine, theirs) in enumerate(pairs, start=1):
            if abs(mine - theirs) > most * max(abs(theirs), 1e-3):
                return (
                    f"the losses of {name_of(group)} and {name_of(base)} differ by {shown(abs(mine - theirs))} in "
                    f"iteration {iteration}, although their settings do not: a gradient is not the average. Run "
                    "`cos598d check` on the sync."
                )
    return ""


def _one_class(runs: Sequence[Run]) -> str:
    found: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        if only := only_class(last_classes(run)):
            found.setdefault(only, []).append(run.name)
    words = (
        f"only one class is predicted by {names_of(names)}: every example is classified as {name}, so the accuracy, "
        f"{shown(share)}, is that class's share of the examples"
        for (name, share), names in found.items()
    )
    return f"{'; '.join(words)}. Train longer, or change the learning rate." if found else ""


def _impossible(groups: Sequence[Group]) -> str:
    for group in groups:
        alone = alone_of(groups, group)
        if alone and speed_up(group, alone) == DISTURBED and not is_busy(group, alone):
            return (
                f"{name_of(group)} is faster than {name_of(alone)} by more than there is to gain: something disturbed "
                f"{name_of(alone)}. Run it again while nothing else runs."
            )
    return ""
