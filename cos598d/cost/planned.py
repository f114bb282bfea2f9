"""A run that has not started: its data and model, its steps, and what several forecasts share."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.data import Task
from cos598d.data.examples import Examples
from cos598d.data.sampler import EXTRA_PASS_TOKENS, MicroBatch, micro_batches
from cos598d.inputs import find_source
from cos598d.models.build import ModelSource, bare_model, uses_every_parameter
from cos598d.models.padding import cuts_by_length, leaves_out_padding
from cos598d.plan import Plan
from cos598d.records.conventions import WARM_UP
from cos598d.strategies.formula import without_values

T = TypeVar("T")
OF_DATA = (
    *("task_name", "data_dir", "max_seq_length", "max_train_examples", "augment", "image_size"),
    *("train_file", "doc_stride", "max_query_length", "version_2_with_negative"),
)
OF_MODEL = ("model_type", "model_name_or_path", "config_name", "tokenizer_name", "cache_dir", "do_lower_case")


@dataclass(frozen=True)
class Work:
    """What a run computes: its task, the location of its data, the training examples, the model's source and shapes."""

    task: Task
    location: Any
    examples: Examples
    source: ModelSource
    model: nn.Module

    @property
    def may_be_unused(self) -> bool:
        """Whether a step may leave a parameter without a gradient."""
        return not uses_every_parameter(self.source.model_type, self.task.head)


@dataclass
class Known:
    """A cache of what was found so far, for the next forecast: use the same one for all of a sweep's.

    costs_from: folders of benches from which calls' costs are fitted; without them a short one is run. times: whether
    compute is timed, without which a forecast has no seconds.
    """

    costs_from: tuple[Path, ...] = ()
    times: bool = True
    _found: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """The result of `find`, which is called only for the first of equal keys."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def work(self, config: RunConfig) -> Work:
        """The run's work. Raises UserError for a model or data that cannot be used, as the run would."""
        return self.once(("work", self.work_key(config)), lambda: _find_work(config))

    def work_key(self, config: RunConfig) -> Hashable:
        """A key that is equal for runs with the same data and model."""
        return tuple(getattr(config, name) for name in (*OF_DATA, *OF_MODEL))


def _find_work(config: RunConfig) -> Work:
    task = config.task()
    location, _ = task.locate(config.data_dir)
    task.check(location, ["train"])
    source = find_source(config, task)
    encoder = source.load_encoder()
    examples = task.load("train", location, encoder, config.max_seq_length, False, config.max_train_examples)
    return Work(task, location, examples, source, without_values(bare_model(source, task.head, task.num_labels)))


@dataclass(frozen=True)
class PlannedSteps:
    """A run's steps on `ranks` ranks. `equal_passes` is the strategy's, `model` as the run builds it."""

    config: RunConfig
    examples: Examples
    ranks: int
    equal_passes: bool
    model: nn.Module

    @cached_property
    def plan(self) -> Plan:
        """When each batch is computed."""
        return Plan(self.config, len(self.examples), self.ranks)

    def share(self, batch: np.ndarray, rank: int) -> list[MicroBatch]:
        """The micro-batches that a rank computes of a global batch, split as in the run."""
        return micro_batches(
            batch,
            self.examples.lengths,
            rank,
            self.ranks,
            self.config.gradient_accumulation_steps,
            group_by_length=cuts_by_length(self.model, self.is_on_cpu),
            equal_passes=self.equal_passes,
        )

    @property
    def is_on_cpu(self) -> bool:
        return self.config.no_cuda or not torch.cuda.is_available()

    def first(self, count: int) -> list[np.ndarray]:
        """The first `count` global batches."""
        return [batch for _, batch in itertools.islice(self.plan.batches(after=0), count)]

    def passes(self, rank: int) -> int:
        """A rank's micro-batches in the step whose memory a record has counted."""
        return len(self.share(self._counted_batch, rank))

    @cached_property
    def _counted_batch(self) -> np.ndarray:
        """Cached for all ranks: it takes an epoch's permutation."""
        return self.first(min(WARM_UP, self.plan.steps))[-1]

    def largest_pass(self, ranks: Sequence[int]) -> MicroBatch:
        """The micro-batch of that step that costs most, of those of these ranks."""
        passes = [one for rank in ranks for one in self.share(self._counted_batch, rank)]
        return max(passes, key=lambda one: self._cost([one]))

    def evaluations_per_epoch(self) -> int:
        """How often per epoch the model is made whole."""
        often = self.config.eval_steps
        return max(1, self.plan.epoch_steps // often if often else 1)

    def costs(self, batches: Sequence[np.ndarray]) -> Iterator[float]:
        """Each batch's cost, in tokens, for the rank with most of them."""
        for batch in batches:
            yield max(self._cost(self.share(batch, rank)) for rank in range(self.ranks))

    def _cost(self, share: Sequence[MicroBatch]) -> float:
        without_padding = self.is_on_cpu and leaves_out_padding(self.model)

        def tokens(lengths: np.ndarray) -> int:
            return int(lengths.sum()) if without_padding else len(lengths) * int(lengths.max())

        return sum(tokens(self.examples.lengths[one.indices]) + EXTRA_PASS_TOKENS for one in share)
