"""`cos598d audit`: run any data-parallel script, unchanged, and say which silent fault it has."""

import argparse
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cos598d.commands.flags import add_flags, given_flags
from cos598d.commands.result_flags import add_assignment, add_result_files, wants_files
from cos598d.errors import ERROR, UsageError, UserError
from cos598d.fields import check_flags
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.audit import script
from cos598d.tools.audit.book import BOOKS
from cos598d.tools.audit.card import card
from cos598d.tools.audit.exchange import read_books, remove_books
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import FAULT, AuditVerdict
from cos598d.tools.audit.options import AuditFlags, Told
from cos598d.tools.audit.record import VERDICT, write_record
from cos598d.tools.audit.starter import run_of_starter, start_ranks
from cos598d.tools.grade.scored import NOT_JUDGED

FAULTS_FOUND, CANNOT_TELL, NOTHING_JUDGED = 3, 4, 5  # the exit codes with --strict
Grader = Callable[[AuditVerdict | None, str], int]  # of the verdict and how the script failed, to the exit code


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    add_flags(parser, AuditFlags)
    add_assignment(parser)
    add_result_files(parser)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [WORD ...]",
        help="the script and its own words, as behind `python`; or the folder of an audit, to judge it again",
    )


def run(options: argparse.Namespace) -> int:
    """Audit a script, or judge a folder again, and return the exit code: the script's own, but for --strict, and for
    files for teachers, with which it is 0, 1 where something is wrong, or 2 where it could not be judged."""
    flags = AuditFlags(**given_flags(options, AuditFlags))
    check_flags(flags)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise UsageError("audit needs a script: give it and its words, or the folder of an audit.")
    is_again = Path(words[0]).is_dir()
    grade = _grader(options, is_again or flags.world_size is not None)
    if is_again:
        return _again(Path(words[0]), words[1:], flags, grade)
    run_name = run_of_starter()
    folder = Path(flags.output_dir or f"runs/audit-{Path(words[0]).stem}").absolute()
    told = Told(str(folder), words[0], flags.steps, run_name, flags.strict)
    if not run_name:
        _check_folder(folder)
    if flags.world_size is None:
        if flags.master_port is not None:
            raise UsageError("--master_port is for ranks that are started here: add --world_size, or leave it out.")
        return _as_rank(told, words[1:])
    script.load(told.script)
    remove_books(folder)
    told = Told(told.folder, told.script, told.steps, secrets.token_hex(8), told.strict)
    with exits_on_sigterm():
        code = start_ranks(told, words[1:], flags.world_size, flags.master_port)
    return _judged(folder, flags.strict, code, grade)


def _grader(options: argparse.Namespace, judges_here: bool) -> Grader | None:
    """What writes the files for teachers, if they are asked for. Raises UsageError."""
    if not wants_files(options):
        return None
    if not judges_here:
        raise UsageError(
            "--gradescope and --classroom50 need --world_size, with which this process, where the script does not run, "
            "judges: add it, or give the folder of an audit."
        )
    from cos598d.tools.grade.result_files import AuditResults  # loads torch, which is the script's to load

    return AuditResults(options).finish


def _again(folder: Path, words: Sequence[str], flags: AuditFlags, grade: Grader | None) -> int:
    if words:
        raise UsageError(f"{folder} is the folder of an audit, which takes no further words: leave {words[0]} out.")
    if not (folder / BOOKS).is_dir():
        raise UsageError(f"{folder} has no books of an audit: give the folder of an audit, or a script.")
    books, remarks = read_books(folder)
    verdict = judge(books, remarks)
    print(card(verdict, books))
    if grade:
        failed = next((book for book in books if book["exit_code"]), None)
        end = f"rank {failed['rank']} ended with exit code {failed['exit_code']}" if failed else ""
        return grade(verdict, end)
    return _strict(verdict) if flags.strict else 0


def _as_rank(told: Told, words: Sequence[str]) -> int:
    """This process is a rank, as the launcher of the script would start it."""
    from cos598d.tools.audit.rank import Rank, audit_script

    def say(rank: Rank, code: int) -> int:
        if rank.trouble:
            print(f"{ERROR}{rank.trouble}", file=sys.stderr)
        if rank.told.run:
            return code
        if rank.book is not None:
            if rank.number != 0:
                return code
            rank.collect()
        elif not rank.has_started_others():
            why = "it never opened a process group" if code == 0 else f"it ended with {code} before its ranks had met"
            print(f"{ERROR}nothing of {told.script} was audited: {why}.", file=sys.stderr)
            return code
        return _judged(Path(told.folder), told.strict, code)

    return audit_script(told, words, say)


def _judged(folder: Path, strict: bool, code: int, grade: Grader | None = None) -> int:
    """Judge the books in the folder, print and write what comes out, and return the exit code."""
    end = f"the script ended with exit code {code}" if code else ""
    try:
        books, remarks = read_books(folder)
        verdict = judge(books, remarks)
        without = write_record(folder, books)
        write_json(folder / VERDICT, verdict.to_json())
    except UserError as error:
        print(f"{ERROR}nothing could be judged: {printable(error)}", file=sys.stderr)
        return grade(None, end) if grade else code
    except OSError as error:
        print(f"{ERROR}{folder / VERDICT} cannot be written: {error.strerror}.", file=sys.stderr)
        return NOT_JUDGED if grade else code
    print(card(verdict, books))
    print(f"no record for compare and report: {without}." if without else f"record: {folder}", flush=True)
    if grade:
        return grade(verdict, end)
    return _strict(verdict) if strict and not code else code


def _strict(verdict: AuditVerdict) -> int:
    """The exit code with --strict, of a script that ended well."""
    if verdict.of(FAULT):
        return FAULTS_FOUND
    if not verdict.seen.judged:
        return NOTHING_JUDGED
    return 0 if verdict.is_sure else CANNOT_TELL


def _check_folder(folder: Path) -> None:
    """Raise UsageError where the folder has something else than an audit, which it would overwrite."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output_dir {folder} is a file: give a folder.")
    if (folder / "summary.json").exists() and not (folder / VERDICT).exists():
        raise UsageError(f"--output_dir {folder} has the record of a run: give another folder.")
    try:
        (folder / BOOKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output_dir {folder} cannot be made ({error.strerror}): give another.") from None
