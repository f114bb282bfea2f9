"""`cos598d predict`: predict with a run's model, for texts, questions or images without labels."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cos598d.commands.flags import add_flags, check_output_file, given_flags
from cos598d.commands.run_flags import RankFlags, identity_from
from cos598d.commands.start import exit_code_of
from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    import numpy as np

    from cos598d.config import RunConfig
    from cos598d.data import Task
    from cos598d.data.examples import Examples
    from cos598d.data.task import Row
    from cos598d.models.build import ModelSource
    from cos598d.world.identity import Identity


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("trained", type=Path, metavar="RUN", help="folder of a finished run that saved its model")
    what = parser.add_argument_group("what to predict")
    what.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="GLUE's test.tsv, a SQuAD file, or your texts; a task of your own gets it as data_dir",
    )
    what.add_argument("--text", nargs="+", metavar="TEXT", help="one text, or the two of a pair")
    what.add_argument("--question", metavar="TEXT", help="a question about --context (SQuAD)")
    what.add_argument("--context", metavar="TEXT", help="the text with the answer")
    what.add_argument("--image", nargs="+", metavar="FILE", help="image files")
    what.add_argument(
        "--task_name", metavar="FILE.py:CLASS", help="the run's task, if it is your own; its code is then executed"
    )
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
    if options.batch < 1:
        raise UsageError(f"--batch {options.batch} is too small. Give 1 or more.")
    check_output_file("--output", options.output)
    ranks = RankFlags(**given_flags(options, RankFlags))
    identity = identity_from(ranks)
    if identity is not None:
        return _predict(options, identity)
    from cos598d.world.launch import start_local_workers

    assert ranks.world_size is not None  # ranks that are to be started here have a number
    be_rank = partial(
        exit_code_of,
        partial(_be_rank, argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "run"}), ranks),
    )
    return start_local_workers(ranks.world_size, ranks.master_port, be_rank)


def _be_rank(options: argparse.Namespace, ranks: RankFlags) -> int:
    """In a process that was started here: be the rank that its environment names."""
    identity = identity_from(ranks)
    assert identity is not None  # it is in the environment
    return _predict(options, identity)


def _predict(options: argparse.Namespace, identity: "Identity") -> int:
    """Be one rank; rank 0 prints or writes the predictions. Return the exit code."""
    from cos598d.evaluate import Evaluation
    from cos598d.models.build import build_model
    from cos598d.rank import RankProcess, init_rank
    from cos598d.terminal.files import write_whole

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

    features: "Examples"
    in_words: Callable[["np.ndarray"], str]


def _asked(trained: "_Trained", options: argparse.Namespace) -> _Asked:
    """What to predict. Raises UserError for inputs that the run's task does not read."""
    head = trained.task.head
    fits = {
        "sequence_classification": ("--file or --text", options.file or options.text),
        "question_answering": ("--file, or --question and --context", options.file or options.question),
        "image_classification": ("--image", options.image),
    }
    words, given = fits[head]
    if given is None:
        raise UsageError(f"{options.trained} is a run of {trained.task.name}. Give {words}.")
    if head == "question_answering":
        return _questions(trained, options)
    return _images(trained, options) if head == "image_classification" else _texts(trained, options)


class _Trained(NamedTuple):
    """A run's config, its task with the classes, and its model with the encoder of its inputs."""

    config: "RunConfig"
    task: "Task"
    source: "ModelSource"


def _trained(options: argparse.Namespace) -> _Trained:
    """A finished run. Raises UserError if the folder is no run, has no model, or needs code that was not named."""
    from cos598d.commands.replay import read_config
    from cos598d.config import config_from
    from cos598d.models.build import find_model
    from cos598d.records.conventions import MODEL
    from cos598d.records.schema import Summary, read
    from cos598d.terminal.own_code import is_own

    folder = options.trained
    if not (folder / "summary.json").is_file():
        raise UserError(f"{folder} has no summary.json. Give the folder of a finished run.")
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder} has no model. Train again without --no_save_model.")
    values, summary = read_config(folder / "config.json"), read(folder / "summary.json", Summary)
    asked = values["task_name"]
    if is_own(asked) and options.task_name is None:
        raise UsageError(f"the task of {folder} is code in a file, {asked}. Add --task_name {asked} to run that code.")
    if options.task_name is not None and not is_own(asked):
        raise UsageError(f"--task_name is for a task of your own, and the task of {folder} is {asked}. Leave it out.")
    config = config_from(values | {"task_name": options.task_name or asked})
    task = config.task()
    classes = tuple(summary.classes or ())
    if is_own(asked) and task.classes != classes:
        raise UserError(
            f"{folder} was trained on {_in_words(classes)}, and --task_name {options.task_name} has "
            f"{_in_words(task.classes)}. Give the task that it was trained on."
        )
    task.classes = task.classes or classes
    return _Trained(config, task, find_model(str(folder / MODEL), task.image_form))


def _in_words(classes: tuple[str, ...]) -> str:
    return f"the classes {printable(', '.join(classes), 100)}" if classes else "numbers"


def _texts(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """A table of tab-separated values: the example's index, its class or score, and the class's probability."""
    from cos598d.data.tables import GLUE, TableTask
    from cos598d.data.task import TextTask, predictions_table

    task, encoder, most = trained.task, trained.source.encoder, trained.config.max_seq_length
    assert isinstance(task, TextTask)  # its head implies it
    if options.text:
        wanted = task.texts
        if len(options.text) not in ((1, 2) if wanted is None else (wanted,)):
            known = {1: "a single text. Give 1", 2: "a pair. Give 2", None: "one text or a pair. Give 1 or 2"}[wanted]
            raise UsageError(
                f"--text has {len(options.text)} texts, and an example of {task.name} is {known}, each in quotes."
            )
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
    import numpy as np

    from cos598d.data.encoders import ImageEncoder
    from cos598d.data.examples import Images
    from cos598d.data.images import decode
    from cos598d.data.task import predictions_table

    encoder = trained.source.encoder
    assert isinstance(encoder, ImageEncoder)  # the task's head implies it
    images = Images(decode([Path(name) for name in options.image], encoder), np.zeros(len(options.image)), encoder)
    return _Asked(images, lambda outputs: predictions_table(trained.task, options.image, outputs, first="file"))


def _questions(trained: _Trained, options: argparse.Namespace) -> _Asked:
    """The answer to --question as a line, or those of a file by id, as SQuAD's scorer reads them."""
    from cos598d.data.encoders import TextEncoder
    from cos598d.data.squad import Question, build_windows, predict, read_questions
    from cos598d.terminal.files import json_text

    config, encoder = trained.config, trained.source.encoder
    assert isinstance(encoder, TextEncoder)  # the task's head implies it
    if options.file is not None:
        asked = read_questions(options.file)
    else:
        if not options.context.strip() or not options.question.strip():
            raise UsageError("--question or --context is empty. Give a text for each.")
        asked = [Question("0", options.question, options.context, ())]
    windows = build_windows(asked, encoder, config.max_seq_length, config.doc_stride)

    def in_words(outputs: "np.ndarray") -> str:
        with_impossible = config.version_2_with_negative
        texts, _ = predict(asked, windows, outputs, with_impossible, config.null_score_diff_threshold)
        return json_text(texts) if options.file is not None else f"{printable(texts['0']) or '(no answer)'}\n"

    return _Asked(windows, in_words)
