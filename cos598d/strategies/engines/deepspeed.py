"""DeepSpeed: ZeRO stages 0 to 3 by the library that introduced them."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.watched import watched
from cos598d.records.conventions import STATE, WHOLE_WEIGHTS
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.engines.deepspeed_layout import FlatState, fragments, held_by_deepspeed, put_weights, sizes
from cos598d.strategies.engines.engine import Apart, Engine, need
from cos598d.strategies.formula import MemoryEstimate, TrainingSpec
from cos598d.strategies.memory import count_memory, tensors_in
from cos598d.strategies.state import (
    FullTensor,
    OptimizerState,
    stepped_whole,
)
from cos598d.sync.options import SYNC_GROUP, SyncOptions
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class DeepSpeedOptions(SyncOptions):
    """The options of DeepSpeed. zero_stage: what it shards: 0 nothing, 1 the optimizer's state, 2 gradients too, 3
    weights too."""

    zero_stage: int = flag(
        2,
        "ZeRO stage for deepspeed: from 0 (shards nothing) to 3 (shards everything)",
        group=SYNC_GROUP,
        least=0,
        below=4,
    )


class DeepSpeed(Engine):
    """DeepSpeed's engine (Rajbhandari et al., "ZeRO", SC 2020; Rasley et al., KDD 2020) with torch's optimizer.

    `--zero_stage` chooses what is sharded over the n ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights.

    1. Stages 1 and 2 pack all weights of a parameter group in one flat tensor; each rank steps its n-th.
    2. Stages 0 and 1 average the gradients after a step's last backward. Stages 2 and 3 average bucket by bucket while
       every backward runs, accumulated ones too, and a rank keeps its part of the sum.
    3. The ranks add up the squares of their parts' norms. Clipping, the step and dropping the gradients are one call.
    4. Stages 1 and 2 gather the stepped weights. Stage 3 gathers a module's weights before its forward and its backward
       and drops them after. Meanwhile it gathers those of the next modules (a bucket's worth). Parameters of up to
       100,000 elements stay on every rank, as long as all of them are at most a hundredth of the model.
    Buckets have `--bucket_mb` (`deepspeed_layout.sizes`). By DeepSpeed's own settings they have 5e8 elements, and at
    stage 3 a model of fewer than 1e9 stays whole during the whole step.

    Cost for S bytes of weights, sent by a rank on gloo. Stage 0: 2(n-1)/n S. Stages 1 and 2: 3(n-1)/n S, since the
    gradients are all-reduced and the weights gathered. Stage 3: up to 4(n-1)/n S, since weights are gathered twice, and
    gloo's reduce-scatter costs as much as an all-reduce. Its prefetch keeps weights that are still gathered. If it
    reaches from forward into backward, weights are gathered once: 3(n-1)/n S. Stages 2 and 3 send their gradients again
    for every accumulated micro-batch.
    Memory between steps (`held_by_deepspeed`), with AdamW. Stage 0: S of weights and 2 S of state. Stages 1 and 2: S of
    weights, and 3 S/n for a copy of S/n and its state. Stage 3: S/n of weights and the small ones whole, S/n of
    gradients, 2 S/n of state, and a bucket. Gradients exist from backward to the step: S at stages 0 and 1, S/n and a
    bucket at 2.
    Choose it for models that fit no other way (it can also use the host's memory and disk), on GPUs with nccl.

    Known wrong: an unused parameter gets zeros, so AdamW still decays it. Its gradient norms with stage 2 were off in
    0.17.6 and later (its issue 7718). bf16 of stage 2 was wrong for modules used twice in 0.18.3 to 0.19.3 (8224). fp16
    has a loss scale of its own and is refused here. Its optimizer has one step count for all parameters: from a state
    with a count per parameter it takes the largest. After a resume, stage 3 learns the order of layers again. So the
    first step's gathers are divided differently, with the same results.
    """

    options: DeepSpeedOptions
    options_kind = DeepSpeedOptions
    uses = ("zero_stage", "bucket_mb")
    precisions = ("fp32", "bf16")

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        super().check_config(config, world_size)
        need("deepspeed", "DeepSpeed", "0.19.4", config.sync)

    optimizer: Any  # torch's at stage 0, else DeepSpeed's own wrapper of it

    def choose(self) -> None:
        self.shards = ("optimizer", "gradients", "parameters")[: self.options.zero_stage]

    @property
    def replicas_equal(self) -> bool:
        return self._apart.is_whole

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        deepspeed = _imported(self.comm.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.comm.device.index or 0))
        deepspeed.init_distributed(dist_backend=self.comm.backend, auto_mpi_discovery=False, verbose=False)
        self._apart = Apart(model)
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its throughput figures ask for it
            "gradient_accumulation_steps": 1,  # we mark the last backward ourselves
            "gradient_clipping": 0.0,  # its default would clip to 1 silently
            "zero_optimization": {"stage": self.options.zero_stage, **sizes(self._apart.copy, self.options.bucket_mb)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }
        self._engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self._apart.copy,
            optimizer=make_optimizer(self._apart.copy.named_parameters()),
            config=settings,
        )
        if self.options.zero_stage == 3:
            self._apart.empty()
        else:
            self._alias()
        return self._engine

    def before_forward(self) -> None:
        self._apart.follow()
        if self.options.zero_stage == 3 and self._apart.is_whole:
            self._apart.empty()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        yield
        self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: torch.Tensor) -> None:
        with watched(self.comm):
            self._engine.backward(loss * self.comm.world_size, scale_wrt_gas=False)

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """As in the interface, but done in `step`, where DeepSpeed computes the norm."""
        if self.options.zero_stage:
            self.optimizer.clip_grad = max_norm
            return None
        return torch.nn.utils.clip_grad_norm_(self._apart.copy.parameters(), max_norm) if max_norm else None

    def step(self) -> bool:
        with self.phase("step"), watched(self.comm):
            self._engine.step()
        return True

    def whole(self) -> contextlib.AbstractContextManager[None]:
        self._fill()
        return contextlib.nullcontext()

    def settle(self) -> None:
        super().settle()
        self._fill()

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        state = self.optimizer_state()
        self._masters = state.parts if isinstance(state, FlatState) else {}
        super().load_state(wholes)

    def put_weights(self, whole: FullTensor) -> None:
        put_weights(self._apart.copy.get_parameter(whole.name), self.comm.rank, whole.tensor)
        if whole.name in self._masters:
            master = self._masters[whole.name]
            master.of(master.flat).copy_(master.part_of(whole.tensor))

    def optimizer_state(self) -> OptimizerState:
        stage, copy = self.options.zero_stage, self._apart.copy
        if stage == 0:
            return OptimizerState(self.optimizer, stepped_whole(copy.named_parameters()))
        return FlatState(self.optimizer.optimizer, fragments(copy, self.optimizer, stage, self.comm.rank))

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As in the interface; stage 3 gathers one parameter at a time."""
        for name, parameter in self._apart.copy.named_parameters():
            whole = self._gathered(parameter) if self.options.zero_stage == 3 else parameter
            if self.comm.rank == 0:
                yield name, whole

    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        import deepspeed

        with watched(self.comm, STATE), deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()

    def detach(self) -> None:
        super().detach()
        for name, parameter in self._apart.model.named_parameters():  # out of DeepSpeed's flat tensors
            self._apart.fill(name, parameter.data.clone())
        self._engine.destroy()
        del self._engine, self.optimizer

    def memory(self) -> dict[str, int]:
        """As in the interface, from the named attributes of DeepSpeed's optimizer."""
        copies = list(self._apart.copy.parameters())
        optimizer = self.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        gradients = [getattr(optimizer, name, ()) for name in ("averaged_gradients", "grad_partitions_flat_buffer")]
        stepped = [p for group in inner.param_groups for p in group["params"]]
        return count_memory(
            parameters=[*_tensors(p.data for p in copies), *_tensors(getattr(p, "ds_tensor", None) for p in copies)],
            # Counted before the gradients, which are views of them until they are reduced.
            buckets=tensors_in([bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]),
            gradients=[*_tensors(p.grad for p in (*copies, *stepped)), *tensors_in(gradients)],
            # The flat fp32 weights that its optimizer steps count as its state: the model has its own.
            optimizer=[
                *_tensors(p.data for p in stepped),
                *tensors_in([list(state.values()) for state in inner.state.values()]),
            ],
        )

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        return held_by_deepspeed(job, self.options.zero_stage, sizes(job.model, self.options.bucket_mb))

    def _alias(self) -> None:
        """Make the model's parameters share memory with those that DeepSpeed has moved the copy's to."""
        for name, parameter in self._apart.copy.named_parameters():
            self._apart.fill(name, parameter.data)

    def _fill(self) -> None:
        """Gather stage 3's weights into the model, one parameter at a time."""
        if self._apart.is_whole:
            return
        import deepspeed

        with watched(self.comm, WHOLE_WEIGHTS):
            for name, parameter in self._apart.copy.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter]):
                    self._apart.fill(name, parameter.data.clone())
        self._apart.is_whole = True


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


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
