"""Linear layers by oneDNN give torch's own numbers and gradients, and only where that is the faster library."""

import pytest
import torch
from torch import nn

from cos598d.models import linear
from cos598d.models.linear import Linear, mkl_is_slow, multiply_by_the_faster

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", [(7, 48), (3, 5, 48), (48,), (1, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_float64(shape, bias, monkeypatch):
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
def test_what_needs_no_gradient_gets_none():
    layer = Linear(8, 4)
    layer.weight.requires_grad_(requires_grad=False)
    inputs = torch.randn(5, 8)
    layer(inputs).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((4,), 5.0))
    with torch.no_grad():
        assert torch.allclose(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5)


def test_everything_else_is_torchs_own(monkeypatch):
    def refuse(*_):
        raise AssertionError("by oneDNN")

    monkeypatch.setattr(linear, "multiply", refuse)
    layer = Linear(8, 4)
    assert layer(torch.empty(0, 8)).shape == (0, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16
    assert layer.double()(torch.randn(3, 8).double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("vendor", "capability", "is_slow"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_mkl_is_slow_on_processors_with_avx512_that_are_not_intels(vendor, capability, is_slow, monkeypatch, tmp_path):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(linear, "_CPU_FACTS", facts)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert mkl_is_slow.__wrapped__() is is_slow
    facts.unlink()
    assert not mkl_is_slow.__wrapped__(), "who makes the processor is not known"


def test_layers_change_their_class_and_nothing_else(monkeypatch):
    for is_slow in (False, True):
        monkeypatch.setattr(linear, "mkl_is_slow", lambda is_slow=is_slow: is_slow)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Bilinear(4, 4, 2))
        before = dict(model.named_parameters())
        multiply_by_the_faster(model)
        assert [type(module) is Linear for module in model] == [is_slow, False, False]
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)
