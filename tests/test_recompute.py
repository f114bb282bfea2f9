"""Activations: their bytes are predicted and measured, and --activation_checkpointing keeps fewer, with equal bits."""

import copy
import functools
import gc
import statistics

import pytest
import torch
from cos598d.strategies.activations import Moment, activations_of_pass
from cos598d.strategies.formula import MemoryEstimate, without_values
from cos598d.strategies.memory import Peak, allocated_bytes, count_memory
from cos598d.strategies.precision import computing_in
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cos598d.data.encoders import ImageForm
from cos598d.models.build import build_model, find_model
from cos598d.models.recompute import recompute_activations
from cos598d.records.run import read_summary

TEXT, IMAGE, ANSWER = "sequence_classification", "image_classification", "question_answering"


def source_of(model_type):
    return find_model("vit-tiny", ImageForm(8, 1)) if model_type == "vit" else find_model("tiny", model_type=model_type)


def bare_model(source, head, num_labels):
    with torch.device("meta"):
        return build_model(source, head, num_labels, None, 0)


def model_and_inputs(model_type, head, dropout):
    model = build_model(source_of(model_type), head, 2, dropout, seed=1)
    generator = torch.Generator().manual_seed(2)
    labels = torch.tensor([0, 1, 1])
    if model_type == "vit":
        return model, {"pixel_values": torch.rand(3, 1, 8, 8, generator=generator), "labels": labels}
    ids = torch.randint(5, 90, (3, 40), generator=generator)
    mask = torch.arange(40) < torch.tensor([40, 9, 23])[:, None]  # so that padding is left out
    told = {"labels": labels} if head == TEXT else {"start_positions": labels, "end_positions": labels}
    return model, {"input_ids": ids, "attention_mask": mask.long(), **told}


def one_pass(model, inputs, precision):
    """Bytes kept for backward, the loss and all gradients, dropout drawn from one seed."""
    torch.manual_seed(3)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**inputs)[0]
        at_forward = sum(kept.values())
    loss.backward()
    return at_forward, loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("model_type", "head"), [("bert", TEXT), ("bert", ANSWER), ("vit", IMAGE)])
def test_recomputed_gradients_have_the_same_bits(model_type, head, dropout, precision):
    model, inputs = model_and_inputs(model_type, head, dropout)
    again = copy.deepcopy(model)
    recompute_activations(again)
    assert again.state_dict().keys() == model.state_dict().keys()
    kept, loss, gradients = one_pass(model, inputs, precision)
    kept_again, loss_again, gradients_again = one_pass(again, inputs, precision)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name
    assert kept_again < kept
    if dropout:
        torch.manual_seed(4)
        assert not torch.equal(again(**inputs)[0], loss_again), "another seed, other masks"


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("sync", ["ddp", "zero3", "shared_weights", "torch_fsdp"])
def test_a_run_that_recomputes_has_the_same_losses(sync, start, tmp_path):
    found = {}
    for name, more in (("plain", []), ("again", ["--activation_checkpointing"])):
        words = ["-m", "cos598d", "train", "--task_name", "digits", "--max_train_examples", 60, "--do_train"]
        words += ["--total_train_batch_size", 20, "--max_steps", 3, "--sync", sync, "--world_size", 2, "--no_cuda"]
        words += ["--dropout", 0.2, "--no_save_model", "--output_dir", name]
        program = start(name, [*words, *more])
        assert program.wait() == 0, program.text
        found[name] = read_summary(tmp_path / name)["losses"]
    assert found["plain"] == found["again"]


CPU = torch.device("cpu")
counts_malloc = pytest.mark.skipif(allocated_bytes(CPU) is None, reason="this C library does not count malloc's bytes")


def large_inputs(model_type):
    """Inputs whose activations are far larger than the weights of a small model."""
    if model_type == "vit":
        return {"pixel_values": torch.rand(128, 1, 8, 8), "labels": torch.arange(128) % 2}
    mask = (torch.arange(128) < torch.arange(64)[:, None] + 65).long()
    return {"input_ids": 5 * mask, "attention_mask": mask, "labels": torch.arange(64) % 2}


class Most(TorchDispatchMode):
    """The most bytes that malloc has given after an operation."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, allocated_bytes(CPU))
        return made


def measured(model, inputs, precision):
    """What a pass takes at its peak, gradients included; and its activations, as a record has them."""
    parameters, module = list(model.parameters()), computing_in(precision, CPU, model)

    def memory():
        gradients = [p.grad for p in parameters if p.grad is not None]
        return count_memory(parameters=parameters, gradients=gradients)

    module(**inputs)[0].backward()
    model.zero_grad()
    gc.collect()  # what earlier tests have left is not freed within a pass
    taken = []
    for _ in range(3):
        before = allocated_bytes(CPU)
        with Most() as most:
            module(**inputs)[0].backward()
        model.zero_grad()
        taken.append(most.bytes - before)
    peak = Peak(memory, functools.partial(allocated_bytes, CPU))
    with peak.watching():
        module(**inputs)[0].backward()
    return statistics.median(taken), peak.with_activations["activations"]


@pytest.mark.long
@counts_malloc
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["bert", "vit"])
def test_the_predicted_memory_of_a_pass_is_within_a_tenth(model_type, precision, recomputes):
    source, inputs = source_of(model_type), large_inputs(model_type)
    head = IMAGE if model_type == "vit" else TEXT
    model, shapes = build_model(source, head, 2, None, seed=1), bare_model(source, head, 2)
    if recomputes:
        recompute_activations(model)
        recompute_activations(shapes)
    size = sum(p.nbytes for p in model.parameters())
    moments = activations_of_pass(without_values(shapes), inputs, precision, CPU)
    between = {"parameters": size, "gradients": 0}
    expected = MemoryEstimate(between, {"parameters": size, "gradients": size}).with_activations(moments, passes=1)
    most, recorded = measured(model, inputs, precision)
    assert sum(expected.peak.values()) - size == pytest.approx(most, rel=0.1)
    assert expected.peak["activations"] == pytest.approx(recorded, rel=0.2), "it looks less often"
    assert expected.between_steps == between


def test_recomputing_halves_the_predicted_activations():
    most = []
    for recomputes in (False, True):
        shapes = bare_model(source_of("vit"), IMAGE, 2)
        if recomputes:
            recompute_activations(shapes)
        most.append(max(moment.activations for moment in activations_of_pass(shapes, large_inputs("vit"), "fp32", CPU)))
    assert most[1] < 0.5 * most[0]


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_a_prediction_draws_no_number_and_leaves_no_gradient(model_type):
    model = bare_model(source_of(model_type), TEXT, 2)
    ids = torch.full((2, 8), 5)
    before = torch.get_rng_state()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    moments = activations_of_pass(model, inputs, "fp32", CPU)
    assert moments[-1].share <= 1.0
    assert all(moment.activations > 0 for moment in moments)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


class AsksForValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight.sum() * (2 if self.weight[0] > 0 else 1),)


def test_nothing_is_predicted_if_forward_asks_for_values():
    assert activations_of_pass(AsksForValues(), {"x": torch.ones(1)}, "fp32", CPU) == []
    estimate = MemoryEstimate({"gradients": 0}, {"gradients": 8})
    assert estimate.with_activations([], 1) == estimate
    unsaid = MemoryEstimate(unsaid="no formula")
    assert unsaid.with_activations([Moment(1.0, 5)], 1) == unsaid


def test_a_peak_has_the_gradients_of_its_moment_and_of_earlier_passes():
    estimate = MemoryEstimate({"parameters": 10, "gradients": 0}, {"parameters": 10, "gradients": 100})
    moments = [Moment(0.1, 50), Moment(0.5, 30), Moment(1.0, 1)]
    assert estimate.with_activations(moments, 1).peak == {"parameters": 10, "gradients": 100, "activations": 1}
    assert estimate.with_activations(moments, 2).peak == {"parameters": 10, "gradients": 100, "activations": 50}
    large = [Moment(0.1, 500), Moment(1.0, 1)]
    assert estimate.with_activations(large, 1).peak == {"parameters": 10, "gradients": 10, "activations": 500}
