"""Classes: how well each is found after the last epoch, which are taken for which, and models that predict only one.

Where every example is classified as one class, the accuracy is that class's share, and no skill.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.records.run import Summary
from cos598d.terminal.colours import BLUE, SKY, VERMILLION
from cos598d.terminal.printable import printable
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.epochs import kept_another, number_in_words
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import names_of
from cos598d.tools.report.references import members
from cos598d.tools.report.svg import draw, legend_below, shortened

MOST_NAMES = 8
MOST_CLASSES = 100  # a page with more rows is read by nobody: the record has them all
MOST_DRAWN = 20  # classes of a panel
SCORES = {"precision": (SKY, "o"), "recall": (BLUE, "s"), "f1": (VERMILLION, "D")}


def one_class_remark(runs: Sequence[Summary]) -> str:
    """A sentence on the runs whose model predicts only one class; "" where there are none.

    Of a run that stopped early and kept its best model it is about that one, else about the last evaluation.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for run in [member for row in runs for member in members(row)]:
        kept = run.get("best", {}).get("evaluated")
        last = next((epoch for epoch in reversed(run.get("epochs", [])) if epoch.get("by_class")), None)
        only = only_class(kept or last or {})
        if only:
            found.setdefault(only, []).append(run["run"] + (" (the model that it kept)" if kept else ""))
    words = (
        f"only one class is predicted by {names_of(names, 'run', MOST_NAMES)}: every example is classified as "
        f"{name}, so the accuracy, {share}, is that class's share of the examples"
        for (name, share), names in found.items()
    )
    return f"{'; '.join(words)}." if found else ""


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


def was_never_predicted(evaluation: Summary, place: int) -> bool:
    """Whether no example was taken for the class at this place, as far as the record tells."""
    if confusion := evaluation.get("confusion"):
        return not any(counts[place] for counts in confusion)
    only = only_class(evaluation)
    return only is not None and only[0] != printable(evaluation["by_class"][place]["class"], 40)


def classes_blocks(runs: Sequence[Run]) -> list[Block]:
    """Of each run whose evaluation tells classes apart a table of these and, where they are few, a figure and
    a table of confusions."""
    blocks: list[Block] = []
    for number, run in enumerate(runs):
        last = next((epoch for epoch in reversed(run.summary["epochs"]) if epoch.get("by_class")), None)
        if last is None:
            continue
        when = f"{run.name}, after epoch {number_in_words(last, run.summary)}"
        when += ", not of the model that it kept" if kept_another(run) else ""
        if len(last["by_class"]) > MOST_CLASSES:
            blocks.append(f"{when}: {len(last['by_class'])} classes, whose scores are in epochs.jsonl.")
            continue
        found = [one | {"class": printable(one["class"], 40)} for one in last["by_class"]]
        rows = [
            [
                *(one["class"], str(one["examples"])),
                "-" if was_never_predicted(last, place) else f"{one['precision']:.4f}",
                *(f"{one[key]:.4f}" for key in ("recall", "f1")),
            ]
            for place, one in enumerate(found)
        ]
        never = any(row[2] == "-" for row in rows)
        note = " Precision -: the class was never predicted; the means over classes take 0 for it." if never else ""
        head = ["class", "examples", "precision", "recall", "F1"]
        blocks.append(Table(f"{when}: each class by itself.{note}", [head, *rows]))
        name, only = f"classes{number}", only_class(last)
        caption = f"Every example is classified as {only[0]}." if only else "The scores of each class by itself."
        blocks += figures((name, _figure(when, found, name), [caption]))
        if confusion := last.get("confusion"):
            counted = [[row[0], *map(str, counts)] for row, counts in zip(rows, confusion)]
            note = f"{when}: examples of the row's class that were classified as the column's."
            blocks.append(Table(note, [["", *(row[0] for row in rows)], *counted]))
    return blocks


def _figure(run: str, found: Sequence[Summary], name: str) -> str | None:
    """A row for each class with its three scores, the first class at the top; None of more classes than MOST_DRAWN."""
    if not 0 < len(found) <= MOST_DRAWN:
        return None

    def paint(figure):
        axes = figure.subplots()
        places = range(len(found))
        handles = [
            axes.plot([one[score] for one in found], places, marker, color=colour, markersize=5)[0]
            for score, (colour, marker) in SCORES.items()
        ]
        axes.set_yticks(places, [shortened(one["class"], 18) for one in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlim(-0.03, 1.03)
        axes.set_title(shortened(run), loc="left")
        legend_below(figure, handles, ["precision", "recall", "F1"])

    return draw(name, f"precision, recall and F1 of each class of {run}", 45 + 15 * len(found), paint)
