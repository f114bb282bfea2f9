"""What the formulas say a rank sends and receives, beside what the kernel's counters saw."""

from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.records.run import Summary
from cos598d.tools.report.bytes_from import counted_wire, is_by_sockets, is_in_ledger
from cos598d.tools.report.load import Run
from cos598d.tools.report.table import megabytes as megabytes_by_rank

PURPOSE_NOTE = (
    "All calls of the run by what they were for: calls and payload of rank 0. They are sums over every call; what part "
    "of all calls has a row of its own is up to --ledger."
)
WAYS = ("sent", "received")
LEAST_BYTES = 1e5  # of less, such as the loss's few bytes, headers are the most


@dataclass(frozen=True)
class Traffic:
    """Bytes of an iteration of one rank, or of all ranks where several share an interface's counters."""

    run: str
    whose: str
    predicted_sent: float
    counted_sent: float
    predicted_received: float
    counted_received: float
    is_shared_in_part: bool  # some ranks, not all, share an interface: what they say to each other is not on it
    is_predicted: bool = True  # else only the counters know what travelled
    has_headers: bool = True  # in what is counted

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Predicted and counted, of what is sent and of what is received."""
        return [(self.predicted_sent, self.counted_sent), (self.predicted_received, self.counted_received)]


def counted_traffic(runs: Sequence[Run]) -> list[Traffic]:
    """Predicted and counted, for the runs whose wire was counted."""
    found = []
    for run in runs:
        wire = counted_wire(run.summary)
        if wire is None:
            continue
        ranks = run.summary["world_size"]
        predicted, counted = _of_whole_epochs(run.summary) or (
            [run.summary[f"bytes_{way}_per_iteration"] for way in WAYS],
            [wire[f"bytes_{way}_per_iteration"] for way in WAYS],
        )
        for group in wire["ranks_by_interface"]:
            counting = [rank for rank in group if counted[0][rank] is not None]
            if not counting:
                continue
            sums = [sum(values[rank] for rank in group) for values in predicted]
            # Each of them has read the whole interface.
            sums += [sum(values[rank] for rank in counting) / len(counting) for values in counted]
            whose = f"rank {group[0]}" if len(group) == 1 else f"all {ranks} ranks"
            if 1 < len(group) < ranks:
                whose = f"ranks {', '.join(map(str, group))}"
            sent, received, wire_sent, wire_received = sums
            is_shared_in_part = 1 < len(group) < ranks
            found.append(
                Traffic(
                    *(run.name, whose, sent, wire_sent, received, wire_received, is_shared_in_part),
                    is_predicted=is_in_ledger(run.summary),
                    has_headers=not is_by_sockets(wire),
                )
            )
    return found


def purpose_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A head and a row for each purpose of each run's calls, of the whole run; nothing where no record says it."""
    rows = []
    for run in runs:
        ledger = run.summary.get("ledger", {})
        kept = sum(ledger.get("rows_kept", [])) / max(1, sum(ledger.get("rows", [])))
        for purpose, sums in ledger.get("by_purpose", {}).items():
            cells = [megabytes_by_rank(sums[f"bytes_{way}"]) for way in ("sent", "received")]
            rows.append([run.name, purpose, f"{sums['calls']:,}", megabytes_by_rank([sums["payload_bytes"]]), *cells])
            rows[-1].append(f"{kept:.0%}" if kept == 1 else f"{kept:.1%}")
    return (
        [["run", "calls for", "calls", "payload MB", "sent MB by rank", "received MB", "rows kept"], *rows]
        if rows
        else []
    )


def _of_whole_epochs(run: Summary) -> tuple[list[list[float]], list[list[float]]] | None:
    """Predicted and counted bytes per iteration, by way and rank, of all epochs; None where one was not counted.

    So both are of the same iterations: means without the warm-up weigh what is sent at an epoch's end differently.
    None, too, where an epoch had more ranks.
    """
    if not is_in_ledger(run) or not run["iterations"]:
        return None
    sums = []
    for how in ("predicted", "counted"):
        for way in WAYS:
            rows = [epoch.get(f"{how}_bytes_{way}") for epoch in run["epochs"]]
            if not rows or any(not row or None in row or len(row) != run["world_size"] for row in rows):
                return None
            sums.append([sum(of_rank) / run["iterations"] for of_rank in zip(*rows, strict=True)])
    return sums[:2], sums[2:]


def epoch_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A head and a row for each epoch whose traffic was counted: its iterations, predicted and counted; else none."""
    rows = []
    for run in runs:
        wire = counted_wire(run.summary)
        if not wire:
            continue
        for epoch in run.summary["epochs"]:
            predicted, counted = (epoch.get(f"{how}_bytes_sent") for how in ("predicted", "counted"))
            if not predicted or not counted or None in counted:
                continue
            groups = wire["ranks_by_interface"]
            sums = [sum(predicted[rank] for rank in group) for group in groups]
            seen = [counted[group[0]] for group in groups]
            ratios = [c / p - 1 for c, p in zip(seen, sums, strict=True) if p >= LEAST_BYTES]
            off = " to ".join(dict.fromkeys(f"{share:+.1%}" for share in (min(ratios), max(ratios)))) if ratios else "-"
            cells = [megabytes_by_rank(sums), megabytes_by_rank(seen), off]
            if not is_in_ledger(run.summary):
                cells = ["-", cells[1], "-"]
            rows.append([run.name, str(epoch["epoch"]), str(epoch.get("iterations", "-")), *cells])
    return [["run", "epoch", "iterations", "predicted", "counted", "off"], *rows] if rows else []
