"""`cos598d predict`: predict with a run's model, for texts, questions or images without labels."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cos598d.commands.flags import add_flags, check_at_least_one, check_output_file, given_flags
from cos598d.commands.replay import read_config
from cos598d.commands.run_flags import RankFlags, on_ranks
from cos598d.config import RunConfig, config_from
from cos598d.data import Task
from cos598d.data.encoders import ImageEncoder, TextEncoder
from cos598d.data.examples import Examples, Images
from cos598d.data.images import decode
from cos598d.data.squad import Question, build_windows, read_questions
from cos598d.data.squad import predict as answers_of
from cos598d.data.tables import GLUE, TableTask
from cos598d.data.task import Row, TextTask, predictions_table
from cos598d.errors import UsageError, UserError
from cos598d.evaluate import Evaluation
from cos598d.models.build import ModelSource, build_model, find_model
from cos598d.rank import RankProcess, init_rank
from cos598d.records.conventions import CONFIG_FILE, MODEL, SUMMARY
from cos598d.records.schema import Summary, read
from cos598d.terminal.files import json_text, write_whole
from cos598d.terminal.own_code import is_own
from cos598d.terminal.printable import printable
from cos598d.world.identity import Identity


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("trained", type=Path, metavar="RUN", help="folder of a finished run that saved its model")
    add = parser.add_argument_group("what to predict").add_argument
    words = "GLUE's test.tsv, a SQuAD file, or your texts; a task of your own gets it as data_dir"
    add("--file", type=Path, metavar="FILE", help=words)
    add("--text", nargs="+", metavar="TEXT", help="one text, or the two of a pair")
    add("--question", metavar="TEXT", help="a question about --context (SQuAD)")
    add("--context", metavar="TEXT", help="the text with the answer")
    add("--image", nargs="+", metavar="FILE", help="image files")
    words = "the run's task, if it is your own; its code is then executed"
    add("--task_name", metavar="FILE.py:CLASS", help=words)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file (default: print)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="examples per forward pass (default: 8)")
    add_flags(parser, RankFlags)


def run(options: argparse.Namespace) -> int:
    """Print the predictions, or write them to --output; return the exit code. Starts the ranks, or is one of them.

    Raises UserError for what cannot be predicted.
    """
    ways = [options.file, options.text, options.question, options.image]
    if sum(way is not None for way in ways) != 1:
        raise UsageError("predict needs something to predict. Give exactly one of --file, --text, --question, --image.")
    if (options.question is None) != (options.context is None):
        raise UsageError("--question and --context belong together. Give both.")
    check_at_least_one("--batch", options.batch)
    check_output_file("--output", options.output)
    return on_ranks(RankFlags(**given_flags(options, RankFlags)), partial(_predict, options))


def _predict(options: argparse.Namespace, identity: Identity) -> int:
    """Be one rank; rank 0 prints or writes the predictions. Return the exit code."""
    with RankProcess(identity) as process:
        trained = _trained(options)
        config, task, asked = trained.config, trained.task, _asked(trained, options)
        meeting = process.meet(config.timeout, config.facts() | {"file": asked.features.digest()})
        ranks = init_rank(meeting, "auto", config.no_cuda, config.threads).ranks
        model = build_model(trained.source, task.head, task.num_labels, 0.0, config.seed).to(ranks.device)
        outputs = Evaluation(task, {}, model, ranks, options.batch, config.precision).outputs(asked.features)
        assert outputs is not None  # nobody asks it to stop
        if ranks.rank == 0 and options.output is None:
            print(asked.in_words(outputs), end="")
        elif ranks.rank == 0:
            write_whole(options.output, asked.in_words(outputs))
    return process.exit_code


class _Asked(NamedTuple):
    """Examples without labels, and the function that prints the model's outputs for them."""

    features: Examples
    in_words: Callable[[np.ndarray], str]


class _Trained(NamedTuple):
    """A run's config, its task with the classes, and its model with the encoder of its inputs."""

    config: RunConfig
    task: Task
    source: ModelSource


def _trained(options: argparse.Namespace) -> _Trained:
    """A finished run. Raises UserError if the folder is no run, has no model, or needs code that was not named."""
    folder = options.trained
    if not (folder / SUMMARY).is_file():
        raise UserError(f"{folder} has no {SUMMARY}. Give the folder of a finished run.")
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder} has no model. Train again without --no_save_model.")
    values, summary = read_config(folder / CONFIG_FILE), read(folder / SUMMARY, Summary)
    asked = values["task_name"]
    if is_own(asked) and options.task_name is None:
        raise UsageError(f"the task of {folder} is code in a file, {asked}. Add --task_name {asked} to run that code.")
    if options.task_name is not None and not is_own(asked):
        raise UsageError(f"--task_name is for a task of your own, and the task of {folder} is {asked}. Leave it out.")
    config = config_from(values | {"task_name": options.task_name or asked})
    task, classes = config.task(), tuple(summary.classes or ())
    if is_own(asked) and task.classes != classes:
        known = f"the classes {printable(', '.join(classes), 100)}" if classes else "numbers"
        raise UserError(
            f"{folder} was trained on {known}, and --task_name {options.task_name} has others. Give its own."
        )
    task.classes = task.classes or classes
    return _Trained(config, task, find_model(str(folder / MODEL), task.image_form))


def _asked(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """What to predict. Raises UserError for inputs that the run's task does not read."""
    ways = {
        "sequence_classification": ("--file or --text", options.file or options.text, _texts),
        "question_answering": ("--file, or --question and --context", options.file or options.question, _questions),
        "image_classification": ("--image", options.image, _images),
    }
    words, given, ask = ways[trained.task.head]
    if given is None:
        raise UsageError(f"{options.trained} is a run of {trained.task.name}. Give {words}.")
    return ask(trained, options)


def _texts(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """A table of tab-separated values: the example's index, its class or score, and the class's probability."""
    task, encoder, most = trained.task, trained.source.encoder, trained.config.max_seq_length
    assert isinstance(task, TextTask)  # its head implies it
    if options.text:
        counts = (1, 2) if task.texts is None else (task.texts,)
        if len(options.text) not in counts:
            known = {1: "a single text", 2: "a pair of texts"}
            wanted = " or ".join(known[count] for count in counts)
            raise UsageError(f"--text: an example of {task.name} is {wanted}. Give that, each text in quotes.")
        first, *others = options.text
        rows: Sequence[Row] = [(first, others[0] if others else None, "")]
    elif isinstance(task, TableTask):
        rows = task.rows(task.tests[""], options.file)
    else:
        task.find(str(options.file))
        rows = task.rows("test")
    features, names = task.encoded(rows, encoder, most), [str(number) for number in range(len(rows))]
    with_probability = bool(options.text) or task.name not in GLUE
    return _Asked(features, lambda outputs: predictions_table(task, names, outputs, with_probability))


def _images(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """A table of tab-separated values: the file, its class, and the class's probability."""
    encoder = trained.source.encoder
    assert isinstance(encoder, ImageEncoder)  # the task's head implies it
    images = Images(decode([Path(name) for name in options.image], encoder), np.zeros(len(options.image)), encoder)
    return _Asked(images, lambda outputs: predictions_table(trained.task, options.image, outputs, first="file"))


def _questions(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """The answer to --question as a line, or those of a file by id, as SQuAD's scorer reads them."""
    config, encoder = trained.config, trained.source.encoder
    assert isinstance(encoder, TextEncoder)  # the task's head implies it
    if options.file is not None:
        asked = read_questions(options.file)
    elif not options.context.strip() or not options.question.strip():
        raise UsageError("--question or --context is empty. Give a text for each.")
    else:
        asked = [Question("0", options.question, options.context, ())]
    windows = build_windows(asked, encoder, config.max_seq_length, config.doc_stride)

    def in_words(outputs: np.ndarray) -> str:
        with_impossible = config.version_2_with_negative
        texts, _ = answers_of(asked, windows, outputs, with_impossible, config.null_score_diff_threshold)
        return json_text(texts) if options.file is not None else f"{printable(texts['0']) or '(no answer)'}\n"

    return _Asked(windows, in_words)
