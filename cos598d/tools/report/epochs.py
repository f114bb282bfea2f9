"""A run's epochs and attempts: which epochs are whole, how long one takes, and how training was interrupted or ended.

An epoch that --max_steps, early stopping or a time limit cut short is not whole."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from cos598d.records.conventions import FINISHED, NOT_METRICS
from cos598d.records.run import Summary
from cos598d.tools.report.blocks import Table
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import is_number, names_of

Epoch = Mapping[str, Any]


def is_cut(epoch: Epoch, run: Summary) -> bool:
    """Whether the run's epoch ended before its last iteration; in an older record, whether another one is longer."""
    longest = max((one.get("iterations", 0) for one in run["epochs"]), default=0)
    return epoch.get("is_cut", False) or 0 < epoch.get("iterations", 0) < longest


def whole_epochs(run: Summary) -> list[Epoch]:
    """The epochs that were not cut, in their order."""
    return [epoch for epoch in run["epochs"] if not is_cut(epoch, run)]


def number_in_words(epoch: Epoch, run: Summary) -> str:
    """ "2", and "2 (cut)" of an epoch that was cut."""
    return f"{epoch['epoch']} (cut)" if is_cut(epoch, run) else str(epoch["epoch"])


def cut_note(runs: Sequence[Run]) -> str:
    """A sentence on epochs that were cut, with a blank before it; "" where all are whole."""
    if not any(is_cut(epoch, run.summary) for run in runs for epoch in run.summary["epochs"]):
        return ""
    return " Cut: training ended during that epoch, so averages over epochs and the figures by epoch leave it out."


def cut_remark(runs: Sequence[Run]) -> str:
    """A sentence that names the runs that have no whole epoch; "" where there are none."""
    names = [run.name for run in runs if not whole_epochs(run.summary)]
    if not names:
        return ""
    where = "any run" if 1 < len(names) == len(runs) else names_of(names, "run")
    return f"no epoch is complete in {where}, so the seconds per epoch are of fewer examples."


def timed_trainings(run: Run) -> list[Epoch]:
    """The trainings that an epoch's seconds are taken from: of whole epochs, or of the longest where none is whole.

    The first is left out where there are others, since its first iterations are slow.
    """
    every = [epoch["training"] for epoch in run.summary["epochs"]]
    whole = [epoch["training"] for epoch in whole_epochs(run.summary)] or every
    most = max(training["examples"] for training in whole)
    found = [training for training in whole if training["examples"] == most]
    return found[1:] or found


def epoch_seconds(run: Run) -> float:
    """The mean wall seconds of `timed_trainings`."""
    return fmean(training["wall_seconds"] for training in timed_trainings(run))


def last_loss(run: Run) -> float:
    """The mean training loss of the last whole epoch; without one, of the last epoch."""
    return [*run.summary["epochs"], *whole_epochs(run.summary)][-1]["loss"]


def metric_names(epochs: Iterable[Epoch]) -> list[str]:
    """The names of all metrics in the rows of epochs, in their order."""
    found = dict.fromkeys(name for epoch in epochs for name, value in epoch.items() if is_number(value))
    return [name for name in found if name not in NOT_METRICS]


def metrics_of(run: Run) -> list[str]:
    """The losses and metrics of an evaluation, without those of parts of the data and of other thresholds."""
    last = run.summary["epochs"][-1]
    names = [name for name in metric_names([last]) if name != "total"]
    return sorted((n for n in names if n.islower() and not n.startswith("best_")), key=lambda n: n != "validation_loss")


NOTE = (
    "Attempts to finish the run, with times in UTC. Lost iterations were repeated by a later attempt, from its "
    "checkpoint. Each iteration's figures are those of its last attempt."
)


EARLY = "stopped early"  # begins the reason, as `EarlyStopping.sentence` has it


def stopped_early(run: Run) -> bool:
    """Whether --early_stopping ended a run that is finished."""
    last = run.summary.get("attempts", [])[-1:]
    return "unfinished" not in run.summary and any(one["why"] != FINISHED for one in last)


def kept_another(run: Run) -> bool:
    """Whether the run kept the model of an iteration before its last."""
    best = run.summary.get("best") or {}
    return bool(best.get("evaluated")) and best["iteration"] != run.summary["iterations"]


def endings(runs: Sequence[Run]) -> list[str]:
    """For each run that stopped early, where it ended and which model it kept."""
    found = []
    for run in filter(stopped_early, runs):
        why, iterations = run.summary["attempts"][-1]["why"], run.summary["iterations"]
        why += ", however small the difference" if why.startswith(EARLY) else ""
        words = f"{run.name} ended after iteration {iterations}, {why}."
        best = run.summary.get("best")
        if best:
            is_last = best["iteration"] == iterations
            evaluated = {name: value for name, value in best.get("evaluated", {}).items() if is_number(value)}
            values = [f"{name} {value:.4f}" for name, value in evaluated.items() if name not in NOT_METRICS]
            if values:
                words += f" It kept the model of iteration {best['iteration']}: {', '.join(values)}."
            elif not is_last:
                words += f" The model of iteration {best['iteration']} could not be kept, so it has the last one."
        found.append(words)
    return found


def attempts(runs: Sequence[Run]) -> list[Table]:
    """A table of the runs that took several attempts, or whose only one has not finished; [] if there are none."""
    rows = [["run", "begun", "ended", "from iteration", "to", "lost", "ranks", "why it ended"]]
    for run in runs:
        found = run.summary.get("attempts", [])
        if len(found) > 1 or "unfinished" in run.summary:
            rows += [
                [
                    run.name,
                    one["begun"],
                    one["ended"] or "-",
                    str(one["from_iteration"]),
                    # If an attempt is running, or was killed, the rows show more than what it wrote at its start.
                    str(run.summary["iterations"] if one["ended"] is None else one["to_iteration"]),
                    str(one["lost_iterations"]),
                    str(one["ranks"]),
                    one["why"] or "-",
                ]
                for one in found
            ]
    return [Table(NOTE, rows)] if len(rows) > 1 else []
