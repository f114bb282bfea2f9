"""torch's FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered layer by layer."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import EngineOfCopy
from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT


class TorchFSDP(EngineOfCopy):
    """`fully_shard` on every layer and on the whole (Zhao et al., "PyTorch FSDP", VLDB 2023, second version).

    1. Every parameter is split along its first dimension into n pieces, one per rank. A layer is a member of a
       ModuleList. What is in no layer, such as the embeddings, belongs to the root.
    2. Before a layer's forward its parameters are gathered in one call. After it they are freed, and gathered again for
       backward. The root's stay in between.
    3. After a layer's backward a reduce-scatter gives each rank the average of its pieces, which it steps.

    Cost for S bytes of weights, of which R are the root's: gathering sends (n-1)/n (2S - R). gloo's reduce-scatter
    sends 2(n-1)/n S, because it is the ring of its all-reduce. Memory: S/n of weights, with AdamW 2 S/n of state;
    within a step also R and the largest layer, whole. Choose it if a model does not fit and you want torch to shard it.
    `zero3` is the same algorithm, written to be read.

    Known wrong: a parameter that no rank used gets zeros, so AdamW still decays it. On gloo nothing overlaps.
    """

    def attach(self, model: nn.Module) -> Callable:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        call = super().attach(model)
        first = next(model.parameters())
        for name, p in model.named_parameters():
            if p.dim() == 0 or p.dtype != first.dtype:
                raise UserError(
                    f"--sync torch_fsdp cuts parameters of one dtype along their first dimension, and {name} has "
                    f"{p.dim()} dimensions and is {p.dtype}. Choose another --sync."
                )
        mesh = DeviceMesh.from_group(cast(Any, self.group or dist.group.WORLD), first.device.type)
        for layer in layers(self.copy):
            fully_shard(layer, mesh=mesh)
        # Backward needs the root's first: if they were freed after forward, they would be gathered at once.
        self.engine = fully_shard(self.copy, mesh=mesh, reshard_after_forward=False)
        self.engine.set_reduce_scatter_unused_params(self.options.find_unused_parameters)
        return call

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces."""
        pieces = dict(self.engine.named_parameters())
        piece_of = {p: pieces[name] for name, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [piece_of[p] for p in group["params"]]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.engine.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.engine.set_requires_gradient_sync(True)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        gradients = [p.grad.to_local() for p in self.engine.parameters() if p.grad is not None]
        squares = sum((torch.linalg.vector_norm(gradient).square() for gradient in gradients), torch.zeros(()))
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.engine.reshard()
        for name, parameter in self.engine.named_parameters():
            yield name, parameter.full_tensor()

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's pieces of the model's weights."""
        for name, piece in self.engine.named_parameters():
            parts = self.model.get_parameter(name).chunk(self.ranks)
            if self.rank < len(parts):
                piece.to_local().copy_(parts[self.rank])

    def detach(self) -> None:
        super().detach()
        del self.engine, self.copy


def layers(model: nn.Module) -> list[nn.Module]:
    """The members of ModuleLists that share no parameter with anything outside, inner ones first."""
    users = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    found = []
    for layer in (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part):
        own = Counter(p for _, p in layer.named_parameters(remove_duplicate=False))
        if own and all(users[p] == count for p, count in own.items()):
            found.append(layer)
    return found[::-1]
