"""Tables of a bench: each candidate's seconds, their ratios within rounds, what travels, and which is the fastest."""

from cos598d.errors import WARNING
from cos598d.records.bench import Bench, Difference, Ratio
from cos598d.records.conventions import ASSUMED_BYTES, DDP, FLOOR
from cos598d.terminal.printable import printable
from cos598d.terminal.words import number_of
from cos598d.tools.report.busy import LEAST_SECONDS, share_of_others
from cos598d.tools.report.cells import Interval, Rows, as_lines, fastest_of, shown

# Norms of averaged gradients that differ by more are not those of the same average. Lossy codecs come closer.
NORM_TOLERANCE = 0.02
# The columns for the screen. A page has the others, too.
BRIEF = ("sync", "median s", "times ddp's", "95 %", "exposed s", "calls", "MB sent")


def bench_table(record: Bench) -> str:
    """All that was measured, for the screen: which is the fastest, the candidates, and warnings."""
    parts = [fastest_in(record), setting_words(record), *(f"{WARNING}{one}." for one in remarks(record))]
    parts += [as_lines(candidate_rows(record), BRIEF), legend(record)]
    return "\n\n".join(filter(None, parts))


def legend(record: Bench) -> str:
    """What the columns say."""
    return (
        f"median s: {printable(record.setting.seconds_of)}. Times ddp's: the median of the ratios within each round, "
        "with its 95 % interval\n(- below 6 rounds). exposed: the median less that of sync none. calls, MB sent: in an "
        "iteration, by the rank that sends most."
    )


def setting_words(record: Bench) -> str:
    """What the record is of, in one or two lines: the model, the ranks, and what an iteration is."""
    setting = record.setting
    work = "forward + backward + sync + zero_grad" + (" + clip + AdamW" if setting.step else ", no optimizer")
    line = (
        f"{setting.model}, gradient of {setting.gradient_bytes / 1e6:.1f} MB; {number_of(setting.world_size, 'rank')} "
        f"({setting.backend}, {setting.device}, {number_of(setting.threads_per_rank, 'thread')} each), "
        f"{setting.precision}, {number_of(setting.rounds, 'round')}\n{setting.precision_note}\n"
        f"an iteration: {setting.batch} x {setting.tokens} tokens on each rank, {work}; syncs in a different order in "
        "each round"
    )
    return "\n".join(printable(part) for part in line.split("\n") if part)


def candidate_rows(record: Bench) -> Rows:
    """A row for each candidate: its seconds, their ratios to DDP and the floor, and what travels."""
    found, setting = [], record.setting
    for one in record.candidates:
        measured, traffic = record.summary[one.label], record.traffic[one.label]
        row = {"sync": one.label, "median s": measured.seconds_median}
        row["quartiles"] = Interval(*measured.seconds_quartiles) if measured.seconds_quartiles else None
        to_ddp, to_floor, within = measured.ratio_to_ddp, measured.ratio_to_floor, measured.exposed_within_rounds
        row |= {"times ddp's": to_ddp and to_ddp.median, "95 %": _interval(to_ddp, one.label == DDP)}
        row |= {"times none's": to_floor and to_floor.median, "95 % of these": _interval(to_floor, one.label == FLOOR)}
        row |= {"exposed s": measured.seconds_exposed, "95 % exposed": _interval(within, one.label == FLOOR)}
        if setting.operations and setting.peak_per_second:
            row["% of the peak"] = 100 * setting.operations / setting.peak_per_second / measured.seconds_median
        if one.bytes_from == "ledger":
            row["calls"] = max(traffic.calls, default=None)
            row["MB sent"] = max(traffic.bytes_sent) / 1e6 if traffic.bytes_sent else None
        found.append(row)
    return found


def remarks(record: Bench) -> list[str]:
    """What to be wary of: a busy machine, assumed bytes, and candidates whose gradient is not DDP's average."""
    found = []
    if share := share_of_busy(record):
        found.append(
            f"the machine was busy: other programs took {100 * share:.0f} % of its processors, so no sync is called "
            "the fastest. Measure again on an idle machine"
        )
    if record.bytes_are_assumed:
        found.append(f"bytes are assumed: {ASSUMED_BYTES}")
    if odd := other_averages(record):
        found.append(f"not ddp's average of the same batch, so not the same work: {printable(', '.join(odd))}")
    return found


def share_of_busy(record: Bench) -> float | None:
    """The share of the processors that other programs took meanwhile; 0 or None if it is little, or not known."""
    if any(load.seconds < LEAST_SECONDS for load in record.host) or not record.host:
        return None
    loads = [(load.host_cpu_percent / 100, load.process_cpu_seconds / load.seconds) for load in record.host]
    return share_of_others(loads, record.environment)


def other_averages(record: Bench) -> list[str]:
    """The labels of the candidates whose averaged gradient is not DDP's, by its norm."""
    expected = record.gradient_norm.get(DDP, [None])[0]
    if expected is None:
        return []
    return [
        label
        for label, by_rank in record.gradient_norm.items()
        if label != FLOOR and any(norm is None or abs(norm - expected) > NORM_TOLERANCE * expected for norm in by_rank)
    ]


def ranked(record: Bench) -> list[str]:
    """The labels from the fastest to the slowest, without the floors and what does other work."""
    left_out = {FLOOR, *other_averages(record)}
    found = [one.label for one in record.candidates if one.label not in left_out]
    return sorted(found, key=lambda label: record.summary[label].seconds_median)


def fastest_in(record: Bench) -> str:
    """Which sync is the fastest. "" if the record cannot tell: the machine was busy, or ratios have no intervals."""
    labels = ranked(record)
    if len(labels) < 2 or share_of_busy(record):
        return ""
    found = [Interval(1, 1) if label == DDP else _interval(record.summary[label].ratio_to_ddp) for label in labels]
    intervals = [interval for interval in found if interval]
    if len(intervals) < len(labels):
        return ""
    # Those whose ratios to DDP leave no gap to the first one's.
    first = intervals[0]
    near = [label for label, own in zip(labels, intervals) if own.meets(first)]
    other = next(iter(label for label in labels if label not in near), labels[-1])
    words = [f"{printable(label)} ({shown(record.summary[label].seconds_median)} s)" for label in (*near, other)]
    return fastest_of(words[:-1], words[-1])


def _interval(found: Ratio | Difference | None, is_itself: bool = False) -> Interval | None:
    return Interval(*found.interval_95) if found and found.interval_95 and not is_itself else None
