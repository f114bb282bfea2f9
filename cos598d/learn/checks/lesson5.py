"""Lesson 5: the sum of tensors of any length, by 2(n-1) messages from each rank to one neighbour."""

from types import ModuleType

import torch

from cos598d.check.claims.base import Claim, MakeSync, World
from cos598d.check.comparison import Comparison, Local
from cos598d.check.evidence import BadEvidence
from cos598d.learn.checking import Check, Checks, OnLesson
from cos598d.learn.checks.common import record
from cos598d.learn.events import RECEIVE, SEND, from_rows
from cos598d.learn.picture.probe import Probe
from cos598d.report.numbers import number_of
from cos598d.sync.base import GradientSync

LENGTHS = (12, 10, 1009, 7, 2, 1)
LONGEST = max(LENGTHS)
WHOLE = 1200  # which 2, 3 and 4 ranks divide
HALF = "a tensor of 12 elements of float16"


def _tensor(nonce: int, rank: int, length: int) -> torch.Tensor:
    """What a rank begins with: between 0.5 and 1.5, so that nothing cancels."""
    return torch.rand(length, generator=torch.Generator().manual_seed(nonce + 7919 * rank + length)) + 0.5


def _half(nonce: int, rank: int) -> torch.Tensor:
    """What a rank begins with of another dtype: whole numbers from 1 to 8, whose sums are exact."""
    return torch.randint(1, 9, (12,), generator=torch.Generator().manual_seed(nonce + 7919 * rank)).half()


def _name(length: int) -> str:
    return f"a tensor of {length} element{'s' if length > 1 else ''}"


@Claim
def sums(on: OnLesson) -> None:
    """Afterwards the tensor is the sum over all ranks, on every rank: of 1 to 1009 elements, also of float16."""
    found = {}
    for length in LENGTHS:
        found[_name(length)] = _tensor(on.nonce, on.rank, length)
        on.student.all_reduce(on.comm, found[_name(length)])
    found[HALF] = _half(on.nonce, on.rank)
    on.student.all_reduce(on.comm, found[HALF])
    on.hand_in("after", found)


@sums.judgement
def _(world: World) -> None:
    own = [{_name(length): _tensor(world.nonce, rank, length) for length in LENGTHS} for rank in range(world.size)]
    right = {name: torch.stack([each[name] for each in own]).sum(dim=0) for name in own[0]}
    half = torch.stack([_half(world.nonce, rank) for rank in range(world.size)]).sum(dim=0)
    handed_in = world.handed_in("after", {**right, HALF: half})
    found = [{name: each[name] for name in right} for each in handed_in]
    _judge_parts(world, [each[_name(LONGEST)] for each in own], [each[_name(LONGEST)] for each in found])
    world.compare(Comparison("", 0, Local([[dict(each) for each in own]]), found, dict(right)))
    halves = [each[HALF] for each in handed_in]
    wrong = next((rank for rank, each in enumerate(halves) if each is None or not each.equal(half)), None)
    if wrong is not None and not world.findings:
        words = f"a tensor of float16 is not the sum on rank {wrong}, and those of float32 are"
        why = "what comes in must land in a tensor of the same dtype (torch.empty_like)"
        world.find(wrong, f"{words}: {why}", f"on {world.size} ranks, in {HALF}")


def _judge_parts(world: World, own: list[torch.Tensor], found: list[torch.Tensor | None]) -> None:
    """Find what the parts of the longest tensor hold where they are not the sum: whose numbers, and how often."""
    n = world.size
    holds = [[_held(each, own, part) for part in range(n)] for each in found]
    flat = [(rank, part, times) for rank, parts in enumerate(holds) for part, times in enumerate(parts)]
    wrong = [(rank, part, times) for rank, part, times in flat if times is not None and times != [1] * n]
    if not wrong or any(times is None for *_, times in flat):
        return
    rank, part, times = wrong[-1]
    if all(times == [int(r == rank) for r in range(n)] for rank, _, times in flat):
        return  # nothing came in at all
    where = f"part {part} of rank {rank}'s tensor"
    each_has_one = all(sum(times == [1] * n for times in parts) == 1 for parts in holds)
    twice = next((f"rank {r}'s numbers {count} times" for r, count in enumerate(times) if count > 1), "")
    if twice:
        words = f"{where} has {twice}: in the second half what comes in replaces what stands there, and is not added"
    elif each_has_one:
        words = f"each rank has the sum of one part alone ({where} has none): the second half hands parts round"
    elif sum(times) == 1:
        words = f"{where} is rank {times.index(1)}'s own: in the first half what comes in is added to what stands there"
    else:
        lost = [str(r) for r, count in enumerate(times) if not count]
        missing = " and ".join(lost)
        words = f"{where} lacks the numbers of rank {missing}: which part goes out, and which comes in, at each step?"
    world.find(rank, words, f"on {n} ranks, in {_name(LONGEST)}; expected the sum over all ranks in every part")


def _held(found: torch.Tensor | None, own: list[torch.Tensor], part: int) -> list[int] | None:
    """How often each rank's numbers are in a part of a tensor; None where it is not made of whole ones."""
    n = len(own)
    # However a file cuts: the parts' ends may lie elsewhere.
    middle = slice(part * LONGEST // n + n, (part + 1) * LONGEST // n - n)
    if found is None:
        return None
    basis = torch.stack([each[middle] for each in own], dim=1)
    times = torch.linalg.lstsq(basis.double(), found[middle].double().unsqueeze(1)).solution.flatten()
    whole = times.round()
    is_made_so = (basis.double() @ whole - found[middle]).abs().max() < 1e-3
    return [int(each) for each in whole] if is_made_so else None


@Claim
def neighbours_only(on: OnLesson) -> None:
    """Each rank sends 2(n-1) messages of S/n bytes, all of them to one rank, and receives as many from one."""
    on.comm.begin_record()
    on.student.all_reduce(on.comm, _tensor(on.nonce, on.rank, WHOLE))
    on.report_events()


@neighbours_only.judgement
def _(world: World) -> None:
    n, size = world.size, WHOLE * 4
    for rank, rows in enumerate(world.reported("events", list)):
        try:
            events = from_rows(rows)
        except ValueError:
            raise BadEvidence(f"rank {rank} did not report what it did") from None
        for kind, verb in ((SEND, "sent"), (RECEIVE, "received")):
            messages = [event for event in events if event.kind == kind]
            peers = sorted({str(event.peer) for event in messages})
            moved = sum(event.bytes for event in messages)
            right = 2 * (n - 1) * size // n
            found = f"rank {rank} {verb} {number_of(len(messages), 'message')} of {moved} bytes in all on {n} ranks"
            wanted = f"expected 2(n-1) = {2 * (n - 1)} messages and 2(n-1)/n S = {right} bytes"
            is_right = (len(messages), moved) == (2 * (n - 1), right)
            world.require(is_right, f"{found}, {wanted}: {_why(len(messages), moved, n, size)}", rank)
            to = "to" if kind == SEND else "from"
            told = (
                f"rank {rank} {verb} messages {to} ranks {', '.join(peers)}, expected one neighbour {to} which all go"
            )
            world.require(
                len(peers) <= 1 or not is_right, told.replace("from which all go", "they all come from"), rank
            )


def _why(messages: int, moved: int, n: int, size: int) -> str:
    if not messages:
        return "the sum has to be made of messages"
    if messages and moved == messages * size:
        return "the whole tensor travels each time; cut it into n parts"
    if messages > 2 * (n - 1):
        return "each half has n-1 steps, since a part needs no step to get to where it is"
    return "n-1 steps to collect, n-1 to hand round, one part in each"


def _ring(student: ModuleType) -> MakeSync:
    """A sync that adds up each gradient by the student's `all_reduce`, for a picture of a step."""

    class ByRing(GradientSync):
        def finish(self) -> None:
            gradients = [gradient for _, gradient in self.gradients() if gradient.dtype == torch.float32]
            buffer = torch.cat([gradient.flatten() for gradient in gradients])
            student.all_reduce(self.comm, buffer)

    return ByRing


@Claim
def record_ring(on: OnLesson) -> None:
    """A step after a first one, recorded; then an all-reduce whose messages can be seen to do what they do."""
    record.observe(on)
    probe = on.comm.probe = Probe(on.rank)
    probe.look()
    on.student.all_reduce(on.comm, probe.tensor)
    probe.look()
    on.report("messages", probe.to_json())


_OWN = {
    "scaled": "rank {rank}'s result is the sum times {factor:.4g}: an all-reduce adds up, and divides by nothing",
    "twice": "rank {rank}'s result is the average over {n} ranks: an all-reduce is the sum, without a division",
    "local": "rank {rank} still has its own tensor: what comes in must be added into a view of `tensor`, in place",
}
CHECKS = Checks((Check(sums, (3, 2, 4), _OWN), Check(neighbours_only, (3, 4))), _ring, record_ring)
