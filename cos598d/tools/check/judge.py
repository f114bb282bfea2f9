"""From how the ranks of a world ended to each claim's outcome, with the rank and line to blame; and to the causes."""

import linecache
import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.rank import BROKEN_COLLECTIVE
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import signal_name
from cos598d.tools.check import card
from cos598d.tools.check.claims.base import NOT_HANDED_IN, Claim, NotAsAgreed, World
from cos598d.tools.check.diagnosis import UNKNOWN, Symptom, sentence
from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.check.notes import SAME_CALLS, Unlike, read_trace, unlike
from cos598d.tools.check.spawn import DIED, LATE, RAISED, RETURNED, RankEnd, StackFrame
from cos598d.tools.check.verdict import CRASHED, DID_NOT_END, FAILED, PASSED

# What a rank prints when it ends only because another one did.
CONSEQUENCES = (
    "lost connection to ",
    "stopped because rank",
    "no answer from rank",
    "the program that started this worker has ended",
)
LAST_LINES = 3
# The folders of Python, packages and this program: lines of their files may be shown.
INSTALLED = (
    *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.realpath(Path(__file__).parents[2]) + os.sep,
)
TRAINS = "trains_like_one_process"
STARTS, SHARES = "starts_from_rank_0", "averages_gradients_that_share_memory"
# Their tensors are harder to average: a mistake with plain gradients looks different there.
HARDER = (SHARES, "averages_any_tensors")
# as in training, ranks start with different weights and buffers, which `attach` may fail to change
AVERAGES = "averages_gradients"
IN_ONE_MEMORY = (
    "wrong only if autograd keeps the gradients of two parameters in one memory: writing into one's .grad changes the "
    "other's; give .grad a new tensor instead"
)


@dataclass(frozen=True)
class ClaimOutcome:
    """The outcome of a claim at one world size. `reports` are `judge`'s, one for each rank that is to blame.

    `cause` is its reason as a phrase. If only the numbers can show it, it is empty, and `symptom` is what they show.
    """

    world_size: int
    status: str
    reports: Sequence[dict[str, Any]] = ()
    cause: str = ""
    symptom: Symptom | None = None

    def details(self) -> dict[str, Any]:
        """Its other fields in JSON."""
        return {"reports": list(self.reports)}

    @classmethod
    def not_made(cls, world_size: int, class_name: str) -> "ClaimOutcome":
        """The outcome of a claim that was asked for, but that the sync does not make."""
        message = f"{class_name} declares that it is not exact, so this test does not apply to it"
        return cls(world_size, FAILED, [_claim_report(0, message)], message)


def judge_claims(
    claims: Sequence[Claim], ends: Sequence[RankEnd], nonce: int, own_file: str, seconds: float
) -> list[ClaimOutcome]:
    """The outcome of each claim on this world: from how it ended, then from what its ranks handed in."""
    size = len(ends)
    status, reports = judge(ends, own_file, seconds)
    odd = unlike([read_trace(end.calls) for end in ends], "", Path(own_file).name, is_over=status == PASSED)
    if status != PASSED:
        if odd:
            return [ClaimOutcome(size, status, [_claim_report(odd.rank, odd.words)], odd.words)] * len(claims)
        return [ClaimOutcome(size, status, reports)] * len(claims)
    try:
        evidence = [Evidence.from_bytes(end.handed_in, end.rank, nonce) for end in ends]
    except BadEvidence as error:
        cause = NOT_HANDED_IN
        return [ClaimOutcome(size, FAILED, [_claim_report(0, printable(error))], cause)] * len(claims)
    return [_judge(claim, World(claim.name, nonce, evidence), odd) for claim in claims]


def _judge(claim: Claim, world: World, odd: Unlike | None) -> ClaimOutcome:
    """The outcome of a claim on a world that ended well; `odd` is the first call in which a rank differed."""
    world.judge(claim)
    if not world.findings:
        return ClaimOutcome(world.size, PASSED)
    first: dict[int, dict[str, Any]] = {}
    for finding in world.findings:
        first.setdefault(finding.rank, _claim_report(finding.rank, printable(finding.message)))
    cause = next((finding.cause for finding in world.findings if finding.cause), "")
    if odd:
        cause = odd.words
    return ClaimOutcome(world.size, FAILED, [first[rank] for rank in sorted(first)], cause, world.symptom)


def _claim_report(rank: int, message: str) -> dict[str, Any]:
    return {"rank": rank, "kind": "claim", "type": "", "message": message}


def judge(ends: Sequence[RankEnd], own_file: str, seconds: float) -> tuple[str, list[dict[str, Any]]]:
    """The status of a world, and a report for each rank that caused it.

    A report has rank, kind (claim, exception, time or crash), type and message. It also has the file, line, function
    and code of the innermost frame in `own_file`, or of the innermost of all.
    """
    ended_badly = [end for end in ends if end.how != RETURNED]
    causes = [end for end in ended_badly if not _is_consequence(end)] or ended_badly
    hows = {end.how for end in causes}
    status = CRASHED if DIED in hows else DID_NOT_END if LATE in hows else FAILED if hows else PASSED
    return status, [_report(end, own_file, seconds) for end in causes]


def _is_consequence(end: RankEnd) -> bool:
    """Whether this rank ended only because another one did."""
    if end.how == RAISED:
        if end.type == "UserError":
            return _tells_of_others(end.message)
        is_broken = any(words in end.message for words in BROKEN_COLLECTIVE)
        return is_broken and "Timed out" not in end.message
    return end.how == DIED and any(map(_tells_of_others, _last_lines(end.output, LAST_LINES)))


def _tells_of_others(words: str) -> bool:
    """Whether these words of a rank mean that it ends because another one did."""
    return any(each in words for each in CONSEQUENCES)


def _report(end: RankEnd, own_file: str, seconds: float) -> dict[str, Any]:
    where: dict[str, Any] = {}
    if frame := _frame(end, own_file):
        where = {"file": frame.file, "line": frame.line, "function": frame.function}
        where["code"] = _code(frame, own_file)
    about: dict[str, Any] = {"rank": end.rank}
    if end.how == RAISED:
        if end.type == NotAsAgreed.__name__:
            return _claim_report(end.rank, end.message)
        return about | {"kind": "exception", "type": end.type, "message": end.message} | where
    if end.how == LATE:
        return about | {"kind": "time", "type": "", "message": f"still running after {seconds:g} s"} | where
    message = end.message or _exit_words(end.exit_code)
    lines = _last_lines(end.output, LAST_LINES)
    own = [f'"{line}"' for line in lines if not _tells_of_others(line)]
    message += f"; it printed {', '.join(own)}" if own else "".join(f"; {line}" for line in lines)
    return about | {"kind": "crash", "type": "", "message": message} | where


def _frame(end: RankEnd, own_file: str) -> StackFrame | None:
    """The innermost frame in the student's file, on any thread; otherwise the innermost of all."""
    # faulthandler writes non-ASCII characters as Python's escapes.
    names = (own_file, own_file.encode("ascii", "backslashreplace").decode())
    for thread in reversed(end.threads):
        for frame in reversed(thread):
            if frame.file in names:
                return StackFrame(own_file, frame.line, frame.function)
    return end.frames[-1] if end.frames else None


def _code(frame: StackFrame, own_file: str) -> str:
    """The line of code, if its file is under test or installed: a rank may name any existing file."""
    file = os.path.realpath(frame.file)
    is_code = file.endswith(".py") and file.startswith(INSTALLED)
    return linecache.getline(frame.file, frame.line).strip() if is_code or frame.file == own_file else ""


def _exit_words(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process ended with exit code {exit_code}"
    return f"the process was ended by {signal_name(-exit_code)}"


def _last_lines(text: str, count: int) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]


def causes_of(by_claim: Sequence[tuple[str, Sequence[ClaimOutcome]]], own_file: str) -> list[dict[str, Any]]:
    """Each `cause` as a phrase, and the names of the `claims` that fail because of it; the most frequent first."""
    causes: dict[Any, dict[str, Any]] = {}
    by_name = dict(by_claim)
    with_symptom = {claim for claim, outcomes in by_claim if any(each.symptom for each in outcomes)}
    start = next((each.cause for each in by_name.get(STARTS, ()) if each.cause), "")
    plain = [outcome for outcome in by_name.get(AVERAGES, ()) if outcome.status != PASSED]
    of_plain = _cause(plain, own_file) if plain else (None, "")
    vague: list[tuple[str, str]] = []  # claims whose numbers show nothing, each with a fallback phrase
    for claim, outcomes in by_claim:
        failed = [outcome for outcome in outcomes if outcome.status != PASSED]
        if not failed:
            continue
        key, words = _cause(failed, own_file)
        # Only if a claim on gradients that starts from equal weights was tested, and holds.
        if start and SHARES in by_name and with_symptom <= {AVERAGES} and claim in (AVERAGES, TRAINS):
            key, words = ("told", start), start
        elif with_symptom == {SHARES} == {claim} and AVERAGES in by_name:
            key, words = ("told", IN_ONE_MEMORY), IN_ONE_MEMORY
        elif claim in HARDER and key and key[0] == "symptom" and of_plain[0] and of_plain[0][0] == "symptom":
            key, words = of_plain
        # Replicas that drift apart in training stop it with a sentence.
        if key is None or (key[0], key[2:3]) == ("raised", ("UserError",)) and claim == TRAINS and causes:
            vague.append((claim, words))
            continue
        causes.setdefault(key, {"cause": words, "claims": []})["claims"].append(claim)
    ordered = sorted(causes.values(), key=lambda cause: -len(cause["claims"]))
    # A fault in training, or without a known reason, is most likely the gradients' fault.
    of_gradients = next((causes[key] for key in causes if key[0] in ("symptom", "calls", "raised")), None)
    for claim, words in vague:
        if of_gradients is None:
            of_gradients = {"cause": words, "claims": []}
            ordered.append(of_gradients)
        of_gradients["claims"].append(claim)
    return ordered


def _cause(failed: Sequence[ClaimOutcome], own_file: str) -> tuple[Any, str]:
    """A key that is equal for equal causes (None if unknown), and the cause as a phrase."""
    told = next((outcome for outcome in failed if outcome.cause), None)
    symptoms = [outcome.symptom for outcome in failed if outcome.symptom and outcome.symptom.kind != UNKNOWN]
    if told:
        return ("calls",) if SAME_CALLS in told.cause else ("told", told.cause), told.cause
    bad = next((outcome for outcome in failed if outcome.reports and outcome.reports[0]["kind"] != "claim"), None)
    if bad:
        report = bad.reports[0]
        key = ("raised", report["kind"], report["type"], report.get("file"), report.get("line"))
        return key, card.report(report, own_file, with_rank=False)
    if symptoms:
        kind = Counter(symptom.kind for symptom in symptoms).most_common(1)[0][0]
        alike = [symptom for symptom in symptoms if symptom.kind == kind]
        bare = [Symptom(symptom.kind, symptom.world_size, symptom.numbers) for symptom in alike]
        return ("symptom", kind, sentence(bare) if kind == "scaled" else ""), sentence(alike)
    return None, failed[0].reports[0]["message"] if failed[0].reports else failed[0].status
