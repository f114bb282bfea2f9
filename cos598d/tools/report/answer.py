"""The head of the page: who is fastest and by how much, where the time goes, what travelled, whether losses agree."""

from collections.abc import Sequence
from dataclasses import replace

from cos598d.records.conventions import FLOOR, PHASES
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report import bench_answer
from cos598d.tools.report.benches import Bench
from cos598d.tools.report.blocks import Figure, Headline
from cos598d.tools.report.bytes_from import is_in_ledger
from cos598d.tools.report.captions import calls_inside, losses_apart, of_one_setting, phase_shares
from cos598d.tools.report.disturbed import DISTURBED, disturbance_remark, is_disturbed
from cos598d.tools.report.fairness import ground_remark, work_remark
from cos598d.tools.report.figures.answer import (
    FEW_LANES,
    MOST_LANES,
    LabelledBar,
    Panel,
    answer_figure,
    lanes_of,
    split_at_floor,
)
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import more_or_less, names_of, percent, plain, seconds
from cos598d.tools.report.one_class import one_class_remark
from cos598d.tools.report.references import exposed_seconds, is_floor, same_setting
from cos598d.tools.report.repeats import in_groups, members
from cos598d.tools.report.settings import comparable, scaling
from cos598d.tools.report.spread import are_apart, ratio
from cos598d.tools.report.table import assumed_bytes, unfinished_remarks
from cos598d.tools.report.traffic import counted_traffic

ONE_EACH = " Each is one run: the next may differ by more than the iterations of one do."
MOST_SENTENCES, MOST_PANELS, MOST_SLOWER, MOST_NAMES = 5, 3, 5, 16


def answer_of(runs: Sequence[Run], benches: Sequence[Bench]) -> Headline:
    """Three to five sentences and a picture, of nothing but what these records support."""
    group = main_group(runs)
    sentences = _sentences(runs, group) if runs else []
    if benches:
        sentences += bench_answer.sentences(benches, MOST_SENTENCES - len(sentences))
    drawn = [bench for bench in benches if bench.candidates][: MOST_PANELS - bool(group)]
    most = MOST_LANES if len(drawn) + bool(group) == 1 else FEW_LANES
    panels = [_panel(group, most, is_split_at_floor=bool(drawn))] if group else []
    panels += [bench_answer.panel(bench, most) for bench in drawn]
    svg = answer_figure(panels)
    spreads = [word for word, is_there in (("the mean's 95 %", group), ("a bench's quartiles", drawn)) if is_there]
    caption = [
        f"The black line: {' and '.join(spreads)}. At the right: times the seconds of the fastest, unless the run"
    ]
    caption[0] += " was disturbed, and the megabytes that leave the rank that sends most."
    caption += [f"There is no room for {listed(names)}: the tables have all." for names in _not_drawn(group, panels)]
    summaries = [run.summary for run in runs]
    remarks = (disturbance_remark, work_remark, ground_remark, one_class_remark)
    cautions = unfinished_remarks(summaries) + [said for remark in remarks if (said := remark(summaries))]
    cautions += [f"{bench.name}: {remark}." for bench in benches for remark in bench.remarks]
    if assumed := assumed_bytes(summaries, before=""):
        cautions.append(assumed)
    return Headline(cautions, sentences, None if svg is None else Figure("answer", svg, caption))


def _not_drawn(group: Sequence[Run], panels: Sequence[Panel]) -> list[list[str]]:
    """The runs of the group that its panel, which is the first, has no lane for."""
    shown = {lane.name for lane in panels[0].lanes} if group else set()
    names = [run.name for run in group if run.name not in shown]
    return [names] if names else []


def main_group(runs: Sequence[Run]) -> list[Run]:
    """Of the groups of runs that differ in nothing but their sync the largest, repeats of a run together as one; empty
    where no run counted an iteration. Of several as large, the one with the most iterations."""
    found = comparable(_together(runs))
    return max(found, key=_size) if found else []


def _size(group: Sequence[Run]) -> tuple[int, int]:
    return sum(not is_floor(run.summary) for run in group), min(run.summary["iterations"] for run in group)


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


def _sentences(runs: Sequence[Run], group: Sequence[Run]) -> list[str]:
    if not group:
        return ["No run counted an iteration, so the records say nothing of speed.", *_losses(runs, runs[0])]
    ranked = _ranked(group)
    quiet = [run for run in ranked if not is_disturbed(run.summary)]
    who = f"{_who(ranked, quiet)} {_faster_alone(runs, ranked[0])}".strip()
    found = [who, _where(quiet, group), _travelled(ranked), *_losses(runs, ranked[0])]
    found = [sentence for sentence in found if sentence]
    here = {name for run in group for name in (one["run"] for one in members(run.summary))}
    others = [run.name for run in runs if run.name not in here]
    if others:
        names, rest = (names_of(some, "run", MOST_NAMES) for some in ([run.name for run in group], others))
        found.append(f"These are the seconds of {names}. Other settings: {rest}.{_elsewhere(runs, group)}")
    return found


def _elsewhere(runs: Sequence[Run], group: Sequence[Run]) -> str:
    """Who is the fastest in the other groups, so that nobody takes one group's order for all."""
    found = []
    for other in comparable(_together(runs)):
        quiet = [run for run in _ranked(other) if not is_disturbed(run.summary)]
        if {run.name for run in other} == {run.name for run in group} or len(quiet) < 2:
            continue
        near = [run.name for run in quiet[1:] if not are_apart(run, quiet[0])]
        words = f"{quiet[0].name} has the fewest seconds of {len(quiet)}"
        found.append(words + (f", and {names_of(near, 'run')} cannot be told from it" if near else ""))
    return f" Among those {'; '.join(found)}." if found else ""


def _ranked(group: Sequence[Run]) -> list[Run]:
    """From the fastest to the slowest, disturbed ones last; the floor only where there is nothing else."""
    found = [run for run in group if not is_floor(run.summary)] or list(group)
    return sorted(found, key=lambda run: (is_disturbed(run.summary), run.seconds["mean"]))


def _who(ranked: Sequence[Run], quiet: Sequence[Run]) -> str:
    """The fastest of the runs that were not disturbed."""
    if len(ranked) == 1:
        busy = "" if quiet else ", on a machine that was busy"
        return f"{ranked[0].name} takes {_seconds(ranked[0])}{busy}."
    if not quiet:
        return "Which run is the fastest is not known, for the machine was busy during all of them."
    disturbed = [run.name for run in ranked if run not in quiet]
    left_out = f" Not compared, for the machine was busy: {names_of(disturbed, 'run')}." if disturbed else ""
    return _who_of(quiet) + left_out


def _who_of(ranked: Sequence[Run]) -> str:
    first, *others = ranked
    if not others:
        return f"{first.name} takes {_seconds(first)}."
    slower = [run for run in others if are_apart(run, first)]
    near = [first, *(run for run in others if not are_apart(run, first))]
    if len(near) == 1:
        words = f"{first.name} is the fastest of {len(ranked)} with {_seconds(first)}"
    else:
        low, high = near[0], near[-1]
        ends = dict.fromkeys([plain(low.seconds["mean"]), plain(high.seconds["mean"])])
        words = f"{names_of([run.name for run in near], 'run')} take {' to '.join(ends)} s an iteration {_ranks(first)}"
        words += f"{', and the differences are within the spread' if len(ends) > 1 else ''}: "
        words += "none of them is shown to be the fastest"
    if slower:
        words += f"; {slower[0].name} takes {_times(slower[0], first)} the seconds of {first.name}"
    more = slower[1:] if len(slower) <= MOST_SLOWER else slower[-1:]
    words += "".join(f", {run.name} {_times(run, first)}" for run in more)
    is_one_each = slower and all(len(members(run.summary)) == 1 for run in ranked)
    return f"{words}.{ONE_EACH if is_one_each else ''}"


def _faster_alone(runs: Sequence[Run], fastest: Run) -> str:
    """Names the runs of the same work on one rank that were faster than the fastest of those that are compared."""
    if fastest.summary["world_size"] == 1 or is_disturbed(fastest.summary):
        return ""
    alone = [base for base, series in scaling(runs) if any(run.name == fastest.name for run in series)]
    faster = [
        run
        for run in alone
        if not is_disturbed(run.summary)
        and run.seconds["mean"] < fastest.seconds["mean"]
        and are_apart(run, fastest)
        and same_setting(run.summary, fastest.summary)
    ]
    cores, on_host = (fastest.environment.get(name) for name in ("cores", "ranks_on_host"))
    is_shared = fastest.environment.get("device") == "cpu" and cores and on_host == fastest.summary["world_size"]
    share = f" All {on_host} ranks share the {cores} cores of one machine." if faster and is_shared else ""
    return " ".join(f"{run.name} is faster than all of them: {_seconds(run)}." for run in faster) + share


def _seconds(run: Run) -> str:
    interval, count = run.seconds["interval_95"], len(members(run.summary))
    words = f"95 % {plain(interval[0])} to {plain(interval[1])}" if interval else "one iteration counted"
    words += f" over {count} repeats" if count > 1 else ""
    return f"{seconds(run.seconds['mean'])} an iteration ({words}) {_ranks(run)}"


def _ranks(run: Run) -> str:
    return f"on {number_of(run.summary['world_size'], 'rank')}"


def _times(run: Run, first: Run) -> str:
    value, interval = ratio(run, first) or (run.seconds["mean"] / first.seconds["mean"], None)
    spread = f" (95 % {plain(interval[0])} to {plain(interval[1])})" if interval else ""
    return f"{plain(value)} times{spread}"


def _where(ranked: Sequence[Run], group: Sequence[Run]) -> str:
    """The largest phases of the fastest and the slowest, and their exposed communication, if a floor was run."""
    if not ranked:
        return ""
    found: dict[str, list[str]] = {}
    for run in _ends(ranked):
        shares = [f"{phase} ({percent(share)})" for phase, share in list(phase_shares(run).items())[:2]]
        if shares:
            found.setdefault(listed(shares), []).append(run.name)
    places = [f"{phases} in {listed(names)}" for phases, names in found.items()]
    words = f"Of the phases' sum, the largest are {', and '.join(places)}" if found else "The phases took no time"
    if inside := calls_inside(_ends(ranked)):
        words += f"; {inside}"
    if ranked[0].summary["world_size"] == 1 or is_floor(ranked[0].summary):
        return f"{words}."
    floor = next((run for run in group if is_floor(run.summary)), None)
    if floor is not None and is_disturbed(floor.summary):
        return f"{words}."
    if floor is None:
        return f"{words}; exposed communication was not measured: no run on as many ranks had sync {FLOOR}."
    shares = []
    for run in _ends(ranked):
        exposed = exposed_seconds(run.summary, floor.summary)
        if exposed is None:
            continue
        if are_apart(run, floor):
            shares.append(f"{seconds(exposed)} ({percent(exposed / run.seconds['median'])}) of {run.name}'s iteration")
        else:
            shares.append(f"nothing beyond the spread in {run.name}")
    return f"{words}; exposed communication is {listed(shares)}." if shares else f"{words}."


def _travelled(ranked: Sequence[Run]) -> str:
    if ranked[0].summary["world_size"] == 1:
        return "On one rank nothing travels."
    most = {run.name: max(run.summary["bytes_sent_per_iteration"]) for run in ranked if is_in_ledger(run.summary)}
    words = bench_answer.travelled(most)
    counted = [one for one in counted_traffic(ranked) if one.predicted_sent > 0 and not one.is_shared_in_part]
    ratios = [one.counted_sent / one.predicted_sent - 1 for one in counted]
    if ratios:
        off = dict.fromkeys(more_or_less(share) for share in (min(ratios), max(ratios)))
        where = "interfaces" if any(one.has_headers for one in counted) else "ranks' sockets"
        words += f". Of all calls, evaluation's weights and the loss too, the {where} counted {' to '.join(off)} than "
        words += "the formulas"
    return f"{words}."


def _losses(runs: Sequence[Run], like: Run) -> list[str]:
    """How far the losses are apart of all runs that can be compared with this one; of one alone, its own way."""
    trained = [run for run in runs if run.summary["losses"]]
    first = members(like.summary)[0]["run"]
    group = next((found for found in of_one_setting(trained) if any(run.name == first for run in found)), [])
    if len(group) > 1:
        names = names_of([run.name for run in group], "run")
        return [f"In the same iteration the losses of {names} are {losses_apart(group)}."]
    if not group:
        return []
    losses = group[0].summary["losses"]
    words = f"The loss of {group[0].name} is {losses[0]:.4f} in the first iteration"
    words += f" and {losses[-1]:.4f} in the last of {len(losses)}" if len(losses) > 1 else ""
    words += "" if len(trained) == 1 else "; no other run's can be compared with it"
    return [f"{words}."]


def _ends(ranked: Sequence[Run]) -> list[Run]:
    """The fastest and the slowest."""
    return [*ranked[:1], *ranked[1:][-1:]]


def _panel(group: Sequence[Run], most: int, is_split_at_floor: bool) -> Panel:
    ranked = _ranked(group)
    floor = next((run for run in group if is_floor(run.summary)), None)
    fastest = next((run for run in ranked if not is_disturbed(run.summary)), None)
    lanes = []
    for run in dict.fromkeys([*lanes_of([one.name for one in ranked], most), *([floor.name] if floor else [])]):
        one = next(other for other in group if other.name == run)
        mean, interval = one.seconds["mean"], one.seconds["interval_95"]
        parts = [(phase, one.summary["phases"][f"seconds_{phase}"] or 0.0) for phase in PHASES]
        if is_split_at_floor or not phase_shares(one):
            parts = split_at_floor(mean, floor.seconds["mean"] if floor else None)
        words = "the floor" if one is floor else f"{plain(mean / fastest.seconds['mean'])} x" if fastest else ""
        words = DISTURBED if is_disturbed(one.summary) else words
        sent = max(one.summary["bytes_sent_per_iteration"], default=0)
        words += f", {sent / 1e6:,.1f} MB" if sent else ""
        lanes.append(LabelledBar(one.name, parts, tuple(interval) if interval else None, words))
    return Panel("", lanes)
