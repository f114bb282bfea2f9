"""The page's part on benches: candidates measured side by side, and benches that differ in one thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import DDP, FLOOR, FLOORS, PRECISIONS
from cos598d.records.facts import OF_BENCHES, collect
from cos598d.records.run import read_record
from cos598d.terminal.colours import DARK_GREY, GREY, SKY, VERMILLION
from cos598d.terminal.printable import printable
from cos598d.terminal.words import listed
from cos598d.tools.report.bench_table import disturbance, other_averages, page_tables, remarks, seconds_of
from cos598d.tools.report.blocks import Block, Section, Table, figures
from cos598d.tools.report.numbers import plain, plain_or_none, words_of
from cos598d.tools.report.scaling import UNITS, alike_but_for, differences, in_series, value_in
from cos598d.tools.report.svg import draw, legend_below, line_style, shortened, swept_axis
from cos598d.tools.report.traffic_table import is_in_ledger

SWEPT = ("examples on each rank", "rate", "delay")
# Told apart by their place too, the floor first; hatches would make a browser's PDF large.
WITHOUT_SYNC, EXPOSED, WHOLE = "without any sync", "exposed communication", "total (sync none was not measured)"
SPLIT_LOOKS = {WITHOUT_SYNC: SKY, EXPOSED: VERMILLION, WHOLE: GREY}
# Ticks of a ratio: where all are near 1, and where they are not.
NEAR, FAR = (
    (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2),
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50),
)


@dataclass(frozen=True)
class CandidateSeconds:
    """A candidate's seconds: the median and its quartiles, those not hidden, and the ratio to DDP with its interval."""

    label: str
    seconds: float
    quartiles: tuple[float, float]
    exposed: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    bytes_sent: float | None  # by the rank that sends most; None where a library tells nobody
    is_same_work: bool  # its gradient is DDP's average, as far as the record can tell


@dataclass(frozen=True)
class Bench:
    """What the page needs of one bench. `tables`: a note and its rows, in the order of the page."""

    name: str
    facts: dict[str, Any]
    environment: dict[str, Any]
    candidates: tuple[CandidateSeconds, ...]
    tables: tuple[tuple[str, list[list[str]]], ...]
    remarks: tuple[str, ...]
    is_disturbed: bool  # by other programs on its machine
    has_norms: bool  # of the averaged gradients, so that they could be compared with DDP's

    def candidate(self, label: str) -> CandidateSeconds | None:
        """The candidate of this label, if it was measured."""
        return next((one for one in self.candidates if one.label == label), None)

    @property
    def ranked(self) -> list[CandidateSeconds]:
        """From the fastest to the slowest, without the floor and what does other work."""
        found = [one for one in self.candidates if one.label not in FLOORS and one.is_same_work]
        return sorted(found, key=lambda one: one.seconds)


def load_bench(path: Path, name: str) -> Bench:
    """The bench in a folder or its file. Raises UserError naming the file that cannot be read."""
    file, found = read_record(path)
    return bench_of(found, name, file)


def bench_of(found: dict[str, Any], name: str, file: Path) -> Bench:
    """The bench of a record that is, or is to be, in `file`. Raises UserError naming it if something is missing."""
    try:
        environment = found["environment"]
        # Before there were others, a bench computed in fp32.
        setting = {"precision": "fp32"} | found["setting"] | {"seconds_of": seconds_of(found)}
        places = {"setting": setting, "network": environment.get("network") or {}, "environment": environment}
        return Bench(
            name,
            collect(OF_BENCHES, places),
            environment,
            tuple(_candidate(candidate, found) for candidate in found["candidates"]),
            tuple(page_tables(found)),
            tuple(remarks(found)),
            bool(disturbance(found)),
            other_averages(found) is not None,
        )
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__} {error}). Measure again.") from None


def _candidate(candidate: dict[str, Any], found: dict[str, Any]) -> CandidateSeconds:
    label = candidate["label"]
    summary, labels = found["summary"][label], {candidate["label"] for candidate in found["candidates"]}
    for figure, reference in (("seconds_exposed", FLOOR), ("ratio_to_ddp", DDP)):
        if (summary[figure] is None) == (reference in labels):
            raise ValueError(f"{label} has no {figure}, or {reference} was not measured")
    ratio = (None if label == DDP else summary["ratio_to_ddp"]) or {"median": None, "interval_95": None}
    interval = ratio["interval_95"]
    if ratio["median"] is not None and not ratio["median"] > 0:
        raise ValueError(f"{label} has a ratio of {ratio['median']}")
    low, high = summary["seconds_quartiles"]
    return CandidateSeconds(
        printable(label),
        summary["seconds_median"],
        (low, high),
        summary["seconds_exposed"],
        ratio["median"],
        None if interval is None else (interval[0], interval[1]),
        max(found["traffic"][label]["bytes_sent"]) if is_in_ledger(candidate) else None,
        label not in (other_averages(found) or ()),
    )


def bench_sections(benches: Sequence[Bench], are_drawn: bool = False) -> list[Section]:
    """What each bench found, side by side; and of those whose machine was quiet, what a setting changes.

    Where all candidates `are_drawn` above, they have no figure here.
    """
    quiet = [bench for bench in benches if not bench.is_disturbed]
    sections = [Section("Side by side", _side_by_side(benches, are_drawn))]
    series = in_series([bench for bench in quiet if bench.candidate(DDP)], SWEPT, frozenset(("rounds",)))
    for word, found in series.items():
        name = f"bench-{word.partition(' ')[0]}"
        ends = [f"{one[0].name} ({words_of(one[0].facts[word])}) to {one[-1].name}" for one in found]
        caption = [f"Ratios within rounds, by the medians: from {listed(ends)}, which differ in nothing else."]
        blocks = figures((name, _sweep_figure(word, found, name), caption))
        sections.append(Section(f"Side by side: {word}", blocks))
    tables = []
    for group in alike_but_for(quiet, frozenset(("precision", "rounds"))):
        ranked = [bench for one in PRECISIONS for bench in group if bench.facts["precision"] == one]
        others = [bench for bench in ranked[1:] if bench.facts["precision"] != ranked[0].facts["precision"]]
        tables += [_precisions(ranked[0], bench) for bench in others]
    return [*sections, Section("Side by side: precision", tables)]


def _side_by_side(benches: Sequence[Bench], are_drawn: bool) -> list[Block]:
    """The settings, the figure of all, and what each bench found."""
    if not benches:
        return []
    # Ranks stand beside whatever differs; a bench alone differs in nothing.
    different = list(dict.fromkeys(["ranks", *differences(benches)])) if len(benches) > 1 else []
    alike = {word: fact for word, fact in benches[0].facts.items() if word not in different and fact is not None}
    found: list[Block] = []
    if different:
        rows = [[bench.name, *(words_of(bench.facts[word]) for word in different)] for bench in benches]
        found.append(Table("The benches and their differences.", [["bench", *different], *rows]))
    common = [["setting", "value"], *([word, words_of(fact)] for word, fact in alike.items())]
    found.append(Table("Settings that all benches share." if different else "The bench's setting.", common))
    if are_drawn:
        found += _not_told_apart(benches)
    else:
        what = f"Slowest first, with the quartiles over the rounds; the number is the ratio to {DDP}."
        found += figures(("ladder", _ladder_figure(benches), [what, *_not_told_apart(benches)]))
    for bench in benches:
        name = f"{bench.name}. " if len(benches) > 1 else ""
        found += [Table(f"{name}{note}", rows) for note, rows in bench.tables]
    return found


def _not_told_apart(benches: Sequence[Bench]) -> list[str]:
    """Which candidates the rounds do not tell from DDP, a sentence for each bench of a quiet machine."""
    sentences = []
    for bench in benches:
        several = [one for one in bench.candidates if one.label not in (*FLOORS, DDP) and one.ratio is not None]
        if bench.is_disturbed:
            continue  # a warning says so
        if several and not any(one.interval for one in several):
            sentences.append(f"{bench.name}: an interval needs at least 6 rounds, so ratios near 1 may be chance.")
        elif same := [one.label for one in several if one.interval and one.interval[0] <= 1 <= one.interval[1]]:
            words = f"{bench.name}: the rounds do not tell {listed(same)} from {DDP}"
            sentences.append(f"{words} (the 95 % interval contains 1).")
    return sentences


def _precisions(before: Bench, after: Bench) -> Table:
    """Seconds and ratios to DDP of what both measured, the fastest in `after` first."""
    words = [bench.facts["precision"] for bench in (before, after)]
    head = ["sync", *(f"{word} s" for word in words), "times"]
    rows = [head + [f"ratio to {DDP} in {word}" for word in words]]
    for one in sorted(after.candidates, key=lambda each: each.seconds):
        other = before.candidate(one.label)
        if other is not None:
            cells = [plain(other.seconds), plain(one.seconds), plain(one.seconds / other.seconds)]
            rows.append([one.label, *cells, plain_or_none(other.ratio), plain_or_none(one.ratio)])
    note = f"{listed([before.name, after.name])}, which differ only in precision: median seconds in "
    note += f"{words[0]} and in {words[1]}, and how many times the first the second are. Each ratio to {DDP} is to "
    return Table(f"{note}{DDP} in the same precision.", rows)


def _ladder_figure(benches: Sequence[Bench]) -> str | None:
    """A panel for each bench, slowest first: the floor's seconds, then what is exposed, the quartiles, the ratio."""
    benches = [bench for bench in benches if bench.candidates]
    if not benches:
        return None
    counts = [len(bench.candidates) for bench in benches]

    def paint(figure):
        from matplotlib.patches import Patch

        panels = figure.subplots(len(benches), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
        for axes, bench in zip(panels[:, 0], benches, strict=True):
            _paint_bench(axes, bench)
        panels[-1, 0].set_xlabel("seconds per iteration; times DDP's at the end")
        has_floor = {bench.candidate(FLOOR) is not None for bench in benches}
        words = [word for word in SPLIT_LOOKS if (word != WHOLE) in has_floor]
        legend_below(figure, [Patch(facecolor=SPLIT_LOOKS[word]) for word in words], words)

    label = f"seconds per iteration of every sync of {listed([bench.name for bench in benches])}"
    return draw("ladder", label, sum(40 + 17 * count for count in counts) + 20, paint)


def _paint_bench(axes, bench: Bench) -> None:
    ranked = sorted(bench.candidates, key=lambda one: -one.seconds)
    floor = bench.candidate(FLOOR)
    longest = max(max(one.quartiles) for one in ranked)
    for place, one in enumerate(ranked):
        split = min(one.seconds, floor.seconds) if floor else one.seconds
        axes.barh(place, split, 0.66, color=SPLIT_LOOKS[WITHOUT_SYNC if floor else WHOLE])
        axes.barh(place, one.seconds - split, 0.66, split, color=SPLIT_LOOKS[EXPOSED])
        axes.plot(one.quartiles, [place, place], "-", color="black", linewidth=1)
        if one.ratio is not None:
            at = max(one.seconds, *one.quartiles) + 0.01 * longest
            axes.text(at, place, f"{one.ratio:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(ranked)), [shortened(one.label, 18) for one in ranked])
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * longest)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title(shortened(bench.name), loc="left")


def _sweep_figure(word: str, series: Sequence[Sequence[Bench]], name: str) -> str | None:
    """Each candidate's ratio to DDP against the setting `word`; None where no series has a candidate in common."""
    lines = []
    for benches in series:
        slowest_first = sorted(benches[0].candidates, key=lambda one: -one.seconds)
        labels = [one.label for one in slowest_first if one.label not in (*FLOORS, DDP)]
        for label in labels:
            found = [bench.candidate(label) for bench in benches]
            if None not in found:
                values = [value_in(bench, word) for bench in benches]
                words = f"{label}, {benches[0].name} on" if len(series) > 1 else label
                lines.append((words, values, [one.ratio for one in found if one]))
    if not lines:
        return None

    def paint(figure):
        axes = figure.subplots()
        handles = [axes.axhline(1, color=DARK_GREY, linestyle=":")]
        for place, (_, values, ratios) in enumerate(lines):
            handles += axes.plot(values, ratios, **line_style(place))
        swept_axis(axes, sorted({value for _, values, _ in lines for value in values}))
        axes.set_xlabel(UNITS[word][0])
        axes.set_title("times DDP's seconds per iteration", loc="left")
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        ticks = [tick for tick in (NEAR if high < 4 * low else FAR) if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        legend_below(figure, handles, [DDP, *(words for words, *_ in lines)])

    return draw(name, f"ratio to DDP against {word}", 260, paint)
