"""The table of strategies at equal total batch: their seconds and speed-up, memory, losses and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cos598d.report.fairness import work_remark
from cos598d.report.load import Run, is_number
from cos598d.report.numbers import plain

BASELINE = "baseline"
TABLE_NOTE = (
    "Seconds: training and evaluation of all epochs, by the wall; start, data and model are not in them. s/epoch and "
    "examples/s: training alone. Speed-up: the baseline's s/epoch over this one's. Efficiency: speed-up divided by how "
    "many times the baseline's processors were at hand: on CPUs the threads of all ranks, but no more than the cores "
    "of their machines; on GPUs one a rank. Peak MB: of the process that took most. Losses, metrics: of the last epoch."
)
# What an epoch's row has beside its metrics.
NOT_METRICS = frozenset(("epoch", "iterations", "loss", "seconds_evaluation", "total"))


@dataclass(frozen=True)
class Entry:
    """One strategy for so many epochs: its run, or in `said` why there is none."""

    label: str
    ranks: int
    epochs: float
    run: Run | None = None
    said: str = ""


def strategies_rows(entries: Sequence[Entry]) -> list[list[str]]:
    """A head and a row for each entry, those without a run too."""
    metrics = list(dict.fromkeys(name for entry in entries if entry.run for name in _metrics(entry.run)))
    has_gpu = any(_gpu_peak(entry.run) is not None for entry in entries if entry.run)
    head = ["strategy", "ranks", "epochs", "seconds", "s/epoch", "examples/s", "speed-up", "efficiency", "peak MB"]
    head += [*(["GPU's peak MB"] if has_gpu else []), "training loss", *metrics]
    rows = [head]
    for entry in entries:
        what = [entry.label, str(entry.ranks), f"{entry.epochs:g}"]
        if entry.run is None:
            rows.append([*what, "failed", *["-"] * (len(head) - 4)])
            continue
        last, seconds = entry.run.summary["epochs"][-1], epoch_seconds(entry.run)
        base = next((one.run for one in entries if one.label == BASELINE and one.epochs == entry.epochs), None)
        cells = [plain(_total(entry.run)), plain(seconds), plain(_examples(entry.run) / _training(entry.run))]
        ratio = epoch_seconds(base) / seconds if base else None
        cells.append(f"{ratio:.2f}" if ratio else "-")
        cells.append(f"{ratio * processors(base) / processors(entry.run):.0%}" if ratio and base else "-")
        memory = entry.run.summary["memory"]
        cells.append(f"{max(memory['process_peak_bytes']) / 1e6:,.0f}")
        if has_gpu:
            peak = _gpu_peak(entry.run)
            cells.append("-" if peak is None else f"{peak / 1e6:,.0f}")
        cells.append(f"{last['loss']:.4f}")
        cells += [f"{last[name]:.4f}" if is_number(last.get(name)) else "-" for name in metrics]
        rows.append([*what, *cells])
    return rows


def learning_rows(entries: Sequence[Entry]) -> list[list[str]]:
    """A head and a row for each run's epoch: where the validation loss rises again, overfitting begins."""
    known = [(entry, entry.run) for entry in entries if entry.run]
    metrics = list(dict.fromkeys(name for _, run in known for name in _metrics(run)))
    rows = [["strategy", "epochs", "epoch", "training loss", *metrics]]
    for entry, run in known:
        for epoch in run.summary["epochs"]:
            cells = [f"{epoch[name]:.4f}" if is_number(epoch.get(name)) else "-" for name in metrics]
            rows.append([entry.label, f"{entry.epochs:g}", str(epoch["epoch"]), f"{epoch['loss']:.4f}", *cells])
    return rows


def cautions(entries: Sequence[Entry]) -> list[str]:
    """What to read before the table: what was not the same work, and which strategies failed."""
    found = []
    for epochs in dict.fromkeys(entry.epochs for entry in entries):
        remark = work_remark([entry.run.summary for entry in entries if entry.run and entry.epochs == epochs])
        found += [remark] if remark else []
    return found + [f"{entry.label}, {entry.epochs:g} epochs: {entry.said}" for entry in entries if entry.run is None]


def epoch_seconds(run: Run) -> float:
    """The mean seconds of an epoch's training, by the wall."""
    return _training(run) / len(run.summary["epochs"])


def processors(run: Run) -> int:
    """With how many cores a run computed, or on how many GPUs."""
    environment, ranks = run.environment, run.summary["world_size"]
    if environment["device"] != "cpu":
        return ranks
    machines = -(-ranks // environment["ranks_on_host"])
    return min(ranks * environment["threads_per_rank"], machines * (environment["cores"] or 1))


def _trainings(run: Run) -> list[Mapping[str, Any]]:
    return [epoch["training"] for epoch in run.summary["epochs"]]


def _training(run: Run) -> float:
    return sum(training["wall_seconds"] for training in _trainings(run))


def _examples(run: Run) -> int:
    return sum(training["examples"] for training in _trainings(run))


def _total(run: Run) -> float:
    return _training(run) + sum(epoch.get("seconds_evaluation", 0.0) for epoch in run.summary["epochs"])


def _gpu_peak(run: Run) -> float | None:
    return max((peak for peak in run.summary["memory"]["gpu_peak_bytes"] if peak is not None), default=None)


def _metrics(run: Run) -> list[str]:
    """The losses and metrics of an evaluation, without those of parts of the data and of other thresholds."""
    last = run.summary["epochs"][-1]
    names = [name for name in last if is_number(last[name]) and name not in NOT_METRICS]
    return sorted((n for n in names if n.islower() and not n.startswith("best_")), key=lambda n: n != "validation_loss")
