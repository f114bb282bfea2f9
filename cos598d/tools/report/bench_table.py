"""A bench's record as tables for the screen. Torch-free: it reads the record alone."""

import textwrap
from typing import Any

from cos598d.errors import WARNING
from cos598d.records.conventions import ASSUMED_BYTES, DDP, FLOOR, FLOORS, SPARSE_FLOOR
from cos598d.records.summary import SLOWEST
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text, picked
from cos598d.terminal.words import number_of
from cos598d.tools.report.disturbed import LEAST_SECONDS, share_of_others
from cos598d.tools.report.memory import COUNTED_NOTE, held_head, held_rows, unsaid
from cos598d.tools.report.numbers import cell, percent
from cos598d.tools.report.traffic_table import is_in_ledger

# Norms of averaged gradients that differ by more are not those of the same average. Lossy codecs come closer.
NORM_TOLERANCE = 0.02
SPARSE_FLOOR_NOTE = (
    f"{SPARSE_FLOOR}: as {FLOOR}, but backward computes only the used rows of a large embedding's gradient."
)
OF_PEAK_NOTE = "Of the peak: products that an iteration needs, by formula, as a share of what the machine can multiply."


# The columns that answer which sync is the fastest, what it costs and what it sends. A page has the others, too.
BRIEF = ("sync", "median s", "ratio to ddp", "95 %", "exposed s", "MB sent", "peak MB", "peak GPU MB")


def legend(record: dict[str, Any]) -> str:
    """What the columns of BRIEF say."""
    lines = (
        f"median s: {seconds_of(record)}. Ratio: the median of those within each round, with its 95 % interval "
        "(- below 6 rounds).\n"
        "exposed: the median minus that of sync none. MB sent: in an iteration, by the rank that sends most."
    )
    return "\n".join([lines, *([SPARSE_FLOOR_NOTE] if has_sparse_floor(record) else [])])


def has_sparse_floor(record: dict[str, Any]) -> bool:
    """Whether the floor with sparse embeddings is among the candidates."""
    return any(candidate["label"] == SPARSE_FLOOR for candidate in record["candidates"])


def seconds_of(record: dict[str, Any]) -> str:
    """Whose seconds the record's are, in its own words."""
    return printable(str(record["setting"].get("seconds_of", SLOWEST)))


def bench_table(record: dict[str, Any]) -> str:
    """All that was measured: the candidates, what the sweeps found, and what to be wary of."""
    warning = disturbance(record)
    parts = [setting_words(record), *([f"{WARNING}{warning}."] if warning else [])]
    if "message_size" in record:
        found = record["message_size"]
        parts.append(f"{as_text(message_rows(found), numbers=True)}\n{message_fit(found)}")
    if record["candidates"]:
        parts += [as_text(picked(candidate_rows(record), BRIEF), numbers=True), legend(record)]
    if "memory" in record:
        parts.append(f"{as_text(memory_rows(record), numbers=True)}\n{textwrap.fill(memory_note(record), 118)}")
    if "bucket_mb" in record:
        parts.append(f"{as_text(capacity_rows(record), numbers=True)}\n{best_capacity(record)}")
    parts += [f"{WARNING}{remark}." for remark in remarks(record) if remark != warning]
    return "\n\n".join(parts)


def page_tables(record: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """The same tables for a page, each with a note."""
    tables = []
    if "message_size" in record:
        tables.append((f"Messages: {message_fit(record['message_size'])}.", message_rows(record["message_size"])))
    if record["candidates"]:
        note = f"Seconds {seconds_of(record)}, medians over the rounds. Ratios: medians of those within each round, "
        note += "and their 95 % intervals. Exposed: the median less that of none, and the 95 % interval of the "
        note += "differences within each round. MB: of the rank that sends most."
        note += f" {OF_PEAK_NOTE}" if record["setting"].get("peak_per_second") else ""
        note += f" {SPARSE_FLOOR_NOTE}" if has_sparse_floor(record) else ""
        tables.append((note, candidate_rows(record)))
    if "memory" in record:
        tables.append((memory_note(record), memory_rows(record)))
    if "bucket_mb" in record:
        tables.append((f"Capacities of buckets: {best_capacity(record)}.", capacity_rows(record)))
    return tables


def setting_words(record: dict[str, Any]) -> str:
    """What the record is of, in one or two lines: the model, the ranks, and what an iteration is."""
    setting = record["setting"]
    ranks, threads = setting["world_size"], setting["threads_per_rank"]
    line = f"{number_of(ranks, 'rank')} ({setting['backend']}, {setting['device']}, "
    line += f"{number_of(threads, 'thread')} each), {setting.get('precision', 'fp32')}, "
    line += number_of(setting["rounds"], "round")
    line += f"\n{printable(note)}" if (note := setting.get("precision_note")) else ""
    if setting["model"] is None:
        return line
    work = "forward + backward + sync + zero_grad" + (" + clip + AdamW" if setting["step"] else ", no optimizer")
    how = "all attached at once" if setting["attach"] == "once" else "attached in turns"
    return (
        f"{setting['model']}, gradient of {setting['gradient_bytes'] / 1e6:.1f} MB; {line}\n"
        f"an iteration: {setting['batch']} x {setting['tokens']} tokens on each rank, {work}; syncs {how}, in a "
        "different order in each round"
    )


def candidate_rows(record: dict[str, Any]) -> list[list[str]]:
    """A head and a row for each candidate: its seconds, their ratios to DDP and the floor, and what travels."""
    peaks = {
        head: record[name]
        for head, name in (("peak MB", "peak_memory_bytes"), ("peak GPU MB", "peak_gpu_memory_bytes"))
        if name in record
    }
    head = ["sync", "median s", "quartiles", "ratio to ddp", "95 %", "ratio to none", "95 %", "exposed s", "95 %"]
    setting = record.get("setting", {})
    needed, can = setting.get("operations"), setting.get("peak_per_second")
    of_peak = ["of the peak"] if needed and can else []
    rows = [[*head, *of_peak, "calls", "MB sent", *peaks]]
    for candidate in record["candidates"]:
        label = candidate["label"]
        summary, traffic = record["summary"][label], record["traffic"][label]
        low, high = summary["seconds_quartiles"]
        row = [label, cell(summary["seconds_median"], ".4f"), f"{low:.4f}-{high:.4f}"]
        for reference, ratio in ((DDP, summary["ratio_to_ddp"]), (FLOOR, summary["ratio_to_floor"])):
            interval = ratio and label != reference and ratio["interval_95"]
            row.append(f"{ratio['median']:.3f}" if ratio else "-")
            row.append(f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-")
        within = summary.get("exposed_within_rounds")  # records of older versions have none
        low, high = (within and label != FLOOR and within["interval_95"]) or (None, None)
        row += [cell(summary["seconds_exposed"], ".4f"), "-" if low is None else f"{low:.4f}-{high:.4f}"]
        row += [f"{needed / can / summary['seconds_median']:.0%}"] if of_peak else []
        if is_in_ledger(candidate):
            row += [str(max(traffic["calls"])), f"{max(traffic['bytes_sent']) / 1e6:.3f}"]
        else:
            row += ["-", "-"]
        row += [f"{max(by_label[label]) / 1e6:.0f}" for by_label in peaks.values()]
        rows.append(row)
    return rows


def memory_rows(record: dict[str, Any]) -> list[list[str]]:
    """A head and for each candidate what it holds between steps and at a step's peak, counted and by formula."""
    rows = [[label, *cells] for label, found in record["memory"].items() for cells in held_rows(found)]
    return [["sync", *held_head()], *rows]


def memory_note(record: dict[str, Any]) -> str:
    """What those rows say, and why a formula is missing."""
    sentences = [COUNTED_NOTE, "The optimizer's state exists only with --step."]
    return " ".join([*sentences, *(f"{reason}." for reason in unsaid(record["memory"]))])


def message_rows(found: dict[str, Any]) -> list[list[str]]:
    """A head and a row for each size of message: its seconds, measured and fitted, and its bandwidth."""
    rows = [["all_reduce of", "median us", "fitted us", "algbw MB/s", "busbw MB/s"]]
    for size in found["sizes"]:
        rows.append(
            [_size(size["payload_bytes"])]
            + [f"{size[name] * 1e6:.0f}" for name in ("seconds_median", "seconds_fitted")]
            + [f"{size[f'{name}_bytes_per_second'] / 1e6:.1f}" for name in ("algbw", "busbw")]
        )
    return rows


def message_fit(found: dict[str, Any]) -> str:
    """The line fitted to the messages, in words."""
    fit = found["fit"]
    return (
        f"fitted: a call takes {fit['overhead_seconds'] * 1e6:.0f} us and its payload / "
        f"{fit['bytes_per_second'] / 1e6:.1f} MB/s"
    )


def capacity_rows(record: dict[str, Any]) -> list[list[str]]:
    """A head and a row for each capacity of a bucket: how many there are, and their exposed seconds, predicted for
    calls that leave backward its cores and for calls that take them."""
    rows = [["bucket MiB", "buckets", "exposed s predicted", "at most", "measured"]]
    measured = _exposed_by_capacity(record)
    for row in record["bucket_mb"]["capacities"]:
        rows.append(
            [f"{row['bucket_mb']:g}", str(len(row["buckets"]))]
            + [cell(row["seconds_exposed_predicted"], ".4f"), cell(row.get("seconds_exposed_at_most"), ".4f")]
            + [cell(measured[row["bucket_mb"]], ".4f")]
        )
    return rows


def best_capacity(record: dict[str, Any]) -> str:
    """The capacities with the least exposed communication, in words."""
    found, measured = record["bucket_mb"], _exposed_by_capacity(record)
    best = min(measured, key=lambda capacity: measured[capacity])
    words = f"backward takes {found['backward_seconds']:.4f} s; least exposed: {found['best_predicted_mb']:g} MiB "
    words += "predicted from overhead and bandwidth"
    return words if disturbance(record) else f"{words}, {best:g} MiB measured by the medians"


def _exposed_by_capacity(record: dict[str, Any]) -> dict[float, float]:
    return {
        row["bucket_mb"]: record["summary"][row["candidate"]]["seconds_exposed"]
        for row in record["bucket_mb"]["capacities"]
    }


def disturbance(record: dict[str, Any]) -> str:
    """A sentence on other programs that kept the machine busy meanwhile; "" where none are known."""
    ranks = []
    for row in record.get("host", []):
        busy, passed = row["host_cpu_percent"] / 100, row["seconds"]
        ranks.append((busy, row["process_cpu_seconds"] / passed) if passed >= LEAST_SECONDS else None)
    if not ranks:
        return ""
    environment = record["environment"] | {"threads_per_rank": record["setting"].get("threads_per_rank")}
    share = share_of_others(ranks, environment)
    if not share:
        return ""
    return (
        f"the machine was busy: other programs took {percent(share)} of its processors, so no sync is called the "
        "fastest. Measure again on an idle machine"
    )


def remarks(record: dict[str, Any]) -> list[str]:
    """What to be wary of: bytes that nobody counted, what syncs say of this model, and candidates whose gradients are
    not DDP's average, so that their seconds are not those of the same work."""
    found = [said] if (said := disturbance(record)) else []
    found += [f"bytes are assumed: {ASSUMED_BYTES}"] if record.get("bytes_are_assumed") else []
    unseen = [candidate["label"] for candidate in record.get("candidates", []) if not is_in_ledger(candidate)]
    if unseen:
        found.append(f"bytes unknown, because the library does not report its calls: {', '.join(unseen)}")
    found += [printable(line) for line in record.get("remarks", [])]
    odd = other_averages(record)
    return found + ([f"not ddp's average of the same batch, so not the same work: {', '.join(odd)}"] if odd else [])


def other_averages(record: dict[str, Any]) -> list[str] | None:
    """The labels of the candidates whose averaged gradient is not DDP's, by its norm; None where DDP has none."""
    norms = record.get("gradient_norm", {})
    expected = norms.get(DDP, [None])[0]
    if expected is None:
        return None
    return [
        label
        for label, by_rank in norms.items()
        if label not in FLOORS
        and any(norm is None or abs(norm - expected) > NORM_TOLERANCE * expected for norm in by_rank)
    ]


def _size(payload_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if payload_bytes >= unit:
            return f"{payload_bytes / unit:g} {name}"
    return f"{payload_bytes} B"
