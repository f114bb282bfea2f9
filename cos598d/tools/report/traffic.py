"""The page's part on bytes: what the formulas say a rank sends and receives, beside what the kernel's counters saw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from cos598d.records.run import Summary
from cos598d.terminal.colours import BLUE, SKY
from cos598d.terminal.words import number_of
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import mb_by_rank, megabytes
from cos598d.tools.report.svg import draw, lanes, legend_below
from cos598d.tools.report.traffic_table import (
    BYTES_NOTE,
    assumed_bytes,
    by_interface,
    counted_wire,
    is_by_sockets,
    is_in_ledger,
    traffic_rows,
)

TRAFFIC_NOTE = (
    "Calls that send gradients or (if a strategy shards them) parameters: the mean over all iterations, by the "
    "algorithms' formulas. Payload: each tensor once, though several calls may carry it. Counted: everything sent "
    f"during training, also the loss and weights gathered for an evaluation. MB: 1,000,000 bytes. {BYTES_NOTE}"
)
PURPOSE_NOTE = (
    "All calls of the run by purpose; calls and payload (of each call) are rank 0's. Sums include every call. "
    "--ledger decides how many calls have a row of their own."
)
WAYS = ("sent", "received")
MOST_TENSORS, FEW_TENSORS = 12, 5  # with a row each, of one run and of one of several
LEAST_BYTES = 1e5  # of less, such as the loss's few bytes, headers are the most


@dataclass(frozen=True)
class Traffic:
    """Bytes of an iteration of one rank, or of all ranks where several share an interface's counters.

    `sent` and `received` are each what is predicted and what was counted.
    """

    run: str
    whose: str
    sent: tuple[float, float]
    received: tuple[float, float]
    is_shared_in_part: bool  # some ranks, not all, share an interface: what they say to each other is not on it
    is_predicted: bool  # else only the counters know what travelled
    has_headers: bool  # in what is counted


def traffic_blocks(runs: Sequence[Run]) -> list[Block]:
    """What the formulas predict, all calls by their purpose, and where the kernel counted, how far off they are."""
    runs = [run for run in runs if run.summary["losses"]]
    if not runs:
        return []
    summaries = [run.summary for run in runs]
    blocks: list[Block] = [Table(TRAFFIC_NOTE + assumed_bytes(summaries, before=" "), traffic_rows(summaries))]
    blocks += [table for run in runs if (table := tensors_table(run, MOST_TENSORS if len(runs) == 1 else FEW_TENSORS))]
    if purposes := purpose_rows(runs):
        blocks.append(Table(PURPOSE_NOTE, purposes))
    counted = counted_traffic(runs)
    if not counted:
        return [*blocks, "The kernel counted no run's bytes."]
    rows = [["run", "whose", "sent predicted", "sent counted", "off", "received predicted", "received counted", "off"]]
    for group in _alike(counted):
        rows.append([group[0].run, _whose(group)])
        for pairs in ([one.sent for one in group], [one.received for one in group]):
            predicted, seen = pairs[0][0], [counted for _, counted in pairs]
            rows[-1] += [megabytes(predicted) if group[0].is_predicted else "-", _ends(seen, megabytes)]
            off = [counted / predicted - 1 for counted in seen] if predicted >= LEAST_BYTES else []
            rows[-1].append(_ends(off, "{:+.1%}".format) if off else "-")
    blocks.append(Table("MB per iteration, predicted and counted by the kernel.", rows))
    if epochs := epoch_rows(runs):
        blocks.append(Table("MB sent in an epoch's training, all calls, predicted and counted.", epochs))
    has_headers = any(one.has_headers for one in counted)
    where = "crossed the interface, with packet headers" if has_headers else "a rank's own sockets carried"
    caption = [f"Predicted: the communication log's formulas. Counted: everything that {where}."]
    if any(one.is_shared_in_part for one in counted):
        caption.append("Ranks of one host share an interface. What they send to each other does not pass through it.")
    return [*blocks, *figures(("traffic", _figure(counted), caption))]


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
            # Each of them has read the whole interface.
            sent, received = (
                (sum(formula[rank] for rank in group), sum(seen[rank] for rank in counting) / len(counting))
                for formula, seen in zip(predicted, counted, strict=True)
            )
            whose = f"rank {group[0]}" if len(group) == 1 else f"all {ranks} ranks"
            is_shared_in_part = 1 < len(group) < ranks
            if is_shared_in_part:
                whose = f"ranks {', '.join(map(str, group))}"
            known = (is_shared_in_part, is_in_ledger(run.summary), not is_by_sockets(wire))
            found.append(Traffic(run.name, whose, sent, received, *known))
    return found


def purpose_rows(runs: Sequence[Run]) -> list[list[str]]:
    """A head and a row for each purpose of each run's calls, of the whole run; nothing where no record has it."""
    rows = []
    for run in runs:
        ledger = run.summary.get("ledger", {})
        kept = sum(ledger.get("rows_kept", [])) / max(1, sum(ledger.get("rows", [])))
        for purpose, sums in ledger.get("by_purpose", {}).items():
            cells = [mb_by_rank(sums[f"bytes_{way}"]) for way in WAYS]
            cells = [f"{sums['calls']:,}", mb_by_rank([sums["payload_bytes"]]), *cells]
            rows.append([run.name, purpose, *cells, f"{kept:.0%}" if kept == 1 else f"{kept:.1%}"])
    head = ["run", "calls for", "calls", "payload MB", "sent MB by rank", "received MB", "rows kept"]
    return [head, *rows] if rows else []


def tensors_table(run: Run, most: int) -> Table | None:
    """What rank 0 sends in its typical step: a row for each tensor or bucket and each kind of call, the `most` with the
    most bytes; the others are summed in one row. None where the record has no calls of that step."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for call in run.calls:
        counts = sums.setdefault((call["tensor"], call["op"], call["purpose"]), [0, 0, 0, 0])
        added = (1, call["payload_bytes"], call["bytes_sent"], call["bytes_received"])
        counts[:] = [count + more for count, more in zip(counts, added, strict=True)]
    if not sums:
        return None
    ranked = sorted(sums.items(), key=lambda item: -sum(item[1][2:]))  # what was sent, and what was received
    rows = [[*names, *map("{:,}".format, counts)] for names, counts in ranked[:most]]
    if others := [counts for _, counts in ranked[most:]]:
        rows.append([f"{len(others)} more", "-", "-", *(f"{sum(column):,}" for column in zip(*others, strict=True))])
    total = sum(counts[2] for counts in sums.values())
    caption = (
        f"{run.name}: what rank 0 sends in a step, by tensor, largest first (iteration {run.calls[0]['iteration']}, "
        f"{number_of(len(run.calls), 'call')}, {total:,} bytes). Sent and received: by the algorithms' formulas."
    )
    head = ["tensor", "call", "carries", "calls", "payload bytes", "bytes sent", "bytes received"]
    return Table(caption, [head, *rows])


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
        for epoch in run.summary["epochs"] if wire else []:
            predicted, counted = (epoch.get(f"{how}_bytes_sent") for how in ("predicted", "counted"))
            if not wire or not predicted or not counted or None in counted:
                continue
            sums, seen = by_interface(wire, predicted, counted)
            ratios = [c / p - 1 for c, p in zip(seen, sums, strict=True) if p >= LEAST_BYTES]
            off = _ends(ratios, "{:+.1%}".format) if ratios else "-"
            cells = [mb_by_rank(sums), mb_by_rank(seen), off]
            if not is_in_ledger(run.summary):
                cells = ["-", cells[1], "-"]
            rows.append([run.name, str(epoch["epoch"]), str(epoch.get("iterations", "-")), *cells])
    return [["run", "epoch", "iterations", "predicted", "counted", "off"], *rows] if rows else []


def _alike(traffic: Sequence[Traffic]) -> list[list[Traffic]]:
    """Neighbours of one run of which the same is predicted, together."""
    kinds = groupby(traffic, key=lambda one: (one.run, one.sent[0], one.received[0]))
    return [list(group) for _, group in kinds]


def _whose(group: Sequence[Traffic]) -> str:
    return group[0].whose + (f" to {group[-1].whose}, each" if len(group) > 1 else "")


def _ends(values: Sequence[float], words: Callable[[float], str]) -> str:
    """The least and the largest of the values, once if they look the same."""
    return " to ".join(dict.fromkeys([words(min(values)), words(max(values))]))


def _figure(traffic: Sequence[Traffic]) -> str:
    """Bytes sent an iteration, predicted and counted, side by side.

    Ranks that are alike share a lane, with the mean of what was counted.
    """
    groups = _alike(traffic)
    names = [f"{group[0].run}, {_whose(group)}" for group in groups]
    bars = {
        "predicted": ([group[0].sent[0] / 1e6 for group in groups], 0.02, {"color": SKY}),
        "counted": (
            [fmean(one.sent[1] for one in group) / 1e6 for group in groups],
            *(0.28, {"color": BLUE, "hatch": "///", "edgecolor": "white"}),
        ),
    }

    def paint(figure):
        axes = figure.subplots()
        handles = [
            axes.barh([place + below for place in range(len(groups))], lengths, 0.24, **look)
            for lengths, below, look in bars.values()
        ]
        lanes(axes, names, -0.25)
        axes.set_xlabel("MB sent per iteration")
        legend_below(figure, handles, list(bars))

    return draw("traffic", "bytes sent per iteration, predicted and counted", 50 + 36 * len(groups), paint)
