"""The card of a check as text, from its facts alone."""

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from cos598d.terminal.printable import printable

WIDTH = 118
STATUS_WIDTH = 13


def head(name: str, sizes: Sequence[int]) -> str:
    """The first line."""
    return f"{name} on {_list(sizes)} rank{'' if list(sizes) == [1] else 's'}\n"


def progress(text: str) -> None:
    """What is being tried, on one line of a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def results(facts: dict[str, Any], own_file: str) -> str:
    """What is wrong, each cause once; then claim by claim; then how many hold."""
    causes = facts["diagnosis"]
    lines = []
    if causes:
        number = sum(len(cause["claims"]) for cause in causes)
        lines.append(
            f"{number} claim{'s do' if number > 1 else ' does'} not hold, for "
            f"{len(causes)} reason{'s' if len(causes) > 1 else ''}:"
        )
    for place, cause in enumerate(causes, 1):
        lines.append(textwrap.fill(f"{place}. {cause['cause']}", WIDTH, subsequent_indent="   "))
        lines.append(textwrap.fill(", ".join(cause["claims"]), WIDTH, initial_indent="   ", subsequent_indent="   "))
    if causes:
        lines.append("")
    for each in facts["claims"]:
        number = next((i for i, cause in enumerate(causes, 1) if each["claim"] in cause["claims"]), 0)
        is_first = bool(number) and causes[number - 1]["claims"][0] == each["claim"]
        lines.append(claim(each, own_file, number, in_full=is_first or not number))
    return "\n".join([*lines, verdict(facts)])


def claim(facts: dict[str, Any], own_file: str, cause: int = 0, in_full: bool = True) -> str:
    """A claim's status; where it does not hold everywhere, what it says and, `in_full`, what each rank found.

    `cause` is the number of its reason, if it has one.
    """
    status = facts["status"]
    if status == "passed":
        return f"{status:{STATUS_WIDTH}}{facts['claim']}"
    by_status: dict[str, list[int]] = {}
    for outcome in facts["outcomes"]:
        by_status.setdefault(outcome["status"], []).append(outcome["world_size"])
    sizes = "; ".join(f"{each} on {_list(found)}" for each, found in by_status.items())
    why = f", reason {cause}" if cause else ""
    lines = [f"{status.upper():{STATUS_WIDTH}}{facts['claim']} ({sizes}){why}", _indented(f"claim: {facts['says']}")]
    if not in_full:
        return "\n".join(lines)
    told = set()
    for outcome in facts["outcomes"]:
        # The smallest world of each status says enough.
        if outcome["status"] == "passed" or outcome["status"] in told:
            continue
        told.add(outcome["status"])
        said: dict[str, list[int]] = {}
        for each in outcome["reports"]:
            said.setdefault(report(each, own_file, with_rank=False), []).append(each["rank"])
        for words, ranks in said.items():
            who = f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)} of {outcome['world_size']}"
            lines.append(_indented(f"{who}: {words}"))
    return "\n".join(lines)


def report(facts: dict[str, Any], own_file: str, with_rank: bool = True) -> str:
    """What happened to one rank, and where, on one line."""
    words = f"{facts['type']}: " if facts["kind"] == "exception" else ""
    words += printable(" ".join(facts["message"].split())) or "no message"
    if "line" in facts:
        file = os.path.relpath(facts["file"]) if facts["file"] == own_file else os.path.basename(facts["file"])
        words += f" - {file} line {facts['line']}, in {facts['function']}"
        words += f": {printable(facts['code'])}" if facts["code"] else ""
    return f"rank {facts['rank']}: {words}" if with_rank else words


def verdict(facts: dict[str, Any]) -> str:
    """How many claims hold, and which are not made."""
    held = sum(claim["status"] == "passed" for claim in facts["claims"])
    lines = [f"\n{held} of {len(facts['claims'])} claims hold."]
    if facts["not_claimed"] and not facts["exact"]:
        lines.append(f"{facts['class']} says that it is not exact, and does not claim {_list(facts['not_claimed'])}.")
    return "\n".join(lines)


def measures(facts: dict[str, Any]) -> str:
    """Calls and bytes beside the nearest formula, and the seconds of a step beside the other syncs'."""
    lines: list[str] = []
    if cost := facts["cost"]:
        lines += _cost(cost)
    if speed := facts["speed"]:
        lines += _speed(facts["sync"], speed)
    elif facts["not_measured"] != "--no_speed":
        what = "Speed was" if facts["cost"] else "Cost and speed were"
        lines += [f"\n{what} not measured: {facts['not_measured']}."]
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
        *_table(rows),
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
        *_table(rows),
    ]


def _spread(values: dict[str, float], scale: float) -> str:
    return f"{values['quartile_1'] * scale:.2f}-{values['quartile_3'] * scale:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]


def _list(values: Sequence[Any]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


def _indented(text: str) -> str:
    indent = " " * STATUS_WIDTH
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)
