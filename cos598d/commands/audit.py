"""`cos598d audit`: run any data-parallel script, unchanged, and report its silent faults."""

import argparse
import functools
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cos598d.commands.flags import add_flags, after, given_flags
from cos598d.errors import ERROR, UsageError
from cos598d.terminal.fields import check_flags
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.audit import script
from cos598d.tools.audit.book import BOOKS, VERDICT
from cos598d.tools.audit.end import check_ignored, conclude, conclude_on_rank
from cos598d.tools.audit.exchange import remove_books
from cos598d.tools.audit.options import AuditFlags, Told
from cos598d.tools.audit.script import MODULE, module_of
from cos598d.tools.audit.starter import audit_script, run_of_starter, start_ranks

TIMED_OUT, INTERRUPTED = 124, 130


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    add_flags(parser, AuditFlags)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENT ...]",
        help="the script and its arguments, as after `python`; or an audit's folder, to judge it again",
    )


def run(options: argparse.Namespace) -> int:
    """Audit a script, or judge a folder again, and return the exit code.

    That is the script's own, unless --strict is given.
    """
    flags = AuditFlags(**given_flags(options, AuditFlags))
    check_flags(flags)
    check_ignored(flags)
    words = after(options.words, "--")
    if not words:
        raise UsageError("audit needs a script. Give it and its arguments, or the folder of an audit.")
    if Path(words[0]).is_dir():
        return _again(Path(words[0]), words[1:], flags)
    _check_ways(flags)
    run_name = run_of_starter()
    if words[0] == "-m":
        words = [module_of(words[1:]), *words[2:]]
    name = words[0].removeprefix(MODULE)
    folder = Path(flags.output_dir or f"runs/audit-{Path(name).stem if name == words[0] else name}").absolute()
    if not run_name:
        _check_folder(folder)
    if flags.world_size is None:
        told = Told(str(folder), words[0], flags.steps, run_name)
        return audit_script(told, words[1:], functools.partial(conclude_on_rank, flags=flags))
    told = Told(str(folder), words[0], flags.steps, secrets.token_hex(8))
    script.check(told.script)
    start = functools.partial(start_ranks, told, words[1:], flags.world_size)
    remove_books(folder)
    return conclude(folder, flags, _started(told, start, flags))


def _check_ways(flags: AuditFlags) -> None:
    """Raise UsageError for flags of ranks that are started here, if they are started in another way."""
    if flags.timeout is not None and flags.world_size is None:
        raise UsageError("--timeout stops what is started here. Add --world_size, or leave it out.")


def _started(told: Told, start: Callable[[float], int], flags: AuditFlags) -> int:
    """Start the ranks here and wait for them; return the exit code, also if they were stopped."""
    try:
        with exits_on_sigterm():
            return start(math.inf if flags.timeout is None else flags.timeout)
    except TimeoutError as still:
        print(f"{ERROR}{told.script} was stopped: {still} (--timeout).", file=sys.stderr)
        return TIMED_OUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 1


def _again(folder: Path, words: Sequence[str], flags: AuditFlags) -> int:
    if words:
        raise UsageError(f"{folder} is the folder of an audit, which takes no further arguments. Leave {words[0]} out.")
    if not (folder / BOOKS).is_dir():
        raise UsageError(f"{folder} has no results of an audit. Give the folder of an audit, or a script.")
    return conclude(folder, flags, 0, is_new=False)


def _check_folder(folder: Path) -> None:
    """Raise UsageError if the folder contains something other than an audit, which would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output_dir {folder} is a file. Give a folder.")
    if (folder / "summary.json").exists() and not (folder / VERDICT).exists():
        raise UsageError(f"--output_dir {folder} contains a training run. Give another folder.")
    try:
        (folder / BOOKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output_dir {folder} cannot be created ({error.strerror}). Give another folder.") from None
