"""The measuring on a rank: every candidate once a round, on the same batch, from a common start."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from cos598d.bench.candidates import Candidate
from cos598d.bench.workload import Stepper, Workload
from cos598d.comm.communicator import Communicator
from cos598d.comm.hosts import host_groups
from cos598d.comm.ledger import AGREEMENT, Ledger, Totals
from cos598d.measure.clock import IterationClock
from cos598d.records.conventions import WARM_UP
from cos598d.records.summary import LAST_TO_LAST, SLOWEST, world_seconds
from cos598d.sync import get_sync
from cos598d.world.devices import gpu_of

PHASES = ("forward", "backward", "sync")
# Of the memory that is free, this much may be taken by candidates that stay attached. Each keeps up to S bytes of
# buckets between its turns, and the one at work needs some S more.
MEMORY_FRACTION, WORKING_GRADIENTS = 0.6, 4


class Turn:
    """One candidate with its replica of the model, from attaching to detaching."""

    def __init__(self, candidate: Candidate, workload: Workload, comm: Communicator, stepper: Stepper | None):
        self._comm, self._stepper = comm, stepper
        self.clock = IterationClock(comm.device)
        self._model: nn.Module = workload.replica()
        self._sync = get_sync(candidate.name)(comm, workload.may_leave_unused, candidate.options)
        self._module = self._sync.attach(self._model)
        first = workload.inputs(0, comm.rank, comm.world_size)
        for _ in range(WARM_UP):
            self.iterate(first)
        self.gradient_norm = self._norm(first)

    def iterate(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """One iteration from a common start: its seconds on this rank, those of its phases, and when it began and ended
        on the host's clock.

        Forward, backward, the sync's finish (with a stepper clipping and AdamW), and gradients set to None.
        """
        start_line(self._comm)
        self._comm.ledger = Ledger()
        clock = self.clock
        clock.start()
        self._average(inputs)
        if self._stepper:
            with clock.phase("clip"):
                self._stepper.clip(self._model)
            with clock.phase("step"):
                self._stepper.step(self._model)
        with clock.phase("sync"):
            self._sync.after_step()
        self._model.zero_grad(set_to_none=True)
        seconds = clock.stop()
        return [seconds, *(clock.phases[phase] for phase in PHASES), clock.started, clock.stopped]

    def detach(self) -> None:
        """Give back what attaching took."""
        self._sync.detach()
        del self._module

    def _average(self, inputs: dict[str, torch.Tensor]) -> None:
        with self.clock.phase("forward"):
            loss = self._module(**inputs)[0]
        with self.clock.phase("backward"):
            loss.backward()
        with self.clock.phase("sync"):
            self._sync.finish()

    def _norm(self, inputs: dict[str, torch.Tensor]) -> float | None:
        """The norm of the averaged gradient, which tells a candidate that does not average; None if it is not finite
        (JSON has no such numbers)."""
        self.clock.start()
        self._average(inputs)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        self._sync.after_step()
        self._model.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None


def start_line(comm: Communicator) -> None:
    """Let all ranks go on together, as near as an all-reduce of 4 bytes can."""
    comm.all_reduce(torch.zeros(1, device=comm.device), "start line", purpose=AGREEMENT)
    comm.time.wait(comm.time.now())  # else a CUDA rank's host would go on before its device has met the others


def order_of_round(count: int, number: int, seed: int) -> list[int]:
    """The places of the candidates in round `number`: shuffled, the same on every rank, so that none always follows
    the same other one."""
    places = list(range(count))
    random.Random(f"{seed} {number}").shuffle(places)
    return places


def stays_attached(workload: Workload, candidates: int, comm: Communicator, ranks_on_host: int, choice: str) -> bool:
    """Whether every candidate stays attached to its replica from the first round to the last.

    Else each is attached for its turn and warmed up anew, which takes longer but only one candidate's memory. With
    `choice` "auto" the memory that is free decides: of each host, and of each GPU, for the ranks that share it.
    """
    if choice != "auto":
        return choice == "once"
    gpu = gpu_of(comm.device)
    free = psutil.virtual_memory().available if gpu is None else torch.cuda.mem_get_info(comm.device)[0]
    return fits(comm.exchange([gpu, ranks_on_host, free]), workload.gradient_bytes * (candidates + WORKING_GRADIENTS))


def fits(memories: Sequence[tuple[str | None, int, int]], needed: int) -> bool:
    """Whether every rank can have `needed` bytes where its tensors lie, and leave enough.

    `memories` has for each rank its GPU (None: the host's memory), the ranks on its host, and the bytes that are free.
    """
    on_gpu = Counter(gpu for gpu, _, _ in memories)
    return all(
        (ranks_on_host if gpu is None else on_gpu[gpu]) * needed < MEMORY_FRACTION * free
        for gpu, ranks_on_host, free in memories
    )


def measure_rounds(
    workload: Workload,
    candidates: Sequence[Candidate],
    comm: Communicator,
    rounds: int,
    seed: int,
    stay: bool,
    step: bool,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Measure every candidate once in each of `rounds` rounds; return the record's part, whole on every rank.

    seconds_of       what the samples' seconds are: LAST_TO_LAST where all ranks are on one host, else SLOWEST
    samples          one for each candidate and round: round, place in it, candidate, seconds (`world_seconds`), and
                     by rank the seconds of the iteration and of its phases, and on one host how long after the first
                     of them it started
    traffic          for each candidate the calls and bytes of its last iteration, by rank
    gradient_norm    for each candidate the norm of the averaged gradient of the first batch, by rank

    Communication before a turn (the weights from rank 0, the warm-up) and the start line are not in them.
    `progress` is called after every turn.
    """
    stepper = Stepper(workload.model) if step else None

    def attach(candidate: Candidate) -> Turn:
        return Turn(candidate, workload, comm, stepper)

    attached = [attach(candidate) if stay else None for candidate in candidates]
    rows: list[list[Any]] = []
    traffic, norms = {}, {}
    for number in range(rounds):
        inputs = workload.inputs(number, comm.rank, comm.world_size)
        for place, index in enumerate(order_of_round(len(candidates), number, seed)):
            label = candidates[index].label
            turn = attached[index] or attach(candidates[index])
            rows.append([number, place, label, *turn.iterate(inputs)])
            totals = comm.ledger.totals_by_iteration().get(comm.ledger.iteration, Totals())
            traffic[label] = [totals.calls, totals.payload_bytes, totals.bytes_sent, totals.bytes_received]
            norms[label] = turn.gradient_norm
            if not stay:
                turn.detach()
            del turn
            progress()
    for stayed in attached:
        if stayed:
            stayed.detach()
    everyone = comm.exchange([[row[3:] for row in rows], traffic, norms])
    seconds, counts, found = zip(*everyone, strict=True)
    one_clock = len(host_groups(comm)) == 1
    samples = []
    for position, (number, place, label, *_) in enumerate(rows):
        by_rank = [list(values) for values in zip(*(rank[position] for rank in seconds), strict=True)]
        mine, *phases, started, stopped = by_rank
        together = world_seconds(mine, started, stopped, one_clock)
        sample = {"round": number, "place": place, "candidate": label, "seconds": together, "seconds_by_rank": mine}
        if one_clock:
            sample["started_by_rank"] = [moment - min(started) for moment in started]
        sample |= {f"seconds_{phase}_by_rank": values for phase, values in zip(PHASES, phases, strict=True)}
        samples.append(sample)
    names = ("calls", "payload_bytes", "bytes_sent", "bytes_received")
    labels = [candidate.label for candidate in candidates]
    return {
        "seconds_of": LAST_TO_LAST if one_clock else SLOWEST,
        "samples": samples,
        "traffic": {
            label: {name: [rank[label][i] for rank in counts] for i, name in enumerate(names)} for label in labels
        },
        "gradient_norm": {label: [rank[label] for rank in found] for label in labels},
    }
