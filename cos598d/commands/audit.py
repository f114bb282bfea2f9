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
from cos598d.tools.audit.starter import run_of_starter, start_launcher, start_ranks

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
    is_again = Path(words[0]).is_dir()
    if is_again:
        return _again(Path(words[0]), words[1:], flags)
    run_name = run_of_starter()
    if words[0] == "-m" and not flags.launch:
        words = [module_of(words[1:]), *words[2:]]
    name = words[0].removeprefix(MODULE)
    folder = Path(flags.output_dir or f"runs/audit-{Path(name).stem if name == words[0] else name}").absolute()
    told = Told(str(folder), words[0], flags.steps, run_name, flags.timeout)
    if not run_name:
        _check_folder(folder)
    if flags.launch:
        return _launched(folder, words, flags)
    if flags.world_size is None:
        if flags.master_port is not None:
            raise UsageError("--master_port is for ranks that are started here. Add --world_size, or leave it out.")
        from cos598d.tools.audit.rank import audit_script  # it loads torch

        return audit_script(told, words[1:], functools.partial(conclude_on_rank, flags=flags))
    script.load(told.script)
    remove_books(folder)
    told = Told(told.folder, told.script, told.steps, secrets.token_hex(8))
    start = functools.partial(start_ranks, told, words[1:], flags.world_size, flags.master_port)
    return _judged(folder, flags, _started(told, start, flags))


def _launched(folder: Path, words: Sequence[str], flags: AuditFlags) -> int:
    """Run a command that starts the ranks by itself."""
    if flags.world_size is not None or flags.master_port is not None:
        raise UsageError("--launch starts a command, which starts the ranks. Leave --world_size and --master_port out.")
    remove_books(folder)
    told = Told(str(folder), words[0], flags.steps, secrets.token_hex(8))
    return _judged(folder, flags, _started(told, functools.partial(start_launcher, told, words), flags))


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
    return conclude(folder, flags, 0, is_new=False)[1]


def _judged(folder: Path, flags: AuditFlags, code: int) -> int:
    """Judge the traces of ranks that were started here, and return the exit code."""
    return conclude(folder, flags, code)[1]


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
