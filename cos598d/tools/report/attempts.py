"""The attempts of runs that were interrupted and resumed: when, from where, on how many ranks, and what was lost."""

from collections.abc import Sequence

from cos598d.records.conventions import FINISHED, NOT_METRICS
from cos598d.tools.report.blocks import Table
from cos598d.tools.report.load import Run, is_number

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
