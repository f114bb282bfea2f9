"""The page's part on classes: how well each is found after the last epoch, and which are taken for which."""

from collections.abc import Sequence

from cos598d.records.run import Summary
from cos598d.terminal.printable import printable
from cos598d.tools.report.attempts import kept_another
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.epochs import number_in_words
from cos598d.tools.report.figures.classes import classes_figure
from cos598d.tools.report.load import Run
from cos598d.tools.report.one_class import only_class

MOST_CLASSES = 100  # a page with more rows is read by nobody: the record has them all


def classes(runs: Sequence[Run]) -> list[Block]:
    """Of each run whose evaluation tells classes apart a table of these and, where they are few, a figure and
    a table of confusions."""
    blocks: list[Block] = []
    for number, run in enumerate(runs):
        evaluated = [epoch for epoch in run.summary["epochs"] if epoch.get("by_class")]
        if not evaluated:
            continue
        last = evaluated[-1]
        when = f"{run.name}, after epoch {number_in_words(last, run.summary)}"
        when += ", not of the model that it kept" if kept_another(run) else ""
        head = ["class", "examples", "precision", "recall", "F1"]
        rows = [
            [
                printable(one["class"], 40),
                str(one["examples"]),
                "-" if was_never_predicted(last, place) else f"{one['precision']:.4f}",
                *(f"{one[key]:.4f}" for key in ("recall", "f1")),
            ]
            for place, one in enumerate(last["by_class"])
        ]
        if len(rows) > MOST_CLASSES:
            blocks.append(f"{when}: {len(rows)} classes, whose scores are in epochs.jsonl.")
            continue
        never = any(row[2] == "-" for row in rows)
        note = " Precision -: the class was never predicted; the means over classes take 0 for it." if never else ""
        blocks.append(Table(f"{when}: each class by itself.{note}", [head, *rows]))
        found = [one | {"class": row[0]} for one, row in zip(last["by_class"], rows, strict=True)]
        name = f"classes{number}"
        only = only_class(last)
        words = f"Every example is taken for {only[0]}." if only else _ends(found)
        blocks += figures((name, classes_figure(when, found, name), [words]))
        if confusion := last.get("confusion"):
            names = [row[0] for row in rows]
            table = [["", *names]]
            table += [
                [name, *(str(count) if count else "" for count in counts)] for name, counts in zip(names, confusion)
            ]
            blocks.append(Table(f"{when}: examples of the row's class that were taken for the column's.", table))
    return blocks


def was_never_predicted(evaluation: Summary, place: int) -> bool:
    """Whether no example was taken for the class at this place, as far as the record tells."""
    if confusion := evaluation.get("confusion"):
        return not any(counts[place] for counts in confusion)
    only = only_class(evaluation)
    return only is not None and only[0] != printable(evaluation["by_class"][place]["class"], 40)


def _ends(found: Sequence[Summary]) -> str:
    """The classes that are found best and worst."""
    ranked = sorted(found, key=lambda one: one["f1"])
    low, high = ranked[0], ranked[-1]
    if low["f1"] == high["f1"]:
        return f"F1 is {high['f1']:.4f} for every class."
    best, worst = (f"class {one['class']}, {one['f1']:.4f}" for one in (high, low))
    return f"F1 is highest for {best}, and lowest for {worst}."
