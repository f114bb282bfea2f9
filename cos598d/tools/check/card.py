"""The report of a check or a proof as text, made only from its result."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text, filled
from cos598d.terminal.words import listed, number_of
from cos598d.tools.check.verdict import KEPT, NOT_CLAIMED, REFUSED

STATUS_WIDTH = 13
WAYS = ("bytes_sent", "bytes_received")
INDENT = " " * STATUS_WIDTH  # of what follows a status
RATIOS = (
    "A ratio is your sync's seconds divided by the row's: above 1 yours is slower. It is the median of the ratios "
    "within a round, which need not be the ratio of the two medians."
)
HOW = (
    "Each strategy is compared with one process on the whole batch. A number is the largest difference, relative to "
    "its tensor's largest value. Up to {tolerances} counts as equal. Gradients are (w0 - w1) / learning rate of one "
    "plain SGD step, so they can be compared even if a strategy hides or shards them. Weights and losses are those "
    "after three steps of SGD and of AdamW."
)


def head(name: str, sizes: Sequence[int]) -> str:
    """The first line."""
    return f"{name} on {listed(sizes)} rank{'' if list(sizes) == [1] else 's'}\n"


def progress(text: str) -> None:
    """Show the running test on one line of a terminal, which the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def results(result: dict[str, Any], own_file: str) -> str:
    """How many tests passed; what is wrong, each cause once; then test by test; then how to repeat it."""
    causes = result["diagnosis"]
    lines = [summary(result)]
    for place, cause in enumerate(causes, 1):
        lines.append(filled(f"{place}. {cause['cause']}", hanging="   "))
        lines.append(filled(", ".join(cause["claims"]), "   ", hanging=""))
    lines.append("")
    for each in result["claims"]:
        number = next((i for i, cause in enumerate(causes, 1) if each["claim"] in cause["claims"]), 0)
        is_first = bool(number) and causes[number - 1]["claims"][0] == each["claim"]
        lines.append(claim(each, own_file, number, in_full=is_first or not number))
    return "\n".join([*lines, *_remarks(result)])


def claim(result: dict[str, Any], own_file: str, cause: int = 0, in_full: bool = True) -> str:
    """A test's status. If it failed somewhere: what it tests and, `in_full`, what each rank found.

    `cause` is the number of its reason, if it has one.
    """
    status = result["status"]
    if status == "passed":
        return f"{status:{STATUS_WIDTH}}{result['claim']}"
    by_status: dict[str, list[int]] = {}
    for outcome in result["outcomes"]:
        by_status.setdefault(outcome["status"], []).append(outcome["world_size"])
    sizes = "; ".join(f"{each} on {listed(found)}" for each, found in by_status.items())
    why = f", reason {cause}" if cause else ""
    lines = [
        f"{status.upper():{STATUS_WIDTH}}{result['claim']} ({sizes}){why}",
        filled(f"test: {result['says']}", INDENT),
    ]
    if not in_full:
        return "\n".join(lines)
    told = set()
    for outcome in result["outcomes"]:
        # The smallest world of each status is enough.
        if outcome["status"] == "passed" or outcome["status"] in told:
            continue
        told.add(outcome["status"])
        said: dict[str, list[int]] = {}
        for each in outcome["reports"]:
            said.setdefault(report(each, own_file, with_rank=False), []).append(each["rank"])
        for words, ranks in said.items():
            who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} of {outcome['world_size']}"
            lines.append(filled(f"{who}: {words}", INDENT))
    return "\n".join(lines)


def report(found: dict[str, Any], own_file: str, with_rank: bool = True) -> str:
    """What happened on one rank, and where, on one line."""
    words = f"{found['type']}: " if found["kind"] == "exception" else ""
    words += printable(" ".join(found["message"].split())) or "no message"
    if "line" in found:
        file = os.path.relpath(found["file"]) if found["file"] == own_file else os.path.basename(found["file"])
        words += f" - {file} line {found['line']}, in {found['function']}"
        words += f": {printable(found['code'])}" if found["code"] else ""
    return f"rank {found['rank']}: {words}" if with_rank else words


def summary(result: dict[str, Any]) -> str:
    """How many tests passed, and for how many reasons the others failed."""
    passed, count, causes = _passed(result), len(result["claims"]), len(result["diagnosis"])
    why = f" {count - passed} failed, for {number_of(causes, 'reason')}:" if causes else ""
    return f"{passed} of {count} tests passed.{why}"


def _passed(result: dict[str, Any]) -> int:
    return sum(claim["status"] == "passed" for claim in result["claims"])


def _remarks(result: dict[str, Any]) -> list[str]:
    """How to repeat a failed check, and which tests do not apply."""
    lines = []
    if _passed(result) < len(result["claims"]):
        lines.append(f"\nRepeat with the same models, data and steps: --nonce {result['nonce']}.")
    if result["not_claimed"] and not result["exact"]:
        tests = listed(result["not_claimed"])
        lines.append(f"\n{result['class']} declares that it is not exact, so these tests do not apply: {tests}.")
    return lines


def measures(result: dict[str, Any]) -> str:
    """Calls and bytes, compared with the nearest formula, and the seconds of a step, compared with other syncs."""
    lines: list[str] = []
    if cost := result["cost"]:
        lines += _cost(cost)
    if speed := result["speed"]:
        lines += _speed(result["sync"], speed)
    elif result["not_measured"] != "--no_speed":
        what = "Speed was" if result["cost"] else "Cost and speed were"
        why = result["not_measured"]
        end = "" if why.endswith(("(", ".")) else "."
        lines += ["", filled(f"{what} not measured: {why}{end}", hanging="")]
    return "\n".join(lines)


def first_sentences(docstring: str) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def _cost(cost: dict[str, Any]) -> list[str]:
    rows = [["rank", "calls", "sent MB", "received MB", "formula: calls", "sent MB", "received MB"]]
    for each in cost["ranks"]:
        rows.append([str(each["rank"]), *_numbers(each["made"]), *_numbers(each["formula"])])
    size = f"{cost['tensors']} tensors, {cost['gradient_bytes'] / 1e6:.2f} MB"
    near = "Its cost is exactly that of the formula of" if cost["is_equal"] else _nearest(cost["ranks"])
    return [
        f"\nOne step of {size}, on {cost['world_size']} ranks. {near} {cost['nearest']}:",
        as_text(rows, numbers=True),
    ]


def _nearest(ranks: list[dict[str, Any]]) -> str:
    """How far the nearest formula's bytes are from those counted, as a share of the larger, where they differ most."""
    both = [[each[which][way] for which in ("made", "formula")] for each in ranks for way in WAYS]
    off = max(abs(made - formula) / max(made, formula, 1) for made, formula in both)
    how_far = f"up to {max(off, 0.001):.1%} off," if off else "with the same bytes,"
    return f"The nearest formula, {how_far} is that of"


def _numbers(cost: dict[str, int]) -> list[str]:
    return [str(cost["calls"]), f"{cost['bytes_sent'] / 1e6:.3f}", f"{cost['bytes_received'] / 1e6:.3f}"]


def _speed(name: str, speed: dict[str, Any]) -> list[str]:
    rows = [["sync", "ms per step", "quartiles", "ratio to it", "quartiles"]]
    for each, seconds in speed["seconds"].items():
        ratio = speed["ratio_to"].get(each)
        rows.append(
            [each, f"{seconds['median'] * 1e3:.2f}", _spread(seconds, 1e3)]
            + ([f"{ratio['median']:.2f}", _spread(ratio, 1)] if ratio else ["", ""])
        )
    return [
        f"\nTime of a step on {speed['world_size']} ranks, in {speed['rounds']} rounds of one step each:",
        as_text(rows, numbers=True),
        RATIOS,
    ]


def _spread(values: dict[str, float], scale: float) -> str:
    return f"{values['quartile_1'] * scale:.2f}-{values['quartile_3'] * scale:.2f}"


def engine_card(result: dict[str, Any]) -> str:
    """How many tests passed; then a table of cases and numbers of ranks; then what is wrong and what is refused."""
    sizes = result["world_sizes"]
    rows = [["case", *(number_of(size, "rank") for size in sizes)]]
    for case in result["cases"]:
        rows.append([case["case"], *(_cell(each) for each in case["outcomes"])])
    lines = [engine_summary(result), "", as_text(rows)]
    return "\n".join([*lines, *_troubles(result["cases"])])


def engine_summary(result: dict[str, Any]) -> str:
    """How many tests passed, and the names of the others."""
    by_status: dict[str, list[str]] = {}
    for case in result["cases"]:
        by_status.setdefault(case["status"], []).append(case["case"])
    made = len(result["cases"]) - len(by_status.pop(NOT_CLAIMED, []))
    held = len(by_status.pop(KEPT, []))
    words = [f"{result['engine']}: {held} of {made} tests passed"]
    words += [f"{status}: {_named(names, result['cases'])}" for status, names in by_status.items()]
    return "; ".join(words) + "."


def engine_numbers(tolerances: dict[str, float]) -> str:
    """What the numbers mean."""
    words = ", ".join(f"{value:g} in {precision}" for precision, value in tolerances.items())
    return filled(HOW.format(tolerances=words), hanging="")


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
        lines.append(filled(head) if len(those) > 1 else head)
        lines.append(filled(words, "  ", hanging=""))
    return lines


def _named(names: Sequence[str], cases: Sequence[dict[str, Any]]) -> str:
    """Cases by name; all of them as one word."""
    return f"all {len(names)} cases" if len(names) == len(cases) > 1 else ", ".join(names)
