"""AdamW steps only the rows that ever had a gradient: the same weights and moments as a step of all, to the bit."""

import pytest
import torch
from torch import nn

from cos598d.strategies.parts.row_steps import RowSteps

ROWS, WIDTH = 40, 8


class Twin:
    """A parameter that is stepped by rows and one that is stepped whole, with the same gradients."""

    def __init__(self, make):
        start = torch.randn(ROWS * WIDTH, generator=torch.Generator().manual_seed(1))
        self.narrow, self.whole = (nn.Parameter(start.clone()) for _ in range(2))
        self.other = nn.Parameter(torch.ones(3))  # without rows
        self.optimizer, self.reference = make([self.narrow, self.other]), make([self.whole])
        self.row_steps = RowSteps(self.optimizer, self.narrow, WIDTH)
        self.stepped = []
        self.optimizer.register_step_pre_hook(lambda *_: self.stepped.append(self.narrow.numel() // WIDTH))

    def step(self, number, rows, known=True):
        """A step with gradients in these rows. `known`: the rows are given to `RowSteps`."""
        gradient = torch.zeros(ROWS, WIDTH)
        gradient[rows] = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(100 + number))
        marked = torch.zeros(ROWS, dtype=torch.bool)
        marked[rows] = True
        for optimizer in (self.optimizer, self.reference):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        self.narrow.grad, self.whole.grad = gradient.flatten().clone(), gradient.flatten().clone()
        self.other.grad = torch.ones(3)
        with self.row_steps.alone(marked if known else None):
            self.optimizer.step()
        self.reference.step()

    def is_same(self):
        assert torch.equal(self.narrow, self.whole)
        assert torch.equal(self.narrow.grad, self.whole.grad)
        own, right = self.optimizer.state[self.narrow], self.reference.state[self.whole]
        assert own.keys() == right.keys()
        assert all(torch.equal(own[kind], right[kind]) for kind in right), own.keys()


def adamw(decay=0.0, **options):
    return lambda parameters: torch.optim.AdamW(parameters, weight_decay=decay, **options)


MAKERS = {
    "fused": adamw(fused=True),
    "fused, decay": adamw(0.01, fused=True),
    "one by one": adamw(0.1, foreach=False),
    "amsgrad": adamw(0.01, amsgrad=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("known", [True, False])
def test_weights_and_moments_equal_those_of_a_step_of_all_rows(kind, known):
    twin = Twin(MAKERS[kind])
    for number in range(12):  # a row moves after its last gradient, also in the step without any
        twin.step(number, [] if number == 8 else [number, (7 * number) % 13, 3], known)
        twin.is_same()
    # The first step makes the moments of all rows. The next take the rows that had a gradient so far.
    assert twin.stepped[:5] == [ROWS, 4, 5, 6, 7]


def test_all_rows_are_stepped_once_more_than_half_have_moved():
    twin = Twin(MAKERS["fused, decay"])
    for number in range(3):
        twin.step(number, list(range(10 * number, 10 * number + 10)))
    twin.step(3, [0])
    twin.is_same()
    assert twin.stepped == [ROWS, 20, ROWS, ROWS]


def test_rows_with_loaded_moments_are_stepped():
    twin = Twin(MAKERS["fused"])
    twin.step(0, [1])
    twin.step(1, [2])
    for optimizer, p in ((twin.optimizer, twin.narrow), (twin.reference, twin.whole)):
        optimizer.state[p]["exp_avg"].view(ROWS, WIDTH)[30] = 1.0
    twin.row_steps.forget()
    twin.step(2, [3])
    twin.is_same()
    assert twin.stepped[-1] == 4


def test_another_optimizer_steps_all_rows_and_no_gradient_means_no_step():
    twin = Twin(lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1))
    for number in range(3):
        twin.step(number, [number])
        twin.is_same()
    assert twin.stepped == [ROWS] * 3
    twin = Twin(MAKERS["fused, decay"])
    twin.step(0, [1])
    before = twin.narrow.detach().clone()
    twin.narrow.grad = None
    with twin.row_steps.alone(None):
        twin.optimizer.step()
    assert torch.equal(twin.narrow, before)


def test_a_failed_step_restores_shapes_and_weights():
    twin = Twin(MAKERS["fused, decay"])
    twin.step(0, [1])
    before = twin.narrow.detach().clone()

    with pytest.raises(ZeroDivisionError), twin.row_steps.alone(None):
        raise ZeroDivisionError
    assert torch.equal(twin.narrow, before)
    assert twin.optimizer.state[twin.narrow]["exp_avg"].shape == (ROWS * WIDTH,)
    assert twin.narrow.grad.shape == (ROWS * WIDTH,)


def test_a_nan_gradient_stays_in_its_row():
    twin = Twin(MAKERS["fused"])
    twin.step(0, [1])
    twin.narrow.grad = torch.zeros(ROWS * WIDTH)
    twin.narrow.grad[3 * WIDTH] = torch.nan
    with twin.row_steps.alone(None):
        twin.optimizer.step()
    assert twin.narrow.view(ROWS, WIDTH).isnan().nonzero().tolist() == [[3, 0]]
