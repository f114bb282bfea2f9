"""Models that take every example for one class: their accuracy is that class's share, and no skill."""

from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.records.run import Summary
from cos598d.terminal.printable import printable
from cos598d.tools.report.numbers import names_of
from cos598d.tools.report.repeats import members

MOST_NAMES = 8


def one_class_remark(runs: Sequence[Summary]) -> str:
    """A sentence on the runs whose model predicts only one class; "" where there are none.

    Of a run that stopped early and kept its best model it is about that one, else about the last evaluation.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for run in [member for row in runs for member in members(row)]:
        kept = run.get("best", {}).get("evaluated")
        only = only_class(kept or _last_evaluation(run))
        if only:
            found.setdefault(only, []).append(run["run"] + (" (the model that it kept)" if kept else ""))
    return " ".join(
        f"only one class is predicted by {names_of(names, 'run', MOST_NAMES)}: every example is taken for "
        f"{name}, so the accuracy, {share}, is that class's share of the examples."
        for (name, share), names in found.items()
    )


def _last_evaluation(run: Summary) -> Mapping[str, Any]:
    return next((epoch for epoch in reversed(run.get("epochs", [])) if epoch.get("by_class")), {})


def only_class(evaluation: Mapping[str, Any]) -> tuple[str, str] | None:
    """The class for which all is taken, and its share; None where there is none, or the data have but one."""
    classes = evaluation.get("by_class", [])
    total = sum(one["examples"] for one in classes)
    if sum(one["examples"] > 0 for one in classes) < 2:
        return None
    for one in classes:
        share = one["examples"] / total
        # All that was taken for a class of which all was found: as many of it as there are in the data.
        if one["recall"] == 1 and abs(one["precision"] - share) < 1e-9:
            return printable(one["class"], 40), f"{share:.4f}"
    return None
