"""Our layers, which leave padding out and multiply by the faster library, compute what the library's compute."""

import copy

import numpy as np
import pytest
import torch
from test_models import ANSWER, CLASSIFY, batch, small_source
from torch import nn

from cos598d.config import RunConfig
from cos598d.cost.planned import PlannedSteps
from cos598d.data.examples import Examples
from cos598d.models import linear
from cos598d.models.build import build_model
from cos598d.models.linear import Linear, mkl_is_slow, multiply_by_the_faster
from cos598d.models.padding import Packing, leaves_out_padding

PACKED = [("bert", CLASSIFY), ("bert", ANSWER), ("roberta", CLASSIFY)]
# Of each row the tokens that are there, and whether padding is left out.
MASKS = {
    "on the right": ([[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0], [1] * 9], True),
    "with holes": ([[1, 1, 0, 1, 1, 0, 1, 0, 0], [1] * 9, [1, 0, 0, 0, 0, 0, 1, 0, 0]], True),
    "none": ([[1] * 9] * 3, True),
    "on the left": ([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 0, 0, 0, 0, 0, 1, 1, 1]], False),
}


def never(*_):
    raise AssertionError("the library computes this")


def small_model(model_type: str, head: str, **changes) -> torch.nn.Module:
    return build_model(small_source(model_type, **changes), head, 2, 0.0, seed=1)


@pytest.mark.parametrize("padded", MASKS)
@pytest.mark.parametrize(("model_type", "head"), PACKED)
def test_losses_and_gradients_equal_the_library_s(model_type, head, padded, monkeypatch):
    mask, is_left_out = MASKS[padded]
    inputs = batch(model_type, head) | {"attention_mask": torch.tensor(mask)}
    if head == ANSWER:  # the begins and ends of answers are tokens
        inputs |= {"start_positions": torch.tensor([3, 3, 6]), "end_positions": torch.tensor([4, 4, 6])}
    # Only the library's layers can return their attention.
    packed, library = small_model(model_type, head), small_model(model_type, head, output_attentions=True)
    pack, calls = Packing.pack, []
    monkeypatch.setattr(Packing, "pack", lambda *both: calls.append(both) or pack(*both))
    found = []
    for model in (packed, library):
        for parameter in model.double().parameters():
            parameter.data.mul_(4)  # so that the layers are far from linear
        loss = model(**{name: value.clone() for name, value in inputs.items()})[0]
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert len(calls) == is_left_out, "by one of the two"
    (loss, gradients), (expected, of_library) = found
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert gradients.keys() == of_library.keys()
    for name, gradient in gradients.items():
        assert (gradient - of_library[name]).abs().max() <= 1e-12, name


def test_only_tokens_are_computed_and_in_a_classifier_s_last_layer_only_the_first():
    rows: dict[str, list[int]] = {CLASSIFY: [], ANSWER: []}
    for head, seen in rows.items():
        model = small_model("bert", head)
        for layer in model.bert.encoder.layer:
            layer.output.dense.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(len(inputs[0])))
        inputs = batch("bert", head, rows=8)
        inputs["attention_mask"][1:, 3:] = 0
        inputs["attention_mask"][7, 3:5] = 1
        model(**inputs)  # 8 rows of 9, of which 30 are tokens
    assert rows == {CLASSIFY: [32, 8], ANSWER: [32, 32]}, "up to a multiple of 32, which oneDNN has seen before"


def test_inputs_that_cannot_be_packed_go_to_the_library(monkeypatch):
    monkeypatch.setattr(Packing, "pack", never)
    model, inputs = small_model("bert", CLASSIFY), batch("bert", CLASSIFY)
    empty = inputs | {"attention_mask": inputs["attention_mask"].index_fill(0, torch.tensor([1]), 0)}
    assert torch.isfinite(model(**empty)[0]), "an example without a token"
    assert torch.isfinite(model(**inputs, head_mask=torch.tensor([0.0, 1.0]))[0]), "masked heads"
    elsewhere = torch.rand(3, 9, 64).as_subclass(Elsewhere)
    assert model.bert.encoder(elsewhere, torch.zeros(3, 1, 1, 9), [None, None])[0].shape == (3, 9, 64), "another device"


class Elsewhere(torch.Tensor):
    """A tensor whose device is a GPU."""

    device = torch.device("cuda")


@pytest.mark.long
def test_attention_drops_weights_and_scales_the_others():
    packing = Packing(torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], dtype=torch.bool))
    torch.manual_seed(1)
    values = packing.pack(torch.ones(2, 5, 8))
    drawn = torch.stack([packing.attend(0 * values, values, values, 2, dropout=0.25) for _ in range(2000)])
    assert drawn[:, :6].mean().item() == pytest.approx(1.0, abs=0.01)
    # With equal weights of 1/length, each dropped with probability p, the sum's variance is p / (1 - p) / length.
    assert drawn[:, :4].var().item() == pytest.approx(0.25 / 0.75 / 4, rel=0.05)
    assert drawn[:, 4:6].var().item() == pytest.approx(0.25 / 0.75 / 2, rel=0.05)


def test_dropout_is_drawn_only_in_training():
    model, inputs = small_model("bert", CLASSIFY), batch("bert", CLASSIFY)
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    assert len({model(**inputs)[0].item() for _ in range(3)}) == 3
    model.eval()
    assert len({model(**inputs)[0].item() for _ in range(3)}) == 1


def test_a_copy_computes_with_its_own_weights():
    model, inputs = small_model("bert", CLASSIFY), batch("bert", CLASSIFY)
    other = copy.deepcopy(model)
    before = model(**inputs)[0].item()
    assert other(**inputs)[0].item() == before
    for parameter in other.parameters():
        parameter.data.mul_(3)
    assert model(**inputs)[0].item() == before != other(**inputs)[0].item()


class Lengths(Examples):
    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int32)

    collate = digest = None


@pytest.mark.parametrize(("model_type", "passes", "cost"), [("bert", 1, 1128), ("distilbert", 2, 1256)])
def test_a_share_is_cut_by_length_only_if_padding_costs(model_type, passes, cost):
    model = small_model(model_type, CLASSIFY)
    assert leaves_out_padding(model) == (model_type == "bert")
    config = RunConfig(do_train=True, total_train_batch_size=8, no_cuda=True)
    steps = PlannedSteps(config, Lengths([10, 490] * 4), 2, equal_passes=False, model=model)
    # Sorted, so that each rank has two short ones and two long ones.
    batch = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    assert len(steps.share(batch, 0)) == passes
    assert list(steps.costs([batch])) == [cost]


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", [(7, 48), (3, 5, 48), (48,), (1, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_s_outputs_and_gradients_are_those_of_float64(shape, bias, monkeypatch):
    calls = []
    multiply = linear.multiply
    monkeypatch.setattr(linear, "multiply", lambda *all_: calls.append(all_) or multiply(*all_))
    torch.manual_seed(1)
    inputs = torch.randn(shape)
    exact = nn.Linear(48, 24, bias).double()
    ours = Linear(48, 24, bias)
    ours.load_state_dict(exact.state_dict())
    found = []
    for layer, rows in ((exact, inputs.double()), (ours, inputs.clone())):
        rows.requires_grad_()
        outputs = layer(rows)
        outputs.square().sum().backward()
        outputs = layer(rows)
        outputs.sum().backward()  # whose gradient is one number, repeated, and is added to the first
        found.append([outputs, rows.grad, *(p.grad for p in layer.parameters())])
    assert len(calls) == 6, "forward, and backward to the inputs and to the weight, twice"
    for expected, value in zip(*found, strict=True):
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= 2e-5 * expected.abs().max()


@needs_onednn
def test_a_frozen_weight_gets_no_gradient():
    layer = Linear(8, 4)
    layer.weight.requires_grad_(requires_grad=False)
    inputs = torch.randn(5, 8)
    layer(inputs).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((4,), 5.0))
    with torch.no_grad():
        assert torch.allclose(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5)


def test_empty_inputs_autocast_and_float64_go_to_torch(monkeypatch):
    monkeypatch.setattr(linear, "multiply", never)
    layer = Linear(8, 4)
    assert layer(torch.empty(0, 8)).shape == (0, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16
    assert layer.double()(torch.randn(3, 8).double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("vendor", "capability", "is_slow"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_mkl_is_slow_on_avx512_processors_of_other_makers(vendor, capability, is_slow, monkeypatch, tmp_path):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(linear, "_CPU_FACTS", facts)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert mkl_is_slow.__wrapped__() is is_slow
    facts.unlink()
    assert not mkl_is_slow.__wrapped__(), "who makes the processor is not known"


def test_multiply_by_the_faster_changes_only_the_class_of_linear_layers(monkeypatch):
    for is_slow in (False, True):
        monkeypatch.setattr(linear, "mkl_is_slow", lambda is_slow=is_slow: is_slow)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Bilinear(4, 4, 2))
        before = dict(model.named_parameters())
        multiply_by_the_faster(model)
        assert [type(module) is Linear for module in model] == [is_slow, False, False]
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)
