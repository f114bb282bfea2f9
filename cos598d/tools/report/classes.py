"""The page's part on classes: how well each is found after the last epoch, and which are taken for which."""

from collections.abc import Sequence

from cos598d.records.run import Summary
from cos598d.terminal.printable import printable
from cos598d.tools.report.attempts import kept_another
from cos598d.tools.report.blocks import Block, Table, figures
from cos598d.tools.report.epochs import number_in_words
from cos598d.tools.report.figures.classes import classes_figure
from cos598d.tools.report.load import Run

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
                *(f"{one[key]:.4f}" for key in ("precision", "recall", "f1")),
            ]
            for one in last["by_class"]
        ]
        if len(rows) > MOST_CLASSES:
            blocks.append(f"{when}: {len(rows)} classes, whose scores are in epochs.jsonl.")
            continue
        blocks.append(Table(f"{when}: each class by itself.", [head, *rows]))
        found = [one | {"class": row[0]} for one, row in zip(last["by_class"], rows, strict=True)]
        name = f"classes{number}"
        blocks += figures((name, classes_figure(when, found, name), [_ends(found)]))
        if confusion := last.get("confusion"):
            names = [row[0] for row in rows]
            table = [["", *names]]
            table += [
                [name, *(str(count) if count else "" for count in counts)] for name, counts in zip(names, confusion)
            ]
            blocks.append(Table(f"{when}: examples of the row's class that were taken for the column's.", table))
    return blocks


def _ends(found: Sequence[Summary]) -> str:
    """The classes that are found best and worst."""
    ranked = sorted(found, key=lambda one: one["f1"])
    low, high = ranked[0], ranked[-1]
    if low["f1"] == high["f1"]:
        return f"F1 is {high['f1']:.4f} for every class."
    best, worst = (f"class {one['class']}, {one['f1']:.4f}" for one in (high, low))
    return f"F1 is highest for {best}, and lowest for {worst}."
