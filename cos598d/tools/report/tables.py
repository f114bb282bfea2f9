"""A row for each run: where the time goes, what travels, and what is held. MB are 1,000,000 bytes."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cos598d.records.conventions import NOT_METRICS, PHASES
from cos598d.terminal.tables import filled
from cos598d.tools.report.cells import Rows, as_lines
from cos598d.tools.report.compare import BRIEF, SECONDS, megabytes, table
from cos598d.tools.report.records import Run
from cos598d.tools.report.verdict import said

LEAST_BYTES = 1e5  # of fewer, such as the loss's, headers are the most
TIME = (
    "s per step: the mean without the first 2 iterations, by rank 0's clock; 95 %: its interval, from the spread of "
    "one run's iterations or, of runs with the same settings, from run to run (Student's t). Times ddp's, exposed s, "
    "speed-up: against torch's DDP, sync none and one rank, in runs that differ in nothing else. Phases: means over "
    "the ranks; calls that run during backward are in its seconds."
)
TRAFFIC = (
    "Per iteration, by the algorithms' formulas: calls with gradients, or with weights that are held in shards. "
    "Counted: what the kernel saw of each rank's connections, without headers. Bytes from: the communication log, "
    "which has every call, or the kernel's counters, where a library does not report its calls. nccl's calls are "
    "assumed to send as many bytes as gloo's."
)
MEMORY = "MB of tensors on the rank that holds most: just before an optimizer's step (peak), and after it."


def brief(runs: Sequence[Run]) -> str:
    """What to be wary of, the fastest, and a small table, for the screen."""
    return "\n\n".join(filter(None, ["\n".join(said(runs)), as_lines(table(runs), BRIEF)]))


def detailed(runs: Sequence[Run]) -> str:
    """The same with all tables and a legend."""
    tables = (table(runs), time_rows(runs), traffic_rows(runs), memory_rows(runs))
    legend = (filled(words, hanging="") for words in (TIME, TRAFFIC, MEMORY))
    return "\n\n".join(filter(None, ["\n".join(said(runs)), *(as_lines(rows) for rows in tables if rows), *legend]))


def time_rows(runs: Sequence[Run]) -> Rows:
    """Seconds of an iteration and of its phases, the rates, and how busy the processors were."""
    found = []
    for run in runs:
        seconds, loads = run.summary.seconds_per_iteration, [load[0] for load in run.loads if load]
        share = run.summary.operations.get("share_of_peak")
        row = {"run": run.name, SECONDS: seconds.mean, "median": seconds.median, "90th percentile": seconds.p90}
        row |= {"first": seconds.first} | {phase: run.summary.phases.get(f"seconds_{phase}") for phase in PHASES}
        row |= {"examples/s": run.summary.wall.get("examples_per_second_clock")}
        row |= {"examples/s, all time": run.summary.wall.get("examples_per_second_wall")}
        row |= {"% of the peak": 100 * share if share else None}
        found.append(row | {"processors busy, %": 100 * fmean(loads) if loads else None})
    return found


def traffic_rows(runs: Sequence[Run]) -> Rows:
    """Calls and bytes of an iteration: by formula, and as the kernel counted."""
    found = []
    for run in runs:
        summary, knows = run.summary, run.is_in_ledger
        row = {"run": run.name, "calls": summary.calls_per_iteration}
        row["payload MB"] = summary.payload_bytes_per_iteration / 1e6
        row["sent MB, by rank"] = megabytes(summary.bytes_sent_per_iteration)
        row["received MB, by rank"] = megabytes(summary.bytes_received_per_iteration)
        row = row if knows else dict.fromkeys(row) | {"run": run.name}
        if wire := summary.wire:
            predicted, counted = wire.predicted_bytes_sent_per_iteration, wire.bytes_sent_per_iteration
            row["all sent MB, predicted"] = megabytes(predicted) if knows else None
            row["all sent MB, counted"] = megabytes(counted)
            whole, seen = (sum(sent or 0 for sent in of) for of in (predicted, counted))
            is_known = knows and whole >= LEAST_BYTES and None not in counted
            row["off, %"] = 100 * (seen / whole - 1) if is_known else None
        log = "log (assumed)" if summary.bytes_are_assumed else "log"
        found.append(row | {"bytes from": log if knows else "counters"})
    return found


def purpose_rows(runs: Sequence[Run]) -> Rows:
    """All calls of a run by their purpose; calls and payload are rank 0's."""
    found = []
    for run in runs:
        for purpose, sums in run.summary.ledger.get("by_purpose", {}).items():
            row = {"run": run.name, "calls for": purpose, "calls": sums.calls, "payload MB": sums.payload_bytes / 1e6}
            row |= {"sent MB, by rank": megabytes(sums.bytes_sent)}
            found.append(row | {"received MB, by rank": megabytes(sums.bytes_received)})
    return found


def memory_rows(runs: Sequence[Run]) -> Rows:
    """MB of tensors by category just before a step, on the rank that holds most; the largest peaks of a process and a
    GPU."""
    found = []
    for run in runs:
        if (memory := run.summary.memory) is None:
            continue
        held = max(memory.peak, key=lambda held: sum(held.values()), default={})
        row = {"run": run.name, **{name: size / 1e6 for name, size in held.items()}, "total": sum(held.values()) / 1e6}
        gpus = [peak / 1e6 for peak in memory.gpu_peak_bytes if peak]
        row |= {"process's peak": max(memory.process_peak_bytes) / 1e6, "GPU's peak": max(gpus, default=None)}
        found.append(row)
    return found


def epoch_rows(runs: Sequence[Run]) -> Rows:
    """Every number of every epoch."""
    found = []
    for run in runs:
        for epoch in run.summary.epochs:
            training = epoch.get("training", {})
            row = {"run": run.name, "epoch": epoch["epoch"], "cut": epoch.get("is_cut") or None}
            row |= {"loss": epoch.get("loss"), **metrics_of(epoch)}
            row |= {"training, s": training.get("wall_seconds"), "evaluation, s": epoch.get("seconds_evaluation")}
            found.append(row | {"examples/s": training.get("examples_per_second_wall")})
    return found


def metrics_of(epoch: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an epoch's evaluation."""
    return {
        name: value
        for name, value in epoch.items()
        if name not in NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
