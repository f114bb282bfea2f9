"""The choice of a run's precision, and what the user is told about it. It rests on a measurement, not on the
processor's name."""

from typing import NamedTuple

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.models.products import ProductShape, seconds_of_product, widest_product
from cos598d.records.conventions import AUTO_PRECISION

SURE = 1.1  # one precision counts as faster if the other's product takes at least this many times as long


class PrecisionChoice(NamedTuple):
    """The `precision`, one of PRECISIONS, equal on every rank; a remark and a warning for the user, each maybe ""."""

    precision: str
    remark: str = ""
    warning: str = ""


def choose_precision(asked: str, shape: ProductShape, comm: Communicator) -> PrecisionChoice:
    """The precision for `asked`, a value of --precision, and for a model whose widest product has this shape.

    Every rank calls it. On CPUs each rank measures a product in 16 bits and in float32, for at most 50 ms. The rank on
    which 16 bits lose most decides. AUTO_PRECISION becomes bf16 if that is faster, else fp32. On GPUs it becomes bf16
    if all of them multiply in it. fp16 is never chosen: it can skip a step, and its loss scale changes training.
    """
    if asked == "fp32":
        return PrecisionChoice(asked)
    half = "bf16" if asked == AUTO_PRECISION else asked
    if comm.device.type == "cpu":
        seconds = seconds_of_product(shape, "fp32", half)
        found = comm.exchange(seconds[half] / seconds["fp32"])
        return decide(asked, max(found), f"in a product of {shape}{' on the slowest rank' if len(found) > 1 else ''}")
    if asked != AUTO_PRECISION:
        return PrecisionChoice(asked)
    has_bf16 = all(comm.exchange(torch.cuda.is_bf16_supported(including_emulation=False)))
    why = "every GPU multiplies in bf16" if has_bf16 else "not every GPU multiplies in bf16"
    chosen = "bf16" if has_bf16 else "fp32"
    return PrecisionChoice(chosen, f"--precision {AUTO_PRECISION}: {chosen}, since {why}")


def decide(asked: str, ratio: float, where: str) -> PrecisionChoice:
    """The choice if 16 bits take `ratio` times float32's seconds; `where` is a phrase for where that was measured."""
    half = "bf16" if asked == AUTO_PRECISION else asked
    words = f"{half} takes {ratio:.2g} times fp32's seconds {where}, measured now"
    if asked == AUTO_PRECISION:
        chosen = "bf16" if ratio * SURE < 1 else "fp32"
        return PrecisionChoice(chosen, f"--precision {AUTO_PRECISION}: {chosen}, since {words}")
    if ratio > SURE:
        return PrecisionChoice(asked, warning=f"{words}. Use --precision fp32, or {AUTO_PRECISION} for the faster one.")
    return PrecisionChoice(asked)


def slow_halves(model: nn.Module) -> str:
    """A warning if the 16 bits in which `model` computes now are slower on this CPU than float32; "" if they are not.

    They are those of torch's autocast where it is on, else the parameters'. A probe of at most 50 ms decides.
    """
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        return ""
    own = next(model.parameters()).dtype
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else own
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    if half is None:
        return ""
    shape = widest_product(model)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        seconds = seconds_of_product(shape, "fp32", half)
    ratio = seconds[half] / seconds["fp32"]
    if ratio <= SURE:
        return ""
    return f"{half} takes {ratio:.2g} times fp32's seconds in a product of {shape}, measured now. Compute in float32."
