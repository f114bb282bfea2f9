"""Predictions for examples without labels: `cos598d predict`, and --do_predict after a training."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data import Task
from cos598d.data.encoder import Encoder
from cos598d.data.examples import Examples
from cos598d.data.glue.task import GlueTask
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.features import build_features
from cos598d.errors import UsageError, UserError
from cos598d.evaluate import model_outputs
from cos598d.measure.claim import TEST_PREDICTIONS
from cos598d.strategies.precision import autocast
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    from cos598d.inputs import RunInputs


class Unlabelled(NamedTuple):
    """Examples without labels: their names and their features. The labels in the features mean nothing."""

    names: Sequence[str]
    features: Examples


def read_texts(rows: Iterable[tuple[str, tuple[str, ...]]], encoder: TextEncoder, max_seq_length: int) -> Unlabelled:
    """The features of named texts; each row has one text or two."""
    found = list(rows)
    examples = ((texts[0], texts[1] if len(texts) > 1 else None, {"labels": 0}) for _, texts in found)
    features = build_features(examples, encoder, max_seq_length, {"labels": np.int64})
    return Unlabelled([name for name, _ in found], features)


def read_test_sets(
    config: RunConfig, inputs: "RunInputs", encoder: Encoder, comm: Communicator
) -> dict[str, Unlabelled]:
    """The test sets for --do_predict, by the names of their files in the run's folder.

    Raises UserError for unfit files, and, the same on every rank, if the ranks' test sets differ.
    """
    sets = inputs.task.test_sets(inputs.location)
    if not sets:
        raise UsageError(
            f"--do_predict: {inputs.data_words} has no test set of {inputs.task.name}. Leave the flag out, and give "
            "files to `cos598d predict`."
        )
    assert isinstance(encoder, TextEncoder)  # RunConfig.check has made sure of this
    found = {
        TEST_PREDICTIONS.format(part=ending): read_texts(inputs.task.unlabelled(source), encoder, config.max_seq_length)
        for ending, source in sets.items()
    }
    digests = comm.exchange([one.features.digest() for one in found.values()])
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(f"the test set of rank {rank} is not rank 0's. Give every rank the same data and model.")
    return found


def predict(
    model: nn.Module, task: Task, features: Examples, config: RunConfig, comm: Communicator, batch_size: int
) -> np.ndarray:
    """The model's outputs for every example: (examples, sum of the task's output widths). Every rank calls it."""
    widths, context = task.output_widths(features), autocast(config.precision, comm.device)
    found = model_outputs(model, features, widths, comm, batch_size, context)
    assert found is not None  # nobody asks it to stop
    return found


def table(
    names: Sequence[str], outputs: np.ndarray, task: Task, with_probability: bool = True, first: str = "index"
) -> str:
    """A table of tab-separated values: each example's name, its class or score, and, if asked, the class's probability.

    `first` is the title of the first column, of names.
    """
    if not task.tells_classes:
        rows = zip(names, outputs, strict=True)
        return "".join([f"{first}\tprediction\n", *(f"{name}\t{row[0]:.3f}\n" for name, row in rows)])
    best = outputs.argmax(axis=1)
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    sure = shifted[np.arange(len(best)), best] / shifted.sum(axis=1)
    lines = [f"{first}\tprediction" + ("\tprobability" if with_probability else "")]
    for name, place, probability in zip(names, best, sure, strict=True):
        cells = [printable(name), printable(task.classes[place])]
        lines.append("\t".join([*cells, *([f"{probability:.4f}"] if with_probability else [])]))
    return "\n".join(lines) + "\n"


def predict_test_sets(
    model: nn.Module, task: Task, tests: Mapping[str, Unlabelled], config: RunConfig, comm: Communicator
) -> dict[str, str]:
    """The tables of --do_predict by file name. For GLUE they have the two columns that its benchmark accepts."""
    size, with_probability = config.per_gpu_eval_batch_size, not isinstance(task, GlueTask)
    return {
        name: table(test.names, predict(model, task, test.features, config, comm, size), task, with_probability)
        for name, test in tests.items()
    }
