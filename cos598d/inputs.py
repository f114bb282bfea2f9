"""The inputs of a run, found, checked and announced: its data and its model, the same on every rank."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from cos598d.comm.group import Ranks
from cos598d.config import RunConfig
from cos598d.data import Task
from cos598d.data.examples import Examples
from cos598d.errors import HubUnreachable, UsageError, UserError
from cos598d.measure.claim import TEST_PREDICTIONS
from cos598d.measure.environment import network_facts
from cos598d.measure.tensorboard import check_tensorboard
from cos598d.models.build import ModelSource, find_model
from cos598d.models.configs import check_head
from cos598d.records.conventions import BY_LEDGER
from cos598d.terminal.words import number_of

# The models of the original assignment's commands, which must also train offline.
COURSE_MODELS = ("bert-base-cased", "bert-base-uncased")


class RunInputs(NamedTuple):
    """The inputs that a run's flags name: its task, whose data were found, a phrase for where, and its model.

    loaded: the examples of some parts, by the part's name, if the launcher has loaded them for all ranks.
    """

    task: Task
    data_words: str
    source: ModelSource
    loaded: Mapping[str, Examples] = MappingProxyType({})


def find(config: RunConfig) -> RunInputs:
    """Find and check a run's data and its model. Raises UserError for whatever cannot work."""
    task, words = find_data(config)
    return RunInputs(task, words, find_source(config, task))


def find_data(config: RunConfig) -> tuple[Task, str]:
    """Find and check a run's data. Return the task and a phrase for where they are. Raises UserError."""
    network_facts()  # raises now, before training, if its settings are wrong
    if config.tensorboard:
        check_tensorboard()
    task = config.task()
    words = task.find(config.data_dir)
    return task, words


def find_source(config: RunConfig, task: Task) -> ModelSource:
    """Find a run's model for its task, or download it from the hub.

    If the hub cannot be reached, MiniLM replaces a model of COURSE_MODELS, and its description shows that. Raises
    UserError if there is no model, or if it cannot read such long texts.
    """
    name, form = config.model_name_or_path, task.image_form
    flags: dict[str, Any] = {name: getattr(config, name) for name in ("model_type", "cache_dir", "do_lower_case")}
    try:
        source = find_model(name, form, **flags)
    except HubUnreachable as error:
        if name not in COURSE_MODELS:
            raise
        try:
            source = find_model("minilm", form, **flags)
        except UserError:
            raise error from None
        source = replace(source, description=f"{source.description}, in place of {name}: no model hub can be reached")
    check_head(source.model_type, task.head)
    if source.longest_sequence and config.max_seq_length > source.longest_sequence:
        most = f"Give at most {source.longest_sequence}"
        raise UsageError(f"--max_seq_length {config.max_seq_length} is more than this model can read. {most}.")
    return source


def load_for_all(config: RunConfig, inputs: RunInputs) -> RunInputs:
    """Load the examples once, for ranks that are forked from this process. Raises UserError for unfit files."""
    parts = [*(["train"] if config.do_train else []), *(inputs.task.parts[1:] if config.do_eval else [])]
    return inputs._replace(loaded={part: _load(part, config, inputs) for part in parts})


def load_examples(part: str, config: RunConfig, inputs: RunInputs, ranks: Ranks) -> Examples:
    """One part of the task's examples. Raises UserError, the same on every rank, if the ranks' data differ."""
    examples = inputs.loaded[part] if part in inputs.loaded else _load(part, config, inputs)
    _same(ranks, examples, f"the {part} part of {inputs.task.name}")
    return examples


def _load(part: str, config: RunConfig, inputs: RunInputs) -> Examples:
    limit = config.max_train_examples if part == "train" else config.max_eval_examples
    return inputs.task.load(part, inputs.source.encoder, config.max_seq_length, limit)


def load_tests(config: RunConfig, inputs: RunInputs, ranks: Ranks) -> dict[str, Examples]:
    """The test sets for --do_predict, by the names of their predictions' files.

    Raises UserError for unfit files, and, the same on every rank, if the ranks' test sets differ.
    """
    found = inputs.task.unlabelled(inputs.source.encoder, config.max_seq_length)
    if not found:
        raise UsageError(f"--do_predict: {inputs.task.name} has no test set. Give files to `cos598d predict`.")
    for examples in found.values():
        _same(ranks, examples, f"the test set of {inputs.task.name}")
    return {TEST_PREDICTIONS.format(part=ending): examples for ending, examples in found.items()}


def _same(ranks: Ranks, examples: Examples, what: str) -> None:
    """Raise UserError, the same on every rank, unless all ranks have the same examples."""
    found = ranks.exchange([len(examples), examples.digest()])
    for rank, other in enumerate(found):
        if other != found[0]:
            counts = f"rank {rank} has {other[0]} examples and rank 0 has {found[0][0]}"
            contents = ", with other contents or another vocabulary" if other[0] == found[0][0] else ""
            raise UserError(f"{what} differs: {counts}{contents}. Give every rank the same data and model.")


def announced(config: RunConfig, inputs: RunInputs, ranks: Ranks, threads: int) -> list[str]:
    """The lines that a run prints first: the model and data, the sync, the number of ranks, and the main settings."""
    number = number_of(ranks.world_size, "rank")
    each = f"{number_of(threads, 'thread')}{' each' if ranks.world_size > 1 else ''}"
    dropout = "the model's own" if config.dropout is None else f"{config.dropout:g}"
    return [
        f"{config.label}: {inputs.task.name}, sync {config.sync}, {number} ({config.backend}, {ranks.device}, {each}); "
        f"model: {inputs.source.description}; data: {inputs.data_words}",
        f"{config.describe_batch(ranks.world_size)}; learning rate {config.learning_rate:g}, dropout {dropout}, "
        f"{config.precision}, seed {config.seed}",
    ]


def summary_facts(config: RunConfig, inputs: RunInputs, ranks: Ranks, parameters: int) -> dict[str, Any]:
    """The summary's facts that are not measurements. `parameters` is the model's number of weights."""
    named = ("label", "sync", "backend", "max_seq_length", "dropout", "precision", "seed")
    return {name: getattr(config, name) for name in named} | {
        "task": inputs.task.name,
        "world_size": ranks.world_size,
        "bytes_are_assumed": ranks.backend == "nccl",
        "bytes_from": BY_LEDGER,
        "device": ranks.device.type,
        "model": inputs.source.description,
        "data": inputs.data_words,
        **({"classes": list(inputs.task.classes)} if inputs.task.tells_classes else {}),
        "parameters": parameters,
        "total_train_batch_size": config.total_batch_size(ranks.world_size),
    }
