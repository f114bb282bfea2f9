"""The benches' part of the page: what each measured, and what happens to the ratios as a setting changes."""

from collections.abc import Sequence

from cos598d.records.conventions import DDP, FLOOR, FLOORS
from cos598d.terminal.words import listed
from cos598d.tools.report.benches import Bench, CandidateSeconds, common_labels, sweeps
from cos598d.tools.report.blocks import Figure, Table, figures
from cos598d.tools.report.figures.ladder import ladder_figure, sweep_figure
from cos598d.tools.report.numbers import percent, plain, plain_or_none, seconds, words_of
from cos598d.tools.report.settings import differences


def blocks(benches: Sequence[Bench]) -> list[Table | Figure | str]:
    """The settings, the figure of all, and what each bench found."""
    if not benches:
        return []
    # Ranks stand beside whatever differs; a bench alone differs in nothing.
    different = list(dict.fromkeys(["ranks", *differences(benches)])) if len(benches) > 1 else []
    alike = {word: fact for word, fact in benches[0].facts.items() if word not in different and fact is not None}
    found: list[Table | Figure | str] = []
    if different:
        rows = [[bench.name, *(words_of(bench.facts[word]) for word in different)] for bench in benches]
        found.append(Table("The benches, and what they differ in.", [["bench", *different], *rows]))
    common = [["setting", "value"], *([word, words_of(fact)] for word, fact in alike.items())]
    found.append(Table("What they have in common." if different else "The bench's setting.", common))
    found += figures(("ladder", ladder_figure(benches), [bench_caption(one) for one in benches if one.candidates]))
    for bench in benches:
        found += [Table(f"{bench.name}. {note}", rows) for note, rows in bench.tables]
        found += [f"{bench.name}: {remark}." for remark in bench.remarks]
    return found


def sweep_blocks(benches: Sequence[Bench]) -> dict[str, list[Figure]]:
    """For each setting in which benches differ alone: the figure of their ratios to DDP."""
    found = {}
    for word, series in sweeps(benches).items():
        name = f"bench-{word.partition(' ')[0]}"
        caption = [line for one in series for line in sweep_caption(word, one)]
        found[word] = figures((name, sweep_figure(word, series, name), caption))
    return found


def bench_caption(bench: Bench) -> str:
    """From the slowest to the fastest, against DDP, and which of them the rounds do not tell from it."""
    if bench.is_disturbed:
        return f"{bench.name}: the machine was busy, so the table has the seconds, and nothing is made of them."
    ranked = sorted((one for one in bench.candidates if one.label not in FLOORS), key=lambda one: -one.seconds)
    words = f"{bench.name}, slowest first: {', '.join(map(_with_ratio, ranked))}." if ranked else f"{bench.name}:"
    ddp, floor = bench.candidate(DDP), bench.candidate(FLOOR)
    if ddp and len(ranked) > 1:
        intervals = [one for one in ranked if one.interval]
        same = [one.label for one in intervals if one.interval and one.interval[0] <= 1 <= one.interval[1]]
        if not intervals:
            words += " Too few rounds for an interval: ratios near 1 may be chance."
        elif same:
            verb, them = ("s of {} hold", "them") if len(same) > 1 else (" of {} holds", "it")
            words += f" The 95 % interval{verb.format(listed(same))} 1: these rounds do not tell {them} from {DDP}."
    if floor:
        words += f" Without any sync it takes {seconds(floor.seconds)}"
        shares = [
            f"{percent(max(0.0, one.exposed / one.seconds))} of {one.label}'s"
            for one in _ends(ranked)
            if one.exposed is not None
        ]
        words += f"; exposed communication is {listed(shares)} seconds." if shares else "."
    return words


def sweep_caption(word: str, series: Sequence[Bench]) -> list[str]:
    """Each candidate's ratio to DDP, from the smallest value of the setting to the largest, and DDP's own seconds."""
    first, last = series[0], series[-1]
    ends = f"from {first.name} ({word} {words_of(first.facts[word])}) to {last.name} ({words_of(last.facts[word])})"
    sentences = [f"{DDP}: {ends}, {_change(*(seconds(bench.measured(DDP).seconds) for bench in (first, last)))}."]
    changes = [
        f"{label} {_change(*(plain_or_none(bench.measured(label).ratio) for bench in (first, last)))}"
        for label in common_labels(series)
    ]
    return [*sentences, f"Ratios to {DDP}, {ends}: {', '.join(changes)}."] if changes else sentences


def _with_ratio(one: CandidateSeconds) -> str:
    return f"{one.label} {seconds(one.seconds)}" + (f" ({plain(one.ratio)} x {DDP})" if one.ratio is not None else "")


def _ends(ranked: Sequence[CandidateSeconds]) -> list[CandidateSeconds]:
    """The slowest and the fastest."""
    return list(ranked[:1]) + list(ranked[1:][-1:])


def _change(before: str, after: str) -> str:
    return f"{before} becomes {after}" if before != after else f"stays {after}"
