"""What formulas are made of: a model without its values, how it is trained, and what a rank then holds and sends."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.sync.cost import Buffers, Tensor

Held = Mapping[str, int]  # bytes by category


@dataclass(frozen=True)
class MemoryEstimate:
    """What a rank should hold, in the categories of `Strategy.memory`: between two steps, and when it is most.

    None is what cannot be stated, and `unsaid` says why. A category that is missing is one that is not stated.
    """

    between_steps: Held | None = None
    peak: Held | None = None
    unsaid: str = ""

    def as_record(self) -> dict[str, Any]:
        """What a record of this rank's memory says of it."""
        return {
            "expected_between_steps": self.between_steps and dict(self.between_steps),
            "expected_peak": self.peak and dict(self.peak),
            "expected_unsaid": self.unsaid,
        }


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step by formula, as its ledger should have them; `unsaid` is why nobody can say.

    synchronizing   gradients, and weights of which ranks hold shards: `bytes_sent_per_iteration` of a record
    others          what the ranks agree on in a step
    settling        once before each evaluation, for a model that is whole and equal on every rank
    calls           of the synchronizing, how many
    gathered        of the synchronizing: weights that travel after the step, beside the next forward
    copied          bytes read and written in a step in memory that the ranks of a host share
    """

    synchronizing: int = 0
    others: int = 0
    settling: int = 0
    calls: int = 0
    unsaid: str = ""
    gathered: int = 0
    copied: int = 0


@dataclass(frozen=True)
class TrainingSpec:
    """A model, and what is done with it, as far as formulas ask.

    model      whole, as it is before a strategy has it; only shapes and dtypes are asked, so `without_values` will do
    states     how many numbers the optimizer remembers of every weight that it steps
    counters   and how many bytes beside them of every parameter, or part of one
    passes     micro-batches of a step on this rank
    clips      whether gradients are clipped by their norm
    hosts      the ranks of each host; without them all share one
    touched    the share of the rows of large embeddings that some rank looks up; None: not known before the step
    """

    model: nn.Module
    ranks: int
    rank: int
    states: int
    counters: int = 0
    passes: int = 1
    clips: bool = True
    hosts: Sequence[Sequence[int]] = ()
    touched: float | None = None

    @cached_property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that get gradients, each once, with their names."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The same as the planning of buckets knows them."""
        return [Tensor(name, tuple(p.shape), dtype_name(p.dtype), size_in_bytes(p)) for name, p in self.trainable]

    @cached_property
    def weights(self) -> int:
        """S: the bytes of what trains."""
        return sum(size_in_bytes(p) for _, p in self.trainable)

    @cached_property
    def frozen(self) -> int:
        """The bytes of the parameters that do not."""
        return sum(size_in_bytes(p) for p in self.model.parameters() if not p.requires_grad)

    def state(self, weights: int, parameters: int) -> int:
        """What the optimizer remembers of so many bytes of weights, in so many parameters."""
        return self.states * weights + self.counters * parameters


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have shapes and dtypes alone; shared ones are shared."""
    memo: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def largest(moments: Sequence[Held]) -> Held:
    """The first of those at which most is held."""
    return max(moments, key=lambda held: sum(held.values()))


def replicated_memory(job: TrainingSpec, buffers: Buffers, state: int | None = None) -> MemoryEstimate:
    """What whole replicas hold: all weights and their state (or so many bytes of it), gradients until the step is made,
    and these buffers."""
    if buffers.unsaid:
        return MemoryEstimate(unsaid=buffers.unsaid)
    state = job.state(job.weights, len(job.trainable)) if state is None else state
    states = {"parameters": job.weights + job.frozen, "optimizer": state}

    def held(gradients: int, in_buffers: int = 0) -> Held:
        """With so many bytes of gradients, of which some are views of the buffers."""
        return states | {"gradients": gradients, "buckets": buffers.bytes - in_buffers}

    # A gradient is added to the one that is there only when it is whole.
    moments = [held(job.weights + (max(t.bytes for t in job.tensors) if job.passes > 1 else 0))]
    if buffers.at_once and buffers.groups:
        moments = moments if job.passes > 2 else [held(job.weights)] if job.passes > 1 else []
        group_of = {tensor: place for place, group in enumerate(buffers.groups) for tensor in group}
        sizes = [sum(tensor.bytes for tensor in group) for group in buffers.groups]
        touched: dict[int, int] = {}
        waiting = job.weights if job.passes > 1 else 0  # of earlier passes, in their own memory
        for tensor in reversed(job.tensors):
            moments.append(held(sum(touched.values()) + waiting + tensor.bytes, sum(touched.values())))
            waiting -= tensor.bytes if job.passes > 1 else 0
            touched[group_of[tensor]] = sizes[group_of[tensor]]
        moments.append(held(sum(touched.values()), sum(touched.values())))
    return MemoryEstimate(held(0), largest(moments))
