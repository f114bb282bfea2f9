"""The dtypes in which a model computes: torch's autocast, and torch's gradient scaler for fp16."""

from contextlib import AbstractContextManager

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.errors import UserError
from cos598d.records.conventions import PRECISIONS

DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))
# torch's words for a processor's instructions for products in 16 bits.
INSTRUCTIONS = {
    "bf16": ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """torch's autocast to the dtype of `precision`, off for "fp32". Weights and gradients stay float32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def step_scaled(scaler: ShardedGradScaler, optimizer: torch.optim.Optimizer, iteration: int) -> bool:
    """Step the optimizer, and update the scale. Return False if the gradients have overflowed, so it has not stepped.

    Raises UserError, the same on every rank, if the scale falls below 1.
    """
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    now = scaler.get_scale()
    if now < 1:
        raise UserError(
            f"the gradients of iteration {iteration} are not finite in fp16, even with a loss scale of 1. Choose "
            "--precision bf16 or fp32, or lower --learning_rate."
        )
    return now >= before


def slow_on_this_processor(precision: str, device: torch.device) -> str:
    """A warning if this processor has no instructions for the 16 bits of `precision`; "" if it has."""
    has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # early releases of torch do not tell
    words = INSTRUCTIONS.get(precision, ()) if device.type == "cpu" and has else ()
    if not words or any(has.get(word) for word in words):
        return ""
    return (
        f"this processor has no instructions for {precision}, so --precision {precision} may be slower here than fp32. "
        "Use --precision fp32 for speed."
    )
