"""Check a lesson's file: it runs on worlds of ranks, and their results are judged here, where it never runs."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cos598d.errors import UserError
from cos598d.terminal.printable import printable
from cos598d.tools.check.claims.base import World
from cos598d.tools.check.evidence import BadEvidence, Evidence, Nonce
from cos598d.tools.check.judge import judge
from cos598d.tools.check.notes import CallTrace, Unlike, misfit, read_trace, standstill, unlike
from cos598d.tools.check.spawn import RankEnd, longer_than, patience, run_world
from cos598d.tools.check.verdict import DID_NOT_END, FAILED, PASSED, result_of
from cos598d.tools.learn import ranks, told
from cos598d.tools.learn.checking import Check
from cos598d.tools.learn.lessons import Lesson
from cos598d.tools.learn.picture.probe import RECORD, Recorded, recorded
from cos598d.tools.learn.stuck import StuckRanks
from cos598d.tools.learn.student import Mistake, first_mistake, line_of, rebound
from cos598d.tools.learn.words import in_words

if TYPE_CHECKING:
    from cos598d.tools.learn.lessons.golf import Stroke

SECONDS = 8.0  # limit of all checks of one world together, on an idle machine: most take one second
STILL = 1 / 3  # of that time: all ranks may wait in calls this long, if it is not certain that they wait forever
NOT_TRIED = "not tried"
MOST_LINES = 5  # of what a rank printed


@dataclass
class CheckVerdict:
    """The result of one check on one world: `status` is a claim's, or "not tried"."""

    check: Check
    size: int
    status: str
    mistakes: list[Mistake] = field(default_factory=list)
    wrong: World | None = None  # its gradients are wrong
    lines: list[int] = field(default_factory=list)  # of the file, by rank: those to print with a mistake
    reports: list[str] = field(default_factory=list)  # why it fails, once all checks are judged

    def details(self) -> dict[str, Any]:
        """Its further fields in JSON."""
        return {"reports": self.reports}


class Marking:
    """One lesson's file under trial."""

    def __init__(self, lesson: Lesson, path: Path, source: bytes, nonce: int, seconds: float = SECONDS):
        """`seconds` is the time limit of one world on an idle machine; a busy machine gets more."""
        self.lesson, self.path, self.source, self.nonce = lesson, path.resolve(), source, nonce
        self._idle_seconds, self.seconds = seconds, seconds
        self.name = path.name
        self.verdicts: list[CheckVerdict] = []
        self.static: Mistake | None = None
        self.printed: list[str] = []

    def run(self, say: Callable[[str], None], sizes: Sequence[int] | None = None) -> None:
        """Try all checks, or only those on these numbers of ranks; `say` gets a line after each world.

        A world that does not end is the last.
        """
        self.static = first_mistake(self.source, self.path, self.lesson.page())
        if self.static:
            return
        checks = self.lesson.load_checks()
        for size in checks.sizes if sizes is None else sizes:
            tried = [check for check in checks.checks if size in check.sizes]
            ends = self._world(size, [check.name for check in tried])
            with _one_thread():
                verdicts = self._judge(tried, ends)
            self.verdicts += verdicts
            held = sum(verdict.status == PASSED for verdict in verdicts)
            left_out = {check.name: check.sizes for check in checks.checks if size not in check.sizes}
            say(told.world(size, held, len(verdicts), left_out))
            if held < len(verdicts) and not self.printed:
                self.printed = _printed(ends)
            if any(verdict.status not in (PASSED, FAILED) for verdict in verdicts):
                break

    def record(self, size: int) -> Recorded | None:
        """What the file does in one step on `size` ranks, in a lesson with steps; None if it fails."""
        if first_mistake(self.source, self.path, self.lesson.page()):
            return None
        try:
            return recorded(self._evidence(self._world(size, [RECORD])))
        except (BadEvidence, ValueError):
            return None

    def golf(self) -> "Stroke":
        """One world of golf, with all checks on as many ranks before it. Raises UserError where one fails."""
        from cos598d.tools.learn.lessons.golf import stroke_of

        every = self.lesson.load_checks()
        golf = every.golf.check  # type: ignore[union-attr]
        (size,) = golf.sizes
        tried = [*(check for check in every.checks if size in check.sizes), golf]
        ends = self._world(size, [check.name for check in tried])
        with _one_thread():
            failed = [verdict for verdict in self._judge(tried, ends) if verdict.status != PASSED]
        if failed:
            mistakes = self._of_check(failed[0].check, failed[:1])
            why = said(mistakes[0], self.name) if mistakes else failed[0].status
            raise UserError(f"{self.name} has passed its checks, but not a round of golf: {why.rstrip('.')}.")
        return stroke_of(World(golf.name, Nonce(self.nonce), self._evidence(ends)))

    def _world(self, size: int, names: Sequence[str]) -> list[RankEnd]:
        arguments = (str(self.path), self.lesson.number, names, [self.nonce])
        seconds = self.seconds = self._idle_seconds * patience()
        is_stuck, timeout = StuckRanks(STILL * seconds), longer_than(seconds)
        return run_world(size, ranks.observe, *arguments, seconds=seconds, timeout=timeout, is_stuck=is_stuck)

    def _evidence(self, ends: Sequence[RankEnd]) -> list[Evidence]:
        return [Evidence.from_bytes(end.handed_in, end.rank, Nonce(self.nonce)) for end in ends]

    def _judge(self, tried: Sequence[Check], ends: Sequence[RankEnd]) -> list[CheckVerdict]:
        status, reports = judge(ends, str(self.path), self.seconds)
        traces = [read_trace(end.calls) for end in ends]
        names = [check.name for check in tried]
        # Where a rank did not get to the end: the check that it was in, or the first if it did not load the file.
        places = [names.index(trace.check) if trace.check in names else 0 for trace in traces]
        stopped = len(names) if status == PASSED else min(places)
        verdicts = [self._judge_check(check, ends, traces) for check in tried[:stopped]]
        if stopped < len(names):
            mistake = self._stopped(status, reports, traces, tried[stopped])
            verdicts.append(CheckVerdict(tried[stopped], len(ends), status, [mistake]))
            verdicts += [CheckVerdict(check, len(ends), NOT_TRIED) for check in tried[stopped + 1 :]]
        return verdicts

    def _judge_check(self, check: Check, ends: Sequence[RankEnd], traces: Sequence[CallTrace]) -> CheckVerdict:
        size = len(ends)
        verdict = CheckVerdict(check, size, PASSED, lines=[self._line(trace, check) for trace in traces])
        try:
            world = World(check.name, Nonce(self.nonce), self._evidence(ends))
            direct = [each.reported("", "direct calls", list) for each in world.evidence]
        except BadEvidence as error:
            return CheckVerdict(check, size, FAILED, [Mistake(printable(error))])
        world.judge(check.claim)
        if world.is_broken:
            return CheckVerdict(check, size, FAILED, [Mistake(world.findings[0].message, self._begins(check))])
        called = next((str(calls[0]) for calls in direct if calls), "")
        if called and not self.lesson.load_checks().calls_torch:
            words = f"torch.distributed is called directly ({printable(called)}): make every call through comm"
            verdict.mistakes.append(Mistake(words, _line_in(called)))
        odd = self._odd(traces, check, is_over=True) if world.findings else None
        # The first rank's finding is enough, and explains more than the wrong gradients that follow from it.
        other = next((finding for finding in world.findings if not finding.is_compared), None)
        left = next((call for trace in traces for call in trace.of(check.name) if not call.is_over), None)
        changed = next((c for trace in traces for c in trace.of(check.name) if c.changed_before), None)
        other_way = next(
            (c for trace in traces for c in trace.of(check.name) if check.only and c.op not in check.only), None
        )
        if other_way:
            wanted = "messages" if "send" in check.only else " and ".join(f"comm.{op}" for op in check.only)
            words = f"comm.{other_way.op} is called: the sum has to be made of {wanted}"
            verdict.mistakes.append(Mistake(words, other_way.line))
        elif changed:
            words = f"the tensor of {changed.words(self.name)} was changed before the call had ended"
            verdict.mistakes.append(Mistake(f"{words}: wait for the call first, then divide", changed.line))
        elif left:
            words = f"{left.words(self.name)} is never waited for: keep what it returns, and call its wait()"
            verdict.mistakes.append(Mistake(words, left.line))
        elif odd:
            verdict.mistakes.append(Mistake(odd.words, odd.line))
        elif other:
            line = other.line or (line_of(self.source, other.at) if other.at else 0) or verdict.lines[other.rank]
            verdict.mistakes.append(Mistake(printable(other.message), line, printable(other.cause)))
        elif world.symptom:
            verdict.wrong = world
        if verdict.mistakes or verdict.wrong:
            verdict.status = FAILED
        return verdict

    def _stopped(
        self, status: str, reports: Sequence[dict[str, Any]], traces: Sequence[CallTrace], check: Check
    ) -> Mistake:
        """Why a world failed."""
        report = reports[0]
        odd = self._odd(traces, check, is_over=False)
        if odd is None and status == DID_NOT_END:
            odd = standstill(traces, self.name)
        if odd:
            return Mistake(odd.words, odd.line)
        is_here = report.get("file") == str(self.path)
        # An error outside the file is in the check's call of it, for example with arguments that it does not take.
        line, code = (report["line"], report.get("code", "")) if is_here else (self._begins(check), "")
        message = printable(" ".join(report["message"].split()))
        if report["kind"] == "claim":  # it returned a value that the check cannot use
            return Mistake(message, self._begins(check))
        if report["type"] == "UsageError":  # the file could not be loaded
            return Mistake(message, _line_in(message))
        words = f"{report['type']}: {message}" if report["type"] else message
        at = f", at `{printable(code)}`" if code else ""
        return Mistake(f"rank {report['rank']} {_ended(report['kind'])}{at}: {words}", line)

    def _odd(self, traces: Sequence[CallTrace], check: Check, is_over: bool) -> Unlike | None:
        """Where ranks do not make the same call, or a message has no other end; None if there is no such place."""
        return unlike(traces, check.name, self.name, is_over) or misfit(traces, check.name, self.name)

    def _line(self, trace: CallTrace, check: Check) -> int:
        """The line of the file to print with a mistake in its results: its last call, else its function."""
        lines = [call.line for call in trace.of(check.name) if call.line]
        return lines[-1] if lines else self._begins(check)

    def _begins(self, check: Check) -> int:
        """The line of the function or class that the check is about."""
        return line_of(self.source, check.about or next(iter(self.lesson.contract)))

    def mistakes(self) -> list[tuple[Mistake, list[str]]]:
        """All mistakes, each once, with the names of the checks that fail for it; first those that stop everything."""
        checks = self.lesson.load_checks().checks
        if self.static:
            return [(self.static, [check.name for check in checks])]
        found: dict[str, tuple[Mistake, list[str]]] = {}
        order = sorted(checks, key=lambda check: not any(v.check is check and _stops(v) for v in self.verdicts))
        for check in order:
            failed = [verdict for verdict in self.verdicts if verdict.check is check and _fails(verdict)]
            for mistake in self._of_check(check, failed):
                found.setdefault(mistake.words, (mistake, []))[1].append(check.name)
        return [(mistake, list(dict.fromkeys(names))) for mistake, names in found.values()]

    def _of_check(self, check: Check, failed: Sequence[CheckVerdict]) -> list[Mistake]:
        """The mistakes of one check: those of the first world that has any; wrong numbers are compared over all."""
        mistakes = next((verdict.mistakes for verdict in failed if verdict.mistakes), [])
        wrongs = [verdict.wrong for verdict in failed if verdict.wrong]
        if wrongs:
            rank, words, detail = in_words(wrongs, check.words)
            line = next(verdict for verdict in failed if verdict.wrong).lines[rank]
            again = rebound(self.source, check.about or next(iter(self.lesson.contract)))
            if again:
                words = (
                    f"{words.partition(':')[0]}: line {again[0]} computes a new tensor and calls it {again[1]}, which "
                )
                words += f"does not change the one that was given; change that in place ({again[1]} /= ...)"
            mistakes = [*mistakes, Mistake(printable(words), line, printable(detail))]
        return mistakes

    def result(self) -> dict[str, Any]:
        """All of it as JSON, in the form of `cos598d check`'s."""
        checks = self.lesson.load_checks().checks
        mistakes = self.mistakes()
        return {
            "lesson": self.lesson.number,
            "title": self.lesson.title,
            "file": self.name,
            "nonce": self.nonce,
            "passed": not mistakes and all(v.status == PASSED for v in self.verdicts) and bool(self.verdicts),
            "world_sizes": sorted({verdict.size for verdict in self.verdicts}),
            "diagnosis": [{**vars(m), "cause": said(m, self.name), "claims": names} for m, names in mistakes],
            "claims": [self._claim(check, mistakes) for check in checks],
            "printed": self.printed,
        }

    def _claim(self, check: Check, mistakes: Sequence[tuple[Mistake, list[str]]]) -> dict[str, Any]:
        own = [verdict for verdict in self.verdicts if verdict.check is check]
        statuses = [verdict.status for verdict in own] or [NOT_TRIED]
        words = [said(mistake, self.name) for mistake, names in mistakes if check.name in names]
        status = next((status for status in statuses if status != PASSED), PASSED)
        verdicts = [(v.size, replace(v, reports=words if _fails(v) else [])) for v in own]
        return result_of("claim", check.name, " ".join(check.claim.says.split()), verdicts, status)


def said(mistake: Mistake, name: str) -> str:
    """ "lesson3.py line 12: ...", as the first line of the output."""
    return f"{name} line {mistake.line}: {mistake.words}" if mistake.line else f"{name}: {mistake.words}"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: the results are small, and threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fails(verdict: CheckVerdict) -> bool:
    return verdict.status not in (PASSED, NOT_TRIED)


def _stops(verdict: CheckVerdict) -> bool:
    return verdict.status not in (PASSED, FAILED, NOT_TRIED)


def _ended(kind: str) -> str:
    return {"time": "did not end", "crash": "ended early", "exception": "raised an exception"}[kind]


def _line_in(words: str) -> int:
    """The line number in a sentence; 0 for none."""
    line = re.search(r"\bline (\d+)", words)
    return int(line[1]) if line else 0


def _printed(ends: Sequence[RankEnd]) -> list[str]:
    """The last lines that the file printed, by rank."""
    told = []
    for end in ends:
        lines = [printable(line) for line in end.output.splitlines() if line.strip()]
        told += [f"rank {end.rank} printed: {line}" for line in lines[-MOST_LINES:]]
    return told[: 2 * MOST_LINES]
