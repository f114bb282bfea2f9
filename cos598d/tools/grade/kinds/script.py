"""Assignments whose submissions are training scripts. `audit` runs them unchanged, and the faults that it finds cost
points."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.errors import UserError
from cos598d.records.kinds import COUNT, NUMBER, TEXT, ListOf, Number
from cos598d.tools.audit import script
from cos598d.tools.audit.exchange import read_books
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import FAULT, AuditFinding, AuditVerdict
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.options import Told
from cos598d.tools.audit.starter import start_ranks
from cos598d.tools.grade.kinds import AssignmentKind, all_alike, take_file, take_seconds
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable

ENDS_WELL, TRAINS, NO_FAULT = "ends_well", "trains", "no_fault"
# What is a note to the audit may cost points, where an assignment names it.
FAULTS = tuple(name for name, words in WORDS.items() if words.level == FAULT or name == "same_dropout")


@dataclass(frozen=True)
class ScriptKind(AssignmentKind):
    """A script that all ranks run with the arguments `words`, for at most `seconds`. It trains if all ranks make
    `steps` steps, the model has at least `parameters_least` parameters, and the loss ends below `loss_below` (None:
    anywhere)."""

    file: str = "train.py"
    words: tuple[str, ...] = ()
    world_size: int = 2
    steps: int = 3
    seconds: float = 300.0
    parameters_least: int = 0
    loss_below: float | None = None

    keys = ("file", "words", "world_size", "steps", "seconds", "parameters_least", "loss_below")

    @classmethod
    def read(cls, table: TomlTable) -> "ScriptKind":
        """Take this kind's keys. Raises UsageError."""
        steps = Number("a whole number from 1 to 1000", least=1, most=1000, is_whole=True)
        sizes = Number("a whole number from 2 to 64", least=2, most=64, is_whole=True)
        loss = table.take("loss_below", NUMBER)
        return cls(
            take_file(table, cls.file),
            tuple(table.take("words", ListOf(TEXT), [])),
            table.take("world_size", sizes, cls.world_size),
            table.take("steps", steps, cls.steps),
            take_seconds(table, cls.seconds, most=86_400),
            table.take("parameters_least", COUNT, cls.parameters_least),
            None if loss is None else float(loss),
        )

    def claims(self) -> Mapping[str, bool]:
        """That it ends well, that it trains, and that no fault is found. Each single fault is a claim too, but is
        scored only if the assignment names it."""
        return {ENDS_WELL: True, TRAINS: True, NO_FAULT: True, **dict.fromkeys(FAULTS, False)}

    def expected(self, claim: str) -> str:
        """What the script must do."""
        if claim == ENDS_WELL:
            return "All ranks end with exit code 0."
        if claim == TRAINS:
            return f"Every rank makes at least {self.steps} steps, and the script trains what the assignment asks for."
        return "The audit finds no fault." if claim == NO_FAULT else f"This is not so: {WORDS[claim].title}."

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Run the script under audit, then judge from the ranks' books."""
        path, books = folder / self.file, Path.cwd() / "audit"
        end = ""
        try:
            script.load(str(path))
            os.chdir(folder)
            told = Told(str(books), str(path), self.steps, secrets.token_hex(8))
            code = start_ranks(told, self.words, self.world_size, None, self.seconds)
            end = f"it ended with exit code {code}" if code else ""
        except TimeoutError as error:
            end = str(error)
        except UserError as error:
            yield from all_alike(claims, False, str(error))
            return
        try:
            verdict = judge(*read_books(books))
        except UserError:
            verdict = None
        yield from score(verdict, claims, end, self, self.world_size)


def score(
    verdict: AuditVerdict | None, claims: Sequence[str], end: str, kind: ScriptKind, world_size: int | None = None
) -> Iterator[Judged]:
    """What an audit's verdict means for these claims.

    `verdict` is None if no rank left a book. `end` describes how the script failed; "" if it ended well. All ranks must
    train as `kind` requires; `world_size` is their number, if it is known.
    """
    trouble = _trouble(verdict, kind, world_size)
    for name in claims:
        if name == ENDS_WELL:
            yield Judged(name, not end, end or "all ranks ended with exit code 0")
        elif name == TRAINS:
            yield Judged(name, not trouble, trouble or f"every rank made at least {kind.steps} steps")
        elif verdict is None or trouble:
            yield Judged(name, False, trouble)
        else:
            yield _of_faults(verdict, name)


def _trouble(verdict: AuditVerdict | None, kind: ScriptKind, world_size: int | None) -> str:
    """Why the script did not train as it should; "" if it did."""
    if verdict is None:
        return "the audit saw nothing of it: it opened no process group, or ended before its first step"
    seen = verdict.seen
    asked = world_size or seen.world_size
    if (seen.ranks, seen.world_size) != (asked, asked):
        return f"{seen.ranks} of {asked} ranks were seen to train, in a world of {seen.world_size}"
    if seen.steps < kind.steps:
        why = f"it made {seen.steps} steps on every rank, and should make {kind.steps}"
    elif seen.parameters < kind.parameters_least:
        why = f"its model has {seen.parameters} parameters, and should have {kind.parameters_least}"
    elif kind.loss_below is not None and (seen.loss is None or seen.loss >= kind.loss_below):
        found = "is not known" if seen.loss is None else f"is {seen.loss:.4g}"
        why = f"its loss {found} at the end, and should be below {kind.loss_below:g}"
    else:
        return ""
    return f"{why}, so its faults cannot be judged"


def _of_faults(verdict: AuditVerdict, name: str) -> Judged:
    """The verdict on one fault, or on NO_FAULT."""
    known = [each for each in verdict.findings if each.level == FAULT or each.name == name]
    found = [each for each in known if name in (NO_FAULT, each.name, *each.consequences)]
    if found:
        return Judged(name, False, "\n".join(map(_in_words, found)))
    if not verdict.is_sure:
        why = " ".join(verdict.not_judged)
        return Judged(name, None, f"no fault was seen, but its gradients could not be judged: {why}")
    return Judged(name, True, f"not found in {verdict.seen.steps} steps, gradients judged in {verdict.seen.judged}")


def _in_words(finding: AuditFinding) -> str:
    words = WORDS[finding.name]
    file, line, function = finding.where
    where = f"\nwhere: {os.path.basename(file)} line {line}, in {function}" if file else ""
    evidence = "\n".join(finding.evidence)
    return f"{words.title} [{finding.name}]\n{evidence}{where}\nwhy: {words.why}\nfix: {words.mend}"
