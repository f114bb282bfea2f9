"""The end of an audit: judge its traces, print and write the verdict, and choose the exit code."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cos598d.errors import ERROR, UsageError, UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean
from cos598d.tools.audit import carried
from cos598d.tools.audit.card import annotations, card
from cos598d.tools.audit.exchange import flight_path, read_books
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import AuditVerdict
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.options import LEVELS, AuditFlags
from cos598d.tools.audit.record import VERDICT, write_record

if TYPE_CHECKING:
    from cos598d.tools.audit.rank import Rank

FAULTS_FOUND, CANNOT_TELL, NOTHING_JUDGED = 3, 4, 5  # the exit codes with --strict


def check_ignored(flags: AuditFlags) -> None:
    """Raise UsageError for a name in --ignore that no finding has."""
    for name in _ignored(flags):
        if name not in WORDS:
            raise UsageError(
                f"--ignore {name} is not the name of a finding.{did_you_mean(name, WORDS)} docs/audit.md lists them."
            )


def _ignored(flags: AuditFlags) -> list[str]:
    return flags.ignore.split(",") if flags.ignore else []


def conclude(folder: Path, flags: AuditFlags, code: int, is_new: bool = True) -> tuple[AuditVerdict | None, int]:
    """Judge the books in the folder, print what comes out, and write it where the audit `is_new`.

    Returns the verdict, None without any, and the exit code: `code`, which is the script's, but for --strict.
    """
    try:
        books, remarks = read_books(folder)
        if any(flight_path(folder, book["rank"]).exists() for book in books if book["stopped"]):
            remarks.append(f"torch's flight recorder of the ranks that were stopped: {flight_path(folder, 0).parent}.")
        verdict = judge(books, remarks).without(_ignored(flags))
        without = write_record(folder, books) if is_new else ""
        if is_new:
            write_json(folder / VERDICT, verdict.to_json())
    except UserError as error:
        if not is_new:
            raise
        print(f"{ERROR}nothing could be judged: {printable(error)}", file=sys.stderr)
        return None, code
    except OSError as error:
        print(
            f"{ERROR}{folder / VERDICT} cannot be written ({error.strerror}). Give another --output_dir.",
            file=sys.stderr,
        )
        return None, code
    text = card(verdict, books)
    if is_new:
        text += f"\noutput: {folder}" + (f" (not for compare and report: {without})" if without else "")
    print(text, file=sys.stderr if flags.json == "-" else sys.stdout, flush=True)
    if flags.json == "-":
        print(json.dumps(verdict.to_json(), allow_nan=False), flush=True)
    elif flags.json:
        try:
            write_json(Path(flags.json), verdict.to_json())
        except OSError as error:
            print(
                f"{ERROR}--json {flags.json} cannot be written ({error.strerror}). Give another path.", file=sys.stderr
            )
            return verdict, code or 2
    if flags.github:
        print(annotations(verdict), end="", flush=True)
    return verdict, _strict(verdict, flags) if flags.strict and not code else code


def _strict(verdict: AuditVerdict, flags: AuditFlags) -> int:
    """The exit code with --strict, of a script that ended well."""
    counts = LEVELS[: LEVELS.index(flags.strict_on) + 1]
    if any(each.level in counts for each in verdict.findings):
        return FAULTS_FOUND
    if not verdict.seen.judged:
        return NOTHING_JUDGED
    return 0 if verdict.is_sure else CANNOT_TELL


def conclude_on_rank(rank: "Rank", code: int, flags: AuditFlags | None = None) -> int:
    """End this rank's script: rank 0 judges, unless the process that started it does; returns the exit code."""
    if rank.trouble:
        print(f"{ERROR}{rank.trouble}", file=sys.stderr)
    if rank.told.run:
        return code
    if rank.book is not None:
        if rank.number != 0:
            return code
        rank.collect()
    elif not carried.count():
        before = f"it ended with exit code {code} before it opened a process group"
        why = "it opened no process group" if code == 0 else before
        fix = "Let it open one on each rank" if code == 0 else "Fix the error above"
        fix = fix if "WORLD_SIZE" in os.environ else "Start it with --world_size N, or under torchrun"
        print(f"{ERROR}{rank.told.script} was not audited, because {why}. {fix}.", file=sys.stderr)
        return code
    return conclude(Path(rank.told.folder), flags or AuditFlags(), code)[1]
