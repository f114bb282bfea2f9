"""Where DeepSpeed has laid weights and optimizer state: the place of each parameter's part in its flat tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.strategies.state import STEP, FullTensor, ShardSlice


@dataclass(frozen=True)
class DeepSpeedShard:
    """This rank's part of a trainable parameter: its elements from `begin`, at `offset` of a flat tensor in fp32.

    `flat` is what DeepSpeed's inner optimizer steps.
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
    """The parts of this rank's, of a model that DeepSpeed's `optimizer` of stage 1, 2 or 3 has cut."""
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
    """Let a parameter that the model computes with, cut or whole, have these values."""
    cut: Any = parameter
    if not hasattr(cut, "ds_tensor"):
        cut.data.copy_(whole)
        return
    length = cut.ds_tensor.numel()
    mine = whole.reshape(-1)[rank * length : (rank + 1) * length]
    cut.ds_tensor.detach()[: len(mine)].copy_(mine)
    if cut.ds_status.name == "AVAILABLE":  # a small one, which stays gathered
        cut.data.copy_(whole)


class FlatState:
    """What DeepSpeed's inner optimizer remembers of its flat tensors, by the model's names.

    It counts the steps of all of them together. So of a state that counts each parameter's the largest STEP is taken,
    and zeros for what was never stepped.
    """

    def __init__(self, inner: torch.optim.Optimizer, parts: list[DeepSpeedShard]):
        self._inner, self.parts = inner, {part.name: part for part in parts}
        self._flats = list({id(part.flat): part.flat for part in parts}.values())

    def pieces(self) -> Iterator[ShardSlice]:
        """What there is so far."""
        for part in self.parts.values():
            for kind, value in self._inner.state.get(part.flat, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == part.flat.shape:
                    yield ShardSlice(kind, part.name, part.shape, part.begin, part.of(value))
                elif value is not None and part.begin == 0:
                    yield ShardSlice.of_whole(kind, part.name, torch.as_tensor(value))

    def put(self, whole: FullTensor) -> None:
        """Remember this rank's part of a whole tensor, and of every STEP whether it is the largest."""
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
