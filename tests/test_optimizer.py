"""What each optimizer does with decay, momentum and late gradients."""

import pytest
import torch

from cos598d.config import RunConfig
from cos598d.strategies.optimizers import make_optimizer


class Layers(torch.nn.Module):
    """One weight that decays, and a bias and a layer norm that do not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(3, 3)
        self.layer_norm = torch.nn.LayerNorm(3)


def steps(count, gradient=1.0, **values):
    """Weights before and after `count` steps at a rate of 0.1 with the same gradient everywhere."""
    model = Layers()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model.named_parameters(), RunConfig(learning_rate=0.1, **values))
    for _ in range(count):
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def test_sgd_moves_weights_by_rate_times_gradient_and_decays_only_matrices():
    before, after = steps(1, optimizer="sgd", weight_decay=0.5)
    for name, weight in before.items():
        decay = 0.5 * weight if name == "dense.weight" else 0.0
        torch.testing.assert_close(after[name], weight - 0.1 * (1 + decay))


def test_momentum_adds_earlier_steps():
    before, after = steps(3, optimizer="sgd", momentum=0.9)
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight - 0.1 * (1 + 1.9 + 2.71))


def test_the_gradient_s_scale_changes_sgd_s_step_and_not_adamw_s():
    """So only SGD tells an average from a sum."""
    for optimizer, factor in (("sgd", 4), ("adamw", 1)):
        moved = []
        for gradient in (1.0, 4.0):
            before, after = steps(1, gradient, optimizer=optimizer)
            moved.append((before["dense.bias"] - after["dense.bias"]).abs().mean().item())
        assert moved[1] == pytest.approx(factor * moved[0])


@pytest.mark.parametrize("values", [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgd"}, {}], ids=str)
def test_a_parameter_may_get_its_first_gradient_later(values):
    model = Layers()
    optimizer = make_optimizer(model.named_parameters(), RunConfig(learning_rate=0.1, **values))
    before = model.layer_norm.weight.detach().clone()
    for used in (model.dense.parameters(), model.parameters()):
        for p in used:
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(model.layer_norm.weight, before - 0.1)
