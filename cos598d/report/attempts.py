"""The attempts of runs that were interrupted and went on: when, from where, on how many ranks, and what was lost."""

from collections.abc import Sequence

from cos598d.report.blocks import Table
from cos598d.report.load import Run

NOTE = (
    "Attempts, UTC. Lost are iterations that a later attempt did again, from the checkpoint that it went on from; what "
    "the record says of an iteration is what its last attempt did."
)


def attempts(runs: Sequence[Run]) -> list[Table]:
    """A table of the runs that took more than one attempt, or whose only one has not finished; else none."""
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
                    # Of one that goes on, or died without a word, the rows know more than what it wrote at its begin.
                    str(run.summary["iterations"] if one["ended"] is None else one["to_iteration"]),
                    str(one["lost_iterations"]),
                    str(one["ranks"]),
                    one["why"] or "-",
                ]
                for one in found
            ]
    return [Table(NOTE, rows)] if len(rows) > 1 else []
