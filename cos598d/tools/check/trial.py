"""A gradient sync under test: loaded in a process of its own, then tested claim by claim, with the outcome as text."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.sync import get_sync
from cos598d.terminal.own_code import is_own
from cos598d.tools.check import card, ranks
from cos598d.tools.check.claims import CLAIMS, claims_of
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.judge import ClaimOutcome, causes_of, judge, judge_claims
from cos598d.tools.check.spawn import RETURNED, RankEnd, longer_than, run_world
from cos598d.tools.check.verdict import PASSED, result_of

NONCE_BITS = 32


class Trial:
    """One check of the sync called `name`: FILE.py:CLASS, or a registered one.

    A claim may take `seconds` at one number of ranks. The ranks' working directory is `folder`, by default this
    process's. All random numbers follow from `nonce`, by default a new one. A class from a file must pass all claims,
    whatever it declares; a registered sync must pass those that it makes.

    Raises UsageError if the file cannot be loaded.
    """

    def __init__(self, name: str, seconds: float, folder: Path | None = None, nonce: int | None = None):
        self.name, self.seconds, self._folder = name, seconds, None if folder is None else str(folder)
        self.about = self._describe()
        self.made: Sequence[Claim] = CLAIMS if is_own(name) else claims_of(get_sync(name))
        self.nonce = secrets.randbits(NONCE_BITS) if nonce is None else nonce

    @property
    def file(self) -> str:
        """The file of the class."""
        return self.about["file"]

    def all_hold(self, claims: Sequence[Claim], sizes: Sequence[int]) -> bool:
        """Whether all these claims hold when they are tested one after another in the same processes.

        That is much faster than `outcomes` of each, and as conclusive if the answer is yes.
        """
        for size in sizes:
            found = judge_claims(claims, self._world(claims, size), self.nonce, self.file, self.seconds)
            if any(outcome.status != PASSED for outcome in found):
                return False
        return True

    def outcomes(self, claim: Claim, sizes: Sequence[int], in_full: bool = True) -> list[ClaimOutcome]:
        """The outcome of a claim on each of these numbers of ranks; unless `in_full`, up to the first that fails."""
        found: list[ClaimOutcome] = []
        for size in sizes:
            found.append(self._outcome(claim, size))
            if not in_full and found[-1].status != PASSED:
                break
        return found

    def _outcome(self, claim: Claim, size: int) -> ClaimOutcome:
        if claim not in self.made:
            return ClaimOutcome.not_made(size, self.about["class"])
        (found,) = judge_claims([claim], self._world([claim], size), self.nonce, self.file, self.seconds)
        return found

    def _world(self, claims: Sequence[Claim], size: int) -> list[RankEnd]:
        arguments = (self.name, [claim.name for claim in claims], self.nonce, self._folder)
        return run_world(
            size, ranks.observe_by_name, *arguments, seconds=self.seconds, timeout=longer_than(self.seconds)
        )

    def _describe(self) -> dict[str, Any]:
        """Load the class in a process of its own, since loading a file runs it."""
        end = run_world(1, ranks.describe, self.name, self._folder, seconds=self.seconds)[0]
        if end.how == RETURNED and ranks.is_description(end.value):
            return end.value
        if end.type == "UsageError":
            raise UsageError(end.message)
        path = self.name.rpartition(":")[0] if is_own(self.name) else self.name
        _, reports = judge([end], str(Path(path).resolve()), self.seconds)
        said = card.report(reports[0], str(Path(path).resolve()), with_rank=False)
        raise UsageError(f"{path} cannot be imported: {said}.")


def facts_of(claim: Claim, outcomes: Sequence[ClaimOutcome]) -> dict[str, Any]:
    """The outcome of a claim, for the report and its JSON."""
    return result_of("claim", claim.name, card.first_sentences(claim.says), [(o.world_size, o) for o in outcomes])


def in_words(claim: Claim, outcomes: Sequence[ClaimOutcome], own_file: str) -> str:
    """What a claim tests, if it holds; otherwise why it does not, and what each rank found."""
    facts = facts_of(claim, outcomes)
    if facts["status"] == PASSED:
        return facts["says"]
    (cause,) = causes_of([(claim.name, outcomes)], own_file)
    return f"{cause['cause']}\n{card.claim(facts, own_file)}"
