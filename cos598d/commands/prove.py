"""`cos598d prove`: does a strategy train as one process does on the whole batch?

Gradients, weights and losses are compared, case by case, on several numbers of ranks.
"""

import argparse
import secrets
from collections.abc import Sequence
from typing import Any

from cos598d.commands.flags import check_output_file
from cos598d.commands.result_flags import add_json, check_seconds, give_result, printer, read_names, read_world_sizes
from cos598d.config import SYNC_FIELDS
from cos598d.errors import flag_called
from cos598d.terminal.fields import defaults_of, given
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.terminal.words import number_of
from cos598d.tools.bench.candidates import Candidate, parse_candidates
from cos598d.tools.check import card
from cos598d.tools.check.proof.cases import CASES, TOLERANCES, Case
from cos598d.tools.check.proof.observe import observe_engine
from cos598d.tools.check.proof.prove import prove
from cos598d.tools.check.verdict import KEPT, NOT_CLAIMED, REFUSED, result_of

SIZES, SECONDS = "1,2,4", 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "engines",
        nargs="+",
        metavar="STRATEGY",
        help="what --sync takes, with options as in bench: zero1, torch_fsdp:reshard=no, bucketed:bucket_mb=5",
    )
    parser.add_argument("--world_sizes", default=SIZES, metavar="N,N", help="ranks to try (default: 1,2,4)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="X",
        help="time limit of a case on one number of ranks (default: 30)",
    )
    parser.add_argument("--cases", metavar="NAME,NAME", help="cases to run, by name (default: all)")
    parser.add_argument("--short", action="store_true", help="print one line per strategy instead of its report")
    add_json(parser, "reports")


def run(options: argparse.Namespace) -> int:
    """Test each strategy on each number of ranks; return 0 if all tests that apply pass, 1 if one does not.

    A case that a strategy refuses is no failure, and its report names it. A strategy that passes no test fails. Raises
    UsageError, before anything is trained, for arguments that cannot work and libraries that are not installed.
    """
    check_output_file("--json", options.json)
    sizes = read_world_sizes(options.world_sizes)
    known = {case.name: case for case in CASES}
    cases = CASES if options.cases is None else [known[name] for name in read_names(options.cases, known, "case")]
    check_seconds(options.seconds, "case")
    with flag_called("sync", there="--sync"):
        engines = parse_candidates(",".join(options.engines))
    say = printer(options.json)
    nonce = secrets.randbits(32)
    with exits_on_sigterm():
        results = []
        for engine in engines:
            results.append(_prove(engine, sizes, cases, nonce, options.seconds))
            say(card.engine_summary(results[-1]) if options.short else card.engine_card(results[-1]) + "\n")
        say(card.engine_numbers(TOLERANCES))
    give_result(options.json, {"nonce": nonce, "tolerances": TOLERANCES, "engines": results})
    return 0 if all(result["passed"] for result in results) else 1


def check(options: argparse.Namespace) -> int:
    """As `run`, for the one strategy that `check` was asked for."""
    more = {"engines": [options.sync], "cases": None, "short": False}
    sizes, seconds = options.world_sizes or SIZES, SECONDS if options.seconds is None else options.seconds
    return run(argparse.Namespace(json=options.json, world_sizes=sizes, seconds=seconds, **more))


def _prove(
    engine: Candidate, sizes: Sequence[int], cases: Sequence[Case], nonce: int, seconds: float
) -> dict[str, Any]:
    own = [name for name in SYNC_FIELDS if name in defaults_of(type(engine.options))]
    values = {name: getattr(engine.options, name) for name in given(engine.options, own)}
    by_size = []
    for size in sizes:
        card.progress(f"{engine.label} on {number_of(size, 'rank')}")
        arguments = (observe_engine, engine.name, values, engine.options)
        by_size.append(prove(size, cases, nonce, seconds, *arguments))
    card.progress("")
    found = [
        result_of("case", case.name, case.says, zip(sizes, [verdicts[case.name] for verdicts in by_size], strict=True))
        for case in cases
    ]
    statuses = [case["status"] for case in found]
    return {
        "engine": engine.label,
        "world_sizes": list(sizes),
        "cases": found,
        "passed": KEPT in statuses and set(statuses) <= {KEPT, REFUSED, NOT_CLAIMED},
    }
