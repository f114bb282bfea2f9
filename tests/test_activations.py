"""What a pass holds next to weights and gradients: predicted without computing it, and measured."""

import functools
import gc
import statistics

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cos598d.data import get_task
from cos598d.models.architectures import ARCHITECTURES
from cos598d.models.build import bare_model, build_model, find_model
from cos598d.models.recompute import recompute_activations
from cos598d.strategies.activations import Moment, activations_of_pass
from cos598d.strategies.formula import MemoryEstimate, without_values
from cos598d.strategies.memory import Peak, allocated_bytes, count_memory
from cos598d.strategies.precision import computing_in

CPU = torch.device("cpu")
tells = pytest.mark.skipif(allocated_bytes(CPU) is None, reason="this C library does not tell what malloc has given")


def found(model_type):
    """A small model's source, and inputs whose activations are far larger than its weights."""
    if model_type == "vit":
        source = find_model("vit-tiny", "vit", form=get_task("digits").image_form)
        side, channels = source.config.image_size, source.config.num_channels
        return source, {"pixel_values": torch.rand(128, channels, side, side), "labels": torch.arange(128) % 2}
    lengths = torch.arange(64)[:, None] + 65
    mask = (torch.arange(128) < lengths).long()
    return find_model("tiny"), {"input_ids": 5 * mask, "attention_mask": mask, "labels": torch.arange(64) % 2}


class Most(TorchDispatchMode):
    """The most that malloc has given, as it is after each operation."""

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
@tells
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["bert", "vit"])
def test_a_pass_s_memory_is_predicted_within_a_tenth(model_type, precision, recomputes):
    source, inputs = found(model_type)
    head = ARCHITECTURES[model_type].head
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


def test_recomputing_layers_saves_what_they_would_keep():
    source, inputs = found("vit")
    most = []
    for recomputes in (False, True):
        shapes = bare_model(source, "image_classification", 2)
        if recomputes:
            recompute_activations(shapes)
        most.append(max(moment.activations for moment in activations_of_pass(shapes, inputs, "fp32", CPU)))
    assert most[1] < 0.5 * most[0]


@pytest.mark.parametrize("model_type", ["roberta", "distilbert"])
def test_a_pass_moves_no_generator_and_leaves_no_gradient(model_type):
    from cos598d.models.build import ModelSource
    from cos598d.models.find import random_shape

    source = ModelSource(model_type, random_shape("tiny", model_type, 100), None, [], True, "")
    model = bare_model(source, "sequence_classification", 2)
    ids = torch.full((2, 8), 5)
    before = torch.get_rng_state()
    moments = activations_of_pass(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}, "fp32", CPU
    )
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


def test_where_forward_asks_for_values_nothing_is_predicted_and_the_estimate_stays():
    assert activations_of_pass(AsksForValues(), {"x": torch.ones(1)}, "fp32", CPU) == []
    estimate = MemoryEstimate({"gradients": 0}, {"gradients": 8})
    assert estimate.with_activations([], 1) == estimate
    unsaid = MemoryEstimate(unsaid="no formula")
    assert unsaid.with_activations([Moment(1.0, 5)], 1) == unsaid


def test_gradients_grow_while_activations_shrink_and_later_passes_begin_with_all_gradients():
    estimate = MemoryEstimate({"parameters": 10, "gradients": 0}, {"parameters": 10, "gradients": 100})
    moments = [Moment(0.1, 50), Moment(0.5, 30), Moment(1.0, 1)]
    assert estimate.with_activations(moments, 1).peak == {"parameters": 10, "gradients": 100, "activations": 1}
    assert estimate.with_activations(moments, 2).peak == {"parameters": 10, "gradients": 100, "activations": 50}
    large = [Moment(0.1, 500), Moment(1.0, 1)]
    assert estimate.with_activations(large, 1).peak == {"parameters": 10, "gradients": 10, "activations": 500}
