"""Lesson 13, measure honestly: intervals, ratios and what is exposed by a bench's own rules, and eight verdicts.

What is right of a claim is computed from its record, by the same rules.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from cos598d.records.conventions import DDP, FLOOR
from cos598d.records.summary import median_interval, paired_difference, paired_ratio
from cos598d.tools.course.common import near
from cos598d.tools.course.formulas import call_each, shown
from cos598d.tools.course.given import given

HOLDS, NOT = "holds", "does not hold"
SPREAD, FEW, NO_FLOOR = "within the spread", "too few rounds", "no floor"
OTHER_WORK, BUSY = "not the same work", "busy machine"
WORDS = (HOLDS, NOT, SPREAD, FEW, NO_FLOOR, OTHER_WORK, BUSY)
WORK = ("model", "precision", "world_size", "batch", "tokens", "step")
SLOWER = 1.5  # times: a floor that far above another's of the same work had not the machine to itself
COUNTS = (5, 6, 8, 9, 12, 15, 20)
NEAR = 1e-6


@dataclass(frozen=True)
class Asked:
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


CLAIMS = {
    1: Asked("zero1 takes less time than ddp", "one_host", "ratio", "zero1"),
    2: Asked("bucketed takes less time than ddp", "one_host", "ratio", "bucketed"),
    3: Asked("zero2 hides all of its communication", "one_host", "exposed", "zero2", bound=0.0),
    4: Asked("sparse_zero1 takes more time", "slow_link", "ratio", "sparse_zero1", "sparse_rows", below=False),
    5: Asked("at least half of ddp's time is exposed", "two_alone", "exposed", DDP, below=False),
    6: Asked("shared_memory exposes less than 0.06 s", "half", "exposed", "shared_memory", bound=0.06),
    7: Asked("shared_memory takes 0.085 s less", "half", "ratio", "shared_memory", beside="single"),
    8: Asked("ddp has become twice as slow", "busy", "ratio", DDP, beside="half"),
}


def figure_of(record: Mapping[str, Any], figure: str, one: str, other: str = DDP) -> dict[str, Any]:
    """Median and interval of a figure of a record, by the bench's own rules."""
    seconds = record["seconds"]
    if figure == "ratio":
        return paired_ratio(seconds[one], seconds[other])
    return paired_difference(seconds[one], seconds[FLOOR])


def verdict_of(asked: Asked) -> tuple[str, str]:
    """What a record says of a claim, and why, in words."""
    record = given(asked.record)
    if asked.beside:
        other = given(asked.beside)
        for name in WORK:
            before, now = other["setting"][name], record["setting"][name]
            if before != now:
                return OTHER_WORK, f"{name} is {before} and {now} in the two records"
        floors = [median(each["seconds"][FLOOR]) for each in (other, record)]
        if max(floors) > SLOWER * min(floors):
            return BUSY, f"the floor, which sends nothing, took {floors[0]:.3f} s and {floors[1]:.3f} s"
    if asked.figure == "exposed" and FLOOR not in record["seconds"]:
        return NO_FLOOR, f"{asked.record} has only {', '.join(record['seconds'])}"
    interval = figure_of(record, asked.figure, asked.one, asked.other)["interval_95"]
    if interval is None:
        rounds = len(record["seconds"][asked.one])
        return FEW, f"{asked.record} has {rounds} rounds, and below 6 there is no interval"
    low, high = interval
    why = f"the interval is {low:.3f} to {high:.3f}"
    if low <= asked.bound <= high:
        return SPREAD, f"{why}, which contains {asked.bound:g}"
    return (HOLDS if (high < asked.bound) == asked.below else NOT), why


def made_up(seed: int) -> list[dict[str, Any]]:
    """Records of so many rounds as COUNTS has, some of them slow altogether; the last one has no floor."""
    draw, records = random.Random(seed), []
    for count in COUNTS:
        slow = [draw.choice((1.0, 1.0, 1.0, 2.5)) for _ in range(count)]
        bases = {FLOOR: 0.2, "ring": 0.31, DDP: 0.3}
        seconds = {label: [by * base * draw.uniform(0.9, 1.2) for by in slow] for label, base in bases.items()}
        records.append({"setting": {}, "seconds": seconds})
    del records[-1]["seconds"][FLOOR]
    return records


def test_tells_intervals(ranks, seed, n):
    """The interval of a median is that of order statistics, and None below 6 values."""
    values = [record["seconds"]["ring"] for record in made_up(seed)]
    world = ranks(n, call_each, "interval", [(each,) for each in values])
    for each, told in zip(values, world.values[0], strict=True):
        words = wrong_interval(each, told)
        world.require(not words, f"interval of {len(each)} values: {words}", about="interval")


def wrong_interval(values: Sequence[float], told: Any) -> str:
    """What is wrong with an interval, in words; "" if nothing is."""
    right = median_interval(values)
    if near(told, right, NEAR):
        return ""
    if right is None or told is None:
        return "got None, but there is one from 6 on" if right else "there is none below 6 values, expected None"
    ordered = sorted(values)
    k = ordered.index(right[0])
    place = next((k for k in range(len(ordered)) if near(told, [ordered[k], ordered[-1 - k]], NEAR)), None)
    if place == 0:
        return "these are the least and the greatest value; take the largest k that the rule allows"
    if place is not None:
        return f"these are the values {place + 1} from either end, expected {k + 1}"
    return f"got {between(told)}, expected {between(right)}: the values {k + 1} from either end, in order"


def test_compares_within_rounds(ranks, seed, n):
    """Ratios are taken within each round; the median and the interval are those of the ratios."""
    world = ranks(n, call_each, "ratio", [(record, "ring", DDP) for record in made_up(seed)])
    for record, told in zip(made_up(seed), world.values[0], strict=True):
        one, other = record["seconds"]["ring"], record["seconds"][DDP]
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        of_medians = "that is the ratio of the medians: take the median of the ratios within each round"
        mistakes = {
            of_medians: median(one) / median(other),
            "that is other / one, expected one / other": median([1 / each for each in ratios]),
            "that is the mean of the ratios, expected their median": fmean(ratios),
        }
        words = wrong_figure(told, figure_of(record, "ratio", "ring"), mistakes)
        world.require(not words, f"ratio of {len(one)} rounds: {words}", about="ratio")


def test_knows_what_is_exposed(ranks, seed, n):
    """The exposed time is that above the floor within each round, and None in a record without a floor."""
    world = ranks(n, call_each, "exposed", [(record, "ring") for record in made_up(seed)])
    for record, told in zip(made_up(seed), world.values[0], strict=True):
        seconds = record["seconds"]
        if FLOOR not in seconds:
            words = f"exposed of a record without a floor: got {told!r}, expected None"
            world.require(told is None, f"{words}: nothing shows the time of computing", about="exposed")
            continue
        ring, floor, ddp = seconds["ring"], seconds[FLOOR], seconds[DDP]
        of_medians = "that is the difference of the medians: take the median of the differences within each round"
        above_ddp = median([a - b for a, b in zip(ring, ddp, strict=True)])
        mistakes = {
            of_medians: median(ring) - median(floor),
            "that is the time above ddp's, expected above the floor's": above_ddp,
        }
        words = wrong_figure(told, figure_of(record, "exposed", "ring"), mistakes)
        world.require(not words, f"exposed of {len(ring)} rounds: {words}", about="exposed")


def wrong_figure(told: Any, right: Mapping[str, Any], mistakes: Mapping[str, float]) -> str:
    """What is wrong with a median and its interval, in words; "" if nothing is."""
    if near(told, [right["median"], right["interval_95"]], NEAR):
        return ""
    middle, interval = told if isinstance(told, list) and len(told) == 2 else (told, None)
    why = next((f"; {words}" for words, value in mistakes.items() if near(middle, value, NEAR)), "")
    expected = f"expected {shown(right['median'], 5)} and the interval {between(right['interval_95'])}"
    return f"got {shown(middle, 5)} and the interval {between(interval)}, {expected}{why}"


def between(values: Any) -> str:
    """An interval in words."""
    is_pair = isinstance(values, list) and len(values) == 2
    return " to ".join(shown(each, 5) for each in values) if is_pair else shown(values)


def verdicts(comm: Any, module: Any) -> dict[str, str]:
    """On a rank: the file's verdicts, by the number of their claim."""
    return {str(number): str(words) for number, words in dict(module.verdicts()).items()}


def test_is_not_trapped(ranks, seed, n):
    """Eight verdicts: what an interval shows, and if a record cannot show it, why not."""
    world = ranks(n, verdicts)
    for number, asked in CLAIMS.items():
        said, (right, why) = world.values[0].get(str(number)), verdict_of(asked)
        what = f"claim {number} ({asked.record}: {asked.words})"
        world.require(said is not None, f"{what} has no verdict", about="verdicts")
        no_verdict = f"{what}: {said!r} is no verdict; they are {', '.join(WORDS)}"
        world.require(said in WORDS, no_verdict, about="verdicts")
        world.require(said == right, f"{what}: your verdict is {said!r}, but {why}", about="verdicts")
