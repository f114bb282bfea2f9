"""One recorded step of a small model on real ranks of this host: what a picture of a sync is made from."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import AGREEMENT, OF_TRAINING
from cos598d.strategies import AUTO_SYNC, STRATEGIES, get_strategy, is_our_own
from cos598d.strategies.base import Strategy
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS
from cos598d.sync.options import SyncOptions
from cos598d.terminal.own_code import is_own
from cos598d.terminal.words import did_you_mean, number_of
from cos598d.tools.check import card
from cos598d.tools.check.judge import judge
from cos598d.tools.check.spawn import RETURNED, RankEnd, run_world
from cos598d.tools.check.toy import seeded, tanh_layers
from cos598d.tools.learn.events import CALL, COMPUTE, LONGEST_NAME, RECEIVE, SEND, Event, from_rows, to_rows
from cos598d.tools.learn.picture.draw import Picture, StepFrames, draw, steps_of
from cos598d.tools.learn.picture.messages import Message, MessageEnd, Shared, join_ends, join_shared, to_json
from cos598d.tools.learn.picture.watch import WatchedCommunicator, WatchedSharedMemory
from cos598d.tools.learn.picture.words import name_of, size

MOST_RANKS, WARM_UP, SECONDS = 8, 2, 30.0
EXAMPLES, WIDTH, LAST_WIDTH, LAYERS = 128, 256, 251, 6
# A layer of the model is a quarter of a MiB: the first bucket has one of them, the others two.
OPTIONS = SyncOptions(bucket_mb=0.6, first_bucket_mb=0.3)
SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True)
class PictureTrial:
    """What the ranks did in one step under `--sync name`: events of all, the messages of the tensor that moved most.

    sent: bytes that each rank sent by its ledger; untimed: calls of rank 0 that a library made without telling when;
    unsaid: why there are no messages although some were noted, else "".
    """

    name: str
    world_size: int
    events: list[Event]
    messages: list[Message]
    sent: list[int]
    untimed: int
    unsaid: str = ""

    @property
    def tensor(self) -> str:
        """Whose messages these are."""
        return self.messages[0].tensor if self.messages else ""


def run_trial(name: str, world_size: int) -> PictureTrial:
    """Train a small model for a few steps under `--sync name` on so many ranks, and record the last one.

    Raises UsageError for a sync that cannot be drawn, and UserError with what went wrong on a rank.
    """
    if not 2 <= world_size <= MOST_RANKS:
        raise UsageError(f"--world_size {world_size} cannot be drawn. Give 2 to {MOST_RANKS} ranks.")
    if name == AUTO_SYNC or not (is_own(name) or is_our_own(name)):
        drawn = [each for each in (*SYNCS, *STRATEGIES) if is_our_own(each)]
        raise UsageError(
            f"--sync {name} cannot be drawn.{did_you_mean(name, drawn)} Give one of {', '.join(drawn)}, or your own as "
            "FILE.py:CLASS."
        )
    ends = run_world(world_size, observe, name, seconds=SECONDS, timeout=SECONDS + 30)
    return _trial(name, [_answer(name, ends, end) for end in ends])


def _trial(name: str, answers: list[dict[str, Any]]) -> PictureTrial:
    """The trial in the answers of the ranks, in order of rank."""
    try:
        events = [event for answer in answers for event in from_rows(answer["events"])]
        messages, unsaid = _messages(answers)
        sent = [int(answer["sent"]) for answer in answers]
        untimed = int(answers[0]["untimed"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{name} cannot be drawn: a rank answered with something other than its record.") from error
    return PictureTrial(name, len(answers), events, messages, sent, untimed, unsaid)


def _messages(answers: list[dict[str, Any]]) -> tuple[list[Message], str]:
    """The messages of the tensor that moved most; else none, and why."""
    try:
        messages = join_ends(MessageEnd(**end) for answer in answers for end in answer["ends"])
    except ValueError as error:
        return [], str(error)
    messages = messages or join_shared([Shared(**note) for answer in answers for note in answer["shared"]])
    moved: Counter[str] = Counter()
    for message in messages:
        moved[message.tensor] += message.bytes
    most = max(moved, key=lambda tensor: moved[tensor], default="")
    return [message for message in messages if message.tensor == most], ""


def _answer(name: str, ends: list[RankEnd], end: RankEnd) -> dict[str, Any]:
    if end.how == RETURNED and isinstance(end.value, dict):
        return end.value
    if any(each.type == "UsageError" for each in ends):
        raise UsageError(next(each.message for each in ends if each.type == "UsageError"))
    file = str(Path(name.rpartition(":")[0]).resolve()) if is_own(name) else ""
    _, reports = judge(ends, file, SECONDS)
    words = (
        card.report(reports[0], file) if reports else f"rank {end.rank} answered with something else than its record"
    )
    raise UserError(f"{name} cannot be drawn on {len(ends)} ranks: {words.rstrip('.')}.")


def observe(comm: Communicator, name: str) -> dict[str, Any]:
    """On a rank: train with `--sync name`, and report the last step (JSON)."""
    watch = WatchedCommunicator(comm)
    strategy, shared = _make(name, watch)
    module = strategy.attach(small_model(), _sgd)
    for step in range(WARM_UP):
        _train(strategy, module, comm.rank, step, [])
    comm.all_reduce(torch.zeros(1), "all are here", purpose=AGREEMENT)
    watch.ledger = Ledger()
    watch.ends.clear()
    shared.clear()
    began = time.perf_counter()
    watch.ledger.begin(1, began)
    events: list[Event] = []
    _train(strategy, module, comm.rank, WARM_UP, events)
    rows = [row for row in watch.ledger.rows if row.purpose in OF_TRAINING]
    timed = [row for row in rows if row.started is not None and row.seconds is not None]
    for row in timed:
        start, words = began + (row.started or 0), f"{row.op} of {row.tensor}"[:LONGEST_NAME]
        end = start + (row.seconds or 0)
        events.append(Event(comm.rank, CALL, words, start, end, row.payload_bytes, None, (row.tensor[:LONGEST_NAME],)))
    for each in watch.ends:
        kind, tensor = SEND if each.is_sent else RECEIVE, each.tensor[:LONGEST_NAME]
        events.append(
            Event(comm.rank, kind, f"{kind} of {tensor}"[:LONGEST_NAME], *_when(each), each.bytes, each.peer, (tensor,))
        )
    strategy.detach()
    return {
        "events": to_rows(events),
        "ends": to_json(watch.ends),
        "shared": to_json(shared),
        "sent": sum(row.bytes_sent for row in rows),
        "untimed": len(rows) - len(timed),
    }


def small_model() -> nn.Sequential:
    """Six layers, 0.4 million parameters, all of them used; their number is not divisible by 2, 4 or 8."""
    return seeded(0, lambda: tanh_layers(LAYERS - 1, WIDTH, LAST_WIDTH))


def _make(name: str, watch: WatchedCommunicator) -> tuple[Strategy, list[Shared]]:
    if name == SHARED_MEMORY:
        sync = WatchedSharedMemory(watch, False, OPTIONS)
        return Replicated(sync, "fp32", watch), sync.notes
    return get_strategy(name)(watch, False, OPTIONS, "fp32"), []


def _train(strategy: Strategy, module: Any, rank: int, step: int, events: list[Event]) -> None:
    """One step of the loop, with the replicas equal at its end; what was computed, as events."""

    @contextlib.contextmanager
    def computing(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        events.append(Event(rank, COMPUTE, name, start, time.perf_counter(), 0, None, ()))

    strategy.phase = lambda name: computing("optimizer's step") if name == "step" else contextlib.nullcontext()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    with computing("forward"):
        loss = module(inputs).square().mean()
    with computing("backward"):
        strategy.backward(loss)
    strategy.finish()
    strategy.clip(0.0)
    strategy.step()
    strategy.settle()


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)


def _when(end: MessageEnd) -> tuple[float, float]:
    return end.started, end.ended


OF_SHARDS = "First gradients are added up, each part at the rank that steps it. Then the new weights go to all ranks."


def draw_sync(name: str, world_size: int, beside: str | None = None) -> tuple[Picture, StepFrames | None]:
    """Pictures of `--sync name`, and beside its lanes those of another; its steps, where it is made of messages.

    Raises as `run_trial` does.
    """
    trial = run_trial(name, world_size)
    other = run_trial(beside, world_size) if beside is not None else None
    note = _note(trial)
    steps = None
    if trial.messages:
        what = f"{name_of(name)} on {world_size} ranks, step by step: {name_of(trial.tensor, 24)}"
        try:
            steps = steps_of(trial.messages, what, OF_SHARDS if name in STRATEGIES else "")
        except ValueError as error:
            note = f"{note} No steps are drawn: {error}.".strip()
    elif trial.unsaid:
        note = f"{note} No steps are drawn: {name_of(trial.unsaid, 200)}.".strip()
    picture = draw(
        trial.events,
        other.events if other is not None else (),
        title=name_of(name),
        reference_title=name_of(beside or ""),
        note=note,
    )
    return picture, steps


def _note(trial: PictureTrial) -> str:
    """What the lanes do not show: the bytes of the communication log, and calls whose times are unknown."""
    least, most = size(min(trial.sent)), size(max(trial.sent))
    sent = most if least == most else f"{least} to {most}"
    note = f"By the communication log a rank sent {sent} in this step."
    if trial.untimed:
        note += f" On each rank a library made {number_of(trial.untimed, 'call')} whose times are not known."
    return note
