"""Linear layers in float32 by oneDNN, where torch's own choice leaves half of the processor idle.

torch multiplies float32 matrices by MKL, which uses instructions of 512 bits only on Intel's processors; oneDNN, which
torch brings along and takes for 16 bits, uses what the processor has. The numbers are float32 all the same, added up in
another order.
"""

from functools import cache, partial

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from cos598d.world.processor import seconds_in_turn

# The product by which the libraries are compared: rows, inputs, outputs. With AVX-512 oneDNN is about twice as fast or
# as fast, with less about a tenth faster; between the two the decision does not depend on what else the machine does.
COMPARED, MUCH_FASTER = (256, 384, 1536), 1.5


@cache
def mkl_is_slow() -> bool:
    """Whether oneDNN multiplies float32 matrices much faster than torch's own choice, by a probe of this process.

    Only asked where torch uses AVX-512 and has both libraries: elsewhere both use the same instructions.
    """
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    count, inputs, outputs = COMPARED
    rows, weight = torch.ones(count, inputs), torch.ones(outputs, inputs)
    ways = {"torch": partial(functional.linear, rows, weight), "oneDNN": partial(multiply, rows, weight)}
    seconds = seconds_in_turn(ways)
    return seconds["torch"] > MUCH_FASTER * seconds["oneDNN"]


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows (n, inputs) times weight (outputs, inputs) transposed, plus bias (outputs), by oneDNN: (n, outputs).

    float32 on the CPU, without gradients.
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
    """torch's layer, computed by oneDNN where its tensors are float32 on the CPU and autocast is off."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_float32 = input.dtype == self.weight.dtype == torch.float32
        if not is_float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not input.numel():
            return functional.linear(input, self.weight, self.bias)
        return Product.apply(input, self.weight, self.bias)


def multiply_by_the_faster(model: nn.Module) -> None:
    """Let the linear layers of `model` be computed by the faster library. Their weights and names stay."""
    if mkl_is_slow():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
