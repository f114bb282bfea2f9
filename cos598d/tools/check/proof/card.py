"""The report of a proof as text, made only from its result."""

import textwrap
from collections.abc import Sequence
from typing import Any

from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed, number_of
from cos598d.tools.check.card import WIDTH
from cos598d.tools.check.verdict import KEPT, NOT_CLAIMED, REFUSED

HOW = (
    "Each strategy is compared with one process on the whole batch. A number is the largest difference, relative to "
    "its tensor's largest value. Up to {tolerances} counts as equal. Gradients are (w0 - w1) / learning rate of one "
    "plain SGD step, so they can be compared even if a strategy hides or shards them. Weights and losses are those "
    "after three steps of SGD and of AdamW."
)


def engine_card(result: dict[str, Any]) -> str:
    """How many tests passed; then a table of cases and numbers of ranks; then what is wrong and what is refused."""
    sizes = result["world_sizes"]
    rows = [["case", *(number_of(size, "rank") for size in sizes)]]
    for case in result["cases"]:
        rows.append([case["case"], *(_cell(each) for each in case["outcomes"])])
    lines = [summary(result), "", as_text(rows)]
    return "\n".join([*lines, *_troubles(result["cases"])])


def summary(result: dict[str, Any]) -> str:
    """How many tests passed, and the names of the others."""
    by_status: dict[str, list[str]] = {}
    for case in result["cases"]:
        by_status.setdefault(case["status"], []).append(case["case"])
    made = len(result["cases"]) - len(by_status.pop(NOT_CLAIMED, []))
    held = len(by_status.pop(KEPT, []))
    words = [f"{result['engine']}: {held} of {made} tests passed"]
    words += [f"{status}: {_named(names, result['cases'])}" for status, names in by_status.items()]
    return "; ".join(words) + "."


def how(tolerances: dict[str, float]) -> str:
    """What the numbers mean."""
    words = ", ".join(f"{value:g} in {precision}" for precision, value in tolerances.items())
    return textwrap.fill(HOW.format(tolerances=words), WIDTH)


def _cell(outcome: dict[str, Any]) -> str:
    status, largest = outcome["status"], outcome["largest"]
    if status == KEPT:
        return f"{largest:.0e}" if largest else "kept" if outcome["says"] else "equal"
    if status in (NOT_CLAIMED, REFUSED):
        return status
    return f"{status.upper()} {largest:.0e}" if largest else status.upper()


def _troubles(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Explanations below the table: for each case and status, at the smallest number of ranks. A refusal that several
    cases share, such as one of this number of ranks, appears once."""
    shared: dict[tuple[str, str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for case in cases:
        said: dict[str, tuple[str, list[int]]] = {}
        for outcome in case["outcomes"]:
            if outcome["says"] and outcome["status"] != KEPT:
                said.setdefault(outcome["status"], (outcome["says"], []))[1].append(outcome["world_size"])
        for status, (words, sizes) in said.items():
            shared.setdefault((status, words, tuple(sizes)), []).append(case)
    lines = []
    for (status, words, on), those in shared.items():
        ranks = f"on {listed(on)} rank{'' if on == (1,) else 's'}"
        mark = status if status in (REFUSED, NOT_CLAIMED) else status.upper()
        one = f"{those[0]['case']} ({those[0]['says']})"
        head = f"{mark} {ranks}: {_named([case['case'] for case in those], cases) if len(those) > 1 else one}"
        lines.append(textwrap.fill(head, WIDTH, subsequent_indent="  ") if len(those) > 1 else head)
        lines.append(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="  "))
    return lines


def _named(names: Sequence[str], cases: Sequence[dict[str, Any]]) -> str:
    """Cases by name; all of them as one word."""
    return f"all {len(names)} cases" if len(names) == len(cases) > 1 else ", ".join(names)
