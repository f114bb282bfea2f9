"""`cos598d check`: does a gradient sync pass every test? Then its cost and speed.

Each test (a claim, in the code) runs in new processes. A strategy is tested as by `prove`, and a lesson's file as by
`learn --check`.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cos598d.commands import learn, prove
from cos598d.commands.flags import check_output_file
from cos598d.commands.result_flags import (
    add_assignment,
    add_json,
    add_result_files,
    check_seconds,
    give_result,
    printer,
    read_names,
    read_world_sizes,
    wants_files,
)
from cos598d.errors import UsageError
from cos598d.strategies import STRATEGIES, known_names
from cos598d.sync import SYNCS, unknown
from cos598d.terminal.own_code import is_own
from cos598d.terminal.reading import read_plain
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.check import card, ranks
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.judge import ClaimOutcome, causes_of, judge
from cos598d.tools.check.ranks import compare, is_cost
from cos598d.tools.check.spawn import RankEnd, longer_than, run_world
from cos598d.tools.check.trial import NONCE_BITS, Trial, facts_of
from cos598d.tools.check.verdict import CRASHED, DID_NOT_END, PASSED
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.student import number_of

if TYPE_CHECKING:  # what grades loads much that a check does without
    from cos598d.tools.grade.result_files import CheckResults

ROUNDS = 20
OTHERS = ("all_reduce", "ddp")
SIZES, SECONDS = [1, 2, 3, 4], 20.0  # without --world_sizes and --seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("sync", metavar="SYNC", help="FILE.py:CLASS, a built-in sync or strategy, or a lesson's file")
    parser.add_argument("--world_sizes", metavar="N,N", help="ranks to try (default: 1,2,3,4)")
    parser.add_argument(
        "--seconds", type=float, metavar="X", help="time limit of a test on one number of ranks (default: 20)"
    )
    parser.add_argument("--claims", metavar="NAME,NAME", help="tests to run, by name (default: all)")
    parser.add_argument(
        "--nonce", type=int, metavar="N", help="repeat a report's random models, data and steps: the number it printed"
    )
    parser.add_argument("--no_speed", action="store_true", help="do not measure the speed")
    add_json(parser, "report")
    add_assignment(parser)
    add_result_files(parser)


def run(options: argparse.Namespace) -> int:
    """Check the sync on each number of ranks; return 0 if all tests passed, 1 if one did not.

    A class from a file must pass all tests that run, whatever it declares. A built-in sync must pass those that apply
    to it. Prints a report that begins with what is wrong, or the same result as JSON. Raises UsageError for arguments
    that cannot work, and for a file that cannot be loaded.
    """
    lesson = _lesson_of(options.sync)
    if lesson is not None:
        if wants_files(options):
            raise UsageError(f"{options.sync} is a file of a lesson. Use grade, with an assignment of the kind lesson.")
        _refuse(options, f"is of lesson {lesson}", "world_sizes", "seconds", "claims", "nonce", "no_speed")
        return learn.check(get_lesson(lesson), Path(options.sync), options.json)
    if options.sync.partition(":")[0] in STRATEGIES:
        files = ("assignment", "gradescope", "classroom50")
        _refuse(options, "is a strategy", "claims", "nonce", "no_speed", *files)
        return prove.check(options)
    check_output_file("--json", options.json)
    wanted: Sequence[str] | None = (
        None if options.claims is None else read_names(options.claims, [claim.name for claim in CLAIMS], "test")
    )
    results = _results_of(options, wanted)
    wanted = results.wanted if results else wanted
    sizes = results.sizes if results else SIZES
    if options.world_sizes is not None:
        sizes = read_world_sizes(options.world_sizes)
    seconds = options.seconds if options.seconds is not None else results.seconds if results else SECONDS
    check_seconds(seconds, "test")
    if options.nonce is not None and not 0 <= options.nonce < 1 << NONCE_BITS:
        raise UsageError(f"--nonce {options.nonce} is not a report's number. Give the one that a report printed.")
    with exits_on_sigterm():
        try:
            if options.sync not in SYNCS and not is_own(options.sync):
                raise unknown("sync", options.sync, known_names())
            trial = Trial(options.sync, seconds, nonce=options.nonce)
        except UsageError as error:
            if results:
                results.refuse(str(error))
            raise
        result = _check(trial, sizes, wanted, not options.no_speed, printer(options.json), results)
    give_result(options.json, result)
    return 0 if result["passed"] else 1


def _refuse(options: argparse.Namespace, what: str, *names: str) -> None:
    """Raise UsageError if one of these flags is given, which are only for gradient syncs."""
    for name in names:
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--{name} is only for gradient syncs, and {options.sync} {what}. Remove it.")


def _results_of(options: argparse.Namespace, wanted: Sequence[str] | None) -> "CheckResults | None":
    """The files for teachers; None without their flags."""
    if not wants_files(options):
        return None
    from cos598d.tools.grade.result_files import CheckResults

    return CheckResults(options, wanted)


def _lesson_of(name: str) -> int | None:
    """The lesson whose file this is; None for a sync, and for a file that does not exist."""
    if not name.endswith(".py"):
        return None
    try:
        return number_of(read_plain(name))
    except OSError:
        return None


def _check(
    trial: Trial,
    sizes: Sequence[int],
    wanted: Sequence[str] | None,
    with_speed: bool,
    say: Callable[[str], None],
    results: "CheckResults | None",
) -> dict[str, Any]:
    name = trial.name
    tried = [claim for claim in CLAIMS if (claim in trial.made if wanted is None else claim.name in wanted)]
    result: dict[str, Any] = {
        "sync": name,
        "class": trial.about["class"],
        "exact": trial.about["exact"],
        "world_sizes": list(sizes),
        "nonce": trial.nonce,
    }
    say(card.head(name, sizes))
    by_claim: list[tuple[Claim, list[ClaimOutcome]]] = []
    for place, claim in enumerate(tried):
        card.progress(f"test {place + 1} of {len(tried)}: {claim.name}")
        by_claim.append((claim, trial.outcomes(claim, sizes)))
        if results:
            results.add(*by_claim[-1], trial.file)
    card.progress("")
    result["diagnosis"] = causes_of([(claim.name, outcomes) for claim, outcomes in by_claim], trial.file)
    result["claims"] = [facts_of(claim, outcomes) for claim, outcomes in by_claim]
    result["not_claimed"] = [claim.name for claim in CLAIMS if claim not in trial.made]
    result["passed"] = bool(tried) and all(claim["status"] == PASSED for claim in result["claims"])
    say(card.results(result, trial.file))
    result |= _measure(name, sizes[-1], trial.seconds, with_speed, result["claims"], trial.file)
    say(card.measures(result))
    if results:
        results.finish(result)
    return result


def _measure(
    name: str, size: int, seconds: float, with_speed: bool, claims: Sequence[dict[str, Any]], own_file: str
) -> dict[str, Any]:
    """Cost and speed at one world size, each a dict; None with a reason if there is nothing to measure."""
    if size == 1:
        return {"cost": None, "speed": None, "not_measured": "one rank has no other rank to send to"}
    mean = next((each for each in claims if each["claim"] == "averages_gradients"), None)
    if mean and mean["status"] in (CRASHED, DID_NOT_END):
        return {"cost": None, "speed": None, "not_measured": f"the test averages_gradients {mean['status']}"}

    def trouble_of(ends: Sequence[RankEnd]) -> str:
        status, reports = judge(ends, own_file, seconds)
        return "" if status == PASSED else f"a step {status} on {card.report(reports[0], own_file)}"

    ends = run_world(size, ranks.cost_of_step, name, seconds=seconds, timeout=longer_than(seconds))
    if trouble := trouble_of(ends):
        return {"cost": None, "speed": None, "not_measured": trouble}
    if not all(is_cost(end.value) for end in ends):
        return {"cost": None, "speed": None, "not_measured": "a rank answered with something other than its cost"}
    cost = compare(name, [end.value for end in ends])
    if not with_speed:
        return {"cost": cost, "speed": None, "not_measured": "--no_speed"}
    if mean and mean["status"] != PASSED:
        return {"cost": cost, "speed": None, "not_measured": f"the test averages_gradients {mean['status']}"}
    names = list(dict.fromkeys((name, *OTHERS)))
    ends = run_world(size, ranks.seconds_of_steps, names, ROUNDS, seconds=3 * seconds, timeout=longer_than(3 * seconds))
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
