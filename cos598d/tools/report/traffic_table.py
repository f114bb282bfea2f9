"""The bytes of runs as tables, from records only: predicted and counted, and where the counts come from."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import ASSUMED_BYTES, BY_LEDGER, OWN_SOCKETS
from cos598d.records.run import Summary
from cos598d.terminal.tables import as_markdown, as_text, picked
from cos598d.terminal.words import listed
from cos598d.tools.report.numbers import cell, mb_by_rank, plain

BYTES_FROM = "bytes from"  # the column of every table of bytes
BYTES_NOTE = (
    "Bytes from: the communication log (log), which has every call with its formula, or only the kernel's "
    "counters if a library does not report its calls. The counters are those of the interface to the other hosts, "
    "with packet headers, or on one host those of each rank's sockets, without headers."
)


def bytes_from(record: Mapping[str, Any]) -> str:
    """The source of the bytes, in a word, for a run's summary or a bench's candidate."""
    if is_in_ledger(record):
        return "log"
    return OWN_SOCKETS if is_by_sockets(counted_wire(record)) else record["bytes_from"]


def is_in_ledger(record: Mapping[str, Any]) -> bool:
    """Whether the ledger has all bytes that were sent. If not, its bytes are not what the run sent."""
    return record.get("bytes_from", BY_LEDGER) == BY_LEDGER  # older records do not have it


def counted_wire(record: Mapping[str, Any]) -> Summary | None:
    """What the kernel has counted for a run; None if it has not, or has only counted a whole host's loopback."""
    wire = record.get("wire")
    return None if wire is None or is_loopback(wire.get("interface", "")) else wire


def by_interface(wire: Summary, predicted: Sequence[Any], counted: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Values by rank as those of the interfaces: what is predicted for all of its ranks together, and what one of them
    has counted, since all read the same counter."""
    groups = wire["ranks_by_interface"]
    return [sum(predicted[rank] for rank in ranks) for ranks in groups], [counted[ranks[0]] for ranks in groups]


def is_loopback(interface: str) -> bool:
    """Whether an interface with that name is loopback, on which all programs of a host send."""
    return re.fullmatch(r"lo\d*", interface) is not None


def is_by_sockets(wire: Mapping[str, Any] | None) -> bool:
    """Whether each rank has counted its own sockets, without headers."""
    return wire is not None and wire.get("interface") == OWN_SOCKETS


def traffic_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and a row for each run: calls, tensors and bytes of an iteration, by the formulas; nothing by them where
    only the kernel knows what travelled."""
    rows = [["run", "calls/it", "tensors/it", "payload MB/it", "sent MB/it by rank", "received MB/it by rank"]]
    rows[0] += ["counted MB/it", BYTES_FROM]
    for run in runs:
        cells = [f"{run[f'{what}_per_iteration']:.4g}" for what in ("calls", "tensors")]
        cells += [mb_by_rank([run["payload_bytes_per_iteration"]])]
        cells += [mb_by_rank(run[f"bytes_{way}_per_iteration"]) for way in ("sent", "received")]
        by_formula = cells if is_in_ledger(run) else ["-"] * len(cells)
        rows.append([run["run"], *by_formula, _counted(counted_wire(run)), bytes_from(run)])
    return rows


def assumed_bytes(runs: Sequence[Summary], before: str) -> str:
    """`before` and a sentence that names the runs whose bytes are assumed; "" where there are none."""
    names = [run["run"] for run in runs if run.get("bytes_are_assumed")]
    return f"{before}Bytes of {', '.join(names)} are assumed: {ASSUMED_BYTES}." if names else ""


def _counted(wire: Summary | None) -> str:
    """Counted bytes sent in megabytes, by interface; where ranks share one, those of all of them together."""
    if not wire:
        return "-"
    by_rank, cells = wire["bytes_sent_per_iteration"], []
    if is_by_sockets(wire):
        return mb_by_rank([sent for sent in by_rank if sent is not None])
    for ranks in wire["ranks_by_interface"]:
        # All read the same counters, each when its own iterations end.
        known = [by_rank[rank] for rank in ranks if by_rank[rank] is not None]
        together = f" (ranks {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
        cells.append(f"{sum(known) / len(known) / 1e6:.3f}{together}")
    return ", ".join(cells)


# Ethernet 14, IPv4 20, TCP 20 and its timestamps 12 bytes: of every packet, acknowledgements too.
HEADER_BYTES = 66
COLUMNS = (
    *("run", "batch", "precision", "tensors", "gradient MB", "its/epoch", "calls/it"),
    *("predicted MB", "counted MB", "difference", "other calls MB", "headers MB", "rest MB", BYTES_FROM),
)
BRIEF = ("run", "predicted MB", "counted MB", "difference", "headers MB", "rest MB")
BRIEF_LEGEND = (
    "MB: 1,000,000 bytes, sent in the first epoch's training, by rank. Predicted: the gradients' calls, by formula.\n"
    "Counted: by the kernel. Difference: packet headers, the rest (the backend's own messages), and small calls such\n"
    "as the loss.\n"
    "--markdown prints all columns."
)
LEGEND = (
    "MB: 1,000,000 bytes, sent in the first epoch's training by rank (equal neighbours once), without evaluation.\n"
    "predicted: the gradients' calls, by the communication log's formulas. counted: by the kernel.\n"
    "difference = counted - predicted = other calls (the loss, agreements of ranks)\n"
    f"+ headers ({HEADER_BYTES} bytes per packet, acknowledgements too; own sockets carry none)\n"
    "+ rest (the backend's own messages, repeats).\n" + textwrap.fill(BYTES_NOTE, 118)
)


def traffic_table(runs: Sequence[Summary], markdown: bool = False) -> str:
    """The table of runs as `load_run` returns them. Raises UserError for one whose traffic was not counted."""
    rows = [list(COLUMNS), *(_row(run) for run in runs)]
    assumed = assumed_bytes(runs, before="\n")
    if markdown:
        return f"{as_markdown(rows)}\n\n{LEGEND}{assumed}"
    answer = textwrap.fill(_answer(runs), 118)
    return "\n\n".join(filter(None, [answer, as_text(picked(rows, BRIEF), numbers=True), BRIEF_LEGEND])) + assumed


def _answer(runs: Sequence[Summary]) -> str:
    """What the busiest rank sends in an epoch, and how far off the formulas are; "" where no log has it."""
    found, off = [], []
    for run in filter(is_in_ledger, runs):
        epoch, sent = run["epochs"][0], run["bytes_sent_per_iteration"]
        size = epoch["iterations"] * max(sent)
        wire = counted_wire(run) or {"ranks_by_interface": []}
        predicted, counted = by_interface(wire, sent, epoch["counted_bytes_sent"])
        if size:
            off.append(sum(counted) / (epoch["iterations"] * sum(predicted)) - 1)
            found.append(f"{plain(size / 1e6)} MB in {run['run']}")
    if not found:
        return ""
    ends = " to ".join(dict.fromkeys(f"{share:.1%}" for share in (min(off), max(off))))
    more = f"The kernel counted {ends} more" if min(off) >= 0 else f"The kernel's count is off by {ends}"
    return f"By formula, the busiest rank sends this much per epoch: {listed(found)}. {more}."


def _row(run: Summary) -> list[str]:
    wire = counted_wire(run)
    epoch = run["epochs"][0] if run.get("epochs") else {}
    iterations = epoch.get("iterations", 0)
    if (
        not wire
        or not wire.get("packets_sent_per_iteration")
        or not iterations
        or not all(epoch.get(f"{how}_bytes_sent") for how in ("predicted", "counted"))
    ):
        raise UserError(
            f"{run['run']} did not count its traffic. Run it on 2 ranks or more, with a --monitor_interval over 0."
        )
    gradients, packets = by_interface(wire, run["bytes_sent_per_iteration"], wire["packets_sent_per_iteration"])
    if None in packets:
        raise UserError(f"{run['run']} has no count of packets. Run it again.")
    everything, counted = by_interface(wire, epoch["predicted_bytes_sent"], epoch["counted_bytes_sent"])
    if None in counted:
        raise UserError(f"{run['run']} stopped counting before its epoch's end. Run it again.")
    gradients = [iterations * sent for sent in gradients]
    headers = [0 if is_by_sockets(wire) else iterations * HEADER_BYTES * count for count in packets]
    rest = [c - e - h for c, e, h in zip(counted, everything, headers, strict=True)]
    other = [e - g for e, g in zip(everything, gradients, strict=True)]
    difference = sum(counted) / sum(gradients) - 1 if sum(gradients) else None
    setting = [run["run"], str(run["total_train_batch_size"]), run["precision"]]
    if not is_in_ledger(run):  # what travels between those calls that it has is not known by kind
        none = ["-", "-"]
        known = [*none, str(iterations), *none, mb_by_rank(counted, 1), *none, mb_by_rank(headers), "-"]
        return [*setting, *known, bytes_from(run)]
    return [
        *(*setting, str(run["tensors_per_iteration"])),
        *(f"{run['payload_bytes_per_iteration'] / 1e6:.3f}", str(iterations), f"{run['calls_per_iteration']:g}"),
        *(mb_by_rank(gradients, 1), mb_by_rank(counted, 1), cell(difference, "+.2%")),
        *(mb_by_rank(other), mb_by_rank(headers), mb_by_rank(rest), bytes_from(run)),
    ]
