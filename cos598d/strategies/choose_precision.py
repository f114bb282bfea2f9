"""Which precision a run computes in, and what its user is told of that: by a probe, never by a processor's name."""

from typing import NamedTuple

import torch

from cos598d.comm.communicator import Communicator
from cos598d.models.products import ProductShape, seconds_of_product
from cos598d.records.conventions import AUTO_PRECISION

SURE = 1.1  # one precision is the faster one where the other's product takes so many times as long


class PrecisionChoice(NamedTuple):
    """The same `precision` on every rank, one of PRECISIONS; a remark and a warning for the user, or "" each."""

    precision: str
    remark: str = ""
    warning: str = ""


def choose_precision(asked: str, shape: ProductShape, comm: Communicator) -> PrecisionChoice:
    """What `asked`, a value of --precision, comes to for a model whose widest product has this shape.

    Every rank calls it. On CPUs each rank measures a product in 16 bits and in float32, for at most 50 ms, and the
    rank that loses most by 16 bits counts. AUTO_PRECISION is bf16 where that is faster, else fp32; on GPUs it is bf16
    where all multiply in it. fp16 is never chosen: it can lose a step, and its loss scale changes training.
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
    """The choice where 16 bits take `ratio` of float32's seconds; `where` that was measured, in words."""
    half = "bf16" if asked == AUTO_PRECISION else asked
    words = f"{half} takes {ratio:.2g} times fp32's seconds {where}, measured now"
    if asked == AUTO_PRECISION:
        chosen = "bf16" if ratio * SURE < 1 else "fp32"
        return PrecisionChoice(chosen, f"--precision {AUTO_PRECISION}: {chosen}, since {words}")
    if ratio > SURE:
        return PrecisionChoice(asked, warning=f"{words}. Use --precision fp32, or {AUTO_PRECISION} for the faster one.")
    return PrecisionChoice(asked)
