"""The card of a check as text, from its result alone."""

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from cos598d.terminal.printable import printable
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed, number_of

WIDTH = 118
STATUS_WIDTH = 13
RATIOS = "A ratio is the median of those within a round, which need not be the ratio of the two medians."


def head(name: str, sizes: Sequence[int]) -> str:
    """The first line."""
    return f"{name} on {listed(sizes)} rank{'' if list(sizes) == [1] else 's'}\n"


def progress(text: str) -> None:
    """What is being tried, on one line of a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def results(result: dict[str, Any], own_file: str) -> str:
    """What is wrong, each cause once; then claim by claim; then how many hold."""
    causes = result["diagnosis"]
    lines = []
    if causes:
        number = sum(len(cause["claims"]) for cause in causes)
        lines.append(
            f"{number} claim{'s do' if number > 1 else ' does'} not hold, for {number_of(len(causes), 'reason')}:"
        )
    for place, cause in enumerate(causes, 1):
        lines.append(textwrap.fill(f"{place}. {cause['cause']}", WIDTH, subsequent_indent="   "))
        lines.append(textwrap.fill(", ".join(cause["claims"]), WIDTH, initial_indent="   ", subsequent_indent="   "))
    if causes:
        lines.append("")
    for each in result["claims"]:
        number = next((i for i, cause in enumerate(causes, 1) if each["claim"] in cause["claims"]), 0)
        is_first = bool(number) and causes[number - 1]["claims"][0] == each["claim"]
        lines.append(claim(each, own_file, number, in_full=is_first or not number))
    return "\n".join([*lines, verdict(result)])


def claim(result: dict[str, Any], own_file: str, cause: int = 0, in_full: bool = True) -> str:
    """A claim's status; where it does not hold everywhere, what it says and, `in_full`, what each rank found.

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
    lines = [f"{status.upper():{STATUS_WIDTH}}{result['claim']} ({sizes}){why}", _indented(f"claim: {result['says']}")]
    if not in_full:
        return "\n".join(lines)
    told = set()
    for outcome in result["outcomes"]:
        # The smallest world of each status says enough.
        if outcome["status"] == "passed" or outcome["status"] in told:
            continue
        told.add(outcome["status"])
        said: dict[str, list[int]] = {}
        for each in outcome["reports"]:
            said.setdefault(report(each, own_file, with_rank=False), []).append(each["rank"])
        for words, ranks in said.items():
            who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} of {outcome['world_size']}"
            lines.append(_indented(f"{who}: {words}"))
    return "\n".join(lines)


def report(found: dict[str, Any], own_file: str, with_rank: bool = True) -> str:
    """What happened to one rank, and where, on one line."""
    words = f"{found['type']}: " if found["kind"] == "exception" else ""
    words += printable(" ".join(found["message"].split())) or "no message"
    if "line" in found:
        file = os.path.relpath(found["file"]) if found["file"] == own_file else os.path.basename(found["file"])
        words += f" - {file} line {found['line']}, in {found['function']}"
        words += f": {printable(found['code'])}" if found["code"] else ""
    return f"rank {found['rank']}: {words}" if with_rank else words


def verdict(result: dict[str, Any]) -> str:
    """How many claims hold, and which are not made."""
    held = sum(claim["status"] == "passed" for claim in result["claims"])
    lines = [f"\n{held} of {len(result['claims'])} claims hold."]
    if held < len(result["claims"]):
        lines.append(f"Models, data and steps were drawn by --nonce {result['nonce']}, which repeats them.")
    if result["not_claimed"] and not result["exact"]:
        lines.append(
            f"{result['class']} says that it is not exact, and does not claim {listed(result['not_claimed'])}."
        )
    return "\n".join(lines)


def measures(result: dict[str, Any]) -> str:
    """Calls and bytes beside the nearest formula, and the seconds of a step beside the other syncs'."""
    lines: list[str] = []
    if cost := result["cost"]:
        lines += _cost(cost)
    if speed := result["speed"]:
        lines += _speed(result["sync"], speed)
    elif result["not_measured"] != "--no_speed":
        what = "Speed was" if result["cost"] else "Cost and speed were"
        lines += [f"\n{what} not measured: {result['not_measured']}."]
    return "\n".join(lines)


def first_sentences(docstring: str) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def _cost(cost: dict[str, Any]) -> list[str]:
    rows = [["rank", "calls", "sent MB", "received MB", "formula: calls", "sent MB", "received MB"]]
    for each in cost["ranks"]:
        rows.append([str(each["rank"]), *_numbers(each["made"]), *_numbers(each["formula"])])
    size = f"{cost['tensors']} tensors, {cost['gradient_bytes'] / 1e6:.2f} MB"
    what = f"\nOne step of {size}, on {cost['world_size']} ranks"
    near = "it costs just what the formula of" if cost["is_equal"] else "the nearest formula is that of"
    return [
        f"{what}; {near} {cost['nearest']}{' says' if cost['is_equal'] else ''}:",
        as_text(rows, numbers=True),
    ]


def _numbers(cost: dict[str, int]) -> list[str]:
    return [str(cost["calls"]), f"{cost['bytes_sent'] / 1e6:.3f}", f"{cost['bytes_received'] / 1e6:.3f}"]


def _speed(name: str, speed: dict[str, Any]) -> list[str]:
    rows = [["sync", "ms a step", "quartiles", "this one's ratio to it", "quartiles"]]
    for each, seconds in speed["seconds"].items():
        ratio = speed["ratio_to"].get(each)
        rows.append(
            [each, f"{seconds['median'] * 1e3:.2f}", _spread(seconds, 1e3)]
            + ([f"{ratio['median']:.2f}", _spread(ratio, 1)] if ratio else ["", ""])
        )
    return [
        f"\nSeconds of a step on {speed['world_size']} ranks, in {speed['rounds']} rounds of one step each:",
        as_text(rows, numbers=True),
        RATIOS,
    ]


def _spread(values: dict[str, float], scale: float) -> str:
    return f"{values['quartile_1'] * scale:.2f}-{values['quartile_3'] * scale:.2f}"


def _indented(text: str) -> str:
    indent = " " * STATUS_WIDTH
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)
