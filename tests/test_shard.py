"""Sharded strategies train as one process does, also after overflows, errors and lost ranks."""

import contextlib
import functools
import json

import pytest
import torch
from compared import ONE_EACH, SMALL_BUCKETS, Compared, adamw, batch, layered, layered_loss, sgd, step_by
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_each, run_ranks

from cos598d.comm.exchange import IN_FLIGHT
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.parts.units import Unit, layers, owners
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.shared_weights import SharedWeights
from cos598d.strategies.sparse_zero1 import SparseZero1
from cos598d.strategies.zero1 import Zero1
from cos598d.strategies.zero2 import Zero2
from cos598d.strategies.zero3 import Zero3
from cos598d.tools.exam.models import local_batch, toy_model

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
SHARDED = {**STAGES, "shared_weights": SharedWeights, "sparse_zero1": SparseZero1}


def compare(comm, name, make, micros, precision="fp32", max_norm=0.3):
    """Three steps by the strategy and by one process: the distance of the weights and norms, and the least norm."""
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS, precision)
    both = Compared(comm, strategy, layered(comm.rank), make, reference=layered(0))  # rank 0's counts
    norms = [both.step(step, micros, max_norm, precision) for step in range(3)]
    return both.end(), max(abs(a / b - 1).item() for a, b in norms), min(alone.item() for _, alone in norms)


def compare_all(comm):
    found = {}
    for name in SHARDED:
        found[f"{name} sgd"] = compare(comm, name, sgd, 4)
        found[f"{name} adamw"] = compare(comm, name, adamw, 1 if comm.world_size == 4 else 4)
        if comm.world_size == 2:
            found[f"{name} bf16"] = compare(comm, name, sgd, 2, "bf16")
    return found


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("ranks", [2, 1, 4])
def test_weights_and_norms_equal_one_process_on_the_global_batch(ranks):
    for found in run_ranks(ranks, compare_all):
        for kind, (apart, norm, least) in found.items():
            assert least > 0.3, "clipping does not bite"
            assert apart < (2e-2 if "bf16" in kind else 1e-5), kind
            assert norm < (2e-2 if "bf16" in kind else 1e-5), kind


def toy_steps(comm, name, steps):
    """On a rank: the distance from one process, and whether the unused weight stays. Some ranks skip a layer."""

    def loss_of(module, rank, step, micro):
        return module(**local_batch(rank, step, rank != 0 or step == 1))[0]

    both = Compared(comm, SHARDED[name](comm), toy_model(comm.rank), sgd, loss_of, reference=toy_model(0))
    for step in range(steps):
        both.step(step)
    state = both.strategy.optimizer.state
    kept = [name for name, part, *_ in both.strategy.pieces if name.startswith("never") and state[part]]
    apart = both.end()
    return apart, not kept and torch.equal(both.model.never.weight, toy_model(0).never.weight)


def test_unused_weights_stay_and_mixed_dtypes_and_skipped_layers_are_right():
    for name, by_rank in zip(SHARDED, run_each(2, toy_steps, SHARDED, 3), strict=True):
        for apart, never_stays in by_rank:
            assert apart < 1e-5, name
            assert never_stays, f"{name}: weight decay must not touch what no rank uses"


def odd_steps(comm, name):
    """On a rank: an overflow on rank 1, an evaluation on one rank, errors in a step, a step without no_sync."""
    found = {}
    model = layered()
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS, "fp16")
    strategy.scale.value = 8.0
    module = strategy.attach(model, adamw)
    with strategy.whole():
        before = {key: value.clone() for key, value in model.state_dict().items()}
    factor = float("inf") if comm.rank == 1 else 1.0
    _, counted = step_by(strategy, module, comm, 0, lambda *where: layered_loss(*where) * factor, max_norm=1.0)
    with strategy.whole():
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    found["overflow"] = [counted, strategy.loss_scale, same, len(strategy.optimizer.state)]
    strategy.detach()

    model = layered()
    both = Compared(comm, SHARDED[name](comm, True, SMALL_BUCKETS), model, sgd)
    strategy, module = both.strategy, both.module
    both.step(0, max_norm=0.3)
    with torch.no_grad():  # on every rank, with weights that are gathered layer by layer
        logits = module(**batch(5, 0, 0))[1]
    strategy.settle()
    if comm.rank == 1:  # on one rank only, twice
        model.eval()
        with torch.no_grad():
            again = [module(**batch(5, 0, 0))[1] for _ in range(2)][1]
        found["evaluation"] = torch.equal(logits, again)
        model.train()
    # A forward and then a backward that fail on all ranks: the step is dropped.
    for failing in (fail_in_forward, fail_in_backward):
        handle = failing(model.blocks[1])
        with contextlib.suppress(ZeroDivisionError):
            strategy.backward(module(**batch(9, 0, comm.rank))[0])
        handle.remove()
        strategy.forget_step()
    # The second backward without no_sync finds what the first is still sending.
    step_by(strategy, module, comm, 1, micros=2, max_norm=0.3, unsynced=0)
    both.step_reference(1, 2, 0.3)
    found["going on"] = both.end()
    found["plain"] = [
        model(**batch(0, 0, 0))[0].isfinite().item(),
        all(p.grad is None for p in model.parameters()),
        not any(p._post_accumulate_grad_hooks for p in model.parameters()),
        not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()),
    ]
    return found


def fail_in_forward(module):
    return module.register_forward_pre_hook(lambda *_: 1 / 0)


def fail_in_backward(module):
    return module.register_full_backward_hook(lambda *_: 1 / 0)


@pytest.fixture(scope="module")
def odd():
    return dict(zip(SHARDED, run_each(2, odd_steps, SHARDED), strict=True))


@pytest.mark.parametrize("name", SHARDED)
def test_training_continues_after_an_overflow_and_errors_and_detach_leaves_a_plain_model(odd, name):
    assert odd[name][1]["evaluation"], "one rank may evaluate a settled model"
    for found in odd[name]:
        assert found["overflow"] == [False, 4.0, True, 0]
        assert found["going on"] < 1e-5
        assert all(found["plain"])


def test_pieces_cover_each_element_once_and_each_weight_has_its_layer():
    model = layered()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for ranks in (1, 3, 1000):
        unit = Unit("all", named, ranks)
        counted = [(piece.name, piece.end - piece.begin) for rank in range(ranks) for piece in unit.pieces(rank)]
        for name, p in named:
            assert sum(elements for of, elements in counted if of == name) == p.numel()
    names = [name for name, _ in layers(model)]
    assert names == ["never", "embedding", "positions", "frozen", "blocks.0", "blocks.1", "blocks.2", "output"]
    owner = owners(model)
    assert owner[model.embedding.weight] == owner[model.gain] == "", "tied, and of no layer: the model owns them"
    assert owner[model.output.bias] == "output"
    assert model.frozen.weight not in owner


def test_a_strategy_class_without_all_methods_is_refused():
    with pytest.raises(TypeError, match=r"^the strategy Half has no hold\. Write it"):
        type("Half", (Sharded,), {"units_of": Zero1.units_of})


class Nested(nn.Module):
    """Modules of which only the members are called."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, state, which):
        return self.head(self.steps[0][which](state) * self.scales[0]).sum()


def test_a_container_is_no_layer():
    model = Nested()
    assert [name for name, _ in layers(model)] == ["steps.0.a", "steps.0.b", "head.0", "head.1"]
    assert owners(model)[model.scales[0]] == ""
    assert [name for name, _ in layers(nn.Linear(2, 2))] == [""]


def use_other_halves(comm, name):
    """On a rank: how far each weight moves in two steps, where rank 1 uses one half of the model per micro-batch."""
    torch.manual_seed(0)
    model = Nested().requires_grad_(False)
    for half in model.steps[0].values():
        half.requires_grad_(True)
    before = {key: p.clone() for key, p in model.named_parameters()}
    strategy = SHARDED[name](comm, True, ONE_EACH)
    module = strategy.attach(model, lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))

    def loss_of(module, rank, step, micro):  # rank 0 uses both halves each time
        return sum(module(torch.ones(2), which) for which in ("ab" if rank == 0 else "ab"[micro]))

    for step in range(2):
        step_by(strategy, module, comm, step, loss_of, micros=2)
    strategy.settle()
    moved = {key: (p - before[key]).abs().sum().item() for key, p in model.named_parameters()}
    strategy.detach()
    return moved


def test_ranks_may_use_different_weights_in_each_micro_batch():
    for first, second in run_each(2, use_other_halves, [name for name in SHARDED if name != "zero3"]):
        assert first == second
        assert all((moved > 0) == ("steps" in key) for key, moved in first.items()), first


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_run_evaluates_and_saves_a_model_that_bert_loads(start, tmp_path, name):
    words = ["-m", "cos598d", "train", "--sync", name, "--world_size", 2, "--model_name_or_path", "tiny"]
    words += ["--max_steps", 3, "--total_train_batch_size", 9, "--max_train_examples", 30, "--max_eval_examples", 12]
    words += ["--check_replicas", 2, "--learning_rate", 1e-3, "--output_dir", tmp_path / "run"]
    from pytorch_transformers import BertForSequenceClassification

    assert start("train", words).wait() == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "acc" in json.dumps(summary)
    model = BertForSequenceClassification.from_pretrained(str(tmp_path / "run" / "model"))
    assert all(p.isfinite().all() for p in model.parameters())
    rows = [json.loads(line) for line in (tmp_path / "run" / "communication.rank1.jsonl").read_text().splitlines()]
    size = 4 * sum(p.numel() for p in model.parameters())
    moved = sum(row["bytes_sent"] for row in rows if row["iteration"] == 2 and row["purpose"] == GRADIENTS)
    assert moved == pytest.approx(size / 2, rel=0.01)


def watch_memory(comm):
    """On a rank: the most bytes that zero3 holds of 16 equal layers, some of them checkpointed, within a step."""

    def loss_of(module, rank, step, micro):
        return module(torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))).square().mean()

    torch.manual_seed(0)
    model = CheckpointedEvery(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16))), 3)
    both, most = Compared(comm, Zero3(comm, False), model, sgd, loss_of), {"parameters": 0, "gradients": 0}

    def sample(*_):
        memory = both.strategy.memory()
        most.update({category: max(value, memory[category]) for category, value in most.items()})

    for layer in model.layers:
        layer.register_forward_pre_hook(sample)
        layer.register_full_backward_hook(sample)
    for step in range(2):
        both.step(step)
    return [most, both.end()]


class CheckpointedEvery(nn.Module):
    """Layers in sequence. One in `every` is checkpointed."""

    def __init__(self, layers_alone, every):
        super().__init__()
        self.layers, self.every = layers_alone, every

    def forward(self, state):
        for place, layer in enumerate(self.layers):
            again = functools.partial(checkpoint, use_reentrant=False) if place % self.every == 0 else _call
            state = torch.tanh(again(layer, state))
        return state


def _call(layer, state):
    return layer(state)


def test_zero3_holds_its_part_and_two_layers_with_checkpointing():
    layer = 4 * 64 * 64
    for most, apart in run_ranks(2, watch_memory):
        assert most["parameters"] <= 16 * (layer / 2 + 4) + 2 * layer
        assert most["gradients"] <= 16 * layer / 2 + (IN_FLIGHT + 1) * layer
        assert apart < 1e-5
