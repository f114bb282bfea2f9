"""Assignments whose submissions are gradient syncs: the claims of `check`, each on every number of ranks."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.records.kinds import TEXT
from cos598d.tools.check.card import first_sentences
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.check.trial import Trial, in_words
from cos598d.tools.check.verdict import PASSED
from cos598d.tools.grade.kinds import AssignmentKind, all_alike, take_file, take_seconds, take_sizes
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable


@dataclass(frozen=True)
class SyncKind(AssignmentKind):
    """A class in a file. `seconds` is the time limit of a claim on one number of ranks."""

    file: str
    class_name: str
    world_sizes: tuple[int, ...]
    seconds: float

    keys = ("file", "class", "world_sizes", "seconds")

    @classmethod
    def read(cls, table: TomlTable) -> "SyncKind":
        """Take this kind's keys. Raises UsageError."""
        file = take_file(table, "my_sync.py")
        name = table.take("class", TEXT, "MySync")
        if not name.isidentifier():
            raise table.error("class", f"class is {name!r}. Give a class's name, as MySync")
        sizes = take_sizes(table, [1, 2, 3, 4], least=1)
        return cls(file, name, sizes, take_seconds(table, 20.0))

    def claims(self) -> Mapping[str, bool]:
        """The claims of `check`, which are all scored."""
        return {claim.name: True for claim in CLAIMS}

    def expected(self, claim: str) -> str:
        """What `check` says about the claim."""
        return next(first_sentences(each.says) for each in CLAIMS if each.name == claim)

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Try all claims in the same processes. If one fails, try each in its own processes, on more and more ranks."""
        try:
            trial = Trial(f"{folder / self.file}:{self.class_name}", self.seconds, folder)
        except UsageError as error:
            yield from all_alike(claims, False, str(error))
            return
        tried = [claim for claim in CLAIMS if claim.name in claims]
        if trial.all_hold(tried, self.world_sizes):
            yield from (Judged(claim.name, True, first_sentences(claim.says)) for claim in tried)
            return
        for claim in tried:
            outcomes = trial.outcomes(claim, self.world_sizes, in_full=False)
            passed = all(outcome.status == PASSED for outcome in outcomes)
            with _inside(folder):
                words = in_words(claim, outcomes, trial.file)
            yield Judged(claim.name, passed, words)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Within the block the working directory is `folder`, if it still exists: reports name paths relative to it."""
    before = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
