"""The dtypes in which a model computes, and fp16's loss scale."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import PRECISIONS

DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))
FIRST, GOOD_STEPS_TO_DOUBLE = 65536.0, 2000  # torch's GradScaler's


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """torch's autocast to the dtype of `precision`, off for "fp32". Weights and gradients stay float32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def computing_in(precision: str, device: torch.device, module: Callable[..., tuple]) -> Callable[..., tuple]:
    """`module` for training in `precision`: its forward runs under `autocast`."""
    if precision == "fp32":
        return module

    def forward(**inputs: torch.Tensor) -> tuple:
        with autocast(precision, device):
            return module(**inputs)

    return forward


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).

    1. Losses are multiplied by `value`, a power of 2, before backward; averaged gradients are divided by it.
    2. If not all gradients are finite then, the step is skipped and the value is halved.
    3. After 2,000 good steps in a row, it is doubled.

    When it is off, the value is 1 and every step counts as good, without a check.
    """

    def __init__(self, is_on: bool):
        self.is_on = is_on
        self.value = FIRST if is_on else 1.0
        self._good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale, in place. Return whether all of them are finite."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self.is_on or not gradients:
            return True
        torch._foreach_mul_(gradients, 1 / self.value)
        return bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))

    def update(self, is_good: bool, step: int) -> None:
        """Update the scale after step number `step`, which was good or skipped. Raises UserError if the scale would
        fall below 1."""
        if not self.is_on:
            return
        self._good_steps = self._good_steps + 1 if is_good else 0
        if not is_good:
            self.value /= 2
        elif self._good_steps % GOOD_STEPS_TO_DOUBLE == 0:
            self.value *= 2
        if self.value < 1:
            raise UserError(
                f"the gradients of iteration {step} are not finite in fp16, even with a loss scale of 1. Choose "
                "--precision bf16 or fp32, or lower --learning_rate."
            )

    def state(self) -> dict[str, Any]:
        """The value and the good steps in a row, as JSON; {} if it is off."""
        return {"loss_scale": self.value, "good_steps": self._good_steps} if self.is_on else {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave. A state from when it was off leaves the first value; if it is off now,
        nothing changes."""
        if not self.is_on or "loss_scale" not in state:
            return
        value, good_steps = state["loss_scale"], state.get("good_steps")
        if not (isinstance(value, float) and isinstance(good_steps, int) and 1 <= value < math.inf and good_steps >= 0):
            raise UserError(
                f"the saved loss scale is {value!r} after {good_steps!r} good steps, where a number from 1 is "
                "expected. "
                "Resume from another checkpoint."
            )
        self.value, self._good_steps = value, good_steps
