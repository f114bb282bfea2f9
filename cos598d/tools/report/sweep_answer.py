"""The head of a sweep's page: which combination is best, which is fastest, what more ranks and a longer way change."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.records.facts import ALSO_OF_WORK, OF_RUNS
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.attempts import stopped_early
from cos598d.tools.report.disturbed import disturbance_remark, impossible_remark
from cos598d.tools.report.fairness import code_remark, ground_remark, work_remark
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.one_class import one_class_remark
from cos598d.tools.report.strategies import cut_remark
from cos598d.tools.report.sweep_captions import CHANCE
from cos598d.tools.report.sweep_entries import ALONE, BATCH, DELAY, SETUP, SeedGroup, SweepEntry, axes_of, varying
from cos598d.tools.report.sweep_lines import chart_of
from cos598d.tools.report.sweep_measures import Measure, Spread, metric_measures, seconds_measure, speed_up, speed_ups

MOST_TIED = 4  # combinations of the same result that are named
# What an axis changes beside the setting that it is.
_SIZE, _EXAMPLES = ("examples a step",), ("training examples", "examples an epoch")
ALSO_CHANGES = {
    BATCH: _SIZE,
    SETUP: (*_SIZE, "threads a rank"),
    "gradient_accumulation_steps": _SIZE,
    "max_train_examples": _EXAMPLES,
    "threads": ("threads a rank",),
    "data_dir": ("data", *_EXAMPLES),
    "task_name": ("task", "data", "model", *_EXAMPLES),
    **dict.fromkeys(("model_name_or_path", "model_type", "config_name", "image_size"), ("model",)),
}
# A sweep's runs differ in their seeds, and early stopping and batches make their steps differ: the table tells.
ALWAYS = frozenset(("seed", "steps"))


def lead(entries: Sequence[SweepEntry], combinations: Sequence[SeedGroup]) -> str:
    """What was swept, and how many runs there are."""
    axes = [f"{axis} ({', '.join(words)})" for axis, words in axes_of(combinations).items()]
    seeds = len({entry.seed for entry in entries})
    counts = Counter(entry.outcome for entry in entries)
    ended = [
        f"{counts[outcome]} {words}"
        for outcome, words in (
            (FINISHED, "finished"),
            (FAILED, "failed"),
            (BROKEN_OFF, "not finished"),
            (LEFT_OUT, "left out"),
        )
        if counts[outcome]
    ]
    done = ", all finished" if counts[FINISHED] == len(entries) else f", of which {listed(ended)}"
    runs = number_of(len(entries), "run")
    return f"A sweep of {listed(axes)} with {number_of(seeds, 'seed')}: {runs}{done}. From their records alone."


def cautions(entries: Sequence[SweepEntry], combinations: Sequence[SeedGroup]) -> list[str]:
    """What to read before anything else: runs that are missing, and in what the others do not compare."""
    found = [
        f"{', '.join(f'{axis} {word}' for axis, word in entry.settings.items())}, seed {entry.seed}, "
        f"{'failed' if entry.outcome == FAILED else 'is not finished'}: {entry.said}"
        for entry in entries
        if entry.outcome in (FAILED, BROKEN_OFF)
    ]
    return found + unlike(combinations)


def unlike(combinations: Sequence[SeedGroup]) -> list[str]:
    """In what the runs were not the same work although the axes do not ask for it, nor by the same code on the same
    ground, and whether they shared it; a sentence each."""
    runs = [run for one in combinations for run in one.runs]
    summaries = [run.summary for run in runs]
    remarks = (
        disturbance_remark(summaries),
        impossible_remark([found for one in combinations for found in speed_ups(one, combinations).values()]),
        work_remark(summaries, _by_design(axes_of(combinations))),
        ground_remark(summaries),
        code_remark(summaries),
        _epochs_remark(runs),
        cut_remark(runs),
        one_class_remark(summaries),
        _parallel_remark([entry for one in combinations for entry in one.entries if entry.run]),
    )
    return [remark for remark in remarks if remark]


def left_out(entries: Sequence[SweepEntry]) -> list[str]:
    """Why there is no run of a combination that cannot run, a sentence each."""
    sentences = (
        f"{', '.join(f'{axis} {word}' for axis, word in entry.settings.items())} is left out: {entry.said}"
        for entry in entries
        if entry.outcome == LEFT_OUT
    )
    return list(dict.fromkeys(sentences))


def sentences(combinations: Sequence[SeedGroup]) -> list[str]:
    """The best, the fastest, the speed-up, and what the delay does, as far as the records show it."""
    if not any(one.runs for one in combinations):
        return ["No run has finished, so there is nothing to compare."]
    axes, metrics, seconds = varying(axes_of(combinations)), metric_measures(combinations), seconds_measure()
    found = [_best(combinations, axes, metrics[0])] if metrics else []
    found += [_fastest(combinations, axes, seconds), _speed_up(combinations)]
    found += _delay(combinations, seconds, metrics[0] if metrics else None)
    if all(len(one.runs) <= 1 for one in combinations) and len(combinations) > 1:
        found.append(CHANCE)
    return [*filter(None, found), *_early(combinations)]


def _ranked(combinations: Sequence[SeedGroup], measure: Measure) -> list[tuple[SeedGroup, Spread]]:
    """The best first."""
    known = [(one, spread) for one in combinations if (spread := measure.spread(one))]
    return sorted(known, key=lambda pair: pair[1].mean, reverse=measure.is_better_high)


def _with_range(measure: Measure, spread: Spread) -> str:
    if spread.seeds == 1:
        return measure.words(spread.mean)
    least, most = measure.words(spread.least).removesuffix(" s"), measure.words(spread.most)
    if spread.least == spread.most:
        return f"{most} (with each of {spread.seeds} seeds)"
    return f"{measure.words(spread.mean)} ({least} to {most} over {spread.seeds} seeds)"


def _best(combinations: Sequence[SeedGroup], axes: Sequence[str], measure: Measure) -> str:
    ranked = _ranked(combinations, measure)
    (best, most), (_, least) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        where = f" with {best.words(axes)}" if axes else ""
        return f"{measure.title} is {_with_range(measure, most)} after the last epoch{where}."
    if most.mean == least.mean:
        return f"{measure.title} is {measure.words(most.mean)} after the last epoch of all combinations."
    high, low = ("highest", "lowest") if measure.is_better_high else ("lowest", "highest")
    words = f"{measure.title} after the last epoch is {high} with {_tied(ranked, most, axes)}"
    words += f", {_with_range(measure, most)}, and {low} with {_tied(ranked, least, axes)}"
    words += f", {_with_range(measure, least)}"
    return f"{words}{_as_good([spread for _, spread in ranked])}."


def _tied(ranked: Sequence[tuple[SeedGroup, Spread]], spread: Spread, axes: Sequence[str]) -> str:
    """The combinations that come to the same."""
    names = [one.words(axes) for one, other in ranked if other == spread]
    return names[0] if len(names) == 1 else f"{len(names)} combinations alike ({', '.join(names[:MOST_TIED])})"


def _as_good(spreads: Sequence[Spread]) -> str:
    """How many of the others the seeds do not tell from the first."""
    if max(spread.seeds for spread in spreads) == 1:
        return ""
    near = sum(spread.overlaps(spreads[0]) for spread in spreads[1:])
    if near == len(spreads) - 1:
        return "; the ranges overlap, so these seeds show none to be the best"
    if near == 1:
        return "; the range of one other combination overlaps the best one's"
    return f"; the ranges of {near} other combinations overlap the best one's" if near else ""


def _fastest(combinations: Sequence[SeedGroup], axes: Sequence[str], measure: Measure) -> str:
    ranked = _ranked(combinations, measure)
    if not ranked:
        return "Which combination is the fastest is not known, for the machine was busy during all of them."
    (fast, few), (slow, many) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        where = f" with {fast.words(axes)}" if axes else ""
        return f"An epoch of training takes {_with_range(measure, few)}{where}."
    if few.mean == many.mean:
        return f"An epoch of training takes {measure.words(few.mean)} with all combinations."
    words = f"An epoch of training takes the fewest seconds with {fast.words(axes)}, {_with_range(measure, few)}, and "
    words += (
        f"the most with {slow.words(axes)}, {_with_range(measure, many)}: {plain(many.mean / few.mean)} times as many"
    )
    return f"{words}{_as_good([spread for _, spread in ranked])}."


def _speed_up(combinations: Sequence[SeedGroup]) -> str:
    measure = speed_up(combinations)
    found: dict[str, list[float]] = {}
    for one in combinations:
        if spread := measure.spread(one):
            found.setdefault(one.settings[SETUP], []).append(spread.mean)
    if not found:
        return ""
    places = [f"{_from_to(ratios)} times as fast with {setup}" for setup, ratios in found.items()]
    return f"Against {SETUP} {ALONE} with the same other settings, an epoch is {listed(places)}."


def _delay(combinations: Sequence[SeedGroup], seconds: Measure, metric: Measure | None) -> list[str]:
    """From the shortest delay to the longest, along each line."""
    chart = chart_of(combinations, DELAY, seconds)
    lines = [line for line in chart.lines if len(line.points) > 1] if chart else []
    if not lines:
        return []
    begin, *_, end = lines[0].points
    lines = [line for line in lines if (next(iter(line.points)), [*line.points][-1]) == (begin, end)]
    ratios = [last.mean / first.mean for first, last in (line.ends for line in lines)]
    words = f"From {DELAY} {begin} to {end} an epoch comes to {_from_to(ratios)} times the seconds"
    known = chart_of(combinations, DELAY, metric) if metric else None
    ends = [line.ends for line in known.lines if len(line.points) > 1] if known else []
    if metric and ends:
        changes = [last.mean - first.mean for first, last in ends]
        low, high = (f"{change:+.4f}" for change in (min(changes), max(changes)))
        words += f", and {metric.title} changes by {low if low == high else f'{low} to {high}'}"
        if all(first.overlaps(last) and first.seeds > 1 for first, last in ends):
            words += ", which is within the range of the seeds"
    return [f"{words}."]


def _early(combinations: Sequence[SeedGroup]) -> list[str]:
    runs = [run for one in combinations for run in one.runs]
    early, again = (
        sum(map(stopped_early, runs)),
        sum(len(run.summary.get("attempts", [])) > 1 for run in runs),
    )
    words = [f"{number_of(early, 'run')} stopped early"] if early else []
    words += [f"{number_of(again, 'run')} went on after an interruption"] if again else []
    return [f"{listed(words)}: the table says which."] if words else []


def _from_to(ratios: Sequence[float]) -> str:
    low, high = plain(min(ratios)), plain(max(ratios))
    return low if low == high else f"{low} to {high}"


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
        f"An epoch is from {min(sizes):,} to {max(sizes):,} examples long in these runs: their seconds do not compare."
    )


def _parallel_remark(finished: Sequence[SweepEntry]) -> str:
    """Said where runs were made side by side."""
    shared = [entry.parallel for entry in finished if entry.parallel > 1]
    if not shared:
        return ""
    who = "The runs" if len(shared) == len(finished) else f"{len(shared)} of {len(finished)} runs"
    return f"{who} were made up to {max(shared)} at a time: their seconds are not those of a run alone."
