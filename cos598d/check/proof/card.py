"""The card of a proof as text, from its result alone."""

import textwrap
from typing import Any

from cos598d.check.card import WIDTH
from cos598d.check.card import join as joined
from cos598d.check.proof.judge import KEPT, NOT_CLAIMED, REFUSED
from cos598d.tables import as_text

HOW = (
    "A number is the largest difference from one process on the whole batch, of its tensor's largest value. Gradients "
    "are (w0 - w1) / learning rate of one plain SGD step, so that of an engine that hides or shards them all of it is "
    "compared; then come weights and losses after three steps of SGD and of AdamW. Up to {tolerances} counts as equal."
)


def engine_card(result: dict[str, Any]) -> str:
    """Case by case and number of ranks by number of ranks; then what is wrong, and what is refused, by name."""
    sizes = result["world_sizes"]
    rows = [["case", *(f"{size} rank{'s' if size > 1 else ''}" for size in sizes)]]
    for case in result["cases"]:
        rows.append([case["case"], *(_cell(each) for each in case["outcomes"])])
    lines = [f"{result['engine']} beside one process on the whole batch\n", as_text(rows), ""]
    for case in result["cases"]:
        lines += _troubles(case)
    return "\n".join([*lines, summary(result)])


def summary(result: dict[str, Any]) -> str:
    """How many claims hold, and the names of the others."""
    by_status: dict[str, list[str]] = {}
    for case in result["cases"]:
        by_status.setdefault(case["status"], []).append(case["case"])
    made = len(result["cases"]) - len(by_status.pop(NOT_CLAIMED, []))
    held = len(by_status.pop(KEPT, []))
    words = [f"{result['engine']}: {held} of {made} claims hold"]
    words += [f"{status}: {', '.join(names)}" for status, names in by_status.items()]
    return "; ".join(words) + "."


def how(tolerances: dict[str, float]) -> str:
    """What the numbers are."""
    words = ", ".join(f"{value:g} in {precision}" for precision, value in tolerances.items())
    return textwrap.fill(HOW.format(tolerances=words), WIDTH)


def _cell(outcome: dict[str, Any]) -> str:
    status, largest = outcome["status"], outcome["largest"]
    if status == KEPT:
        return f"{largest:.0e}" if largest else "kept" if outcome["says"] else "equal"
    if status in (NOT_CLAIMED, REFUSED):
        return status
    return f"{status.upper()} {largest:.0e}" if largest else status.upper()


def _troubles(case: dict[str, Any]) -> list[str]:
    """What is to be said of a case beyond its row, for each of its statuses by the smallest number of ranks."""
    said: dict[str, tuple[str, list[int]]] = {}
    for outcome in case["outcomes"]:
        if outcome["says"] and outcome["status"] != KEPT:
            said.setdefault(outcome["status"], (outcome["says"], []))[1].append(outcome["world_size"])
    lines = []
    for status, (words, sizes) in said.items():
        ranks = f"on {joined(sizes)} rank{'' if sizes == [1] else 's'}"
        mark = status if status in (REFUSED, NOT_CLAIMED) else status.upper()
        lines.append(f"{mark} {ranks}: {case['case']} ({case['says']})")
        lines.append(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="  "))
    return lines
