"""A rank's memory is counted by category, between steps and at a step's peak, and recorded next to its formula."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
from report_records import edit, write_run
from torch import nn
from worlds import run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.loop import train
from cos598d.measure.record import RunRecord
from cos598d.plan import TrainingSetup
from cos598d.strategies import get_strategy
from cos598d.strategies.formula import TrainingSpec
from cos598d.strategies.memory import Peak, tensors_in
from cos598d.strategies.optimizers import OPTIMIZERS, counter_bytes, make_optimizer, states_per_weight
from cos598d.strategies.replicated import Replicated
from cos598d.sync import get_sync
from cos598d.terminal.console import Console
from toy_features import ToyFeatures
from cos598d.tools.report.load import load_run
from cos598d.tools.report.memory import memory_note, memory_rows

WIDTH, LAYERS, STEPS = 32, 4, 3
STRATEGIES = ("all_reduce", "zero1", "zero2", "zero3")


class Deep(nn.Module):
    """Layers of one size, which dwarf the rest."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, WIDTH)
        self.words.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, input_ids, **_):
        found = self.words(input_ids).mean(1)
        for layer in self.layers:
            found = found + layer(found)
        return (found.square().mean(),)


WEIGHTS, FROZEN = 4 * LAYERS * WIDTH * WIDTH, 4 * 100 * WIDTH


def memory_of(comm, name):
    """The record's "memory" of a run of the deep model."""
    config = RunConfig(do_train=True, total_train_batch_size=8, max_steps=STEPS, sync=name)
    strategy = get_strategy(name)(comm, False, config.sync_options(), "fp32")
    with tempfile.TemporaryDirectory() as folder, RunRecord(Path(folder), comm.rank) as record:
        comm.ledger = record.ledger
        train(TrainingSetup(config, comm, Deep(), strategy, ToyFeatures(64), record, Console("", speaks=False)), dict)
        return record.share()["memory"]


def all_memories(comm):
    return {name: memory_of(comm, name) for name in STRATEGIES}


@pytest.fixture(scope="module")
def memories():
    return run_ranks(2, all_memories)


# Parameters, gradients and state between two steps.
TEXTBOOK = {
    "all_reduce": [WEIGHTS + FROZEN, 0, 2 * WEIGHTS],
    "zero1": [WEIGHTS + FROZEN, WEIGHTS, WEIGHTS],
    "zero2": [WEIGHTS + FROZEN, 0, WEIGHTS],
    "zero3": [WEIGHTS // 2 + FROZEN, 0, WEIGHTS],
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rank_s_memory_is_the_textbook_s_and_the_formula_s(memories, name):
    for rank in memories:
        found = rank[name]
        slack = 200  # the optimizer counts its steps, and what is freed leaves placeholders
        for category, expected in zip(("parameters", "gradients", "optimizer"), TEXTBOOK[name], strict=True):
            assert expected <= found["between_steps"][category] <= expected + slack
        assert found["expected_between_steps"] == found["between_steps"]
        assert sum(found["expected_peak"].values()) == pytest.approx(sum(found["peak"].values()), rel=1e-3)
        most = found["peak_with_activations"]
        assert not most or sum(most.values()) >= sum(found["peak"].values()) < sum(most.values()) + most["activations"]
        assert found["expected_unsaid"] == ""
        assert found["process_peak_bytes"] > 50_000_000
        assert found["gpu_peak_bytes"] is None


def test_the_peak_has_the_gradients_and_the_gathered_layers(memories):
    for rank in memories:
        assert rank["all_reduce"]["peak"]["gradients"] == WEIGHTS
        layer, between, peak = WEIGHTS // LAYERS, *(rank["zero3"][when] for when in ("between_steps", "peak"))
        assert sum(peak.values()) - sum(between.values()) >= 2 * layer
        for found in rank.values():
            assert sum(found["peak"].values()) >= sum(found["between_steps"].values())


CIRCLE = """
import torch
from collections import deque
from cos598d.sync.base import GradientSync

class Part:
    def __init__(self, owner):
        self.owner, self.kept = owner, deque([torch.zeros(100)])

class Circle(GradientSync):
    def __init__(self, comm, find_unused_parameters=True):
        super().__init__(comm, find_unused_parameters)
        self.part = Part(self)
"""


def test_your_own_sync_is_counted_if_its_parts_refer_to_each_other(tmp_path):
    (tmp_path / "circle.py").write_text(CIRCLE)
    sync = get_sync(f"{tmp_path / 'circle.py'}:Circle")(comm=None)
    assert sum(tensor.nbytes for tensor in tensors_in(sync)) == 400


def test_watching_leaves_no_hook_and_changes_no_gradient():
    model, looked, gradients = Deep(), [], []
    peak = Peak(lambda: looked.append(1) or {"parameters": len(looked)})
    for watching in (peak.watching(), contextlib.nullcontext()):
        model.zero_grad()
        with watching:
            model(torch.arange(6).view(2, 3))[0].backward()
        gradients.append([p.grad for p in model.layers.parameters()])
        assert len(looked) == 1 + 3 * LAYERS, "the frozen embedding has no backward"
    assert peak.held == {"parameters": len(looked), "gradients": 4 * WIDTH * WIDTH}, "with the last gradient"
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "values", [*({"optimizer": name} for name in OPTIMIZERS), {"optimizer": "sgd", "momentum": 0.9}], ids=str
)
def test_every_optimizer_declares_its_memory(values):
    config, model = RunConfig(**values), Deep()
    strategy = Replicated(get_sync("all_reduce")(Communicator(None, "gloo", torch.device("cpu"))))
    module = strategy.attach(model, lambda named: make_optimizer(named, config))
    strategy.backward(module(input_ids=torch.arange(6).view(2, 3))[0])
    strategy.finish()
    strategy.step()
    job = TrainingSpec(model, 1, 0, states_per_weight(config), counter_bytes(config))
    expected = strategy.expected_memory(job).between_steps["optimizer"]
    assert expected == strategy.memory()["optimizer"], "see numbers_per_weight and bytes_per_tensor of OPTIMIZERS"


def with_memory(folder, **changes):
    write_run(folder)
    held = {"parameters": 4_000_000, "gradients": 0, "optimizer": 8_000_000, "buckets": 0}
    peak = held | {"gradients": 5_000_000}
    memory = {"process_peak_bytes": [300_000_000, 400_000_000], "gpu_peak_bytes": [None, None]}
    memory |= {"between_steps": [held, held], "peak": [held, peak]}
    memory |= {"expected_between_steps": [held, held], "expected_peak": [held, held | {"gradients": 4_830_000}]}
    memory |= {"expected_unsaid": ["", ""]}
    return edit(folder / "summary.json", lambda record: record.update(memory=memory | changes))


def test_the_table_has_formula_and_count_of_the_rank_with_the_most_memory(tmp_path):
    old = write_run(tmp_path / "old")
    rows = memory_rows([load_run(with_memory(tmp_path / "new")), load_run(old)])
    assert rows[0][-3:] == ["total", "off formula", "process's peak"], "no GPU, no column"
    assert rows[1] == ["new", "between steps", "4.000", "0.000", "8.000", "0.000", "12.000", "0.0%", "-"]
    assert rows[2] == ["new", "at a step's peak", "4.000", "5.000", "8.000", "0.000", "17.000", "+1.0%", "400.000"]
    assert rows[3][1:7] == ["by formula", "4.000", "4.830", "8.000", "0.000", "16.830"], "only where it differs"
    assert {row[0] for row in rows[1:]} == {"new"}
    assert memory_rows([load_run(old)]) == []
    peak = {"parameters": 4_000_000, "gradients": 1_000_000, "activations": 9_000_000}
    active = memory_rows([load_run(with_memory(tmp_path / "active", peak_with_activations=[{}, peak]))])
    assert [row[6] for row in active] == ["activations", "-", "-", "-", "9.000"], "a column only if a record has them"
    assert active[-1][-3:] == ["14.000", "-", "-"]
    gpu = memory_rows([load_run(with_memory(tmp_path / "gpu", gpu_peak_bytes=[1e6, 2e6]))])
    assert [row[-1] for row in gpu] == ["GPU's peak", "-", "2.000", "-"]


def test_the_table_has_a_dash_for_a_missing_formula(tmp_path):
    run = load_run(with_memory(tmp_path / "new", expected_peak=[None, None], expected_unsaid=["it is its own"] * 2))
    rows = memory_rows([run])
    assert [(row[1], row[-2]) for row in rows[1:]] == [("between steps", "0.0%"), ("at a step's peak", "-")]
    assert memory_note([run]).endswith("A dash for new: it is its own.")
    part = load_run(with_memory(tmp_path / "part", expected_peak=[None, {"parameters": 5_000_000}]))
    assert memory_rows([part])[2][-2] == "-20.0%", "of what is stated"
    old = with_memory(tmp_path / "old", expected_peak=[None, None], expected_between_steps=[None, None])
    assert [row[-2] for row in memory_rows([load_run(old)])[1:]] == ["-", "-"]


def test_memory_without_numbers_or_ranks_is_a_damaged_record(tmp_path):
    damages = ({"process_peak_bytes": [1]}, {"peak": [{"parameters": "much"}] * 2}, {"expected_peak": [None]})
    for number, changes in enumerate((*damages, {"expected_unsaid": [1, 2]})):
        with pytest.raises(UserError, match="is damaged: its memory"):
            load_run(with_memory(tmp_path / str(number), **changes))
