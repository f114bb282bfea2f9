"""The steps of a run before it is run: its plan, and each rank's share of a global batch."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.data.sampler import EXTRA_PASS_TOKENS, MicroBatch, micro_batches
from cos598d.models.padding import cuts_by_length, leaves_out_padding
from cos598d.plan import Plan
from cos598d.records.conventions import WARM_UP


@dataclass(frozen=True)
class PlannedSteps:
    """A run's steps on so many ranks. `equal_passes` is the strategy's, `model` as the run builds it."""

    config: RunConfig
    examples: Examples
    ranks: int
    equal_passes: bool
    model: nn.Module

    @cached_property
    def plan(self) -> Plan:
        """When which batch is computed."""
        return Plan(self.config, len(self.examples), self.ranks)

    def share(self, batch: np.ndarray, rank: int) -> list[MicroBatch]:
        """What a rank computes of a global batch, as the run cuts it."""
        return micro_batches(
            batch,
            self.examples.lengths,
            rank,
            self.ranks,
            self.config.gradient_accumulation_steps,
            group_by_length=cuts_by_length(self.model, self._is_on_cpu),
            equal_passes=self.equal_passes,
        )

    @property
    def _is_on_cpu(self) -> bool:
        return self.config.no_cuda or not torch.cuda.is_available()

    def first(self, count: int) -> list[np.ndarray]:
        """The first global batches."""
        return [batch for _, batch in itertools.islice(self.plan.batches(after=0), count)]

    def passes(self, rank: int) -> int:
        """A rank's micro-batches in the step whose memory a record has counted."""
        return len(self.share(self._counted_batch, rank))

    @cached_property
    def _counted_batch(self) -> np.ndarray:
        """Found once for all ranks: it takes an epoch's permutation."""
        return self.first(min(WARM_UP, self.plan.steps))[-1]

    def evaluations_per_epoch(self) -> int:
        """How often the model is made whole in an epoch."""
        often = self.config.eval_steps
        return max(1, self.plan.epoch_steps // often if often else 1)

    def costs(self, batches: Sequence[np.ndarray]) -> Iterator[float]:
        """What each batch costs the rank that has most of it, in tokens."""
        for batch in batches:
            yield max(self._cost(self.share(batch, rank)) for rank in range(self.ranks))

    def _cost(self, share: Sequence[MicroBatch]) -> float:
        without_padding = self._is_on_cpu and leaves_out_padding(self.model)

        def tokens(lengths: np.ndarray) -> int:
            return int(lengths.sum()) if without_padding else len(lengths) * int(lengths.max())

        return sum(tokens(self.examples.lengths[one.indices]) + EXTRA_PASS_TOKENS for one in share)
