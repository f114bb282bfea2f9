"""Weights averaged every few steps instead of gradients in every step."""

from typing import Any

import torch
from torch import nn

from cos598d.records.kinds import COUNT, FLAG, Fields, expect
from cos598d.sync.base import GradientSync
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.parts.fragments import by_dtype

OWN = Fields({"steps": COUNT, "replicas_equal": FLAG})


class LocalSGD(GradientSync):
    """Each rank trains by itself and the ranks average their weights every H steps (Stich 2019, "Local SGD").

    1. In every step each rank steps by the gradient of its own share of the global batch, clipped by its own norm.
    2. After every H-th step (`--sync_every H`), and before the model is evaluated or saved, all ranks average their
       weights, in one buffer, by a ring all-reduce. Each rank keeps its own optimizer state; a run that resumes with
       other ranks, or with another sync, uses rank 0's.
    3. Under fp16 the ranks agree in every step on whether any of them overflowed, by an all-reduce of 4 bytes. They
       skip the same steps, so loss scales and learning rates stay equal.

    Parity: with H = 1, plain SGD and no clipping, the weights are those of averaged gradients, up to rounding. With
    Adam, clipping or H > 1 they are not. It is another algorithm then: compare its loss, not its weights.

    Cost for weights of S bytes: 1 call every H steps; every rank sends and receives 2(n-1)/n S / H per step on average.
    Choose it if links are so slow that a step must not wait for them.
    """

    uses: tuple[str, ...] = ("sync_every",)
    averages_weights = keeps_nothing = takes_sparse = True
    exact = False
    not_modelled = "it does not average gradients in every step"
    claims = ("starts_from_rank_0", "refuses_different_models")

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self._steps = 0
        self.replicas_equal = True  # until the first step, and after each average until the next step
        return module

    def finish(self) -> None:
        """Nothing is sent: each rank trains by itself until the next average."""

    def after_step(self) -> None:
        self._steps += 1
        self.replicas_equal = False
        if self._steps % self.options.sync_every == 0:
            self._average_weights()

    def agree_on_finite(self, is_finite: bool) -> bool:
        return self.all_finite(is_finite)

    def settle(self) -> None:
        if not self.replicas_equal:
            self._average_weights()
        super().settle()

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {"steps": self._steps, "replicas_equal": self.replicas_equal}, {}

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        expect(facts, OWN)
        self._steps, self.replicas_equal = facts["steps"], facts["replicas_equal"]

    @property
    def own_is_lost(self) -> str | None:
        if self.comm.world_size == 1:
            return None
        return (
            "each rank's own weights since the last average, and its optimizer's state (training continues from the "
            "average, with rank 0's optimizer)"
        )

    @classmethod
    def averages(cls, step: Step) -> list[CollectiveCall]:
        return [CollectiveCall(ALL_REDUCE, tensors) for tensors in by_dtype(step.tensors)]

    def _average_weights(self) -> None:
        self.replicas_equal = True
        for dtype in dict.fromkeys(p.dtype for _, p in self.parameters):
            weights = [p.data for _, p in self.parameters if p.dtype == dtype]
            flat = torch.cat([weight.flatten() for weight in weights])
            self.comm.all_reduce(flat, f"weights of {str(dtype)[6:]}")
            flat /= self.comm.world_size
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.copy_(part.view_as(weight))
