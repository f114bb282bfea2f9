"""Lesson 5: the sum of tensors of any length, by 2(n-1) messages from each rank to one neighbour."""

from collections import Counter
from types import ModuleType

import torch

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.sync.base import GradientSync
from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, MakeSync, World
from cos598d.tools.check.comparison import Comparison, Local
from cos598d.tools.check.evidence import BadEvidence, seed_of
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.events import RECEIVE, SEND, from_rows
from cos598d.tools.learn.lessons.common import record
from cos598d.tools.learn.lessons.golf import STEPS, Results, Turn, golf_of
from cos598d.tools.learn.picture.probe import MessageProbe

LENGTHS = (12, 10, 1009, 7, 2, 1)
LONGEST = max(LENGTHS)
WHOLE = 1200  # which 2, 3 and 4 ranks divide
HALF = "a tensor of 12 elements of float16"
GOLF, GOLF_RANKS = 1 << 17, 4  # elements


def _tensor(nonce: int, rank: int, length: int) -> torch.Tensor:
    """What a rank begins with: between 0.5 and 1.5, so that nothing cancels."""
    return torch.rand(length, generator=torch.Generator().manual_seed(seed_of(nonce, rank) + length)) + 0.5


def _number(nonce: int, rank: int) -> float:
    """What each element of a rank's tensor is where messages are counted: sums of a few are exact, and no two alike."""
    return float(torch.randint(1, 1 << 20, (), generator=torch.Generator().manual_seed(seed_of(nonce, rank))))


def _half(nonce: int, rank: int) -> torch.Tensor:
    """What a rank begins with of another dtype: whole numbers from 1 to 8, whose sums are exact."""
    return torch.randint(1, 9, (12,), generator=torch.Generator().manual_seed(seed_of(nonce, rank))).half()


def _name(length: int) -> str:
    return f"a tensor of {number_of(length, 'element')}"


class _Watch:
    """Sees a tensor when its second half of messages begins, if there is one, and all that comes in by messages."""

    def __init__(self, tensor: torch.Tensor, ranks: int):
        self.halfway: torch.Tensor | None = None
        self.came: Counter[float] = Counter()
        self._tensor, self._begun, self._half = tensor, 0, 2 * (ranks - 1)

    def look(self) -> None:
        """A message is about to begin."""
        if self._begun == self._half:
            self.halfway = self._tensor.clone()
        self._begun += 1

    def ended(self, is_sent: bool, peer: int, part: torch.Tensor, started: float) -> None:
        """A message was waited for, which sent `part`, or has come in there."""
        if not is_sent:
            self.came.update(part.flatten().tolist())


def _watched(on: OnLesson, tensor: torch.Tensor) -> _Watch:
    """The student's all-reduce of the tensor, seen message by message."""
    watch = on.comm.probe = _Watch(tensor, on.world_size)
    on.student.all_reduce(on.comm, tensor)
    on.comm.probe = None
    return watch


@Claim
def sums(on: OnLesson) -> None:
    """Afterwards the tensor is the sum over all ranks, on every rank: of 1 to 1009 elements, also of float16."""
    found = {}
    for length in LENGTHS:
        found[_name(length)] = _tensor(on.nonce, on.rank, length)
        watch = _watched(on, found[_name(length)])
        if length == LONGEST:
            on.hand_in("halfway", {"tensor": watch.halfway})
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
    longest = [each[_name(LONGEST)] for each in own]
    halfway = [each["tensor"] for each in world.handed_in("halfway", {"tensor": longest[0]})]
    _judge_parts(world, longest, [each[_name(LONGEST)] for each in found], halfway)
    world.compare(Comparison("", 0, Local([[dict(each) for each in own]]), found, dict(right)))
    halves = [each[HALF] for each in handed_in]
    wrong = next((rank for rank, each in enumerate(halves) if each is None or not each.equal(half)), None)
    if wrong is not None and not world.findings:
        words = f"a tensor of float16 is not the sum on rank {wrong}, although those of float32 are"
        why = "receive into a tensor of the same dtype (torch.empty_like)"
        world.find(wrong, f"{words}: {why}", f"on {world.size} ranks, in {HALF}")


def _judge_parts(
    world: World, own: list[torch.Tensor], found: list[torch.Tensor | None], halfway: list[torch.Tensor | None]
) -> None:
    """Find what the parts of the longest tensor hold where they are not the sum: whose numbers, and how often.

    `halfway` are the tensors when each rank began its second half.
    """
    n = world.size
    holds, held_halfway = (
        [[_held(each, own, part) for part in range(n)] for each in some] for some in (found, halfway)
    )
    flat = [(rank, part, times) for rank, parts in enumerate(holds) for part, times in enumerate(parts)]
    wrong = [(rank, part, times) for rank, part, times in flat if times is not None and times != [1] * n]
    if not wrong or any(times is None for *_, times in flat):
        return
    rank, part, times = wrong[-1]
    if all(times == [int(r == rank) for r in range(n)] for rank, _, times in flat):
        return  # nothing came in at all
    where = f"part {part} of rank {rank}'s tensor"
    each_has_one = all(parts.count([1] * n) == 1 for parts in holds)
    is_collected = {parts.index([1] * n) for parts in held_halfway if [1] * n in parts} == set(range(n))
    twice = next((f"rank {r}'s numbers {count} times" for r, count in enumerate(times) if count > 1), "")
    if twice:
        words = f"{where} has {twice}: in the second half what comes in replaces what is there, and is not added"
    elif each_has_one:
        words = f"each rank has the sum of only one part ({where} has none): the second half passes parts round"
    elif is_collected:
        words = f"{where} is not the sum, and the first half was right, which left each rank the sum of one part: in "
        words += "the second half, which part goes out, and which comes in, at each step?"
    elif sum(times) == 1:
        words = f"{where} is rank {times.index(1)}'s own: in the first half what comes in is added to what is there"
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
    tensor = torch.full((WHOLE,), _number(on.nonce, on.rank))
    on.comm.begin_record()
    came = _watched(on, tensor).came
    on.report_events()
    on.report("came", list(came.items()))
    on.hand_in("after", {"tensor": tensor})


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
            told = f"rank {rank} {verb} messages {to} ranks {', '.join(peers)}, expected only one neighbour"
            world.require(len(peers) <= 1 or not is_right, told, rank)
    if not world.findings:
        _judge_what_came(world)


def _judge_what_came(world: World) -> None:
    """That the sums are made of what came in: of n-1 parts the whole sum, of one all but the rank's own number."""
    n, like = world.size, torch.zeros(WHOLE)
    own = [_number(world.nonce, rank) for rank in range(n)]
    right = torch.full_like(like, sum(own))
    for rank, after in enumerate(world.handed_in("after", {"tensor": like})):
        found = after["tensor"]
        came = Counter({float(value): int(times) for value, times in world.reported("came", list)[rank]})
        has_come = came[sum(own)] >= (n - 1) * WHOLE // n and came[sum(own) - own[rank]] >= WHOLE // n
        if found is not None and found.equal(right) and not has_come:
            words = f"rank {rank} has the sum, but not from its messages: {came[sum(own)]} of {WHOLE} elements "
            words += f"came in as the complete sum on {n} ranks, expected {(n - 1) * WHOLE // n}"
            world.find(rank, f"{words}: the sum has to be made of messages")
        elif _has_summed(world) and not (found is not None and found.equal(right)):
            world.find(
                rank,
                f"rank {rank} has no sum of the tensor whose messages are counted, although it has those of others",
            )


def _has_summed(world: World) -> bool:
    """Whether the ranks had the sum of the longest tensor, in the check before."""
    name = _name(LONGEST)
    right = torch.stack([_tensor(world.nonce, rank, LONGEST) for rank in range(world.size)]).sum(dim=0)
    found = [each.get(sums.name, "after", {name: right})[name] for each in world.evidence]
    return all(each is not None and torch.allclose(each, right) for each in found)


def _why(messages: int, moved: int, n: int, size: int) -> str:
    if not messages:
        return "the sum has to be made of messages"
    if messages and moved == messages * size:
        return "the whole tensor is sent each time; cut it into n parts"
    if messages > 2 * (n - 1):
        return "each half has n-1 steps, since a part needs no step to stay where it is"
    return "n-1 steps to collect, n-1 to pass round, one part in each"


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
    probe = on.comm.probe = MessageProbe(on.rank)
    probe.look()
    on.student.all_reduce(on.comm, probe.tensor)
    probe.look()
    on.report("messages", probe.to_json())


def _golf_tensor(nonce: int, rank: int, step: int) -> torch.Tensor:
    return torch.rand(GOLF, generator=torch.Generator().manual_seed(seed_of(nonce, rank) + 7 + step)) + 0.5


def _golf(on: OnLesson) -> Turn:
    def turn(step: int):
        tensor = _golf_tensor(on.nonce, on.rank, step)
        return lambda: on.student.all_reduce(on.comm, tensor), lambda: {"the sum": tensor}

    return turn


def _golf_sums(nonce: int, ranks: int) -> list[Results]:
    own = [[_golf_tensor(nonce, rank, step) for rank in range(ranks)] for step in range(STEPS)]
    return [{"the sum": torch.stack(of_step).sum(dim=0)} for of_step in own]


_OWN = {
    "scaled": "rank {rank}'s result is the sum times {factor:.4g}: an all-reduce adds up, without a division",
    "twice": "rank {rank}'s result is the average over {n} ranks: an all-reduce is the sum, without a division",
    "local": "rank {rank} still has its own tensor: add what comes in to a view of `tensor`, in place",
}
_MESSAGES = ("send", "receive")
CHECKS = Checks(
    (Check(sums, (3, 2, 4), _OWN, only=_MESSAGES), Check(neighbours_only, (3, 4), only=_MESSAGES)),
    _ring,
    record_ring,
    golf=golf_of(
        f"an all-reduce of {GOLF * 4:,} bytes",
        GOLF_RANKS,
        all_reduce_bytes(GOLF * 4, GOLF_RANKS),
        _golf,
        _golf_sums,
        _MESSAGES,
    ),
)
