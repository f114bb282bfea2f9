"""The end of an audit: judge its traces, print and write the verdict, and choose the exit code."""

import linecache
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cos598d.errors import ERROR, UsageError, UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.terminal.tables import filled
from cos598d.terminal.words import did_you_mean, number_of
from cos598d.tools.audit.book import BOOKS, VERDICT
from cos598d.tools.audit.exchange import read_books
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import FAULT, NOTE, WASTE, AuditFinding, AuditVerdict
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.options import AuditFlags

if TYPE_CHECKING:
    from cos598d.tools.audit.rank import Rank

_TO_DO = (
    "let every rank make two or more steps with a torch.optim optimizer of the model's parameters (not of shards), on "
    "data of its own, in a process that `cos598d audit` starts. Then audit again. If your strategy shards, audit the "
    "same script once with another one, such as ddp."
)
_HEADS = {FAULT: ("fault", "faults"), WASTE: ("waste", "wastes"), NOTE: ("note", "notes")}
FAULTS_FOUND, CANNOT_TELL, NOTHING_JUDGED = 3, 4, 5  # the exit codes with --strict


def card(verdict: AuditVerdict) -> str:
    """The whole text."""
    seen = verdict.seen
    ranks = f"{seen.ranks} of {seen.world_size} ranks" if seen.ranks < seen.world_size else f"{seen.ranks} ranks"
    lines = [
        f"== audit of {printable(verdict.script)}: {ranks if seen.world_size > 1 else '1 rank'}, {seen.steps} steps"
    ]
    lines += [filled(f"{remark[:1].upper()}{remark[1:]}") for remark in map(printable, verdict.remarks)]
    for level in (FAULT, WASTE, NOTE):
        found = verdict.of(level)
        for number, each in enumerate(found, 1):
            lines += ["", *_finding(each, number, len(found))]
    lines += ["", _result(verdict)]
    lines += [filled(f"Not judged: {printable(each)}", "  ") for each in verdict.not_judged]
    if not seen.judged and not verdict.of(FAULT):
        lines.append(filled(f"To do: {_TO_DO}", "  "))
    return "\n".join(lines)


def _result(verdict: AuditVerdict) -> str:
    faults, seen = len(verdict.of(FAULT)), verdict.seen
    sure = "No fault found" if verdict.is_sure else "Cannot tell: no fault in what could be judged"
    sure = sure if seen.judged else "NOT JUDGED"
    what = f"{number_of(faults, 'fault')} found" if faults else sure
    judged = f"gradients judged in {seen.judged} of {seen.steps} steps"
    cost = f"The audit took {seen.own_seconds:.2f} of {seen.seconds:.1f} s."
    return filled(f"{what}; {judged}. {cost}")


def _finding(finding: AuditFinding, number: int, of: int) -> list[str]:
    words = WORDS[finding.name]
    head = _HEADS[words.level][0].upper() + (f" {number} of {of}" if of > 1 else "")
    lines = [f"{head}: {words.title} [{finding.name}]"]
    lines += [filled(printable(each), "  ") for each in finding.evidence]
    file, line, function = finding.where
    if file:
        code = linecache.getline(file, line).strip()
        shown = f"{os.path.basename(file)} line {line}, in {function}" + (f": {code}" if code else "")
        lines.append(filled(f"where: {printable(shown, 200)}", "  "))
    lines += [filled(f"why: {words.why}", "  "), filled(f"fix: {words.mend}", "  ")]
    if finding.consequences:
        lines.append(filled("also: " + "; ".join(WORDS[name].title for name in finding.consequences) + ".", "  "))
    return lines


def check_ignored(flags: AuditFlags) -> None:
    """Raise UsageError for a name in --ignore that no finding has."""
    for name in _ignored(flags):
        if name not in WORDS:
            raise UsageError(
                f"--ignore {name} is not the name of a finding.{did_you_mean(name, WORDS)} docs/audit.md lists them."
            )


def _ignored(flags: AuditFlags) -> list[str]:
    return flags.ignore.split(",") if flags.ignore else []


def conclude(folder: Path, flags: AuditFlags, code: int, is_new: bool = True) -> int:
    """Judge the books in the folder, print and write what comes out, and return the exit code: `code`, which is the
    script's, but for --strict. Raises UserError where an audit that is not new cannot be judged."""
    try:
        books, remarks = read_books(folder)
        verdict = judge(books, remarks).without(_ignored(flags))
        write_json(folder / VERDICT, verdict.to_json())
    except UserError as error:
        if not is_new:
            raise
        print(f"{ERROR}nothing could be judged: {printable(error)}", file=sys.stderr)
        return code
    except OSError as error:
        fix = "Give another --output_dir."
        print(f"{ERROR}{folder / VERDICT} cannot be written ({error.strerror}). {fix}", file=sys.stderr)
        return code
    print(f"{card(verdict)}\noutput: {folder}", flush=True)
    return _strict(verdict) if flags.strict and not code else code


def _strict(verdict: AuditVerdict) -> int:
    """The exit code with --strict, of a script that ended well."""
    if verdict.of(FAULT):
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
    elif not any((Path(rank.told.folder) / BOOKS).glob("rank*.json")):
        before = f"it ended with exit code {code} before it opened a process group"
        why = "it opened no process group" if code == 0 else before
        fix = "Let it open one on each rank" if code == 0 else "Fix the error above"
        fix = fix if "WORLD_SIZE" in os.environ else "Start it with --world_size N, or under torchrun"
        print(f"{ERROR}{rank.told.script} was not audited, because {why}. {fix}.", file=sys.stderr)
        return code
    return conclude(Path(rank.told.folder), flags or AuditFlags(), code)
