"""The head of a page: the fastest and its spread, exposed communication, whether losses agree, and cautions."""

from collections.abc import Sequence
from dataclasses import replace

from cos598d.records.conventions import DDP, FLOOR
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.answer_figure import answer_figure, ranked_runs
from cos598d.tools.report.bench_table import NORM_TOLERANCE
from cos598d.tools.report.benches import Bench, CandidateSeconds
from cos598d.tools.report.blocks import Headline, headline_of
from cos598d.tools.report.learning import losses_apart, of_one_setting
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import names_of, percent, plain, seconds
from cos598d.tools.report.references import (
    are_apart,
    exposed_seconds,
    in_groups,
    is_disturbed,
    is_floor,
    members,
    same_setting,
)
from cos598d.tools.report.scaling import comparable, scaling
from cos598d.tools.report.table import remarks_on, warm_up_words
from cos598d.tools.report.traffic_table import assumed_bytes

MOST_NAMES, MOST_BENCHES = 16, 3


def answer_of(runs: Sequence[Run], benches: Sequence[Bench]) -> Headline:
    """What these records support: cautions, sentences and a picture."""
    summaries = [run.summary for run in runs]
    cautions = remarks_on(summaries)
    cautions += [f"{bench.name}: {remark}." for bench in benches for remark in bench.remarks]
    cautions += [assumed] if (assumed := assumed_bytes(summaries, before="")) else []
    group = main_group(runs)
    of_runs, of_benches = _of_runs(runs, group) if runs else [], []
    if benches:
        of_benches = _of_benches(benches, is_only=not runs and len(benches) == 1)
    first, rest = [*of_runs[:1], *of_benches[:1]], [*of_runs[1:], *of_benches[1:]]
    return headline_of(cautions, [*first, *rest], answer_figure(group, benches), least=len(first))


def main_group(runs: Sequence[Run]) -> list[Run]:
    """Of the groups of runs that differ in nothing but their sync the largest, repeats of a run together as one; empty
    where no run counted an iteration. Of several as large, the one with the most iterations."""

    def size(group: Sequence[Run]) -> tuple[int, int]:
        return sum(not is_floor(run.summary) for run in group), min(run.summary["iterations"] for run in group)

    return max(comparable(_together(runs)), key=size, default=[])


def _together(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of the same settings as one, which has the rows of the first."""
    by_name = {run.name: run for run in runs}
    found = in_groups([run.summary for run in runs])
    # Without the number of repeats, where the rest is a name of its own.
    short = [one["run"].rpartition(", ")[0] if "repeats" in one else one["run"] for one in found]
    names = short if len(set(short)) == len(short) else [one["run"] for one in found]
    return [
        replace(by_name[members(one)[0]["run"]], summary=one | {"run": name})
        for one, name in zip(found, names, strict=True)
    ]


def _of_runs(runs: Sequence[Run], group: Sequence[Run]) -> list[str]:
    """Who is the fastest of the group; who else was run; what is exposed; and how far losses are apart."""
    if not group:
        warm_up = warm_up_words([run.summary for run in runs])
        none = f"No run has an iteration after its warm-up ({warm_up}), so there is no speed to report."
        return [none, *_losses(runs, runs[0])]
    ranked = ranked_runs(group)
    alone, faster = _faster_alone(runs, ranked)
    found = [_who(ranked), _others(runs, group, alone), faster, _exposed(ranked, group)]
    return [*filter(None, found), *_losses(runs, ranked[0])]


def _who(ranked: Sequence[Run]) -> str:
    """The fastest of the runs that were not disturbed, if their spread shows one."""
    quiet = [run for run in ranked if not is_disturbed(run.summary)]
    if not quiet and len(ranked) > 1:
        return "The fastest run is unknown: the machine was busy during all runs."
    first = ranked[0]
    near = [run for run in quiet if run is first or not are_apart(run.summary, first.summary)]
    if len(quiet) <= 1:
        words = f"{first.name} takes {_seconds(first)}{'' if quiet else ', on a machine that was busy'}"
    elif len(near) == 1:
        words = f"{first.name} is the fastest of {len(quiet)} with {_seconds(first)}"
    else:
        ends = dict.fromkeys([plain(near[0].seconds["mean"]), plain(near[-1].seconds["mean"])])
        words = (
            f"{names_of([run.name for run in near], 'run')} take {' to '.join(ends)} s per iteration {_ranks(first)}"
        )
        words += f"{', and the differences are within the spread' if len(ends) > 1 else ''}: "
        words += "no run is clearly the fastest"
    if len(near) < len(quiet):
        last = [run for run in quiet if run not in near][-1]
        ratio = plain(last.seconds["mean"] / first.seconds["mean"])
        which = ", the slowest," if last is quiet[-1] else ""
        words += f"; {last.name}{which} takes {ratio} times the seconds of {first.name}"
        if all(len(members(run.summary)) == 1 for run in ranked):
            words += "; each was run once, and a repeat may differ more"
    disturbed = [run.name for run in ranked if run not in quiet]
    if quiet and disturbed:
        words += f"; not compared, because the machine was busy: {names_of(disturbed, 'run')}"
    return f"{words}."


def _others(runs: Sequence[Run], group: Sequence[Run], named: Sequence[str]) -> str:
    """Which runs were not compared, and who is the fastest among those, so that one group's order is not all's. The
    runs in `named` have a sentence of their own."""
    here = {one["run"] for run in group for one in members(run.summary)} | set(named)
    bases = {base.name for base, series in scaling(runs) if any(run.name in here for run in series)} - here
    below = names_of([run.name for run in runs if run.name in bases], "run") if bases else ""
    others = [run.name for run in runs if run.name not in here | bases]
    if not others:
        return f"{below}, on one rank, {'is' if len(bases) == 1 else 'are'} compared further down." if below else ""
    found = []
    for other in comparable(_together(runs)):
        quiet = [run for run in ranked_runs(other) if run.name in others and not is_disturbed(run.summary)]
        if {run.name for run in other} != {run.name for run in group} and len(quiet) > 1:
            near = [run.name for run in quiet[1:] if not are_apart(run.summary, quiet[0].summary)]
            words = f"{quiet[0].name} has the fewest seconds of {len(quiet)}"
            found.append(words + (f", and {names_of(near, 'run')} may be as fast" if near else ""))
    names, rest = (names_of(some, "run", MOST_NAMES) for some in ([run.name for run in group], others))
    among = f", among which {'; '.join(found)}" if found else ""
    among += f"; {below}, on one rank, {'is' if len(bases) == 1 else 'are'} compared further down" if below else ""
    differs, are = ("differs", "it is") if len(others) == 1 else ("differ", "they are")
    return f"{rest} {differs} in more than the sync from {names}, so {are} not compared with them{among}."


def _faster_alone(runs: Sequence[Run], ranked: Sequence[Run]) -> tuple[list[str], str]:
    """The runs of the same work on one rank that are faster than the fastest of those that are compared, and a sentence
    that names them and the compared runs that they are shown to be faster than."""
    fastest = ranked[0]
    if fastest.summary["world_size"] == 1 or is_disturbed(fastest.summary):
        return [], ""
    faster = [
        base
        for base, series in scaling(runs)
        if any(run.name == fastest.name for run in series)
        and not is_disturbed(base.summary)
        and base.seconds["mean"] < fastest.seconds["mean"]
        and are_apart(base.summary, fastest.summary)
        and same_setting(base.summary, fastest.summary)
    ]
    if not faster:
        return [], ""
    quiet = [run for run in ranked if not is_disturbed(run.summary)]
    slower = [run.name for run in quiet if all(are_apart(base.summary, run.summary) for base in faster)]
    words = listed([f"{base.name} ({seconds(base.seconds['mean'])} per iteration)" for base in faster])
    cores, on_host = (fastest.environment.get(name) for name in ("cores", "ranks_on_host"))
    is_shared = fastest.environment.get("device") == "cpu" and cores and on_host == fastest.summary["world_size"]
    share = f", whose {on_host} ranks share the {cores} cores of one machine" if is_shared else ""
    verb = "is" if len(faster) == 1 else "are"
    return [base.name for base in faster], f"On one rank, {words} {verb} faster than {names_of(slower, 'run')}{share}."


def _exposed(ranked: Sequence[Run], group: Sequence[Run]) -> str:
    """The exposed communication of the fastest and the slowest, if a floor was run."""
    quiet = [run for run in ranked if not is_disturbed(run.summary)]
    if not quiet or quiet[0].summary["world_size"] == 1 or is_floor(quiet[0].summary):
        return ""
    floor = next((run for run in group if is_floor(run.summary)), None)
    if floor is None:
        return f"Exposed communication was not measured: no run on as many ranks had sync {FLOOR}."
    shares = []
    for run in [*quiet[:1], *quiet[1:][-1:]]:
        exposed = exposed_seconds(run.summary, floor.summary)
        if exposed is not None and are_apart(run.summary, floor.summary):
            shares.append(f"{seconds(exposed)} ({percent(exposed / run.seconds['median'])}) of {run.name}'s iteration")
        elif exposed is not None:
            shares.append(f"nothing beyond the spread in {run.name}")
    is_known = shares and not is_disturbed(floor.summary)
    return f"Exposed communication is {listed(shares)}." if is_known else ""


def _losses(runs: Sequence[Run], like: Run) -> list[str]:
    """How far the losses are apart of all runs that can be compared with this one; of one alone, its own way."""
    trained = [run for run in runs if run.summary["losses"]]
    first = members(like.summary)[0]["run"]
    group = next((found for found in of_one_setting(trained) if any(run.name == first for run in found)), [])
    if len(group) > 1:
        names = names_of([run.name for run in group], "run")
        return [f"In the same iteration, the losses of {names} are {losses_apart(group)}."]
    if not group:
        return []
    losses = group[0].summary["losses"]
    words = f"The loss of {group[0].name} is {losses[0]:.4f} in the first iteration"
    words += f" and {losses[-1]:.4f} in the last of {len(losses)}" if len(losses) > 1 else ""
    words += "" if len(trained) == 1 else "; no other run's can be compared with it"
    return [f"{words}."]


def _seconds(run: Run) -> str:
    interval, count = run.seconds["interval_95"], len(members(run.summary))
    words = f"95 % {plain(interval[0])} to {plain(interval[1])}" if interval else "one iteration counted"
    words += f" over {count} repeats" if count > 1 else ""
    return f"{seconds(run.seconds['mean'])} per iteration ({words}) {_ranks(run)}"


def _ranks(run: Run) -> str:
    return f"on {number_of(run.summary['world_size'], 'rank')}"


def _of_benches(benches: Sequence[Bench], is_only: bool) -> list[str]:
    """Who is the fastest in each, what is exposed, and whether the candidates' averages agree.

    is_only: whether the page has nothing but one bench, so that a share needs no name of it.
    """
    found = [bench for bench in benches if bench.ranked]
    if not found:
        return ["No bench compared two syncs." if len(benches) > 1 else "The bench compared no syncs."]
    sentences = [fastest_in(bench) for bench in found[:MOST_BENCHES]]
    shares = [
        f"{percent(max(0.0, one.exposed / one.seconds))} of {one.label}'s seconds"
        + ("" if is_only else f" in {bench.name}")
        for bench in found[:MOST_BENCHES]
        for one in [*bench.ranked[:1], *bench.ranked[1:][-1:]]
        if one.exposed is not None and not bench.is_disturbed
    ]
    if shares:
        sentences.append(f"By the medians, exposed communication is {listed(shares)}.")
    elif not all(bench.is_disturbed for bench in found):
        sentences.append(f"Exposed communication is unknown, because sync {FLOOR} was not measured.")
    if all(bench.has_norms and all(one.is_same_work for one in bench.candidates) for bench in found):
        words = "All" if is_only else f"In {listed([bench.name for bench in found])}, all"
        sentences.append(f"{words} averaged gradients have {DDP}'s norm to within {percent(NORM_TOLERANCE)}.")
    return sentences


def fastest_in(bench: Bench) -> str:
    """Which sync is the fastest of a bench that compared some, and how that compares with DDP."""
    return f"{_who_in(bench)}."


def _who_in(bench: Bench) -> str:
    first, *others = bench.ranked
    if bench.is_disturbed and others:
        return f"The fastest sync in {bench.name} is unknown: the machine was busy"
    if not others:
        return f"In {bench.name}, {first.label} takes {seconds(first.seconds)} per iteration"
    near = [one for one in others if not _have_gap(one, first)]
    ratio = f"{plain(first.ratio)} times {DDP}'s" if first.ratio is not None else ""
    if ratio and first.interval:
        ratio += f" (95 % {plain(first.interval[0])} to {plain(first.interval[1])})"
    elif ratio:
        ratio += " (by the median; a confidence interval needs at least 6 rounds)"
    if not near:
        words = f"In {bench.name}, {first.label} is the fastest of {len(others) + 1} syncs with "
        return f"{words}{seconds(first.seconds)} per iteration{f', {ratio}' if ratio else ''}"
    names = names_of([first.label, *(one.label for one in near)], "sync")
    words = f"In {bench.name}, {names} take {plain(first.seconds)} to {seconds(near[-1].seconds)} per iteration, and "
    if any(one.interval is None for one in [first, *near] if one.label != DDP):
        return f"{words}no fastest can be named, since that needs at least 6 rounds"
    return f"{words}no sync is clearly the fastest"


def _have_gap(one: CandidateSeconds, other: CandidateSeconds) -> bool:
    """Whether the intervals of their ratios to DDP leave a gap; False where one has none."""
    first, second = ((1.0, 1.0) if each.label == DDP else each.interval for each in (one, other))
    return first is not None and second is not None and (first[1] < second[0] or second[1] < first[0])
