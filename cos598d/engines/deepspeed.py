"""DeepSpeed: ZeRO stages 1 to 3 by the library that introduced them."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cos598d.engines import EngineOfCopy, need
from cos598d.errors import UsageError
from cos598d.records.conventions import STATE
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


class DeepSpeed(EngineOfCopy):
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

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("deepspeed", "DeepSpeed", "deepspeed")
        if precision == "fp16":
            raise UsageError("--sync deepspeed has a loss scale of its own for fp16. Choose --precision bf16 or fp32.")

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.every_backward = self.options.zero_stage >= 2
        self._plain, self._step = optimizer, _Step(optimizer)
        self._begin()
        return self._step

    def _begin(self) -> None:
        """Let DeepSpeed train a copy of the model, by an optimizer of the plain one's kind and groups."""
        if next(self.model.parameters()).device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # It calls torch functions by deprecated names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        import deepspeed

        # It would spend up to two minutes compiling a second all-reduce through shared memory with g++.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        twins = dict(self.copy.named_parameters())
        twin_of = {p: twins[name] for name, p in self.model.named_parameters()}
        groups = [group | {"params": [twin_of[p] for p in group["params"]]} for group in self._plain.param_groups]
        elements = sum(p.numel() for p in twin_of)
        bucket = max(1, min(elements, int(self.options.bucket_mb * (1 << 20)) // 4))
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its throughput figures ask for it
            "gradient_accumulation_steps": 1,  # we mark the last backward ourselves
            "gradient_clipping": 0.0,  # its default would clip to 1 silently
            "zero_optimization": {  # in elements; its defaults are for models of billions, and keep this one whole
                "stage": self.options.zero_stage,
                "reduce_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_reuse_distance": bucket,
                "stage3_model_persistence_threshold": elements // 100,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }
        kind: Any = type(self._plain)
        with self.ledger.naming("weights", STATE):
            self.engine, inner, _, _ = deepspeed.initialize(model=self.copy, optimizer=kind(groups), config=settings)
        self._step.engine, self._step.param_groups = self.engine, inner.param_groups

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Let the next step clip to this norm: DeepSpeed computes it there, so none is returned (NaN)."""
        self.engine.optimizer.clip_grad = max_norm
        return torch.tensor(float("nan"))

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed

        for name, p in self.copy.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=self.options.zero_stage == 3):
                yield name, p

    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin anew with the model's weights, which are the same on every rank."""
        self.engine.destroy()
        self.make_copy()
        self._begin()

    def detach(self) -> None:
        super().detach()
        self.engine.destroy()
        del self.engine, self.copy


class _Step(torch.optim.Optimizer):
    """What the loop steps: DeepSpeed's engine. Its groups are those of DeepSpeed's optimizer."""

    engine: Any

    def __init__(self, plain: torch.optim.Optimizer):
        super().__init__(plain.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the engine's step has done it."""
