"""Lesson 13, measure honestly: intervals, ratios and what is exposed by the library's own rules, and eight verdicts.

What is right of a claim is computed from its record, by the same rules.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cos598d.records.conventions import DDP, FLOOR
from cos598d.records.summary import median_interval, paired_difference, paired_ratio
from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.given import given
from cos598d.tools.learn.lessons.formulas import as_json, is_near, is_number, shown

HOLDS, NOT = "holds", "does not hold"
SPREAD, FEW, NO_FLOOR, OTHER_WORK, BUSY = (
    *("within the spread", "too few rounds", "no floor"),
    *("not the same work", "busy machine"),
)
WORDS = (HOLDS, NOT, SPREAD, FEW, NO_FLOOR, OTHER_WORK, BUSY)
WORK = ("model", "precision", "world_size", "batch", "tokens", "step")
SLOWER = 1.5  # times: a floor that far above another's of the same work had not the machine to itself
COUNTS = (5, 6, 8, 9, 12, 15, 20)
NEAR = 1e-6


@dataclass(frozen=True)
class RecordQuestion:
    """A claim about a record: the median of a figure's values is below (or above) `bound`.

    figure: "ratio" of `one` to `other`, or the seconds of `one` that are "exposed". beside: the record that it is
    compared with, where the claim is about two.
    """

    words: str
    record: str
    figure: str
    one: str
    other: str = DDP
    bound: float = 1.0
    below: bool = True
    beside: str = ""


ASKED = {
    1: RecordQuestion("zero1 takes less time than ddp", "one_host", "ratio", "zero1"),
    2: RecordQuestion("bucketed takes less time than ddp", "one_host", "ratio", "bucketed"),
    3: RecordQuestion("zero2 hides all of its communication", "one_host", "exposed", "zero2", bound=0.0),
    4: RecordQuestion("sparse_zero1 takes more time", "slow_link", "ratio", "sparse_zero1", "sparse_rows", below=False),
    5: RecordQuestion("at least half of ddp's time is exposed", "two_alone", "exposed", DDP, below=False),
    6: RecordQuestion("shared_memory exposes less than 0.06 s", "half", "exposed", "shared_memory", bound=0.06),
    7: RecordQuestion("shared_memory takes 0.085 s less", "half", "ratio", "shared_memory", beside="single"),
    8: RecordQuestion("ddp has become twice as slow", "busy", "ratio", DDP, beside="half"),
}


def verdict_of(asked: RecordQuestion) -> tuple[str, str]:
    """What a record says of a claim, and why, in words."""
    record = given(asked.record)
    if asked.beside:
        other = given(asked.beside)
        differ = [name for name in WORK if record["setting"][name] != other["setting"][name]]
        if differ:
            values = " and ".join(str(each["setting"][differ[0]]) for each in (other, record))
            return OTHER_WORK, f"{differ[0]} is {values} in the two records"
        floors = [median(each["seconds"][FLOOR]) for each in (other, record)]
        if max(floors) > SLOWER * min(floors):
            return BUSY, f"the floor, which sends nothing, took {floors[0]:.3f} s and {floors[1]:.3f} s"
    if asked.figure == "exposed" and FLOOR not in record["seconds"]:
        return NO_FLOOR, f"{asked.record} has only {', '.join(record['seconds'])}"
    figure = figure_of(record, asked.figure, asked.one, asked.other)
    if figure["interval_95"] is None:
        rounds = number_of(len(record["seconds"][asked.one]), "round")
        return FEW, f"{asked.record} has {rounds}, and below 6 there is no interval"
    low, high = figure["interval_95"]
    why = f"the interval is {low:.3f} to {high:.3f}"
    if low <= asked.bound <= high:
        return SPREAD, f"{why}, which contains {asked.bound:g}"
    return (HOLDS if (high < asked.bound) == asked.below else NOT), why


def figure_of(record: dict[str, Any], figure: str, one: str, other: str = DDP) -> dict[str, Any]:
    """Median and interval of a figure of a record, by the bench's own rules."""
    seconds = record["seconds"]
    if figure == "ratio":
        return paired_ratio(seconds[one], seconds[other])
    return paired_difference(seconds[one], seconds[FLOOR])


def made_up(nonce: int) -> list[dict[str, Any]]:
    """Records of so many rounds as COUNTS has, some of them slow altogether; the last one has no floor."""
    draw = random.Random(nonce)
    records = []
    for count in COUNTS:
        slow = [draw.choice((1.0, 1.0, 1.0, 2.5)) for _ in range(count)]
        seconds = {
            label: [slow_by * base * draw.uniform(0.9, 1.2) for slow_by in slow]
            for label, base in ((FLOOR, 0.2), ("ring", 0.31), (DDP, 0.3))
        }
        records.append({"setting": {}, "seconds": seconds})
    del records[-1]["seconds"][FLOOR]
    return records


@Claim
def tells_intervals(on: OnLesson) -> None:
    """The interval of a median is that of order statistics, and None below 6 values."""
    on.report("intervals", [as_json(on.student.interval(list(r["seconds"]["ring"]))) for r in made_up(on.nonce)])


@tells_intervals.judgement
def _(world: World) -> None:
    found = world.reported("intervals", list)
    for record, told in zip(made_up(world.nonce), found[0], strict=True):
        words = wrong_interval(record["seconds"]["ring"], told)
        world.require(not words, f"interval of {len(record['seconds']['ring'])} values: {words}")


def wrong_interval(values: Sequence[float], told: Any) -> str:
    """What is wrong with an interval, in words; "" if nothing is."""
    right = median_interval(values)
    if right is None or told is None:
        words = "got None, but there is one from 6 on" if right else "there is none below 6 values, expected None"
        return "" if right is told else words
    if is_near(told, list(right), NEAR):
        return ""
    if not isinstance(told, list) or len(told) != 2 or not all(map(is_number, told)):
        return f"got {told!r}, expected a list of two numbers"
    ordered = sorted(values)
    k = ordered.index(right[0])
    place = next((k for k in range(len(ordered)) if is_near(told, [ordered[k], ordered[-1 - k]], NEAR)), None)
    if place == 0:
        return "these are the least and the greatest value; take the largest k that the rule allows"
    if place is not None:
        return f"these are the values {place + 1} from either end, expected {k + 1}"
    return f"got {_range(told)}, expected {_range(list(right))}: the values {k + 1} from either end, in order"


@Claim
def compares_within_rounds(on: OnLesson) -> None:
    """Ratios are taken within each round; the median and the interval are those of the ratios."""
    found = [on.student.ratio(record, "ring", DDP) for record in made_up(on.nonce)]
    on.report("ratios", [as_json(each) for each in found])


@compares_within_rounds.judgement
def _(world: World) -> None:
    for record, told in zip(made_up(world.nonce), world.reported("ratios", list)[0], strict=True):
        one, other = record["seconds"]["ring"], record["seconds"][DDP]
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        mistakes = {
            "that is the ratio of the medians: take the median of the ratios within each round": (
                median(one) / median(other)
            ),
            "that is other / one, expected one / other": median([1 / each for each in ratios]),
            "that is the mean of the ratios, expected their median": sum(ratios) / len(ratios),
        }
        words = wrong_figure(told, figure_of(record, "ratio", "ring"), mistakes)
        world.require(not words, f"ratio of {len(one)} rounds: {words}")


@Claim
def knows_what_is_exposed(on: OnLesson) -> None:
    """The exposed time is that above the floor within each round, and None in a record without a floor."""
    found = [on.student.exposed(record, "ring") for record in made_up(on.nonce)]
    on.report("exposed", [as_json(each) for each in found])


@knows_what_is_exposed.judgement
def _(world: World) -> None:
    for record, told in zip(made_up(world.nonce), world.reported("exposed", list)[0], strict=True):
        seconds = record["seconds"]
        if FLOOR not in seconds:
            words = (
                f"exposed of a record without a floor: got {told!r}, expected None: nothing shows the time of computing"
            )
            world.require(told is None, words)
            continue
        ring, floor, ddp = seconds["ring"], seconds[FLOOR], seconds[DDP]
        above_ddp = [a - b for a, b in zip(ring, ddp, strict=True)]
        mistakes = {
            "that is the difference of the medians: take the median of the differences within each round": (
                median(ring) - median(floor)
            ),
            "that is the time above ddp's, expected above the floor's": median(above_ddp),
        }
        words = wrong_figure(told, figure_of(record, "exposed", "ring"), mistakes)
        world.require(not words, f"exposed of {len(ring)} rounds: {words}")


def wrong_figure(told: Any, right: dict[str, Any], mistakes: Mapping[str, float]) -> str:
    """What is wrong with a median and its interval, in words; "" if nothing is."""
    if not isinstance(told, list) or len(told) != 2 or not is_number(told[0]):
        return f"got {told!r}, expected a median and an interval"
    middle, between = told
    if not is_near(middle, right["median"], NEAR):
        why = next((f"; {words}" for words, value in mistakes.items() if is_near(middle, value, NEAR)), "")
        return f"got {middle:.5g}, expected {right['median']:.5g}{why}"
    expected = None if right["interval_95"] is None else list(right["interval_95"])
    if is_near(between, expected, NEAR):
        return ""
    words = f"the median is right, its interval is {_range(between)}, expected {_range(expected)}"
    return f"{words}, of the same values" if expected and between else words


@Claim
def is_not_trapped(on: OnLesson) -> None:
    """Eight verdicts: what an interval shows, and if a record cannot show it, why not."""
    found = on.student.verdicts()
    on.report("verdicts", {str(number): str(words) for number, words in dict(found).items()})


@is_not_trapped.judgement
def _(world: World) -> None:
    found = world.reported("verdicts", dict)[0]
    for number, asked in ASKED.items():
        said, (right, why) = found.get(str(number)), verdict_of(asked)
        what = f"claim {number} ({asked.record}: {asked.words})"
        if said is None:
            world.find(0, f"{what} has no verdict")
        elif said not in WORDS:
            world.find(0, f"{what}: {said!r} is no verdict; they are {', '.join(WORDS)}")
        elif said != right:
            world.find(0, f"{what}: your verdict is {said!r}, but {why}")


def _range(values: Any) -> str:
    is_pair = isinstance(values, list) and len(values) == 2
    return " to ".join(shown(each, 5) for each in values) if is_pair else shown(values)


CHECKS = Checks(
    (
        Check(tells_intervals, (1,), about="interval"),
        Check(compares_within_rounds, (1,), about="ratio"),
        Check(knows_what_is_exposed, (1,), about="exposed"),
        Check(is_not_trapped, (1,), about="verdicts"),
    )
)
