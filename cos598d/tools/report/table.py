"""The comparison of runs as tables for the screen or in Markdown, from their records alone."""

import math
import textwrap
from collections.abc import Sequence
from statistics import fmean

from cos598d.errors import WARNING
from cos598d.records.conventions import CHECKPOINT, FLOOR, PHASES, WARM_UP
from cos598d.records.run import Summary
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_markdown, as_text, markdown_text, with_columns
from cos598d.terminal.words import listed
from cos598d.tools.report.classes import one_class_remark
from cos598d.tools.report.disturbed import DISTURBED, disturbance_remark
from cos598d.tools.report.fairness import ground_remark, work_remark
from cos598d.tools.report.load import left_out
from cos598d.tools.report.memory import memory_note, memory_rows
from cos598d.tools.report.numbers import cell, mb_by_rank, plain, plain_or_none
from cos598d.tools.report.references import (
    alone_of,
    are_apart,
    ddp_of,
    drifts,
    exposed_seconds,
    floor_of,
    has_all_rows,
    in_groups,
    is_disturbed,
    largest_difference,
    members,
    over_pairs,
    ratio_of_means,
)
from cos598d.tools.report.traffic_table import (
    BYTES_NOTE,
    assumed_bytes,
    is_in_ledger,
    traffic_rows,
)

FIRST_LOSSES = 3
# The columns of `time_cells`. The last ones of a table are the phases.
SPREAD, AGAINST = ("s/it", "95 %", "median"), ("ratio to ddp", "exposed s")
SLOW_ONES = ("90th percentile", "first")
OF_PEAK = "of the peak"
SPEED_NOTE = (
    "examples/s: by rank 0's iterations, and by wall-clock time, which includes recording; both without the first "
    "iterations. Of the peak: matrix products that the examples need, by formula, as a share of what the processors "
    "or GPUs can multiply."
)


def comparison(runs: Sequence[Summary], markdown: bool = False, each: bool = False) -> str:
    """Tables and a legend: losses, where the time goes, how fast that is, and what travels. Above them stands a line
    that says in what the runs were not the same work, if they were not.

    Runs of the same settings are one row, unless `each` is to have its own. Differences and ratios are given against
    the first run of one rank, the first `ddp` run of the same number of ranks, and (exposed communication) the first
    run of the same number of ranks with sync `none`.
    """
    runs = runs if each else in_groups(runs)
    parts = [losses_rows(runs), time_rows(runs), speed_rows(runs), traffic_rows(runs), memory_rows(runs)]
    text = "\n\n".join(as_markdown(part) if markdown else as_text(part) for part in parts if part)
    said = "\n".join(
        markdown_text(line) if markdown else printable(line) for line in [*_warnings(runs), *_answers(runs)]
    )
    return "\n\n".join(part for part in (_setting(runs), said, text, legend(runs)) if part)


def brief(runs: Sequence[Summary], markdown: bool = False, each: bool = False) -> str:
    """The answers, which was the fastest, what was sent, did all learn the same; and one small table of the runs."""
    rows, said = brief_parts(runs, each)
    words = list(map(markdown_text, said)) if markdown else ["\n".join(said)]
    return "\n\n".join(part for part in (*words, as_markdown(rows) if markdown else as_text(rows)) if part)


def brief_parts(runs: Sequence[Summary], each: bool = False) -> tuple[list[list[str]], list[str]]:
    """The rows of that table, the head first, and the sentences."""
    runs = runs if each else in_groups(runs)
    rows = [["run", "sync", "ranks", "s per step", "sent MB per step, by rank", "losses differ from 1 rank by"]]
    is_little = any(0 < sent < 1e6 for run in runs if is_in_ledger(run) for sent in run["bytes_sent_per_iteration"])
    for run in runs:
        seconds = DISTURBED if is_disturbed(run) else cell(run["seconds_per_iteration"]["mean"], ".3f")
        sent = mb_by_rank(run["bytes_sent_per_iteration"], 3 if is_little else 1) if is_in_ledger(run) else "-"
        difference = _difference(run, alone_of(runs, run))
        rows.append([run["run"], run["sync"], str(run["world_size"]), seconds, sent, difference])
    return rows, [*map(printable, [*_warnings(runs), *_answers(runs)])]


def _warnings(runs: Sequence[Summary]) -> list[str]:
    return [f"{WARNING}{remark}" for remark in remarks_on(runs)]


def _answers(runs: Sequence[Summary]) -> list[str]:
    """Which was the fastest, what was sent, and did all learn the same, as far as the runs show it."""
    averaging = [run for run in runs if run["world_size"] > 1 and run["sync"] != FLOOR]
    words = [_fastest_words(averaging), _sent_words(averaging), _same_losses_words(runs, averaging)]
    return [sentence for sentence in words if sentence]


def _fastest_words(runs: Sequence[Summary]) -> str:
    """Which of the runs was the fastest, if the spread shows one; "" if one was disturbed."""
    if len(runs) < 2 or any(is_disturbed(run) or run["seconds_per_iteration"]["mean"] is None for run in runs):
        return ""
    first, *others = sorted(runs, key=lambda run: run["seconds_per_iteration"]["mean"])
    near = [first, *(run for run in others if not are_apart(run, first))]
    words = [f"{run['run']} ({plain(run['seconds_per_iteration']['mean'])} s per step)" for run in (*near, others[0])]
    if len(near) > 1:
        return f"Fastest: {listed(words[:-1])} are too close to call."
    return f"Fastest: {words[0]}, before {words[1]}. Other networks and machines give another order."


def _sent_words(runs: Sequence[Summary]) -> str:
    """How much the busiest rank of each run sends in a step; runs that send the same bytes share a number."""
    by_size: dict[float, list[str]] = {}
    for run in runs:
        if is_in_ledger(run):
            by_size.setdefault(max(run["bytes_sent_per_iteration"]), []).append(run["run"])
    found = [f"{plain(size / 1e6)} MB in {listed(names)}" for size, names in by_size.items()]
    return f"Sent per step by the busiest rank: {listed(found)}." if found else ""


def _same_losses_words(runs: Sequence[Summary], averaging: Sequence[Summary]) -> str:
    """Whether the runs that average have the losses of one rank, and who drifts apart."""
    pairs = [(run, alone_of(runs, run)) for run in averaging if not drifts(run)]
    apart = [largest_difference(run, alone) for run, alone in pairs if alone is not None and has_all_rows(run)]
    known = [difference for difference in apart if difference is not None]
    if not known or len(known) < len(pairs) or not all(map(math.isfinite, known)):
        return ""
    drifting = [run["run"] for run in runs if drifts(run)]
    then = f" Without an average per step, the replicas drift apart: {listed(drifting)}." if drifting else ""
    names = listed([run["run"] for run, _ in pairs])
    return f"Losses differ from one rank's by at most {max(known):.1e}: {names}.{then}"


def remarks_on(runs: Sequence[Summary]) -> list[str]:
    """What to read before any figure: which runs have not ended well, and in what they do not compare."""
    members_of_all = [member for run in runs for member in members(run)]
    unfinished = [
        f"{run['run']} {run['unfinished'].rstrip('.')}. Its figures are of those."
        for run in members_of_all
        if "unfinished" in run
    ]
    found = (disturbance_remark(runs), work_remark(runs), ground_remark(runs), one_class_remark(runs))
    return [*unfinished, *filter(None, found)]


def losses_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and a row for each run: what it is, its first losses, and how far they are from those of one rank."""
    rows = [["run", "sync", "ranks", "iterations", "first losses", "largest difference to one rank"]]
    for run in runs:
        losses = " ".join(f"{loss:.6f}" for loss in run["losses"][:FIRST_LOSSES])
        what = [run["run"], run["sync"], str(run["world_size"]), str(run["iterations"])]
        rows.append([*what, losses, _difference(run, alone_of(runs, run))])
    return rows


def time_cells(runs: Sequence[Summary]) -> list[dict[str, str]]:
    """For each run the cells of SPREAD, SLOW_ONES, AGAINST and PHASES, by column: seconds per iteration with their
    spread, how they compare, and what the phases take.

    Ratios and exposed seconds have an interval where there are repeats of the run and of what it is compared with.
    """
    cells = []
    for run in runs:
        seconds, interval = run["seconds_per_iteration"], run["seconds_per_iteration"]["interval_95"]
        cells.append(
            {
                "run": run["run"],
                "s/it": cell(seconds["mean"], ".3f"),
                "95 %": f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "-",
                "median": cell(seconds["median"], ".3f"),
                "90th percentile": plain_or_none(seconds["p90"]),
                "first": plain_or_none(seconds["first"]),
                "ratio to ddp": _ratio(run, ddp_of(runs, run)),
                "exposed s": _exposed(run, floor_of(runs, run)),
            }
            | {phase: cell(run["phases"][f"seconds_{phase}"], ".3f") for phase in PHASES}
        )
    return cells


def time_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and a row for each run, of `time_cells`."""
    return with_columns(time_cells(runs), ["run", *SPREAD, *AGAINST, *phases_of(runs)])


def phases_of(runs: Sequence[Summary]) -> list[str]:
    """The phases to show of these runs: that of checkpoints where one of them has written any."""
    has_saved = any(run["phases"][f"seconds_{CHECKPOINT}"] for run in runs)
    return [phase for phase in PHASES if phase != CHECKPOINT or has_saved]


def speed_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and a row for each run whose record has its speed; nothing where none has, as older ones have not."""
    rows = []
    names = ("examples_per_second_clock", "examples_per_second_wall", "share_off_the_clock")
    for run in runs:
        found = [[(one.get("wall") or {}).get(name) for name in names] for one in members(run)]
        if all(isinstance(value, int | float) for values in found for value in values):
            clock, wall, share = (fmean(values) for values in zip(*found))
            rows.append([run["run"], f"{clock:.4g}", f"{wall:.4g}", f"{share:.1%}", _of_peak(run)])
    if not any(row[-1] != "-" for row in rows):  # as in older records
        rows = [row[:-1] for row in rows]
    head = ["run", "examples/s", "examples/s (wall clock)", "share not timed", OF_PEAK]
    return [head[: len(rows[0])], *rows] if rows else []


def _of_peak(run: Summary) -> str:
    shares = [(one.get("operations") or {}).get("share_of_peak") for one in members(run)]
    known = [share for share in shares if share is not None]
    return f"{fmean(known):.0%}" if known else "-"


def legend(runs: Sequence[Summary]) -> str:
    """What the columns say."""
    intervals = []
    if any("repeats" not in run for run in runs):
        intervals.append("of that mean, from the spread of one run's iterations. A repeat may be outside it.")
    if any("repeats" in run for run in runs):
        intervals.append(
            "where there are several runs of the same settings, from run to run (Student's t): of the mean of their\n"
            "means, and of ratios and exposed seconds taken within each repeat."
        )
    return (
        f"s/it: mean seconds per iteration without {warm_up_words(runs)}; phases: the mean over the ranks.\n"
        f"95 %: {' And '.join(intervals)}\n"
        "exposed s: the median minus that of sync none on as many ranks. MB: 1,000,000 bytes; sent, received: by "
        "formula.\n"
        "counted: everything that the kernel sent through the interface, with headers and other programs' bytes;\n"
        "on one host, only each rank's own sockets, without headers.\n"
        + textwrap.fill(BYTES_NOTE, 118)
        + (f"\n{textwrap.fill(SPEED_NOTE, 118)}" if speed_rows(runs) else "")
        + (f"\n{textwrap.fill(memory_note(runs), 118)}" if memory_rows(runs) else "")
        + assumed_bytes(runs, before="\n")
    )


def warm_up_words(runs: Sequence[Summary]) -> str:
    """ "the first 2", as far as these runs' records say so."""
    found = sorted({left_out(run) for run in runs if run["seconds_per_iteration"].get("counted")} or {WARM_UP})
    return f"the first {' or '.join(map(str, found))}"


def _setting(runs: Sequence[Summary]) -> str:
    """What the runs have in common, in a line."""
    words = []
    for name, unit in (
        ("task", ""),
        ("model", ""),
        ("data", ""),
        ("total_train_batch_size", " examples per step"),
        ("dropout", " dropout"),
        ("precision", ""),
    ):
        values = dict.fromkeys(printable(run[name]) for run in runs)
        words.append(" / ".join(values) + unit)
    return ", ".join(words)


def _difference(run: Summary, alone: Summary | None) -> str:
    if alone is None or run is alone or not (has_all_rows(run) and has_all_rows(alone)):
        return "-"
    if drifts(run):
        return "drifts"
    return cell(largest_difference(run, alone), ".1e")


def _ratio(run: Summary, ddp: Summary | None) -> str:
    if ddp is None:
        return "-"
    if is_disturbed(run) or is_disturbed(ddp):
        return DISTURBED
    several = over_pairs(run, ddp, ratio_of_means) if run is not ddp else None
    if several:
        return f"{several[0]:.2f} ({several[1][0]:.2f}-{several[1][1]:.2f})"
    ratio = ratio_of_means(run, ddp)
    return ("itself" if run is ddp else f"{ratio:.2f}") if ratio else "-"


def _exposed(run: Summary, floor: Summary | None) -> str:
    seconds = exposed_seconds(run, floor)
    if floor is None or seconds is None:
        return "-"
    if is_disturbed(run) or is_disturbed(floor):
        return DISTURBED
    words = f"{seconds:.3f} ({seconds / run['seconds_per_iteration']['median']:.0%})"
    several = over_pairs(run, floor, exposed_seconds)
    return f"{words}, 95 % {several[1][0]:.3f} to {several[1][1]:.3f}" if several else words
