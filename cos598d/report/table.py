"""The comparison of runs as tables for the screen or in Markdown, from their records alone."""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.records.conventions import ASSUMED_BYTES, DDP, FLOOR, PHASES, WARM_UP
from cos598d.records.run import CONFIG, ENVIRONMENT, read_object, read_summary
from cos598d.report.repeats import in_groups, is_repeat, members, over_pairs, what_was_asked
from cos598d.report.speed import SPEED_NOTE, speed_rows
from cos598d.terminal.printable import printable

FIRST_LOSSES = 3
# What two runs must share for a difference of their losses to mean anything.
SETTING = ("task", "model", "data", "total_train_batch_size", "max_seq_length", "dropout", "precision", "seed")


def load_run(folder: Path) -> dict[str, Any]:
    """A run's summary, with its folder's name as "run", the emulated links as "network" (None without), and what makes
    another run a repeat of it as "repeat_of" (None where its config is not there).

    Raises UserError when there is none that can be read.
    """
    summary = read_summary(folder)
    environment = read_object(folder / "environment.json", ENVIRONMENT) or {}
    config = read_object(folder / "config.json", CONFIG)
    asked = config and what_was_asked(summary, config, environment)
    return {"run": folder.resolve().name} | summary | {"network": environment.get("network"), "repeat_of": asked}


def comparison(runs: Sequence[dict[str, Any]], markdown: bool = False, each: bool = False) -> str:
    """Tables and a legend: losses, where the time goes, how fast that is, and what travels.

    Runs of the same settings are one row, unless `each` is to have its own. Differences and ratios are given against
    the first run of one rank, the first `ddp` run of the same number of ranks, and (exposed communication) the first
    run of the same number of ranks with sync `none`.
    """
    runs = runs if each else in_groups(runs)
    parts = [losses_rows(runs), time_rows(runs), speed_rows(runs), traffic_rows(runs)]
    text = "\n\n".join(as_markdown(part) if markdown else as_text(part) for part in parts if part)
    return f"{_setting(runs)}\n\n{text}\n\n{legend(runs)}"


def losses_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A head and a row for each run: what it is, its first losses, and how far they are from those of one rank."""
    rows = [["run", "sync", "ranks", "its", "first losses", "largest difference to one rank"]]
    for run in runs:
        alone = next((other for other in runs if other["world_size"] == 1 and same_setting(run, other)), None)
        rows.append(
            [run["run"], run["sync"], str(run["world_size"]), str(run["iterations"])]
            + [" ".join(f"{loss:.6f}" for loss in run["losses"][:FIRST_LOSSES]), _difference(run, alone)]
        )
    return rows


def time_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A head and a row for each run: seconds per iteration with their spread, what is exposed, and the phases.

    Ratios and exposed seconds have an interval where there are repeats of the run and of what it is compared with.
    """
    rows = [["run", "s/it", "95 %", "median", "ratio to ddp", "exposed s", *PHASES]]
    for run in runs:
        seconds = run["seconds_per_iteration"]
        interval = seconds["interval_95"]
        rows.append(
            [run["run"], _seconds(seconds["mean"]), f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-"]
            + [_seconds(seconds["median"]), _ratio(run, alike(runs, run, DDP)), _exposed(run, floor_of(runs, run))]
            + [_seconds(run["phases"][f"seconds_{phase}"]) for phase in PHASES]
        )
    return rows


def traffic_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A head and a row for each run: calls, tensors and bytes of an iteration, by the formulas."""
    rows = [["run", "calls/it", "tensors/it", "payload MB/it", "sent MB/it by rank", "received MB/it by rank"]]
    rows[0] += ["counted MB/it"]
    rows += [
        [run["run"], str(run["calls_per_iteration"]), str(run["tensors_per_iteration"])]
        + [megabytes([run["payload_bytes_per_iteration"]])]
        + [megabytes(run["bytes_sent_per_iteration"]), megabytes(run["bytes_received_per_iteration"])]
        + [_counted(run.get("wire"))]
        for run in runs
    ]
    return rows


def legend(runs: Sequence[dict[str, Any]]) -> str:
    """What the columns say."""
    intervals = []
    if any("repeats" not in run for run in runs):
        intervals.append("of that mean, from the spread of one run's iterations; another run may lie outside it.")
    if any("repeats" in run for run in runs):
        intervals.append(
            "where there are several runs of the same settings, from run to run (Student's t): of the mean of their\n"
            "means, and of ratios and exposed seconds taken within each repeat."
        )
    return (
        f"s/it: mean seconds an iteration without {warm_up_words(runs)}; phases: the mean over the ranks.\n"
        f"95 %: {' And '.join(intervals)}\n"
        "exposed s: median less that of sync none on as many ranks. MB: 1,000,000 bytes; sent, received: by formula.\n"
        "counted: what the kernel saw leave by the interface, with headers and all else that the host sent there."
        + (f"\n{SPEED_NOTE}" if speed_rows(runs) else "")
        + assumed_bytes(runs, before="\n")
    )


def assumed_bytes(runs: Sequence[dict[str, Any]], before: str) -> str:
    """`before` and a sentence that names the runs whose bytes are assumed; "" where there are none."""
    names = [run["run"] for run in runs if run.get("bytes_are_assumed")]
    return f"{before}Bytes of {', '.join(names)} are assumed: {ASSUMED_BYTES}." if names else ""


def left_out(run: dict[str, Any]) -> int:
    """How many of its first iterations a run's seconds do not count."""
    iterations, counted = run["iterations"], run["seconds_per_iteration"].get("counted")
    known = isinstance(iterations, int) and isinstance(counted, int) and 0 <= counted <= iterations
    return iterations - counted if known else WARM_UP


def warm_up_words(runs: Sequence[dict[str, Any]]) -> str:
    """ "the first 2", as far as these runs' records say so."""
    found = sorted({left_out(run) for run in runs if run["seconds_per_iteration"].get("counted")} or {WARM_UP})
    return f"the first {' or '.join(map(str, found))}"


def _setting(runs: Sequence[dict[str, Any]]) -> str:
    """What the runs have in common, in a line."""
    words = []
    for name, unit in (
        ("task", ""),
        ("model", ""),
        ("data", ""),
        ("total_train_batch_size", " examples a step"),
        ("dropout", " dropout"),
        ("precision", ""),
    ):
        values = dict.fromkeys(printable(run[name]) for run in runs)
        words.append(" / ".join(values) + unit)
    return ", ".join(words)


def alike(runs: Sequence[dict[str, Any]], like: dict[str, Any], sync: str) -> dict[str, Any] | None:
    """The first run with this sync, as many ranks as `like`, its setting and its network.

    Where that has repeats among `runs`, and `like` is the k-th of its own, the k-th of them.
    """
    found = [
        run
        for run in runs
        if run["sync"] == sync
        and run["world_size"] == like["world_size"]
        and run["network"] == like["network"]
        and same_setting(run, like)
    ]
    if not found:
        return None
    repeats = [run for run in found if run is found[0] or is_repeat(run, found[0])]
    place = sum(is_repeat(run, like) for run in runs[: next((i for i, run in enumerate(runs) if run is like), 0)])
    return repeats[place] if place < len(repeats) else repeats[0]


def floor_of(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any] | None:
    """The run without any sync that a run's exposed communication is measured against."""
    return alike(runs, run, FLOOR) if run["world_size"] > 1 else None


def exposed_seconds(run: dict[str, Any], floor: dict[str, Any] | None) -> float | None:
    """The run's median less its floor's, seconds; None where either is missing, and for the floor itself."""
    if floor is None or run is floor:
        return None
    median, base = run["seconds_per_iteration"]["median"], floor["seconds_per_iteration"]["median"]
    return None if median is None or base is None else median - base


def same_setting(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a difference of the two runs' losses means anything."""
    return all(run[name] == other[name] for name in SETTING)


def _difference(run: dict[str, Any], alone: dict[str, Any] | None) -> str:
    if alone is None or run is alone:
        return "-"
    if run["sync"] == FLOOR:
        return "drifts"
    pairs = [pair for member in members(run) for pair in zip(member["losses"], alone["losses"])]
    return f"{max(abs(a - b) for a, b in pairs):.1e}" if pairs else "-"


def _ratio(run: dict[str, Any], ddp: dict[str, Any] | None) -> str:
    if ddp is None:
        return "-"
    several = over_pairs(run, ddp, _ratio_of_means) if run is not ddp else None
    if several:
        return f"{several[0]:.2f} ({several[1][0]:.2f}-{several[1][1]:.2f})"
    ratio = _ratio_of_means(run, ddp)
    return f"{ratio:.2f}" if ratio else "-"


def _ratio_of_means(run: dict[str, Any], ddp: dict[str, Any]) -> float | None:
    mean, base = run["seconds_per_iteration"]["mean"], ddp["seconds_per_iteration"]["mean"]
    return mean / base if mean and base else None


def _exposed(run: dict[str, Any], floor: dict[str, Any] | None) -> str:
    seconds = exposed_seconds(run, floor)
    if seconds is None:
        return "-"
    words = f"{seconds:.3f} ({seconds / run['seconds_per_iteration']['median']:.0%})"
    several = over_pairs(run, floor, exposed_seconds)
    return f"{words}, 95 % {several[1][0]:.3f} to {several[1][1]:.3f}" if several else words


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def megabytes(values: Sequence[float], digits: int = 3) -> str:
    """Bytes by rank in megabytes; neighbours that look the same once: "272.568, 90.856 x 3"."""
    groups: list[list[Any]] = []
    for value in values:
        words = f"{value / 1e6:.{digits}f}"
        if groups and groups[-1][0] == words:
            groups[-1][1] += 1
        else:
            groups.append([words, 1])
    return ", ".join(words + (f" x {count}" if count > 1 else "") for words, count in groups)


def _counted(wire: dict[str, Any] | None) -> str:
    """Counted bytes sent in megabytes, by interface; where ranks share one, those of all of them together."""
    if not wire:
        return "-"
    by_rank, cells = wire["bytes_sent_per_iteration"], []
    for ranks in wire["ranks_by_interface"]:
        # All read the same counters, each when its own iterations end.
        known = [by_rank[rank] for rank in ranks if by_rank[rank] is not None]
        together = f" (ranks {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
        cells.append(f"{sum(known) / len(known) / 1e6:.3f}{together}")
    return ", ".join(cells)


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines for the screen, the first one as their head."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def markdown_text(text: str) -> str:
    """Words that stand in Markdown as they are: no marks, no HTML, no new cell or line of a table."""
    text = printable(" ".join(html.escape(text, quote=False).split()))
    # An underscore inside a word is no mark, and all_reduce is easier to read without a backslash.
    return re.sub(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
