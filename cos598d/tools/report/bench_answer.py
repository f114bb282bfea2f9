"""What benches come to, in sentences and a panel of the page's first picture."""

from collections.abc import Mapping, Sequence

from cos598d.records.conventions import DDP, FLOOR, FLOORS
from cos598d.terminal.words import listed
from cos598d.tools.report.bench_table import NORM_TOLERANCE
from cos598d.tools.report.benches import Bench, CandidateSeconds
from cos598d.tools.report.disturbed import DISTURBED
from cos598d.tools.report.figures.answer import LabelledBar, Panel, lanes_of, split_at_floor
from cos598d.tools.report.numbers import names_of, percent, plain, seconds
from cos598d.tools.report.spread import Interval

MOST_BENCHES = 3  # with a sentence each


def sentences(benches: Sequence[Bench], most: int) -> list[str]:
    """At most so many, at least one: who is fastest first."""
    found = [bench for bench in benches if _ranked(bench)]
    if not found:
        return ["No bench compared two candidates." if len(benches) > 1 else "The bench compared no candidates."]
    if len(found) > min(MOST_BENCHES, most):
        return [_who_in_all(found)]
    quiet = [bench for bench in found if not bench.is_disturbed]
    sent = _sent(found[0])
    travels = [f"{travelled(sent)}."] if all(_sent(bench) == sent for bench in found) else []
    rest = [*([_where(quiet)] if quiet else []), *travels, *_averages(found)]
    return [*map(_who, found), *rest][:most]


def travelled(most: Mapping[str, float]) -> str:
    """What the rank that sends most sends, by name: all alike, or the least and the most; without a full stop.

    Those are left out of which the ledger does not know it.
    """
    if not most:
        return "What travels is not in the ledger: only the kernel knows"
    sizes = {name: f"{size / 1e6:,.3f} MB" for name, size in most.items()}
    words = "By the formulas, the rank that sends most sends"
    if len(set(sizes.values())) == 1:
        return f"{words} {next(iter(sizes.values()))} an iteration" + (", whatever the sync" if len(sizes) > 1 else "")
    # Of names with the same bytes DDP's, which all know.
    ranked = sorted(most, key=lambda name: (most[name], name == DDP))
    named = list(dict.fromkeys([ranked[0], *([DDP] if DDP in most else []), ranked[-1]]))
    return f"{words} {listed([f'{sizes[name]} with {name}' for name in named])} an iteration"


def panel(bench: Bench, most: int) -> Panel:
    """At most so many candidates and the floor."""
    floor, ranked = bench.candidate(FLOOR), _ranked(bench)
    fastest = ranked[0].seconds if ranked else None
    lanes = []
    for label in [*lanes_of([one.label for one in ranked], most), *([FLOOR] if floor else [])]:
        one = bench.candidate(label)
        if one is None:
            continue
        words = "the floor" if one is floor or not fastest else f"{plain(one.seconds / fastest)} x"
        words = DISTURBED if bench.is_disturbed else words
        words += f", {one.bytes_sent / 1e6:,.1f} MB" if one.bytes_sent else ""
        parts = split_at_floor(one.seconds, floor.seconds if floor else None)
        lanes.append(LabelledBar(label, parts, one.quartiles, words))
    return Panel(bench.name, lanes)


def _ranked(bench: Bench) -> list[CandidateSeconds]:
    """From the fastest to the slowest, without the floor and what does other work."""
    found = [one for one in bench.candidates if one.label not in FLOORS and one.is_same_work]
    return sorted(found, key=lambda one: one.seconds)


def _sent(bench: Bench) -> dict[str, float]:
    return {one.label: one.bytes_sent for one in _ranked(bench) if one.bytes_sent is not None}


def _who(bench: Bench) -> str:
    first, *others = _ranked(bench)
    if bench.is_disturbed and others:
        return f"Which candidate is the fastest in {bench.name} is not known, for the machine was busy."
    if not others:
        return f"In {bench.name}, {first.label} takes {seconds(first.seconds)} an iteration."
    near = [one for one in others if not _are_apart(one, first)]
    if not near:
        words = f"In {bench.name}, {first.label} is the fastest of {len(others) + 1} candidates"
        words += f" with {seconds(first.seconds)} an iteration"
    else:
        names = names_of([first.label, *(one.label for one in near)], "candidate")
        words = f"In {bench.name}, {names} take {plain(first.seconds)} to {seconds(near[-1].seconds)} an iteration, "
        words += "and its rounds do not show which of them is the fastest"
    if first.ratio is not None:
        whose = f"; {first.label} takes " if near else ", "
        words += f"{whose}{plain(first.ratio)} times {DDP}'s{_interval(first)}"
    last = others[-1]
    if last not in near:
        words += (
            f"; {last.label}, the slowest, takes {plain(last.seconds / first.seconds)} times as long as {first.label}"
        )
    return f"{words}."


def _who_in_all(benches: Sequence[Bench]) -> str:
    """One sentence for many: each one's fastest, as far as its rounds show one."""
    quiet = [bench for bench in benches if not bench.is_disturbed]
    if not quiet:
        return "Which candidates are the fastest is not known, for the machine was busy during all benches."
    found = []
    for bench in quiet:
        first, *others = _ranked(bench)
        near = [one for one in others if not _are_apart(one, first)]
        words = f"{first.label} in {bench.name} ({seconds(first.seconds)})"
        found.append(
            words if not near else f"{words[:-1]}, with {names_of([one.label for one in near], 'other')} near it)"
        )
    return f"By the medians the fastest are {listed(found)}."


def _interval(one: CandidateSeconds) -> str:
    if one.interval is None:
        return " (by the median: too few rounds for an interval)"
    return f" (95 % {plain(one.interval[0])} to {plain(one.interval[1])})"


def _are_apart(one: CandidateSeconds, other: CandidateSeconds) -> bool:
    """Whether the intervals of their ratios to DDP, or where there are none their quartiles, leave a gap."""
    first, second = _ratios(one), _ratios(other)
    return first is not None and second is not None and (first[1] < second[0] or second[1] < first[0])


def _ratios(one: CandidateSeconds) -> Interval | None:
    return (1.0, 1.0) if one.label == DDP else one.interval


def _where(benches: Sequence[Bench]) -> str:
    """What is exposed of the fastest's and the slowest's seconds, bench by bench."""
    found = []
    for bench in benches:
        ranked = _ranked(bench)
        shares = [
            f"{percent(max(0.0, one.exposed / one.seconds))} of {one.label}'s"
            for one in (*ranked[:1], *ranked[1:][-1:])
            if one.exposed is not None
        ]
        if shares:
            found.append(f"{listed(shares)} seconds{f' in {bench.name}' if len(benches) > 1 else ''}")
    if not found:
        return f"What of the seconds is exposed communication is not known, for {FLOOR} was not measured."
    return f"By the medians, exposed communication is {'; '.join(found)}; the rest is the floor."


def _averages(benches: Sequence[Bench]) -> list[str]:
    """Whether all candidates agree on the gradient; the cautions name those that do not."""
    if not all(bench.has_norms for bench in benches):
        return []
    if not all(one.is_same_work for bench in benches for one in bench.candidates):
        return []
    return [f"The norm of every averaged gradient is {DDP}'s to within {percent(NORM_TOLERANCE)}."]
