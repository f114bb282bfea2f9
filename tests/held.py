"""What ranks hold in real steps, counted, beside what the formulas of their strategies say: for tests."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.bench.workload import Workload
from cos598d.config import RunConfig
from cos598d.models.build import find_model
from cos598d.strategies import get_strategy
from cos598d.strategies.formula import Job, without_values
from cos598d.strategies.memory import Peak
from cos598d.strategies.optimizers import counter_bytes, make_optimizer, states_per_weight
from cos598d.sync.base import SyncOptions

STEPS = 3  # the last is watched


class Uneven(nn.Module):
    """Layers of sizes that no number of ranks divides, a large one, a frozen one, and one that is shared."""

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
    """A strategy with options, the model ("toy", or a name that --model_name_or_path takes), and a step's passes."""

    sync: str
    options: dict
    model: str
    passes: int


def held(comm, case):
    """On a rank: counted and expected between two steps, and at the peak of one; and why something is not stated."""
    config = RunConfig()
    workload = Workload(find_model("tiny" if case.model == "toy" else case.model), comm.device, 2, 16, 1)
    model = Uneven() if case.model == "toy" else workload.model
    first_bucket = min(1.0, case.options.get("bucket_mb", 1.0))
    strategy = get_strategy(case.sync)(comm, False, SyncOptions(**case.options, first_bucket_mb=first_bucket), "fp32")
    states = states_per_weight(config), counter_bytes(config)
    job = Job(without_values(model), comm.world_size, comm.rank, *states, passes=case.passes)
    module = strategy.attach(model, lambda named: make_optimizer(named, config))
    peak = Peak(strategy.memory)
    for step in range(STEPS):
        is_watched = step == STEPS - 1
        with peak.watching() if is_watched else contextlib.nullcontext():
            for part in range(case.passes):
                inputs = workload.inputs(step * case.passes + part, comm.rank, comm.world_size)
                inputs["input_ids"] = inputs["input_ids"] % 101
                with strategy.no_sync() if part < case.passes - 1 else contextlib.nullcontext():
                    strategy.backward(module(**inputs)[0] / comm.world_size / case.passes)
                    if is_watched:
                        peak.look()
        strategy.finish()
        if is_watched:
            peak.look()
        strategy.clip(1.0)
        strategy.step()
    between, expected = strategy.memory(), strategy.expected_memory(job)
    strategy.settle()
    strategy.detach()
    return [between, expected.between_steps, peak.held, expected.peak, expected.unsaid]


def all_held(comm, cases):
    """One case after the other in one world."""
    return [held(comm, case) for case in cases]
