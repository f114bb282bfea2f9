"""What a rank holds and sends, by formula: the parts of all formulas, and the formulas for whole replicas."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from cos598d.comm.gloo import all_reduce_bytes, broadcast_bytes
from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.strategies.activations import Moment
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import in_code
from cos598d.sync.cost import CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.options import DEFAULTS

MemoryBytes = Mapping[str, int]  # by category


@dataclass(frozen=True)
class MemoryEstimate:
    """What a rank should hold, in the categories of `Strategy.memory`: between two steps, and at the peak.

    A value is None if it has no formula; `unsaid` gives the reason. A missing category has no formula.
    """

    between_steps: MemoryBytes | None = None
    peak: MemoryBytes | None = None
    unsaid: str = ""

    def with_activations(self, moments: Sequence[Moment], passes: int) -> "MemoryEstimate":
        """With what a pass holds at the peak: `moments` of the largest of a step's so many passes, none if not known.

        Within a pass this estimate's bytes are taken to grow with the gradients. Later passes begin with all of them.
        """
        if not (self.between_steps and self.peak and moments):
            return self
        between, peak = self.between_steps, self.peak

        def held(moment: Moment) -> MemoryBytes:
            share = moment.share if passes == 1 else 1.0
            grown = {name: round(size + share * (peak.get(name, size) - size)) for name, size in between.items()}
            return grown | {"activations": moment.activations}

        return replace(self, peak=largest([held(moment) for moment in moments]))

    def as_record(self) -> dict[str, Any]:
        """The fields for the record of this rank's memory."""
        return {
            "expected_between_steps": self.between_steps and dict(self.between_steps),
            "expected_peak": self.peak and dict(self.peak),
            "expected_unsaid": self.unsaid,
        }


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes that a rank sends per step by formula, as its ledger should have them; `unsaid`: why there is no formula.

    synchronizing   gradients, and weights that ranks hold in shards: a record's `bytes_sent_per_iteration`
    others          bytes by which ranks agree on something in a step
    settling        once before each evaluation, for a model that is complete and equal on every rank
    calls           the number of calls in synchronizing
    gathered        the part of synchronizing that is weights sent after the step, during the next forward
    copied          bytes read and written per step in memory that the ranks of a host share
    more            why a step may send more than this, as a phrase; "" if the bytes are exact
    """

    synchronizing: int = 0
    others: int = 0
    settling: int = 0
    calls: int = 0
    unsaid: str = ""
    gathered: int = 0
    copied: int = 0
    more: str = ""


@dataclass(frozen=True)
class TrainingSpec:
    """A model and the settings of its training that formulas need.

    model      complete, as before a strategy takes it; only shapes and dtypes count, so `without_values` will do
    states     how many numbers the optimizer keeps per weight that it steps
    counters   how many bytes it keeps in addition per parameter, or per part of one
    passes     micro-batches of a step on this rank
    clips      whether gradients are clipped by their norm
    hosts      the ranks of each host; by default all share one
    touched    the share of large embeddings' rows that some rank looks up; None: not known before the step
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
        """The (name, parameter) pairs that get gradients, each parameter once."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The same as Tensors, the form in which buckets are planned."""
        return [Tensor(name, tuple(p.shape), dtype_name(p.dtype), size_in_bytes(p)) for name, p in self.trainable]

    @cached_property
    def weights(self) -> int:
        """S: the bytes of the trainable parameters."""
        return sum(size_in_bytes(p) for _, p in self.trainable)

    @cached_property
    def frozen(self) -> int:
        """The bytes of the frozen parameters."""
        return sum(size_in_bytes(p) for p in self.model.parameters() if not p.requires_grad)

    def state(self, weights: int, parameters: int) -> int:
        """The bytes of optimizer state for this many bytes of weights in this many parameters."""
        return self.states * weights + self.counters * parameters


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have only shapes and dtypes. Tied ones stay tied."""
    memo: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def largest(moments: Sequence[MemoryBytes]) -> MemoryBytes:
    """The moment with the most bytes; the first of several."""
    return max(moments, key=lambda held: sum(held.values()))


def replicated_memory(job: TrainingSpec, buffers: Buffers, state: int | None = None) -> MemoryEstimate:
    """What whole replicas hold: all weights, their optimizer state (or `state` bytes of it), gradients until the step,
    and these buffers."""
    if buffers.unsaid:
        return MemoryEstimate(unsaid=buffers.unsaid)
    state = job.state(job.weights, len(job.trainable)) if state is None else state
    states = {"parameters": job.weights + job.frozen, "optimizer": state}

    def held(gradients: int, in_buffers: int = 0) -> MemoryBytes:
        """With this many bytes of gradients, of which some are views of the buffers."""
        return states | {"gradients": gradients, "buckets": buffers.bytes - in_buffers}

    # A gradient is added to the existing one only once it is complete.
    moments = [held(job.weights + (max(t.bytes for t in job.tensors) if job.passes > 1 else 0))]
    if buffers.at_once and buffers.groups:
        moments = moments if job.passes > 2 else [held(job.weights)] if job.passes > 1 else []
        group_of = {tensor: place for place, group in enumerate(buffers.groups) for tensor in group}
        sizes = [sum(tensor.bytes for tensor in group) for group in buffers.groups]
        touched: dict[int, int] = {}
        waiting = job.weights if job.passes > 1 else 0  # of earlier passes, in memory of their own
        for tensor in reversed(job.tensors):
            moments.append(held(sum(touched.values()) + waiting + tensor.bytes, sum(touched.values())))
            waiting -= tensor.bytes if job.passes > 1 else 0
            touched[group_of[tensor]] = sizes[group_of[tensor]]
        moments.append(held(sum(touched.values()), sum(touched.values())))
    return MemoryEstimate(held(0), largest(moments))


def sent_by_replicas(job: TrainingSpec, sync: GradientSync, precision: str = "fp32") -> TrafficEstimate:
    """What whole replicas send that average by `sync`, which need not be attached."""
    if job.ranks == 1:
        return TrafficEstimate()
    options = getattr(sync, "options", DEFAULTS)  # your own class need not have them
    step = Step(job.tensors, options, job.hosts or [range(job.ranks)], job.tensors[::-1])
    travels = sync.calls(step) or _calls_whatever_is_touched(sync, step)
    if travels is None and sync.averages_weights:
        return _sent_by_averages(job, sync, step, precision)
    if travels is None or sync.changes_calls(options):
        return TrafficEstimate(unsaid=_bounds(sync, step, job))
    moved = [bytes_sent for travel in travels for bytes_sent in sent_in_call(travel, job, sync.codec_of_calls(options))]
    if not travels:  # replicas that drift apart do not settle
        return TrafficEstimate()
    agreed = agreement(job) if getattr(sync, "find_unused_parameters", True) else 0
    buffers = settled(job) if sync.sends_buffers else 0
    return TrafficEstimate(sum(moved), agreed + buffers, settled(job), len(moved))


def _sent_by_averages(job: TrainingSpec, sync: GradientSync, step: Step, precision: str) -> TrafficEstimate:
    """For a sync that averages weights: the mean over the steps in which each weight is averaged once."""
    steps, word = sync.round_steps(step.options), sync.codec_of_calls(step.options)
    sent = sum(each for travel in sync.averages(step) for each in sent_in_call(travel, job, word))
    overflows = all_reduce_bytes(4, job.ranks) if precision == "fp16" else 0
    rest = all_reduce_bytes(job.weights, job.ranks) if steps > 1 else 0
    return TrafficEstimate(round(sent / steps), overflows, rest + settled(job), calls=1)


def _calls_whatever_is_touched(sync: GradientSync, step: Step) -> list[CollectiveCall] | None:
    """The calls of a step; None if they include a large embedding of which only some rows would be sent."""
    none, every = (sync.calls(replace(step, touched=share)) for share in (0.0, 1.0))
    return every if none == every else None


def _bounds(sync: GradientSync, step: Step, job: TrainingSpec) -> str:
    """Why a sync's bytes are not known, as a phrase, with the least and the most if the rows of a batch decide."""
    both = [sync.calls(replace(step, touched=share)) for share in (0.0, 1.0)]
    word = sync.codec_of_calls(step.options) if any(both) else None
    least, most = (sum(sum(sent_in_call(one, job, word)) for one in calls or ()) for calls in both)
    if least == most:
        return "this sync's calls are known only after a step"
    return f"it depends on how many embedding rows the batch uses ({least:,} bytes for none, {most:,} for all)"


def agreement(job: TrainingSpec) -> int:
    """The bytes to agree on which parameters any rank has used: an all-reduce of 4 bytes per parameter."""
    return all_reduce_bytes(4 * len(job.trainable), job.ranks)


def settled(job: TrainingSpec) -> int:
    """The bytes to give all ranks rank 0's buffers."""
    return broadcast_bytes(sum(map(size_in_bytes, job.model.buffers())), job.ranks, job.rank)[0]


def sent_in_call(travel: CollectiveCall, job: TrainingSpec, word: str | None) -> list[int]:
    """The bytes that `job.rank` sends in one call, or in each of the calls that the codec `word` makes of it."""
    members = range(job.ranks) if travel.members is None else travel.members
    if word is None or len(members) < 2 or job.rank not in members:
        return [travel.moved(job.ranks, job.rank)[0]]
    place = members.index(job.rank)
    return [payload.moved(len(members), place)[0] for payload in in_code(travel, word, len(members))]
