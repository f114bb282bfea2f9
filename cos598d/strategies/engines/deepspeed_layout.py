"""How DeepSpeed lays out weights and optimizer state, its settings, and the memory of a rank by formula."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.strategies.formula import MemoryBytes, MemoryEstimate, TrainingSpec
from cos598d.strategies.optimizers import decayed_and_plain
from cos598d.strategies.state import STEP, FullTensor, OptimizerState, ShardSlice

SMALL = 100_000  # elements: stage 3 leaves parameters up to this size whole, as DeepSpeed's own default does
UNSAID = "DeepSpeed copies gradients during reduction by its own rules, so there is no formula for the peak"


def sizes(model: nn.Module, bucket_mb: float) -> dict[str, int]:
    """DeepSpeed's settings for this model, in elements; its defaults are for models of billions of elements.

    By default a bucket has 5e8 elements, and a model of fewer than 1e9 stays whole during the whole step.
    """
    elements = sum(p.numel() for p in model.parameters())
    bucket = max(1, min(elements, int(bucket_mb * (1 << 20)) // 4))
    return {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        # Weights that are needed again within this many elements are not freed, as between forward and backward.
        "stage3_max_reuse_distance": bucket,
        "stage3_param_persistence_threshold": SMALL,
        # The most elements that stay whole in total: without this, all of a small model would.
        "stage3_model_persistence_threshold": elements // 100,
    }


def held_by_deepspeed(job: TrainingSpec, stage: int, settings: Mapping[str, int]) -> MemoryEstimate:
    """Memory between two steps for float32 weights with these `sizes`, by stage:

    0      all weights and their state
    1, 2   the weights of each of the optimizer's groups, padded to a multiple of 2n elements; a stepped copy of one
           n-th of these, and its state
    3      one n-th of each parameter, padded to a multiple of n elements, and as much for its gradient; its state; the
           parameters that stay whole, with the same padding; one bucket
    """
    if stage == 0:
        state = job.state(job.weights, len(job.trainable))
        return _expected(job.weights + job.frozen, state)
    groups = [group for group in decayed_and_plain(job.trainable) if group]
    if stage < 3:
        flat = sum(4 * _up(sum(p.numel() for p in group), 2 * job.ranks) for group in groups)
        part = flat // job.ranks
        return _expected(flat + job.frozen, part + job.state(part, len(groups)))
    parts = {p: 4 * _up(p.numel(), job.ranks) // job.ranks for p in job.model.parameters()}
    own = sum(parts[p] for _, p in job.trainable)
    parameters = sum(parts.values()) + sum(job.ranks * parts[p] for p in _persistent(job.model, settings))
    bucket = 4 * settings["reduce_bucket_size"]
    return _expected(parameters, job.state(own, len(groups)), gradients=own, buckets=bucket)


def _expected(parameters: int, optimizer: int, gradients: int = 0, buckets: int = 0) -> MemoryEstimate:
    held: MemoryBytes = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "buckets": buckets}
    return MemoryEstimate(between_steps=held, unsaid=UNSAID)


def _persistent(model: nn.Module, settings: Mapping[str, int]) -> list[nn.Parameter]:
    """The parameters that stage 3 leaves whole: small ones, in order, as long as they fit into the total limit."""
    found: list[nn.Parameter] = []
    room = settings["stage3_model_persistence_threshold"]
    for p in model.parameters():
        if p.numel() <= min(room, settings["stage3_param_persistence_threshold"]):
            found.append(p)
            room -= p.numel()
    return found


def _up(elements: int, unit: int) -> int:
    """`elements` rounded up to a multiple of `unit`."""
    return -(-elements // unit) * unit


@dataclass(frozen=True)
class DeepSpeedShard:
    """This rank's part of a trainable parameter: its elements from `begin`, at `offset` in a flat fp32 tensor.

    DeepSpeed's inner optimizer steps `flat`.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    elements: int
    flat: torch.Tensor
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of a flat tensor."""
        return flat.detach().narrow(0, self.offset, self.elements)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a whole tensor."""
        return whole.reshape(-1)[self.begin : self.begin + self.elements]


def fragments(model: nn.Module, optimizer: Any, stage: int, rank: int) -> list[DeepSpeedShard]:
    """This rank's parts of a model that DeepSpeed's `optimizer` of stage 1, 2 or 3 has sharded."""
    found = _of_stage_3(model, optimizer, rank) if stage == 3 else _of_stages_1_and_2(model, optimizer)
    return [fragment for fragment in found if fragment.elements > 0]


def _of_stages_1_and_2(model: nn.Module, optimizer: Any) -> Iterator[DeepSpeedShard]:
    for name, parameter in model.named_parameters():
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            yield DeepSpeedShard(name, tuple(parameter.shape), here.start, here.numel, flat, there.start)


def _of_stage_3(model: nn.Module, optimizer: Any, rank: int) -> Iterator[DeepSpeedShard]:
    for name, parameter in model.named_parameters():
        cut: Any = parameter
        if parameter.requires_grad:
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            elements = min(length, cut.ds_numel - rank * length)  # the last part is padded
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield DeepSpeedShard(name, tuple(cut.ds_shape), rank * length, elements, flat, offset)


def put_weights(parameter: nn.Parameter, rank: int, whole: torch.Tensor) -> None:
    """Set a parameter that the model computes with, sharded or whole, to these values."""
    cut: Any = parameter
    if not hasattr(cut, "ds_tensor"):
        cut.data.copy_(whole)
        return
    length = cut.ds_tensor.numel()
    mine = whole.reshape(-1)[rank * length : (rank + 1) * length]
    cut.ds_tensor.detach()[: len(mine)].copy_(mine)
    if cut.ds_status.name == "AVAILABLE":  # a small parameter, which stays gathered
        cut.data.copy_(whole)


class FlatState(OptimizerState):
    """The state of DeepSpeed's inner optimizer for its flat tensors, under the model's names.

    It has one step count for all of them. From a state with a count per parameter it takes the largest STEP. Parameters
    that were never stepped get zeros.
    """

    def __init__(self, inner: torch.optim.Optimizer, parts: list[DeepSpeedShard]):
        self._inner, self.parts = inner, {part.name: part for part in parts}
        self._flats = list({id(part.flat): part.flat for part in parts}.values())

    def pieces(self) -> Iterator[ShardSlice]:
        """The pieces that exist so far."""
        for part in self.parts.values():
            for kind, value in self._inner.state.get(part.flat, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == part.flat.shape:
                    yield ShardSlice(kind, part.name, part.shape, part.begin, part.of(value))
                elif value is not None and part.begin == 0:
                    yield ShardSlice.of_whole(kind, part.name, torch.as_tensor(value))

    def put(self, whole: FullTensor) -> None:
        """Load this rank's part of a whole tensor. Of several values of STEP, keep the largest."""
        if whole.kind == STEP:
            for flat in self._flats:
                state, step = self._inner.state[flat], whole.tensor.to(flat.device, copy=True)
                state[STEP] = torch.maximum(step, state[STEP]) if STEP in state else step
            return
        part = self.parts.get(whole.name)
        if part is None:
            return
        state = self._inner.state[part.flat]
        if whole.kind not in state:
            state[whole.kind] = torch.zeros_like(part.flat, requires_grad=False)
        part.of(state[whole.kind]).copy_(part.part_of(whole.tensor))
