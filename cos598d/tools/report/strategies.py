"""The table of strategies at equal total batch: their seconds and speed-up, memory, losses and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.terminal.tables import picked
from cos598d.tools.report.blocks import Page, Section, Table, headline_of
from cos598d.tools.report.classes import one_class_remark
from cos598d.tools.report.disturbed import (
    DISTURBED,
    disturbance_remark,
    impossible_remark,
    most_speed_up,
    speed_up_words,
)
from cos598d.tools.report.epochs import (
    cut_remark,
    epoch_seconds,
    last_loss,
    metrics_of,
    number_in_words,
    timed_trainings,
)
from cos598d.tools.report.fairness import ground_remark, shared_remark, work_remark
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import cell, names_of, plain
from cos598d.tools.report.references import is_disturbed
from cos598d.tools.report.scaling import speed_up_remarks
from cos598d.tools.report.traffic_table import BYTES_FROM, bytes_from, counted_wire, is_in_ledger

BASELINE = "baseline"
SENT, TRAINING_LOSS = "sent MB/it", "training loss"
ALL_GPUS = "dp"  # the strategy of one process that computes on all of them
SPEED_NOTE = (
    "Seconds: the wall-clock time of training and evaluation in all epochs, without start, data and model. s/epoch "
    "and examples/s: training only, without the first epoch if there are several, since its first iterations are "
    "slow. Each was run once, and a repeat may differ. Speed-up: the baseline's s/epoch divided by this one's. "
    "Efficiency: the speed-up divided by the processors, as a multiple of the baseline's. On CPUs these are the "
    "threads of all ranks, at most the cores of their machines; on GPUs one per rank. Peak MB: the most memory that "
    "a process held, for the largest rank and summed over ranks. It includes libraries, evaluation and shared pages. "
    "Sent: by the rank that sends most, from the communication log, or the mean over the ranks by the kernel's "
    "counters if a library does not report its calls."
)
TABLE_NOTE = f"{SPEED_NOTE} Training loss: of the last complete epoch. Validation loss and metrics: at the end."
BRIEF_NOTE = (
    "s/epoch: seconds of training per epoch. Speed-up: against the baseline. Peak MB: of the largest process. Sent: "
    "per iteration, by the rank that sends most."
)
# Processes of one thread may use cores better than one process with several; much more means a slow baseline.
ABOVE_ALL = 1.05


@dataclass(frozen=True)
class StrategyResult:
    """One strategy for so many epochs: how it ended, one of OUTCOMES; its run if it is finished, else why it is not.

    `parallel` is how many runs were made at a time with it, itself included.
    """

    label: str
    ranks: int
    epochs: float
    outcome: str = FINISHED
    said: str = ""
    run: Run | None = None
    parallel: int = 1


def strategies_rows(entries: Sequence[StrategyResult]) -> list[list[str]]:
    """A head and a row for each entry, those without a run too."""
    metrics = list(dict.fromkeys(name for entry in entries if entry.run for name in metrics_of(entry.run)))
    has_gpu = any(_gpu_peak(entry.run) is not None for entry in entries if entry.run)
    head = ["strategy", "ranks", "epochs", "seconds", "s/epoch", "examples/s", "speed-up", "efficiency"]
    head += ["peak MB", "all ranks' MB", *(["GPU's peak MB"] if has_gpu else [])]
    head += [SENT, BYTES_FROM, TRAINING_LOSS, *metrics]
    rows = [head]
    for entry in entries:
        what = [entry.label, str(entry.ranks), f"{entry.epochs:g}"]
        if entry.run is None:
            rows.append([*what, entry.outcome, *["-"] * (len(head) - 4)])
            continue
        last, seconds = entry.run.summary["epochs"][-1], epoch_seconds(entry.run)
        base = _baseline(entry, entries)
        trained = sum(epoch["training"]["wall_seconds"] for epoch in entry.run.summary["epochs"])
        total = trained + sum(epoch.get("seconds_evaluation", 0.0) for epoch in entry.run.summary["epochs"])
        cells = [plain(total), plain(seconds), plain(timed_trainings(entry.run)[0]["examples"] / seconds)]
        ratio = epoch_seconds(base) / seconds if base else None
        words = speed_up_words(ratio, entry.run.summary, base.summary, entry.run.environment) if ratio and base else "-"
        cells.append(words)
        cells.append(cell(_efficiency(base, entry.run) if base else None, ".0%"))
        peaks = entry.run.summary["memory"]["process_peak_bytes"]
        cells += [f"{peak / 1e6:,.0f}" for peak in (max(peaks), sum(peaks))]
        if has_gpu:
            peak = _gpu_peak(entry.run)
            cells.append("-" if peak is None else f"{peak / 1e6:,.0f}")
        sent = sent_bytes(entry.run.summary)
        cells += ["-" if sent is None else f"{sent / 1e6:,.1f}", bytes_from(entry.run.summary)]
        cells.append(f"{last_loss(entry.run):.4f}")
        cells += [cell(last.get(name), ".4f") for name in metrics]
        rows.append([*what, *cells])
    return rows


def brief_rows(entries: Sequence[StrategyResult]) -> list[list[str]]:
    """The columns of `strategies_rows` that answer which is the fastest, what it sends and what it needs."""
    epochs = ["epochs"] if len({entry.epochs for entry in entries}) > 1 else []
    rows = picked(strategies_rows(entries), ["strategy", "ranks", *epochs, "s/epoch", "speed-up", "peak MB", SENT])
    for row, entry in zip(rows[1:], entries, strict=True):
        if entry.run is None:
            row[rows[0].index("s/epoch")] = entry.outcome
    return rows


def strategies_page(entries: Sequence[StrategyResult]) -> Page:
    """The table, why a strategy has no row, what was learned in each epoch, and then the page of all runs."""
    from cos598d.tools.report.page import build_page

    runs = [entry.run for entry in entries if entry.run]
    page = build_page(runs)
    rows = strategies_rows(entries)
    speed = rows[0].index(TRAINING_LOSS)  # what follows is in the table of each epoch
    table = Section(
        "The strategies at equal total batch",
        [
            Table(" ".join([SPEED_NOTE, *speed_up_remarks(runs)]), [row[:speed] for row in rows]),
            *left_out(entries),
            Table("Losses and metrics after each epoch.", learning_rows(entries)),
        ],
    )
    remarks = list(dict.fromkeys([*cautions(entries), *page.answer.cautions]))
    answer = headline_of(remarks, page.answer.sentences, page.answer.figure)
    # The table has every run's speed-up already, by its epochs' seconds: a second one would differ from it.
    rest = [section for section in page.sections if section.title != "Scaling"]
    return replace(page, answer=answer, sections=[table, *rest])


def learning_rows(entries: Sequence[StrategyResult]) -> list[list[str]]:
    """A head and a row for each run's epoch."""
    known = [(entry, entry.run) for entry in entries if entry.run]
    metrics = list(dict.fromkeys(name for _, run in known for name in metrics_of(run)))
    rows = [["strategy", "epochs", "epoch", TRAINING_LOSS, *metrics]]
    for entry, run in known:
        for epoch in run.summary["epochs"]:
            cells = [cell(epoch.get(name), ".4f") for name in metrics]
            number = number_in_words(epoch, run.summary)
            rows.append([entry.label, f"{entry.epochs:g}", number, f"{epoch['loss']:.4f}", *cells])
    return rows


def cautions(entries: Sequence[StrategyResult]) -> list[str]:
    """What to read before the table: what was not the same work, and which strategies failed."""
    known = [(entry, entry.run) for entry in entries if entry.run]
    pairs = [(base, run) for entry, run in known if (base := _baseline(entry, entries)) is not None]
    found = [
        disturbance_remark([run.summary for _, run in known]),
        impossible_remark(
            [
                (
                    run.name,
                    base.name,
                    epoch_seconds(base) / epoch_seconds(run),
                    most_speed_up(run.summary, run.environment),
                )
                for base, run in pairs
                if not is_disturbed(base.summary)
            ]
        ),
    ]
    for epochs in dict.fromkeys(entry.epochs for entry in entries):
        runs = [run.summary for entry, run in known if entry.epochs == epochs]
        found += [work_remark(runs), ground_remark(runs)]
    found += [
        _above_all_remark(entries),
        cut_remark([run for _, run in known]),
        one_class_remark([run.summary for _, run in known]),
        shared_remark([entry.parallel for entry, _ in known]),
    ]
    failed = [entry for entry in entries if entry.outcome in (FAILED, BROKEN_OFF)]
    return [*filter(None, found), *(f"{entry.label}, {entry.epochs:g} epochs: {entry.said}" for entry in failed)]


def _baseline(entry: StrategyResult, entries: Sequence[StrategyResult]) -> Run | None:
    return next((one.run for one in entries if one.label == BASELINE and one.epochs == entry.epochs), None)


def _above_all_remark(entries: Sequence[StrategyResult]) -> str:
    """A sentence on the runs that have an efficiency above 100 %; "" where there are none."""
    known = [(entry, entry.run, _baseline(entry, entries)) for entry in entries]
    found = [
        f"{entry.label} for {entry.epochs:g} epochs"
        for entry, run, base in known
        if run and base and (_efficiency(base, run) or 0) > ABOVE_ALL
    ]
    if not found:
        return ""
    return (
        f"the efficiency of {names_of(found, 'run')} is above 100 %, which more processors do not explain. Repeat it "
        "and the baseline before you conclude anything from it."
    )


def left_out(entries: Sequence[StrategyResult]) -> list[str]:
    """Why there is no number for a strategy that cannot run here, a sentence each."""
    sentences = [f"{entry.label} is left out: {entry.said}" for entry in entries if entry.outcome == LEFT_OUT]
    return list(dict.fromkeys(sentences))


def sent_bytes(summary: Mapping[str, Any]) -> float | None:
    """Bytes of an iteration, of the rank that sends most; or the mean over the ranks that the kernel's counters saw
    leave, where no ledger has them. None where nobody knows."""
    if is_in_ledger(summary):
        return max(summary["bytes_sent_per_iteration"])
    wire = counted_wire(summary)
    counted = [wire["bytes_sent_per_iteration"][ranks[0]] for ranks in wire["ranks_by_interface"]] if wire else []
    return sum(counted) / summary["world_size"] if counted and None not in counted else None


def processors(run: Run) -> int | None:
    """With how many cores a run computed, or on how many GPUs; None of a process with several, which no record says."""
    environment, ranks = run.environment, run.summary["world_size"]
    if environment["device"] != "cpu":
        return None if run.summary["sync"] == ALL_GPUS else ranks
    machines = -(-ranks // environment["ranks_on_host"])
    return min(ranks * environment["threads_per_rank"], machines * (environment["cores"] or 1))


def _efficiency(base: Run, run: Run) -> float | None:
    """The speed-up over that of the processors; None where these are not known, or a run was disturbed."""
    mine, theirs, ratio = processors(run), processors(base), epoch_seconds(base) / epoch_seconds(run)
    if not mine or not theirs or speed_up_words(ratio, run.summary, base.summary, run.environment) == DISTURBED:
        return None
    return ratio * theirs / mine


def _gpu_peak(run: Run) -> float | None:
    return max((peak for peak in run.summary["memory"]["gpu_peak_bytes"] if peak is not None), default=None)
