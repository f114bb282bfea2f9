"""torch's FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered layer by layer."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import EngineOfCopy
from cos598d.records.conventions import AGREEMENT


class TorchFSDP(EngineOfCopy):
    """`fully_shard` on every layer and on the whole (Zhao et al., "PyTorch FSDP", VLDB 2023, second version).

    1. Every parameter is split along its first dimension into n pieces, one per rank. A layer is a member of a
       ModuleList. What is in no layer, such as the embeddings, belongs to the root.
    2. Before a layer's forward its parameters are gathered in one call. After it they are freed, and gathered again for
       backward. The root's stay in between.
    3. After a layer's backward a reduce-scatter gives each rank the average of its pieces, which it steps; also after
       those of micro-batches that only accumulate.

    Cost for S bytes of weights, of which R are the root's: gathering sends (n-1)/n (2S - R). gloo's reduce-scatter
    sends 2(n-1)/n S, because it is the ring of its all-reduce. Memory: S/n of weights, with AdamW 2 S/n of state;
    within a step also R and the largest layer, whole. Choose it if a model does not fit and you want torch to shard it.
    `zero3` is the same algorithm, written to be read.

    Known wrong: a parameter that no rank used gets zeros, so AdamW still decays it. On gloo nothing overlaps.
    """

    def begin(self, copied: nn.Module) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(cast(Any, self.group or dist.group.WORLD), next(copied.parameters()).device.type)
        for layer in layers(copied):
            fully_shard(layer, mesh=mesh)
        # Backward needs the root's first: if they were freed after forward, they would be gathered at once.
        engine = fully_shard(copied, mesh=mesh, reshard_after_forward=False)
        engine.set_reduce_scatter_unused_params(self.options.find_unused_parameters)
        self.steps(engine)
        return engine

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        parameters = list(self.engine.parameters())
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.engine.reshard()
        for name, parameter in self.engine.named_parameters():
            yield name, parameter.full_tensor()


def layers(model: nn.Module) -> list[nn.Module]:
    """The members of ModuleLists, inner ones first; none if some weights are tied: then the root has all of them."""
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        return []
    return [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part][::-1]
