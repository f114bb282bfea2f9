"""torch's FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered layer by layer."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import Apart
from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, PARAMETERS, WHOLE_WEIGHTS
from cos598d.sync.base import GradientSync, Options
from cos598d.sync.options import SYNC_GROUP
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class FSDPOptions(Options):
    """reshard: "yes" frees gathered parameters after their layer's forward, and gathers them again for backward."""

    reshard: str = flag(
        "yes",
        "free gathered weights after each layer's forward, for torch_fsdp: {choices}",
        group=SYNC_GROUP,
        choices=("yes", "no"),
    )


class TorchFSDP(GradientSync):
    """`fully_shard` on every layer and on the whole (Zhao et al., "PyTorch FSDP", VLDB 2023, second version).

    1. Every parameter is split along its first dimension into n pieces, one per rank. A layer is a member of a
       ModuleList. What is in no layer, such as the embeddings, belongs to the root.
    2. Before a layer's forward its parameters are gathered in one call. After it they are freed, and gathered again for
       backward. The root's stay in between; with `--reshard no` the layers' as well.
    3. After a layer's backward a reduce-scatter gives each rank the average of its pieces, which it steps.

    Cost for S bytes of weights, of which R are the root's: gathering sends (n-1)/n (2S - R), with `--reshard no`
    (n-1)/n S. gloo's reduce-scatter sends 2(n-1)/n S, because it is the ring of its all-reduce. Memory: S/n of weights,
    with AdamW 2 S/n of state; within a step also R and the largest layer, whole. Choose it if a model does not fit and
    you want torch to shard it. `zero3` is the same algorithm, written to be read.

    Known wrong: a parameter that no rank used gets zeros, so AdamW still decays it. On gloo nothing overlaps.
    """

    options_kind = FSDPOptions
    options: FSDPOptions
    shards, keeps_optimizer_state = True, False

    def attach(self, model: nn.Module) -> Callable:
        from torch.distributed.device_mesh import DeviceMesh

        super().attach(model)
        for name, p in model.named_parameters():
            if p.dim() == 0 or p.dtype != self.parameters[0][1].dtype:
                raise UserError(
                    f"--sync torch_fsdp cuts parameters of one dtype along their first dimension, and {name} has "
                    f"{p.dim()} dimensions and is {p.dtype}. Choose another --sync."
                )
        self._apart = Apart(model)
        self._cut = cast(Any, self._apart.copy)  # an FSDPModule soon, which its type does not show
        group: Any = self.group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, self.device.type)
        self._units = fully_sharded(self._cut, mesh, self.options.reshard == "yes")
        self._cut.set_reduce_scatter_unused_params(self.options.find_unused_parameters)
        self.parameters = []  # FSDP has its own hooks
        return self._forward

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer step this rank's pieces."""
        pieces = dict(self._cut.named_parameters())
        piece_of = {p: pieces[name] for name, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [piece_of[p] for p in group["params"]]

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._apart.begin_forward()
        with self.ledger.naming("a layer", PARAMETERS):
            return self._cut(*inputs, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._cut.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._cut.set_requires_gradient_sync(True)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to this L2 norm at most. Return the norm that it had, over all ranks."""
        gradients = [p.grad.to_local() for p in self._cut.parameters() if p.grad is not None]
        squares = sum((torch.linalg.vector_norm(gradient).square() for gradient in gradients), torch.zeros(()))
        with self.ledger.naming("squares of the gradient", AGREEMENT):
            dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def settle(self) -> None:
        super().settle()
        if self._apart.is_whole:
            return
        with self._apart.filling(), self.ledger.naming("whole weights", WHOLE_WEIGHTS):
            for unit in self._units:  # one at a time
                unit.unshard()
                for name, parameter in self._cut.named_parameters():
                    if not hasattr(parameter, "to_local"):
                        self._apart.fill(name, parameter)
                unit.reshard()

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: a run resumes from the weights."""
        yield from ()

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's pieces of the model's weights."""
        for name, piece in self._cut.named_parameters():
            parts = self.model.get_parameter(name).chunk(self.ranks)
            if self.rank < len(parts):
                piece.to_local().copy_(parts[self.rank])

    def detach(self) -> None:
        super().detach()
        del self._cut, self._units, self._apart


def fully_sharded(module: nn.Module, mesh: Any, reshard: bool) -> list[Any]:
    """Shard every layer and then the whole with FSDP2, bottom-up. Return the FSDP modules, the root last."""
    from torch.distributed.fsdp import fully_shard

    units = [fully_shard(layer, mesh=mesh, reshard_after_forward=reshard) for layer in layers(module)]
    # Backward needs the root's first: if they were freed after forward, they would be gathered again at once.
    return [*units, fully_shard(module, mesh=mesh, reshard_after_forward=False)]


def layers(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost ModuleLists that share no parameter with anything outside."""
    users = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(part, nn.ModuleList):
                own = Counter(p for _, p in child.named_parameters(remove_duplicate=False))
                if own and all(users[p] == count for p, count in own.items()):
                    found.append(child)
            else:
                walk(child)

    walk(module)
    return found
