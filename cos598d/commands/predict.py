"""`cos598d predict`: a run's model predicts for texts, questions or images that have no labels."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cos598d.commands.flags import check_output_file
from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    import numpy as np

    from cos598d.config import RunConfig
    from cos598d.data import Task
    from cos598d.data.examples import Examples
    from cos598d.models.build import ModelSource


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("trained", type=Path, metavar="RUN", help="folder of a run that has saved its model")
    what = parser.add_argument_group("what to predict")
    what.add_argument("--file", type=Path, metavar="FILE", help="GLUE's test.tsv, a SQuAD file, or your texts")
    what.add_argument("--text", nargs="+", metavar="TEXT", help="one text, or the two of a pair")
    what.add_argument("--question", metavar="TEXT", help="a question about --context (SQuAD)")
    what.add_argument("--context", metavar="TEXT", help="the text with the answer")
    what.add_argument("--image", nargs="+", metavar="FILE", help="image files")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file (default: the screen)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="examples per forward pass (default: 8)")


def run(options: argparse.Namespace) -> int:
    """Print the predictions, or write them to --output, and return 0. Raises UserError for what cannot be predicted."""
    from cos598d.terminal.files import write_whole

    ways = [options.file, options.text, options.question, options.image]
    if sum(way is not None for way in ways) != 1:
        raise UsageError("predict needs one of --file, --text, --question and --image. Give exactly one.")
    if (options.question is None) != (options.context is None):
        raise UsageError("--question and --context belong together. Give both.")
    if options.batch < 1:
        raise UsageError(f"--batch {options.batch} is too small. Give a number of at least 1.")
    check_output_file("--output", options.output)
    said = _predictions(options)
    if options.output is None:
        print(said, end="")
    else:
        write_whole(options.output, said)
    return 0


def _predictions(options: argparse.Namespace) -> str:
    trained = _trained(options.trained)
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
        return _answers(trained, options)
    return _of_images(trained, options) if head == "image_classification" else _of_texts(trained, options)


class _Trained(NamedTuple):
    """A run's config, its task, its model with the encoder of its inputs, and the names of its classes."""

    config: "RunConfig"
    task: "Task"
    source: "ModelSource"
    classes: Sequence[str]


def _trained(folder: Path) -> _Trained:
    """What a run has left. Raises UserError if it is no run, or has not saved its model."""
    from cos598d.commands.replay import read_config
    from cos598d.config import config_from
    from cos598d.models.build import find_model
    from cos598d.records.conventions import MODEL
    from cos598d.records.run import read_summary

    if not (folder / "summary.json").is_file():
        raise UserError(f"{folder} has no summary.json. Give the folder of a run that has ended.")
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder} has no model. Train again without --no_save_model.")
    config = config_from(read_config(folder / "config.json"))
    task, summary = config.task(), read_summary(folder)
    classes = task.classes or tuple(summary.get("classes") or ())
    if task.tells_classes and not classes:
        raise UserError(f"{folder} does not name its classes, so it is of an older version. Train again.")
    task.num_labels = task.num_labels or len(classes)
    source = find_model(str(folder / MODEL), config.model_type, form=task.image_form)
    return _Trained(config, task, source, classes)


def _outputs(trained: _Trained, features: "Examples", batch: int) -> "np.ndarray":
    """The model's outputs for every example, (examples, sum of the task's output widths)."""
    import torch

    from cos598d.comm.communicator import Communicator
    from cos598d.evaluate import model_outputs
    from cos598d.models.build import build_model
    from cos598d.strategies.precision import autocast

    config, task = trained.config, trained.task
    device = torch.device("cuda" if torch.cuda.is_available() and not config.no_cuda else "cpu")
    model = build_model(trained.source, task.head, task.num_labels, 0.0, config.seed).to(device)
    widths, context = task.output_widths(features), autocast(config.precision, device)
    found = model_outputs(model, features, widths, Communicator(None, "gloo", device), batch, context)
    assert found is not None  # nobody asks it to stop
    return found


def _of_texts(trained: _Trained, options: argparse.Namespace) -> str:
    """A table of tab-separated values: the example's place or id, its class or score, and the class's probability."""
    import numpy as np

    from cos598d.data.glue.task import GlueTask
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import build_features
    from cos598d.data.text.table import TextTask, read_rows

    task, config = trained.task, trained.config
    if options.text:
        is_single = isinstance(task, GlueTask) and task.form.text_b is None
        wanted = len(task.options.columns) if isinstance(task, TextTask) else 1 if is_single else 2
        if len(options.text) != wanted:
            raise UsageError(
                f"--text has {len(options.text)} texts, and the model was trained on "
                f"{'pairs' if wanted == 2 else 'single texts'}. Give {wanted}, each in quotes."
            )
        rows = [("0", tuple(options.text))]
    elif isinstance(task, GlueTask):
        rows = list(task.form.read_unlabelled(options.file))
    elif isinstance(task, TextTask):
        found = read_rows(options.file, task.options, with_labels=False)
        rows = [(str(place), row.texts) for place, row in enumerate(found)]
    else:
        raise UsageError(f"{options.trained} is a run of {task.name}, which has no form for --file. Give --text.")
    examples = ((texts[0], texts[1] if len(texts) > 1 else None, {"labels": 0}) for _, texts in rows)
    encoder = trained.source.load_encoder()
    assert isinstance(encoder, TextEncoder)  # the task's head implies it
    features = build_features(examples, encoder, config.max_seq_length, {"labels": np.int64})
    outputs = _outputs(trained, features, options.batch)
    # GLUE's benchmark takes a file of two columns.
    is_submission = options.file is not None and isinstance(task, GlueTask)
    return _table([identity for identity, _ in rows], outputs, trained, "index", with_probability=not is_submission)


def _of_images(trained: _Trained, options: argparse.Namespace) -> str:
    """A table of tab-separated values: the file, its class, and the class's probability."""
    import numpy as np

    from cos598d.data.images.decode import Refused, check_pillow, decode
    from cos598d.data.images.encoder import ImageEncoder, Images
    from cos598d.data.images.files import MOST_BYTES
    from cos598d.terminal.reading import read_plain

    check_pillow()
    encoder = trained.source.load_encoder()
    assert isinstance(encoder, ImageEncoder)  # the task's head implies it
    pixels = []
    for name in options.image:
        try:
            pixels.append(encoder.fit(decode(read_plain(Path(name), MOST_BYTES))[None]))
        except (OSError, Refused) as why:
            reason = f"cannot be read ({why.strerror})" if isinstance(why, OSError) else str(why)
            raise UserError(f"--image {printable(name, 100)} {reason}. Give an image file.") from None
    images = Images(np.concatenate(pixels), np.zeros(len(pixels), dtype=np.int64), encoder, False, False)
    outputs = _outputs(trained, images, options.batch)
    return _table(options.image, outputs, trained, "file", with_probability=True)


def _table(names: Sequence[str], outputs: "np.ndarray", trained: _Trained, first: str, with_probability: bool) -> str:
    if not trained.task.tells_classes:
        return "".join([f"{first}\tprediction\n", *(f"{name}\t{row[0]:.3f}\n" for name, row in zip(names, outputs))])
    import numpy as np

    best = outputs.argmax(axis=1)
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    sure = shifted[np.arange(len(best)), best] / shifted.sum(axis=1)
    lines = [f"{first}\tprediction" + ("\tprobability" if with_probability else "")]
    for name, place, probability in zip(names, best, sure, strict=True):
        cells = [printable(name), printable(trained.classes[place])]
        lines.append("\t".join([*cells, *([f"{probability:.4f}"] if with_probability else [])]))
    return "\n".join(lines) + "\n"


def _answers(trained: _Trained, options: argparse.Namespace) -> str:
    """The answer to --question as a line, or those of a file by id, as SQuAD's scorer reads them."""
    from cos598d.data.squad.predict import predict
    from cos598d.data.squad.read import Question, Squad, read_squad
    from cos598d.data.squad.windows import WindowOptions, build_windows
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.terminal.files import json_text

    config = trained.config
    if options.file is not None:
        squad = read_squad(options.file)
    else:
        if not options.context.strip() or not options.question.strip():
            raise UsageError("--question or --context is empty. Give a text for each.")
        squad = Squad("--question", [options.context], [Question("0", 0, options.question, (), False)])
    chosen = list(range(len(squad.questions)))
    windows = WindowOptions(config.max_seq_length, config.max_query_length, config.doc_stride)
    encoder = trained.source.load_encoder()
    assert isinstance(encoder, TextEncoder)  # the task's head implies it
    features = build_windows(squad, chosen, encoder, windows, training=False)
    outputs = _outputs(trained, features, options.batch)
    texts = predict(squad, chosen, features, outputs, config).texts
    return json_text(texts) if options.file is not None else f"{printable(texts['0']) or '(no answer)'}\n"
