"""`python -m cos598d check`: does a gradient sync keep every claim? Then its cost and speed.

Each claim is tried in fresh processes.
"""

import argparse
import json
import secrets
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cos598d.check import card, ranks
from cos598d.check.causes import causes_of
from cos598d.check.claims import CLAIMS, claims_of
from cos598d.check.cost import compare, is_cost
from cos598d.check.judge import CRASHED, DID_NOT_END, FAILED, PASSED, Outcome, judge, judge_claim
from cos598d.check.spawn import RETURNED, RankEnd, run_world
from cos598d.commands import learn
from cos598d.commands.flags import check_output_file
from cos598d.errors import UsageError, UserError
from cos598d.files import write_json
from cos598d.learn.lessons import get_lesson
from cos598d.learn.student import number_of
from cos598d.sync import get_sync
from cos598d.sync.from_file import is_own
from cos598d.terminal.signals import exits_on_sigterm

ROUNDS = 20
OTHERS = ("all_reduce", "ddp")
# Of several statuses at several world sizes, the first is the claim's.
WORST_FIRST = (CRASHED, DID_NOT_END, FAILED, PASSED)
MOST_RANKS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("sync", metavar="SYNC", help="FILE.py:CLASS, a registered sync's name, or a lesson's file")
    parser.add_argument("--world_sizes", default="1,2,3,4", metavar="N,N", help="ranks to try (default: 1,2,3,4)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="X", help="what a claim may take at one world size (default: 20)"
    )
    parser.add_argument("--claims", metavar="NAME,NAME", help="the claims to try (default: all)")
    parser.add_argument("--no_speed", action="store_true", help="measure no seconds")
    parser.add_argument(
        "--json", metavar="FILE", help="write the card's result there as JSON too; -: print them instead of the card"
    )


def run(options: argparse.Namespace) -> int:
    """Check the sync on each number of ranks; return 0 when all claims hold, 1 when one does not.

    A class from a file must keep all claims that are tried, whatever it says of itself; a registered sync those that
    it makes. Prints a card that begins with what is wrong, or the same result as JSON. Raises UsageError for words
    that cannot work, and for a file that cannot be loaded.
    """
    lesson = _lesson_of(options.sync)
    if lesson is not None:
        return learn.check(get_lesson(lesson), Path(options.sync), options.json)
    check_output_file("--json", options.json)
    sizes = read_world_sizes(options.world_sizes)
    wanted = None if options.claims is None else read_claims(options.claims)
    seconds = options.seconds
    if not 0 < seconds < 10_000:
        raise UsageError(f"--seconds {seconds:g}: give the seconds that a claim may take, above 0 and below 10000.")
    say: Callable[[str], None] = (lambda _: None) if options.json == "-" else partial(print, flush=True)
    with exits_on_sigterm():
        result = _check(options.sync, sizes, wanted, seconds, not options.no_speed, say)
    if options.json == "-":
        print(json.dumps(result, indent=2))
    elif options.json:
        try:
            write_json(options.json, result)
        except OSError as error:
            raise UserError(f"--json {options.json} cannot be written: {error.strerror}.") from None
    return 0 if result["passed"] else 1


def _lesson_of(name: str) -> int | None:
    """The lesson whose file this is; None for a sync, and for a file that is not there."""
    if not name.endswith(".py"):
        return None
    try:
        return number_of(Path(name).read_bytes())
    except OSError:
        return None


def read_world_sizes(text: str) -> list[int]:
    """ "2,3,4" as numbers, each once, in order. Raises UsageError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST_RANKS:
        raise UsageError(f"--world_sizes {text}: give numbers from 1 to {MOST_RANKS} with commas between, as 2,3,4.")
    return sizes


def read_claims(text: str) -> list[str]:
    """The claims' names in `text`. Raises UsageError for an unknown one."""
    known = [claim.name for claim in CLAIMS]
    for name in text.split(","):
        if name not in known:
            raise UsageError(f"--claims {name}: no such claim; they are {', '.join(known)}.")
    return text.split(",")


def _check(
    name: str,
    sizes: Sequence[int],
    wanted: Sequence[str] | None,
    seconds: float,
    with_speed: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    about = _load(name, seconds)
    made = CLAIMS if is_own(name) else claims_of(get_sync(name))
    tried = [claim for claim in CLAIMS if (claim in made if wanted is None else claim.name in wanted)]
    result: dict[str, Any] = {
        "sync": name,
        "class": about["class"],
        "exact": about["exact"],
        "world_sizes": list(sizes),
    }
    result["nonce"] = secrets.randbits(32)
    say(card.head(name, sizes))
    by_claim: list[tuple[str, list[Outcome]]] = []
    for place, claim in enumerate(tried):
        card.progress(f"claim {place + 1} of {len(tried)}: {claim.name}")
        outcomes = []
        for size in sizes:
            if claim not in made:
                outcomes.append(Outcome.not_made(size, about["class"]))
                continue
            arguments = (name, [claim.name], result["nonce"])
            ends = run_world(size, ranks.observe_by_name, *arguments, seconds=seconds, timeout=_longer_than(seconds))
            outcomes.append(judge_claim(claim, ends, result["nonce"], about["file"], seconds))
        by_claim.append((claim.name, outcomes))
    card.progress("")
    result["diagnosis"] = causes_of(by_claim, about["file"])
    result["claims"] = [
        {
            "claim": claim.name,
            "says": card.first_sentences(claim.says),
            "status": next(status for status in WORST_FIRST if any(o.status == status for o in outcomes)),
            "outcomes": [
                {"world_size": o.world_size, "status": o.status, "reports": list(o.reports)} for o in outcomes
            ],
        }
        for claim, (_, outcomes) in zip(tried, by_claim, strict=True)
    ]
    result["not_claimed"] = [claim.name for claim in CLAIMS if claim not in made]
    result["passed"] = bool(tried) and all(claim["status"] == PASSED for claim in result["claims"])
    say(card.results(result, about["file"]))
    result |= _measure(name, sizes[-1], seconds, with_speed, result["claims"], about["file"])
    say(card.measures(result))
    return result


def _load(name: str, seconds: float) -> dict[str, Any]:
    """Load the class in a process of its own, since loading a file runs it. Raises UsageError if that does not work."""
    end = run_world(1, ranks.describe, name, seconds=seconds)[0]
    if end.how == RETURNED and ranks.is_description(end.value):
        return end.value
    if end.type == "UsageError":
        raise UsageError(end.message)
    path = name.rpartition(":")[0] if is_own(name) else name
    _, reports = judge([end], str(Path(path).resolve()), seconds)
    raise UsageError(
        f"{path} cannot be imported: {card.report(reports[0], str(Path(path).resolve()), with_rank=False)}."
    )


def _measure(
    name: str, size: int, seconds: float, with_speed: bool, claims: Sequence[dict[str, Any]], own_file: str
) -> dict[str, Any]:
    """Cost and speed at one world size, each a dict; None where there is nothing to measure, with the reason."""
    if size == 1:
        return {"cost": None, "speed": None, "not_measured": "one rank has nobody to send to"}
    mean = next((each for each in claims if each["claim"] == "averages_gradients"), None)
    if mean and mean["status"] in (CRASHED, DID_NOT_END):
        return {"cost": None, "speed": None, "not_measured": f"averages_gradients {mean['status']}"}

    def trouble_of(ends: Sequence[RankEnd]) -> str:
        status, reports = judge(ends, own_file, seconds)
        return "" if status == PASSED else f"{status}, {card.report(reports[0], own_file)}"

    ends = run_world(size, ranks.cost_of_step, name, seconds=seconds, timeout=_longer_than(seconds))
    if trouble := trouble_of(ends):
        return {"cost": None, "speed": None, "not_measured": trouble}
    if not all(is_cost(end.value) for end in ends):
        return {"cost": None, "speed": None, "not_measured": "a rank answered with something other than its cost"}
    cost = compare(name, [end.value for end in ends])
    if not with_speed:
        return {"cost": cost, "speed": None, "not_measured": "--no_speed"}
    if mean and mean["status"] != PASSED:
        return {"cost": cost, "speed": None, "not_measured": f"averages_gradients {mean['status']}"}
    names = list(dict.fromkeys((name, *OTHERS)))
    ends = run_world(
        size, ranks.seconds_of_steps, names, ROUNDS, seconds=3 * seconds, timeout=_longer_than(3 * seconds)
    )
    if trouble := trouble_of(ends):
        return {"cost": cost, "speed": None, "not_measured": trouble}
    if not ranks.are_samples(ends[0].value, names, ROUNDS):
        return {"cost": cost, "speed": None, "not_measured": "rank 0 answered with something other than seconds"}
    return {"cost": cost, "speed": _speed(name, size, ends[0].value), "not_measured": ""}


def _speed(name: str, size: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        other: [mine / its for mine, its in zip(samples[name], samples[other], strict=True)]
        for other in samples
        if other != name
    }
    return {
        "world_size": size,
        "rounds": ROUNDS,
        "seconds": {each: _quartiles(values) for each, values in samples.items()},
        "ratio_to": {other: _quartiles(values) for other, values in ratios.items()},
        "samples_seconds": samples,
    }


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"quartile_1": low, "median": middle, "quartile_3": high}


def _longer_than(seconds: float) -> float:
    """A collective that waits for a rank in an endless loop must not give up before the loop is found."""
    return seconds + 30
