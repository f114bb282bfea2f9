"""DeepSpeed: ZeRO stages 1 to 3 by the library that introduced them."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import EngineOfCopy, need
from cos598d.errors import UsageError
from cos598d.records.conventions import STATE

BUCKET = 25 << 18  # elements: 25 MiB of float32, as in torch's DDP


class DeepSpeed(EngineOfCopy):
    """DeepSpeed's engine (Rajbhandari et al., "ZeRO", SC 2020; Rasley et al., KDD 2020) with torch's optimizer.

    1. Stages 1 and 2 pack all weights of a parameter group in one flat tensor; each rank steps its n-th.
    2. Stage 1 averages the gradients in the step. Stages 2 and 3 average bucket by bucket while every
       backward runs, accumulated ones too, and a rank keeps its part of the sum.
    3. The ranks add up the squares of their parts' norms. Clipping, the step and dropping the gradients are one call.
    4. Stages 1 and 2 gather the stepped weights. Stage 3 gathers a module's weights before its forward and its backward
       and drops them after. Parameters of up to a hundredth of all elements stay on every rank.

    Cost for S bytes of weights, sent by a rank on gloo: stages 1 and 2 3(n-1)/n S, since the gradients are all-reduced
    and the weights gathered; stage 3 up to 4(n-1)/n S. Memory between steps with AdamW: stages 1 and 2 S + 3 S/n,
    stage 3 4 S/n and the small weights. Choose it for models that fit no other way, on GPUs with nccl.

    Known wrong: an unused parameter gets zeros, so AdamW still decays it. Gradient norms of stage 2 were off from
    0.17.6 on (its issue 7718); bf16 of stage 2 was wrong for modules used twice in 0.18.3 to 0.19.3 (8224).
    """

    takes = (*EngineOfCopy.takes, "zero_stage")

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("deepspeed", "DeepSpeed", "deepspeed")
        if precision == "fp16":
            raise UsageError("--sync deepspeed has a loss scale of its own for fp16. Choose --precision bf16 or fp32.")

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._plain = optimizer
        return _Step(self)

    def begin(self, copied: nn.Module) -> Any:
        if next(copied.parameters()).device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # It calls torch functions by deprecated names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        import deepspeed

        # It would spend up to two minutes compiling a second all-reduce through shared memory with g++.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        elements = sum(p.numel() for p in copied.parameters())
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its throughput figures ask for it
            "managed_gradient_accumulation": False,  # a step ends when we say so, after any number of backwards
            "gradient_clipping": 0.0,  # its default would clip to 1 silently
            "zero_optimization": {  # in elements; its defaults are for models of billions, and keep this one whole
                "stage": self.options.zero_stage,
                "reduce_bucket_size": min(elements, BUCKET),
                "stage3_prefetch_bucket_size": min(elements, BUCKET),
                "stage3_max_reuse_distance": min(elements, BUCKET),
                "stage3_model_persistence_threshold": elements // 100,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }
        self.steps(copied)
        with self.ledger.naming("weights", STATE):
            return deepspeed.initialize(model=copied, optimizer=self._plain, config=settings)[0]

    def clip(self, max_norm: float) -> torch.Tensor:
        """Let the next step clip to this norm: DeepSpeed computes it there, so none is returned (NaN)."""
        self.engine.optimizer.clip_grad = max_norm
        return torch.tensor(float("nan"))

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed

        for name, p in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=self.options.zero_stage == 3):
                yield name, p

    def detach(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
        super().detach()


class _Step(torch.optim.Optimizer):
    """What the loop steps: DeepSpeed's engine. It shares the groups of the plain optimizer, which DeepSpeed steps."""

    def __init__(self, sync: DeepSpeed):
        super().__init__(sync._plain.param_groups, {})
        self.sync = sync

    def step(self, closure: Any = None) -> Any:
        self.sync.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the engine's step has done it."""
