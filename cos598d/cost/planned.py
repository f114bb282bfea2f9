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
from cos598d.data.sampler import MicroBatch, micro_batches
from cos598d.inputs import find_source
from cos598d.models.build import ModelSource, build_model
from cos598d.plan import Plan
from cos598d.records.conventions import WARM_UP

T = TypeVar("T")
OF_DATA = (
    *("task_name", "data_dir", "max_seq_length", "max_train_examples", "augment", "image_size"),
    *("doc_stride", "version_2_with_negative", "text_columns", "label_column"),
)
OF_MODEL = ("model_type", "model_name_or_path", "cache_dir", "do_lower_case")


@dataclass(frozen=True)
class Work:
    """What a run computes: its task, the training examples, the model's source and shapes."""

    task: Task
    examples: Examples
    source: ModelSource
    model: nn.Module


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
    task.find(config.data_dir)
    source = find_source(config, task)
    examples = task.load("train", source.encoder, config.max_seq_length, config.max_train_examples)
    with torch.device("meta"):
        model = build_model(source, task.head, task.num_labels, None, config.seed)
    return Work(task, examples, source, model)


@dataclass(frozen=True)
class PlannedSteps:
    """A run's steps on `ranks` ranks."""

    config: RunConfig
    examples: Examples
    ranks: int

    @cached_property
    def plan(self) -> Plan:
        """When each batch is computed."""
        return Plan(self.config, len(self.examples), self.ranks)

    def share(self, batch: np.ndarray, rank: int) -> list[MicroBatch]:
        """The micro-batches that a rank computes of a global batch, split as in the run."""
        return micro_batches(batch, rank, self.ranks, self.config.gradient_accumulation_steps)

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
        return sum(int(self.examples.lengths[one.indices].sum()) for one in share)
