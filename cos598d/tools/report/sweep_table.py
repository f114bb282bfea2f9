"""A sweep's table, a row for each combination of values with its seeds together, and what to be wary of in it."""

from collections.abc import Mapping, Sequence

from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT
from cos598d.records.facts import ALSO_OF_WORK, OF_RUNS
from cos598d.terminal.tables import picked
from cos598d.terminal.words import number_of
from cos598d.tools.report.blocks import Table
from cos598d.tools.report.classes import one_class_remark
from cos598d.tools.report.disturbed import disturbance_remark, impossible_remark
from cos598d.tools.report.epochs import cut_remark, is_cut, stopped_early, whole_epochs
from cos598d.tools.report.fairness import code_remark, ground_remark, shared_remark, work_remark
from cos598d.tools.report.load import Run
from cos598d.tools.report.sweep_entries import (
    ALL_SECONDS,
    BATCH,
    LOSS,
    SENT,
    SETUP,
    SPEED_UP,
    TRAINING_LOSS,
    Measure,
    Point,
    SweepEntry,
    axes_of,
    long_table,
    metric_measures,
    points_of,
    speed_ups,
)

TABLE_NOTE = (
    "Figures are means over the seeds, with the smallest and largest in brackets. Metrics and losses: of the last "
    "epoch; training loss: of the last complete one. s/epoch: the wall-clock time of a complete epoch's training, "
    "without evaluation, and without the first epoch if there are several, since its first iterations are slow. "
    "Speed-up: the seconds of setup 1x1 with the same other settings over these, seed by seed. Sent: by the rank that "
    "sends most, by the communication log, or the mean over the ranks by the kernel's counters if a library does not "
    "report its calls. Epochs: those that were trained."
)
BRIEF_NOTE = (
    "Means over the seeds (smallest to largest). s/epoch: seconds of training per epoch. Sent: per iteration, by the "
    "rank that sends most."
)
# What an axis changes beside the setting that it is.
_SIZE, _EXAMPLES = ("examples per step",), ("training examples", "examples per epoch")
ALSO_CHANGES = {
    BATCH: _SIZE,
    SETUP: (*_SIZE, "threads per rank"),
    "gradient_accumulation_steps": _SIZE,
    "max_train_examples": _EXAMPLES,
    "threads": ("threads per rank",),
    "data_dir": ("data", *_EXAMPLES),
    "task_name": ("task", "data", "model", *_EXAMPLES),
    **dict.fromkeys(("model_name_or_path", "model_type", "config_name", "image_size"), ("model",)),
}
# A sweep's runs differ in their seeds, and early stopping and batches make their steps differ: the table tells.
ALWAYS = frozenset(("seed", "steps"))


def sweep_rows(entries: Sequence[SweepEntry]) -> list[list[str]]:
    """A head and a row for each combination, those without a finished run too."""
    table, axes = long_table(entries), axes_of(entry.settings for entry in entries)
    measures = [*metric_measures(table), Measure(TRAINING_LOSS), Measure(ALL_SECONDS)]
    measures += [Measure(SPEED_UP)] if (table["Metric"] == SPEED_UP).any() else []
    cells = {
        measure: {tuple(point.settings.items()): _cell(measure, point) for point in points_of(table, measure)}
        for measure in [*measures, Measure(SENT)]
    }
    rows = [[*axes, "seeds", *(measure.title for measure in cells), "epochs", "remarks"]]
    combinations: dict[tuple, list[SweepEntry]] = {}
    for entry in entries:
        combinations.setdefault(tuple(entry.settings.items()), []).append(entry)
    for settings, group in combinations.items():
        runs = [entry.run for entry in group if entry.run]
        seeds = str(len(runs)) if len(runs) == len(group) else f"{len(runs)} of {len(group)}"
        found = [by_settings.get(settings, "-") for by_settings in cells.values()]
        words = [dict(settings).get(axis, "-") for axis in axes]
        rows.append([*words, seeds, *found, _epochs(runs), "; ".join(dict.fromkeys(_remarks(group)))])
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def brief_rows(entries: Sequence[SweepEntry]) -> list[list[str]]:
    """The columns of `sweep_rows` that answer which combination is the best and which the fastest, and what is sent."""
    rows, axes = sweep_rows(entries), axes_of(entry.settings for entry in entries)
    seeds = ["seeds"] if any(row[len(axes)] != "1" for row in rows[1:]) else []
    best = [one.title for one in metric_measures(long_table(entries))[:1]] or [TRAINING_LOSS]
    return picked(rows, [*axes, *seeds, *best, ALL_SECONDS, SPEED_UP, SENT, "remarks"])


def tables_of(entries: Sequence[SweepEntry]) -> list[Table]:
    """The columns of `sweep_rows` in two tables, each narrow enough for a page: all metrics but the first are in the
    second, if there are any."""
    rows, axes = sweep_rows(entries), axes_of(entry.settings for entry in entries)
    metrics = [one.title for one in metric_measures(long_table(entries))]
    others = [name for name in metrics[1:] if not name.startswith(LOSS)]
    first = Table(TABLE_NOTE, picked(rows, [name for name in rows[0] if name not in others]))
    return [first, *([Table("The other metrics.", picked(rows, [*axes, "seeds", *others]))] if others else [])]


def _cell(measure: Measure, point: Point) -> str:
    mean = measure.shown(point.mean)
    if point.seeds == 1 or measure.title == SENT:
        return mean
    return f"{mean} ({measure.shown(point.least)}-{measure.shown(point.most)})"


def _epochs(runs: Sequence[Run]) -> str:
    counts = sorted({len(whole_epochs(run.summary)) for run in runs})
    words = f"{counts[0]}-{counts[-1]}" if len(counts) > 1 else str(counts[0]) if counts else "-"
    return words + (" and a part" if any(is_cut(run.summary["epochs"][-1], run.summary) for run in runs) else "")


def _remarks(group: Sequence[SweepEntry]) -> list[str]:
    """What happened on the way, seed by seed."""
    found = []
    for entry in group:
        seed = f"seed {entry.seed}"
        if entry.run is None:
            found.append({FAILED: f"{seed} failed", BROKEN_OFF: f"{seed} not finished"}.get(entry.outcome, LEFT_OUT))
            continue
        attempts = len(entry.run.summary.get("attempts", []))
        found += [f"{seed} took {number_of(attempts, 'attempt')}"] if attempts > 1 else []
        found += [f"{seed} stopped early"] if stopped_early(entry.run) else []
    return found


def cautions(entries: Sequence[SweepEntry]) -> list[str]:
    """What to read before anything else: runs that are missing, and in what the others do not compare."""
    ends = {FAILED: "failed", BROKEN_OFF: "is not finished"}
    found = [
        f"{entry.words}, seed {entry.seed}, {ends[entry.outcome]}: {entry.said}"
        for entry in entries
        if entry.outcome in ends
    ]
    return found + unlike(entries)


def left_out(entries: Sequence[SweepEntry]) -> list[str]:
    """Why there is no run of a combination that cannot run, a sentence each."""
    found = (f"{entry.words} is skipped: {entry.said}" for entry in entries if entry.outcome == LEFT_OUT)
    return list(dict.fromkeys(found))


def unlike(entries: Sequence[SweepEntry]) -> list[str]:
    """In what the runs were not the same work although the axes do not ask for it, nor by the same code on the same
    ground, and whether they shared it; a sentence each."""
    finished = [entry for entry in entries if entry.run]
    runs = [entry.run for entry in finished if entry.run]
    summaries = [run.summary for run in runs]
    remarks = (
        disturbance_remark(summaries),
        _impossible(entries),
        work_remark(summaries, _by_design(axes_of(entry.settings for entry in entries))),
        ground_remark(summaries),
        code_remark(summaries),
        _epochs_remark(runs),
        cut_remark(runs),
        one_class_remark(summaries),
        shared_remark([entry.parallel for entry in finished]),
    )
    return [remark for remark in remarks if remark]


def _impossible(entries: Sequence[SweepEntry]) -> str:
    names = [entry.run.name if entry.run else "" for entry in entries]
    found = speed_ups(entries, long_table(entries))[["Entry", "alone", "ratio", "most"]].itertuples(index=False)
    return impossible_remark([(names[place], names[alone], ratio, most) for place, alone, ratio, most in found])


def _by_design(axes: Mapping[str, Sequence[str]]) -> set[str]:
    """The words of a run's work in which the axes make the runs differ."""
    flags = {name: word for word, place, name in OF_RUNS if place != "environment"}
    flags |= {name: word for word, name in ALSO_OF_WORK}
    found = {flags[axis] for axis in axes if axis in flags}
    return found.union(ALWAYS, *(ALSO_CHANGES.get(axis, ()) for axis in axes))


def _epochs_remark(runs: Sequence[Run]) -> str:
    """Said where an epoch is not as long in all runs, as of one that --max_steps has cut short."""
    sizes = {max(epoch["training"]["examples"] for epoch in run.summary["epochs"]) for run in runs}
    if len(sizes) < 2:
        return ""
    return (
        f"an epoch has from {min(sizes):,} to {max(sizes):,} examples in these runs, so their seconds do not compare."
    )
