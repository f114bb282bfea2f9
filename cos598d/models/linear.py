"""Linear layers in float32 by oneDNN, on CPUs where torch's default library leaves half of the CPU idle.

torch multiplies float32 matrices with MKL, which uses 512-bit instructions only on Intel CPUs. oneDNN, which torch
includes and uses for 16 bits, uses all that the CPU has. Both use float32, but add up in another order.
"""

from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

_CPU_FACTS = Path("/proc/cpuinfo")


@cache
def mkl_is_slow() -> bool:
    """Whether this CPU has AVX-512 but is not Intel's, and torch has both libraries.

    This depends on the CPU, not on a measurement, because the libraries differ in the last bits. On a busy machine a
    measurement could choose one library in one process and the other in the next. Then ranks would differ, and so would
    a resumed run.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or not _CPU_FACTS.exists():
        return False
    return "GenuineIntel" not in _CPU_FACTS.read_text(encoding="utf-8", errors="replace")


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows (n, inputs) times weight (outputs, inputs) transposed, plus bias (outputs), by oneDNN: (n, outputs).

    For float32 on the CPU, without gradients.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class Product(torch.autograd.Function):
    """`torch.nn.functional.linear` of float32 tensors on the CPU, and its gradients, by `multiply`."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        ctx.save_for_backward(inputs, weight)
        return multiply(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_inputs = multiply(rows, weight.t()).view_as(inputs)
        if ctx.needs_input_grad[1]:
            of_weight = multiply(rows.t(), inputs.reshape(len(rows), -1).t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(dim=0)
        return of_inputs, of_weight, of_bias


class Linear(nn.Linear):
    """torch's layer, computed by oneDNN if its tensors are float32 on the CPU and autocast is off."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_float32 = input.dtype == self.weight.dtype == torch.float32
        if not is_float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not input.numel():
            return functional.linear(input, self.weight, self.bias)
        return Product.apply(input, self.weight, self.bias)


def multiply_by_the_faster(model: nn.Module) -> None:
    """Make the faster library compute the linear layers of `model`. Their weights and names do not change."""
    if mkl_is_slow():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
