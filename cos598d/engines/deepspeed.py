"""DeepSpeed: ZeRO stages 1 to 3 by the library that introduced them."""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import Apart, need
from cos598d.errors import UsageError
from cos598d.records.conventions import STATE, WHOLE_WEIGHTS
from cos598d.sync.base import GradientSync
from cos598d.sync.options import SYNC_GROUP, BucketSizes
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class DeepSpeedOptions(BucketSizes):
    """zero_stage: what is sharded: 1 the optimizer's state, 2 gradients too, 3 weights too."""

    zero_stage: int = flag(
        2,
        "ZeRO stage of deepspeed: 1 (optimizer state), 2 (gradients too), 3 (weights too)",
        group=SYNC_GROUP,
        least=1,
        below=4,
    )


class DeepSpeed(GradientSync):
    """DeepSpeed's engine (Rajbhandari et al., "ZeRO", SC 2020; Rasley et al., KDD 2020) with torch's optimizer.

    1. Stages 1 and 2 pack all weights of a parameter group in one flat tensor; each rank steps its n-th.
    2. Stage 1 averages the gradients after a step's last backward. Stages 2 and 3 average bucket by bucket while every
       backward runs, accumulated ones too, and a rank keeps its part of the sum.
    3. The ranks add up the squares of their parts' norms. Clipping, the step and dropping the gradients are one call.
    4. Stages 1 and 2 gather the stepped weights. Stage 3 gathers a module's weights before its forward and its backward
       and drops them after. Parameters of up to 100,000 elements stay on every rank.

    Cost for S bytes of weights, sent by a rank on gloo: stages 1 and 2 3(n-1)/n S, since the gradients are all-reduced
    and the weights gathered; stage 3 up to 4(n-1)/n S. Memory between steps with AdamW: stages 1 and 2 S + 3 S/n,
    stage 3 4 S/n and the small weights. Choose it for models that fit no other way, on GPUs with nccl.

    Known wrong: an unused parameter gets zeros, so AdamW still decays it. Gradient norms of stage 2 were off from
    0.17.6 on (its issue 7718); bf16 of stage 2 was wrong for modules used twice in 0.18.3 to 0.19.3 (8224).
    """

    options_kind = DeepSpeedOptions
    options: DeepSpeedOptions
    shards, keeps_optimizer_state = True, False

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("deepspeed", "DeepSpeed", "0.19.4", "deepspeed")
        if precision == "fp16":
            raise UsageError("--sync deepspeed has a loss scale of its own for fp16. Choose --precision bf16 or fp32.")

    def attach(self, model: nn.Module) -> Callable:
        super().attach(model)
        self.every_backward = self.options.zero_stage >= 2
        self._apart, self._max_norm = Apart(model), 0.0
        self.parameters = []  # DeepSpeed has its own hooks
        return self._forward

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer of the same kind and groups, on the copy, inside DeepSpeed's engine, whose step is its own."""
        deepspeed = _imported(next(self.model.parameters()).device.type)
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        twins = dict(self._apart.copy.named_parameters())
        twin_of = {p: twins[name] for name, p in self.model.named_parameters()}
        groups = [group | {"params": [twin_of[p] for p in group["params"]]} for group in optimizer.param_groups]
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its throughput figures ask for it
            "gradient_accumulation_steps": 1,  # we mark the last backward ourselves
            "gradient_clipping": 0.0,  # its default would clip to 1 silently
            "zero_optimization": {"stage": self.options.zero_stage, **self._sizes()},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }
        kind: Any = type(optimizer)
        with self.ledger.naming("weights", STATE):
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=self._apart.copy, optimizer=kind(groups), config=settings
            )
        return _Step(self._engine, self._optimizer)

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: DeepSpeed has sharded it."""

    def _sizes(self) -> dict[str, int]:
        """Its sizes for this model, in elements; its defaults are for models of billions, and keep this one whole."""
        elements = sum(p.numel() for p in self.model.parameters())
        bucket = max(1, min(elements, int(self.options.bucket_mb * (1 << 20)) // 4))
        return {
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_model_persistence_threshold": elements // 100,
        }

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._apart.begin_forward()
        return self._engine(*inputs, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Let the next step clip to this norm: DeepSpeed computes it there, so none is returned (NaN)."""
        self._optimizer.clip_grad = max_norm
        return torch.tensor(float("nan"))

    def settle(self) -> None:
        super().settle()
        if self._apart.is_whole:
            return
        with self._apart.filling(), self.ledger.naming("whole weights", WHOLE_WEIGHTS):
            for name, p in self._apart.copy.named_parameters():
                with self._gathered(p):
                    self._apart.fill(name, p)

    def _gathered(self, parameter: nn.Parameter, modifier: int | None = None) -> contextlib.AbstractContextManager:
        """A context in which a parameter of the copy is whole; rank `modifier` may change it."""
        if self.options.zero_stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier)

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: a run resumes from the weights."""
        yield from ()

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the model's weights, which are the same on every rank."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for name, p in self._apart.copy.named_parameters():
            whole = self.model.get_parameter(name)
            with self._gathered(p, 0):
                p.copy_(whole)
            if p.requires_grad and self.options.zero_stage < 3:
                safe_set_full_fp32_param(p, whole)
            elif p.requires_grad:  # this rank's n-th; the last ones may be shorter
                length = p.ds_tensor.numel()  # type: ignore[attr-defined]
                padded = nn.functional.pad(whole.flatten(), (0, length * self.ranks - whole.numel()))
                safe_set_local_fp32_param(p, padded[self.rank * length : (self.rank + 1) * length])

    def detach(self) -> None:
        super().detach()
        self._engine.destroy()
        del self._engine, self._optimizer, self._apart


class _Step(torch.optim.Optimizer):
    """What the loop steps: DeepSpeed's engine. Its groups are those of DeepSpeed's optimizer."""

    def __init__(self, engine: Any, inner: Any):
        super().__init__(inner.param_groups, {})
        self._engine, self.param_groups = engine, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the engine's step has done it."""


def _imported(device: str) -> Any:
    """Import DeepSpeed for this device, without its output, and without letting it compile a collective of its own."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # It calls torch functions by deprecated names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # It would spend up to two minutes compiling a second all-reduce through shared memory with g++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
