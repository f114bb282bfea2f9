"""What forecasts of many runs find out once: models by name, data by task, and the seconds of what was timed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from cos598d.config import RunConfig
from cos598d.data import Task
from cos598d.data.examples import Examples
from cos598d.inputs import find_source
from cos598d.models.build import ModelSource, bare_model, uses_every_parameter
from cos598d.strategies.formula import without_values

T = TypeVar("T")
OF_DATA = (
    *("task_name", "data_dir", "max_seq_length", "max_train_examples", "augment", "image_size"),
    *("train_file", "doc_stride", "max_query_length", "version_2_with_negative"),
)
OF_MODEL = ("model_type", "model_name_or_path", "config_name", "tokenizer_name", "cache_dir", "do_lower_case")


@dataclass(frozen=True)
class Work:
    """What a run computes: its task, where the data are, the training examples, the model's source and its shapes."""

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
    """What was found so far, kept for the next forecast: give the same one to all of a sweep's.

    costs_from: folders of benches that tell what calls cost; without them a short one is made. times:
    whether compute is timed, by which alone a forecast has seconds.
    """

    costs_from: tuple[Path, ...] = ()
    times: bool = True
    _found: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` gives, called for the first of equal keys alone."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def work(self, config: RunConfig) -> Work:
        """The run's work. Raises UserError for a model or data that cannot be used, as the run itself would."""
        return self.once(("work", self.work_key(config)), lambda: _find_work(config))

    def work_key(self, config: RunConfig) -> Hashable:
        """What runs of the same data and model have in common."""
        return tuple(getattr(config, name) for name in (*OF_DATA, *OF_MODEL))


def _find_work(config: RunConfig) -> Work:
    task = config.task()
    location, _ = task.locate(config.data_dir)
    task.check(location, ["train"])
    source = find_source(config, task)
    encoder = source.load_encoder()
    examples = task.load("train", location, encoder, config.max_seq_length, False, config.max_train_examples)
    return Work(task, location, examples, source, without_values(bare_model(source, task.head, task.num_labels)))
