"""What records share, in what they differ, and the series they form: speed-up by ranks, seconds by setting."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from cos598d.errors import WARNING
from cos598d.records.conventions import FLOOR
from cos598d.records.quantities import quantity
from cos598d.terminal.colours import DARK_GREY
from cos598d.terminal.words import listed
from cos598d.tools.report.blocks import Block, Figure, Section, Table
from cos598d.tools.report.disturbed import DISTURBED, impossible_remark, most_speed_up, speed_up_words
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.references import are_apart, is_disturbed, same_setting
from cos598d.tools.report.svg import draw, legend_below, line_style, swept_axis

# May differ between runs of different numbers of ranks: a single rank has other threads, and no network.
OF_THE_RANKS = frozenset(("ranks", "threads per rank", "ranks per machine", "rate", "delay", "offload"))
# The unit of an axis of a swept setting, and the factor to it.
UNITS = {
    "examples per step": ("examples per step", 1),
    "examples on each rank": ("examples on each rank", 1),
    "rate": ("Mbit/s", 1e6),
    "delay": ("delay in ms", 1e-3),
}

AnyRecord = TypeVar("AnyRecord", bound="HasSetting")


class HasSetting(Protocol):
    """The part of a run or bench that has its setting."""

    @property
    def facts(self) -> dict[str, Any]:
        """Its setting, by the page's names."""


def differences(records: Sequence[HasSetting]) -> list[str]:
    """The names of the settings in which the records differ."""
    found = [record.facts for record in records]
    return [word for word in found[0] if any(one[word] != found[0][word] for one in found)]


def alike_but_for(records: Sequence[AnyRecord], free: frozenset[str]) -> list[list[AnyRecord]]:
    """The records in groups that differ only in the `free` settings."""
    import pandas

    if not records:
        return []
    facts = [{word: str(value) for word, value in record.facts.items() if word not in free} for record in records]
    groups = pandas.DataFrame(facts).groupby(list(facts[0]), sort=False)
    return [[records[place] for place in group.index] for _, group in groups]


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with a mean, in groups that differ only in the sync and its own options."""
    free = frozenset(("sync", "bucket MB", "compression", "bucket views", "steps between averages"))
    found = []
    for group in alike_but_for([run for run in runs if run.seconds["mean"]], free):
        # Runs of different lengths are different work.
        plans = [run.summary["step"].get("planned") for run in group]
        found += [[run for run, own in zip(group, plans) if own == plan] for plan in dict.fromkeys(plans)]
    return found


def in_series(
    records: Sequence[AnyRecord], words: Sequence[str], free: frozenset[str] = frozenset()
) -> dict[str, list[list[AnyRecord]]]:
    """For each setting in `words`, the series of records that differ only in it and in the `free` ones, ordered by its
    value; each of at least two values."""
    found: dict[str, list[list[AnyRecord]]] = {}
    for word in words:
        for group in alike_but_for([one for one in records if quantity(one.facts[word]) is not None], free | {word}):
            by_value = {value_in(record, word): record for record in reversed(group)}
            if len(by_value) > 1:
                found.setdefault(word, []).append([by_value[value] for value in sorted(by_value)])
    return found


def scaling(runs: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """Each sync's runs on several ranks, by their number, with the run of one rank as the baseline."""
    found: dict[str, tuple[Run, list[Run]]] = {}
    for group in alike_but_for([run for run in runs if run.seconds["mean"]], OF_THE_RANKS | {"sync"}):
        alone = [run for run in group if run.summary["world_size"] == 1]
        for run in group if alone else []:
            if run.summary["world_size"] > 1 and run.summary["sync"] != FLOOR:
                # Of several, the one with the same length.
                base = next((one for one in alone if same_setting(run.summary, one.summary)), alone[0])
                found.setdefault(base.name, (base, []))[1].append(run)
    # Runs over other links, or with ranks placed otherwise on the hosts, are separate series.
    ranks = frozenset(("ranks", "threads per rank", "ranks per machine"))
    return [
        (base, sorted(series, key=lambda run: run.summary["world_size"]))
        for base, of_base in found.values()
        for series in alike_but_for(of_base, ranks)
    ]


def value_in(record: HasSetting, word: str) -> float:
    """The setting of a record of a sweep, in its axis' unit."""
    return (quantity(record.facts[word]) or 0.0) / UNITS[word][1]


SWEPT = ("examples per step", "rate", "delay")
SCALING_NOTE = (
    "Speed-up: the one-rank run's mean seconds divided by this run's, with the same global batch, without the first "
    "iterations. Efficiency: speed-up divided by ranks."
)
ON_ONE_MACHINE = (
    "Ranks on one machine (emulated hosts too) share its cores: this is not the speed-up of more machines, and "
    "where one rank already uses all cores, more ranks can hardly be faster."
)


def scaling_blocks(runs: Sequence[Run]) -> list[Block]:
    """Speed-up over one rank as a table and, of those that were not disturbed, as a figure."""
    rows, drawn = [["run", "against", "sync", "ranks", "s/it", "speed-up", "efficiency"]], []
    found = []
    for base, others in scaling(runs):
        quiet = []
        for run in others:
            ranks, ratio = run.summary["world_size"], base.seconds["mean"] / run.seconds["mean"]
            words = speed_up_words(ratio, run.summary, base.summary, run.environment)
            share = "-" if words == DISTURBED else f"{ratio / ranks:.0%}"
            what = [run.name, base.name, run.summary["sync"], str(ranks), plain(run.seconds["mean"])]
            rows.append([*what, words, share])
            quiet += [run] if words != DISTURBED else []
            if not is_disturbed(base.summary) and not is_disturbed(run.summary):
                found.append((run.name, base.name, ratio, most_speed_up(run.summary, run.environment)))
        drawn += [(base, quiet)] if quiet else []
    if len(rows) == 1:
        return []
    blocks: list[Block] = [Table(SCALING_NOTE, rows)]
    if odd := impossible_remark(found):
        blocks.append(f"{WARNING}{odd}")
    return [*blocks, Figure("scaling", _scaling_figure(drawn), speed_up_remarks(runs))] if drawn else blocks


def speed_up_remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences on what a speed-up over one rank does not show, for runs that were not disturbed."""
    pairs = [
        (base, run)
        for base, series in scaling(runs)
        for run in series
        if not is_disturbed(base.summary) and not is_disturbed(run.summary)
    ]
    sentences = []
    near = [run.name for base, run in pairs if not are_apart(base.summary, run.summary)]
    if near:
        sentences.append(f"Not shown to differ from one rank, since the spread is as large: {listed(near)}.")
    if any(base.seconds["mean"] / run.seconds["mean"] > run.summary["world_size"] for base, run in pairs):
        sentences.append("More ranks do not explain a speed-up of more than n times with n ranks.")
    if len({str(run.environment.get("threads_per_rank")) for pair in pairs for run in pair}) > 1:
        sentences.append("The ranks have not all the same number of threads.")
    hosts = [run.environment.get("ranks_on_host") for _, run in pairs]
    if any(isinstance(ranks, int) and ranks > 1 for ranks in hosts):
        sentences.append(ON_ONE_MACHINE)
    return sentences


def sweep_sections(runs: Sequence[Run]) -> list[Section]:
    """For each of SWEPT the series of runs that differ in it alone; runs that were disturbed are left out."""
    counted = [
        run for run in runs if run.seconds["mean"] and run.summary["world_size"] > 1 and not is_disturbed(run.summary)
    ]
    caption = ["Bars: the mean's 95 %. Points whose bars overlap may not differ."]
    found = []
    for word, series in in_series(counted, SWEPT).items():
        name = f"sweep-{word.partition(' ')[0]}"
        found.append(Section(f"Sweep: {word}", [Figure(name, _sweep_figure(word, series, name), caption)]))
    return found


def _series_name(series: Sequence[Run], all_series: Sequence[Sequence[Run]]) -> str:
    """The sync, and what else tells this series from the others of its figure."""
    own, found = series[0].facts, [one[0].facts for one in all_series]
    varies = set(differences(series)) | {"sync", "ranks", "threads per rank", "ranks per machine"}
    words = [word for word in own if word not in varies and any(one[word] != own[word] for one in found)]
    return ", ".join([own["sync"], *(f"{word} {own[word]}" for word in words if own[word] is not None)])


def _scaling_figure(series: Sequence[tuple[Run, list[Run]]]) -> str:
    """Speed-up against the number of ranks, with the line of as many times as fast as there are ranks."""
    every = [runs for _, runs in series]
    ticks = sorted({1, *(run.summary["world_size"] for runs in every for run in runs)})

    def paint(figure):
        axes = figure.subplots()
        handles = axes.plot([1, ticks[-1]], [1, ticks[-1]], color=DARK_GREY, linestyle=":")
        for place, (base, runs) in enumerate(series):
            ranks = [1, *(run.summary["world_size"] for run in runs)]
            ratios = [1, *(base.seconds["mean"] / run.seconds["mean"] for run in runs)]
            handles += axes.plot(ranks, ratios, **line_style(place))
        axes.set_xlabel("ranks")
        axes.set_title("speed-up over one rank", loc="left")
        axes.set_xticks(ticks)
        axes.set_ylim(bottom=0)
        legend_below(figure, handles, ["n times with n ranks", *(_series_name(runs, every) for runs in every)])

    return draw("scaling", "speed-up against the number of ranks", 220, paint)


def _sweep_figure(word: str, series: Sequence[list[Run]], name: str) -> str:
    """Seconds per iteration, with their 95 % intervals, against the setting `word`, a line for each series."""

    def paint(figure):
        axes = figure.subplots()
        handles = []
        for place, runs in enumerate(series):
            means = [run.seconds["mean"] for run in runs]
            below = [run.seconds["mean"] - (run.seconds["interval_95"] or [run.seconds["mean"]])[0] for run in runs]
            values = [value_in(run, word) for run in runs]
            handles.append(axes.errorbar(values, means, yerr=below, capsize=3, **line_style(place)))
        swept_axis(axes, sorted({value_in(run, word) for runs in series for run in runs}))
        axes.set_xlabel(UNITS[word][0])
        axes.set_title("seconds per iteration", loc="left")
        axes.set_ylim(bottom=0)
        legend_below(figure, handles, [_series_name(runs, series) for runs in series])

    label = f"seconds per iteration against {word} of {listed([runs[0].summary['sync'] for runs in series])}"
    return draw(name, label, 220, paint)
