"""Lightning Fabric: torch's DDP or FSDP2, set up by another library."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.watched import watched
from cos598d.errors import UsageError
from cos598d.records.kinds import COUNT, Fields, ListOf, expect
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.engines.engine import Engine, need
from cos598d.strategies.engines.torch_fsdp import FSDPOptions, TorchFSDP, check_parameters, fully_sharded
from cos598d.strategies.formula import (
    MemoryEstimate,
    TrafficEstimate,
    TrainingSpec,
    replicated_memory,
    sent_by_replicas,
)
from cos598d.strategies.state import FullTensor, OptimizerState, own_state_of
from cos598d.sync.ddp import DDP
from cos598d.sync.options import SYNC_GROUP
from cos598d.sync.parts.reducer import Reducer
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class FabricOptions(FSDPOptions):
    """The options of torch's FSDP2, and `fabric_strategy`: the strategy of Lightning Fabric."""

    fabric_strategy: str = flag("ddp", "fabric's strategy: {choices}", group=SYNC_GROUP, choices=("ddp", "fsdp2"))


class Fabric(TorchFSDP):
    """Fabric around the model and the optimizer (Lightning AI), by `--fabric_strategy`.

    ddp:    1. `setup` wraps the model in torch's DDP, which averages in buckets while backward runs.
            2. Fabric's `clip_gradients` clips the averages; every rank makes the same step.
            Cost: as for `ddp`, 2(n-1)/n S. Memory: S each of weights, gradients and buckets, 2 S of AdamW's state.
    fsdp2:  1. Its `ModelParallelStrategy` passes the model and a mesh to our function, which shards every layer and
               the whole by `fully_shard`. After that it is `torch_fsdp` with torch's own reduce-scatter.
            Cost for R bytes in the root: (n-1)/n (2S - R) to gather; on gloo 2(n-1)/n S to reduce. Memory: S/n each of
            weights and gradients, 2 S/n of AdamW's state.

    We start the ranks: Fabric gets their numbers and starts none. Each counts as a node of one device.
    Choose it to keep your own loop and change strategies by a word; it uses torch's engines underneath.

    The ledger gets what the DDP inside sends, as for `ddp`.

    Known wrong: its own clipping under fsdp2 reduces by calls that the ledger does not see, so the norm is summed here.
    """

    options: FabricOptions
    options_kind = FabricOptions
    uses = ("fabric_strategy", "reshard")
    precisions = ("fp32", "bf16")

    takes_ours = False

    @property
    def is_cut(self) -> bool:
        """Whether parameters are sharded."""
        return self.options.fabric_strategy == "fsdp2"

    def choose(self) -> None:
        if not self.is_cut:
            self.shards = ()

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        super(TorchFSDP, cls).check_config(config, world_size)
        need("lightning", "Lightning Fabric", "2.5", config.sync)
        if config.reshard != FabricOptions.reshard and config.fabric_strategy == "ddp":
            raise UsageError("--reshard has no effect with --fabric_strategy ddp. Leave it out, or choose fsdp2.")

    @property
    def replicas_equal(self) -> bool:
        return not self.is_cut or self._apart.is_whole

    optimizer: Any  # Fabric's wrapper of torch's

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        if self.is_cut:
            check_parameters(model, "fabric")
            return super().wrap(model, make_optimizer)
        self._fabric = _fabric(self, _ddp(self))
        self._wrapped, self.optimizer = self._fabric.setup(model, make_optimizer(model.named_parameters()))
        self._reducer = Reducer(self.comm, self._wrapped._forward_module)
        return self._wrapped

    def shard(self, module: nn.Module) -> nn.Module:
        self._units: list[Any] = []

        def parallelize(part: nn.Module, mesh: Any) -> nn.Module:
            self._units = fully_sharded(part, mesh["data_parallel"], self.options.reshard == "yes")
            return part

        self._fabric = _fabric(self, _model_parallel(self, parallelize))
        self._wrapped = self._fabric.setup_module(module)
        self.begin(module)
        return self._wrapped

    def optimize(self, module: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        return self._fabric.setup_optimizers(make_optimizer(self._module.named_parameters()))

    def before_forward(self) -> None:
        if self.is_cut:
            super().before_forward()

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()  # Fabric's own, by its `precision`

    def no_sync(self) -> AbstractContextManager[None]:
        return self._fabric.no_backward_sync(self._wrapped)

    def backward(self, loss: torch.Tensor) -> None:
        with watched(self.comm):
            self._fabric.backward(loss * self.comm.world_size)

    def finish(self) -> None:
        if self.is_cut:
            super().finish()
        else:
            self._reducer.end_step()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        if self.is_cut:
            return super().clip(max_norm)
        if not max_norm:
            return None
        return self._fabric.clip_gradients(self._wrapped, self.optimizer, max_norm=max_norm, error_if_nonfinite=False)

    def memory(self) -> dict[str, int]:
        return super().memory() if self.is_cut else Engine.memory(self) | {"buckets": self._reducer.bucket_bytes}

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        return (
            super().expected_memory(job)
            if self.is_cut
            else replicated_memory(job, DDP.buffers(job.tensors, self.options))
        )

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        if self.is_cut:
            return super().expected_sent(job)
        return sent_by_replicas(job, DDP(self.comm, self.find_unused_parameters))

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        if self.is_cut:
            super().load_state(wholes)
        else:
            Engine.load_state(self, wholes)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return super().whole_weights() if self.is_cut else Engine.whole_weights(self)

    def put_weights(self, whole: FullTensor) -> None:
        if self.is_cut:
            super().put_weights(whole)
        else:
            Engine.put_weights(self, whole)

    def optimizer_state(self) -> OptimizerState:
        return super().optimizer_state() if self.is_cut else Engine.optimizer_state(self)

    def inner_optimizer(self) -> Any:
        return self.optimizer.optimizer

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As in the interface; under ddp, also the order of torch's buckets."""
        facts, tensors = super().own_state()
        return facts if self.is_cut else {"arrival": self._reducer.arrival()}, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        if not self.is_cut and facts.get("arrival") is not None:
            with own_state_of(self.comm.rank):
                expect(facts, Fields({"arrival": ListOf(COUNT)}))
                self._reducer.rehearse(facts["arrival"], steps=1)

    def whole(self) -> AbstractContextManager[None]:
        return super().whole() if self.is_cut else nullcontext()

    def settle(self) -> None:
        if self.is_cut:
            super().settle()
        else:
            Engine.settle(self)

    def detach(self) -> None:
        if self.is_cut:
            super().detach()
        else:
            self._reducer.close()
            Engine.detach(self)
            del self.optimizer, self._reducer
        del self._wrapped, self._fabric


def _ddp(engine: Fabric) -> Any:
    from lightning.fabric.strategies import DDPStrategy

    # init_sync: `attach` has just done it
    return DDPStrategy(find_unused_parameters=engine.find_unused_parameters, init_sync=False)


def _model_parallel(engine: Fabric, parallelize: Any) -> Any:
    from lightning.fabric.strategies import ModelParallelStrategy

    return ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=engine.comm.world_size, tensor_parallel_size=1
    )


def _fabric(engine: Fabric, strategy: Any) -> Any:
    """Fabric with the existing ranks."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import lightning.fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Ours(LightningEnvironment):
        """Every rank is a node of one device. The process group is open already."""

        creates_processes_externally = True

        def world_size(self) -> int:
            return engine.comm.world_size

        def global_rank(self) -> int:
            return engine.comm.rank

        def local_rank(self) -> int:
            return 0

        def node_rank(self) -> int:
            return engine.comm.rank

        def set_world_size(self, size: int) -> None:
            """Nothing to do: it is known."""

        def set_global_rank(self, rank: int) -> None:
            """Nothing to do: it is known."""

        def teardown(self) -> None:
            """Nothing to undo."""

    device = engine.comm.device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = lightning.fabric.Fabric(
            accelerator=device.type,
            devices=1 if device.type == "cpu" else [device.index or 0],
            num_nodes=engine.comm.world_size,
            strategy=strategy,
            plugins=[Ours()],
            precision="bf16-mixed" if engine.precision == "bf16" else "32-true",
        )
        fabric.launch()
    return fabric
