"""`cos598d check`: does a gradient sync, or another way to train, pass every test? Then what a step costs.

A sync that averages gradients is tested for all that a sync must do. One that shards, or averages weights, is compared
with one process.
"""

import argparse
from pathlib import Path

from cos598d.commands.flags import check_output_file
from cos598d.errors import UsageError
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.course import session

SIZES, MOST_RANKS = "1,2,3,4", 16
NONE_FOUND = 5  # pytest's exit code


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("sync", metavar="SYNC", help="FILE.py:CLASS, or a built-in sync")
    parser.add_argument("--world_sizes", default=SIZES, metavar="N,N", help=f"ranks to try (default: {SIZES})")
    parser.add_argument("--tests", metavar="NAME,NAME", help="tests to run, by a part of their names (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="of random models, data and steps (default: a new one)")
    parser.add_argument("--no_cost", action="store_true", help="do not print what a step costs")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write Gradescope's results.json there")


def run(options: argparse.Namespace) -> int:
    """Check the sync on each number of ranks; return 0 if all tests passed, 1 if one did not.

    Raises UsageError for arguments that cannot work, and for a file that cannot be loaded.
    """
    check_output_file("--results", options.results)
    if options.sync.endswith(".py"):
        raise UsageError(
            f"{options.sync} names no class. Give {options.sync}:CLASS; a lesson's file to `learn --check`."
        )
    sizes = _sizes(options.world_sizes)
    from cos598d.tools.check.report import cost_in_words, tests_of  # they load torch

    file = tests_of(options.sync)
    plugins = ["-p", "cos598d.tools.exam.plugin", "-p", "cos598d.tools.check.plugin"]
    words = [str(file), *plugins, "--sync", _absolute(options.sync), "--sizes", ",".join(map(str, sizes))]
    for flag, value in (("--seed", options.seed), ("--results", options.results and options.results.resolve())):
        words += [flag, str(value)] if value is not None else []
    if options.tests:
        words += ["-k", " or ".join(options.tests.split(","))]
    with exits_on_sigterm():
        code = session.run_tests(words)
        if code == NONE_FOUND:
            raise UsageError(f"--tests {options.tests} names no test. Leave it out to run all.")
        if sizes[-1] > 1 and not options.no_cost and code == 0:
            print(cost_in_words(_absolute(options.sync), sizes[-1]), end="")
    return 0 if code == 0 else 1


def _absolute(name: str) -> str:
    """The sync's name from any folder."""
    path, _, kind = name.rpartition(":")
    return f"{Path(path).resolve()}:{kind}" if path else name


def _sizes(text: str) -> list[int]:
    """ "2,3,4" as numbers, each once, in order. Raises UsageError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST_RANKS:
        raise UsageError(
            f"--world_sizes {text} is not valid. Give numbers from 1 to {MOST_RANKS} with commas, such as 2,3,4."
        )
    return sizes
