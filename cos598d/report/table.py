"""The comparison of runs as tables for the screen or in Markdown, from their records alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UserError

PHASES = ("data", "forward", "backward", "sync", "clip", "step")
FIRST_LOSSES = 3
# What two runs must share for a difference of their losses to mean anything.
SETTING = ("task", "model", "data", "total_train_batch_size", "max_seq_length", "dropout", "precision", "seed")
NEEDED = (
    *SETTING,
    *("sync", "world_size", "iterations", "losses", "seconds_per_iteration", "phases", "calls_per_iteration"),
    *("tensors_per_iteration", "payload_bytes_per_iteration", "bytes_sent_per_iteration"),
    "bytes_received_per_iteration",
)


def load_run(folder: Path) -> dict[str, Any]:
    """A run's summary, with its folder's name as "run". Raises UserError when there is none that can be read."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{folder} has no summary.json: give the folder of a run that ended well.") from None
    except ValueError:
        raise UserError(f"{path} is not JSON: it is damaged, run again.") from None
    missing = [name for name in NEEDED if not isinstance(summary, dict) or name not in summary]
    if missing:
        raise UserError(f"{path} has no {missing[0]}: it is not the summary of a run of this version.")
    return {"run": folder.name} | summary


def comparison(runs: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """Two tables and a legend: losses and time, then where the time goes and what travels.

    Differences and ratios are given against the first run of one rank, the first `ddp` run of the same number of
    ranks, and (exposed communication) the first run of the same number of ranks with sync `none`.
    """
    losses = [["run", "sync", "ranks", "its", "first losses", "largest difference to one rank"]]
    time = [["run", "s/it", "95 %", "median", "ratio to ddp", "exposed s", *PHASES]]
    traffic = [["run", "calls/it", "tensors/it", "payload MB/it", "sent MB/it by rank", "received MB/it by rank"]]
    traffic[0] += ["counted MB/it"]
    for run in runs:
        seconds = run["seconds_per_iteration"]
        alone = next((other for other in runs if other["world_size"] == 1 and _same_setting(run, other)), None)
        ddp = _first(runs, run, "ddp")
        floor = _first(runs, run, "none") if run["world_size"] > 1 else None
        losses.append(
            [run["run"], run["sync"], str(run["world_size"]), str(run["iterations"])]
            + [" ".join(f"{loss:.6f}" for loss in run["losses"][:FIRST_LOSSES]), _difference(run, alone)]
        )
        interval = seconds["interval_95"]
        time.append(
            [run["run"], _seconds(seconds["mean"]), f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-"]
            + [_seconds(seconds["median"]), _ratio(run, ddp), _exposed(run, floor)]
            + [_seconds(run["phases"][f"seconds_{phase}"]) for phase in PHASES]
        )
        traffic.append(
            [run["run"], str(run["calls_per_iteration"]), str(run["tensors_per_iteration"])]
            + [_megabytes([run["payload_bytes_per_iteration"]])]
            + [_megabytes(run["bytes_sent_per_iteration"]), _megabytes(run["bytes_received_per_iteration"])]
            + [_counted(run.get("wire"))]
        )
    parts = [losses, time, traffic]
    text = "\n\n".join(as_markdown(part) if markdown else as_text(part) for part in parts)
    return f"{_setting(runs)}\n\n{text}\n\n{LEGEND}"


LEGEND = (
    "s/it: mean seconds an iteration without the first, with its 95 % interval; phases: the mean over the ranks.\n"
    "exposed s: median less that of sync none on as many ranks. MB: 1,000,000 bytes; sent and received by formula.\n"
    "counted: what the kernel saw leave by the interface, with headers and all else that the host sent there."
)


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
        values = dict.fromkeys(str(run[name]) for run in runs)
        words.append(" / ".join(values) + unit)
    return ", ".join(words)


def _first(runs: Sequence[dict[str, Any]], like: dict[str, Any], sync: str) -> dict[str, Any] | None:
    return next(
        (
            run
            for run in runs
            if run["sync"] == sync and run["world_size"] == like["world_size"] and _same_setting(run, like)
        ),
        None,
    )


def _same_setting(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(run[name] == other[name] for name in SETTING)


def _difference(run: dict[str, Any], alone: dict[str, Any] | None) -> str:
    if alone is None or run is alone:
        return "-"
    if run["sync"] == "none":
        return "drifts"
    pairs = list(zip(run["losses"], alone["losses"]))
    return f"{max(abs(a - b) for a, b in pairs):.1e}" if pairs else "-"


def _ratio(run: dict[str, Any], ddp: dict[str, Any] | None) -> str:
    mean = run["seconds_per_iteration"]["mean"]
    base = ddp and ddp["seconds_per_iteration"]["mean"]
    return f"{mean / base:.2f}" if mean and base else "-"


def _exposed(run: dict[str, Any], floor: dict[str, Any] | None) -> str:
    if floor is None or run is floor:
        return "-"
    median, base = run["seconds_per_iteration"]["median"], floor["seconds_per_iteration"]["median"]
    if median is None or base is None:
        return "-"
    return f"{median - base:.3f} ({(median - base) / median:.0%})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _megabytes(values: Sequence[int]) -> str:
    """Bytes by rank in megabytes; equal neighbours once: "[272.4, 90.8 x 3]"."""
    groups: list[list[Any]] = []
    for value in values:
        if groups and groups[-1][0] == value:
            groups[-1][1] += 1
        else:
            groups.append([value, 1])
    return ", ".join(f"{value / 1e6:.3f}" + (f" x {count}" if count > 1 else "") for value, count in groups)


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first one as its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
