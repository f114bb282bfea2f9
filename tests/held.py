"""Memory and bytes of real steps, counted, next to the formulas of their strategies."""

import contextlib
import copy
import functools
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.models.build import find_model
from cos598d.records.conventions import PARAMETERS, SYNCHRONIZING
from cos598d.strategies import class_of, get_strategy
from cos598d.strategies.formula import TrainingSpec, without_values
from cos598d.strategies.memory import Peak
from cos598d.strategies.optimizers import counter_bytes, make_optimizer, states_per_weight
from cos598d.strategies.parts.low_bytes import SHORTEST
from cos598d.tools.bench.workload import Workload

STEPS = 3  # the last is watched
SMALL = {"bucket_mb": 0.01}  # several buckets for the toy's 45 kB, and some parameters larger than one
# By ranks, the models and the passes of a step. More ranks change only the uneven sizes of the toy.
KINDS = {2: (("toy", 3), ("tiny", 1)), 4: (("toy", 1), ("toy", 2))}


class Uneven(nn.Module):
    """Layers of sizes that no number of ranks divides, a large one, a frozen one, and a shared one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(101, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(13, width), nn.Tanh(), nn.Linear(width, 13)) for width in (7, 211, 31)
        )
        self.twice = nn.Linear(13, 13)
        self.output = nn.Linear(13, 101)
        self.output.weight = self.words.weight

    def forward(self, input_ids, **_):
        state = self.frozen(self.twice(self.words(input_ids).mean(1)))
        for layer in self.layers:
            state = state + layer(state)
        return (self.output(self.twice(state)).square().mean(),)


@dataclass(frozen=True)
class Case:
    """A strategy with options, the model ("toy" or "tiny"), and the passes of a step."""

    sync: str
    options: dict
    model: str
    passes: int


def cases_of(options, world_size):
    """Each of KINDS for so many ranks, by each strategy of {"NAME" or "NAME, words": a list of its options}."""
    return [
        Case(name.partition(",")[0], own, model, passes)
        for name, several in options.items()
        for own in several
        for model, passes in KINDS[world_size]
    ]


@functools.cache
def workload():
    """The batches of all cases, and their first tiny BERT."""
    return Workload(find_model("tiny"), torch.device("cpu"), 2, 16, 1)


class Steps:
    """The steps of a case on a rank, by its strategy. With `has_peak`, `peak` watches the last one."""

    def __init__(self, comm, case, may_be_unused=False, has_peak=False):
        config = RunConfig(learning_rate=0.0)  # so that weights are sent in the shortest form
        self.case, self.comm = case, comm
        model = Uneven() if case.model == "toy" else copy.deepcopy(workload().model)
        first_bucket = min(1.0, case.options.get("bucket_mb", 1.0))
        options = class_of(case.sync).options_kind(**case.options, first_bucket_mb=first_bucket)
        self.strategy = get_strategy(case.sync)(comm, may_be_unused, options, "fp32")
        states = states_per_weight(config), counter_bytes(config)
        self.job = TrainingSpec(without_values(model), comm.world_size, comm.rank, *states, passes=case.passes)
        self.module = self.strategy.attach(model, lambda named: make_optimizer(named, config))
        for packed in getattr(self.strategy, "_packed", {}).values():
            packed.forms = [SHORTEST] * comm.world_size  # as after a first step
        self.peak = Peak(self.strategy.memory) if has_peak else None

    def make(self, step):
        """Make one step."""
        strategy, case, comm = self.strategy, self.case, self.comm
        is_watched = self.peak is not None and step == STEPS - 1
        with self.peak.watching() if is_watched else contextlib.nullcontext():
            for part in range(case.passes):
                inputs = workload().inputs(step * case.passes + part, comm.rank, comm.world_size)
                inputs["input_ids"] = inputs["input_ids"] % 101
                with strategy.no_sync() if part < case.passes - 1 else contextlib.nullcontext():
                    strategy.backward(self.module(**inputs)[0] / comm.world_size / case.passes)
                    if is_watched:
                        self.peak.look()
        strategy.finish()
        if is_watched:
            self.peak.look()
        strategy.clip(1.0)
        strategy.step()


def held(comm, case):
    """On a rank: memory between two steps and at the peak, counted and expected, and what the formula leaves out."""
    steps = Steps(comm, case, has_peak=True)
    for step in range(STEPS):
        steps.make(step)
    between, expected = steps.strategy.memory(), steps.strategy.expected_memory(steps.job)
    steps.strategy.settle()
    steps.strategy.detach()
    return [between, expected.between_steps, steps.peak.held, expected.peak, expected.unsaid]


def sent(comm, case):
    """On a rank: bytes of synchronizing, other and settling calls, counted and expected, the number of calls, and what
    the formula leaves out."""
    steps = Steps(comm, case, may_be_unused=True)
    comm.ledger = Ledger()
    for step in range(STEPS):
        comm.ledger.begin(step + 1, 0.0)
        steps.make(step)
    rows = len(comm.ledger.rows)
    steps.strategy.settle()
    expected = steps.strategy.expected_sent(steps.job)
    # These wait for the weights of a step, and enter them, after it.
    late = [row for row in comm.ledger.rows[rows:] if case.sync in ("zero1", "sparse_zero1", "zero2")]
    of_steps = [*comm.ledger.rows[:rows], *late]
    settling = [row for row in comm.ledger.rows[rows:] if row not in late]
    steps.strategy.detach()
    counted = [
        [row.bytes_sent for row in of_steps if row.purpose in SYNCHRONIZING],
        [row.bytes_sent for row in of_steps if row.purpose not in SYNCHRONIZING],
        [row.bytes_sent for row in settling],
    ]
    stated = [STEPS * expected.synchronizing, STEPS * expected.others, expected.settling]
    # Only an evaluation needs them, so they are no cost of a step.
    assert PARAMETERS not in {row.purpose for row in settling}, case
    return [[sum(found) for found in counted], stated, [len(counted[0]), STEPS * expected.calls], expected.unsaid]


def all_sent(comm, cases):
    """One case after the other in one world."""
    return [sent(comm, case) for case in cases]


def all_held(comm, cases):
    """One case after the other in one world."""
    return [held(comm, case) for case in cases]
