"""The registry of tasks: those of tables, SQuAD, images, your own texts, and yours as FILE.py:CLASS."""

from dataclasses import dataclass

from cos598d.data.images import Cifar10Task, DigitsTask, ImageFolderTask
from cos598d.data.own import OwnTask
from cos598d.data.squad import SquadTask
from cos598d.data.tables import TABLES, Table, TableTask
from cos598d.data.task import Task
from cos598d.errors import UsageError
from cos598d.terminal.fields import flag
from cos598d.terminal.own_code import is_own
from cos598d.terminal.words import did_you_mean

_IMAGES = {one.name: one for one in (DigitsTask, Cifar10Task, ImageFolderTask)}
TASK_NAMES: tuple[str, ...] = (*TABLES, "squad", *_IMAGES, "text")
# The flags that only some tasks read: their heading in --help, and the tasks.
SQUAD, IMAGES, OWN_TEXTS = "SQuAD", "images", "your own texts"
TASKS_WITH = {SQUAD: ("squad",), IMAGES: tuple(_IMAGES), OWN_TEXTS: ("text",)}


@dataclass(frozen=True)
class TaskFlags:
    """The flags of tasks' data. Those of a heading of TASKS_WITH have an effect only on its tasks."""

    overwrite_cache: bool = flag(False, "accepted, as before: nothing is cached", group="task and data", is_local=True)
    version_2_with_negative: bool = flag(
        False, "SQuAD 2.0: questions may have no answer; files are those of v2.0", group=SQUAD
    )
    null_score_diff_threshold: float = flag(
        0.0, "predict no answer if its score is higher than the best answer's by more than X", group=SQUAD
    )
    doc_stride: int = flag(128, "word pieces from one window over a long context to the next", group=SQUAD, least=1)
    image_size: int | None = flag(
        None, "width and height in pixels, for vit-tiny and vit-base (default: the task's)", group=IMAGES, least=4
    )
    augment: bool = flag(
        False, "augment training images: shift each, and mirror half of them if right and left are alike", group=IMAGES
    )
    text_columns: str = flag(
        "text", "the column of the text, or two: premise,hypothesis", group=OWN_TEXTS, metavar="NAME[,NAME]"
    )
    label_column: str = flag("label", "the column of the class", group=OWN_TEXTS)


_STANDARD = TaskFlags()


def get_task(name: str, flags: TaskFlags = _STANDARD) -> Task:
    """The task with that name, in upper or lower case, or your own as FILE.py:CLASS, with its flags applied.

    Raises UsageError with the known names, or with the error of your file.
    """
    return OwnTask(name) if is_own(name) else _known(name.lower(), flags)


def _known(name: str, flags: TaskFlags) -> Task:
    if name in TABLES:
        return TableTask(name, TABLES[name])
    if name in _IMAGES:
        return _IMAGES[name](flags.image_size, flags.augment)
    if name == "squad":
        return SquadTask(flags.version_2_with_negative, flags.doc_stride, flags.null_score_diff_threshold)
    if name == "text":
        texts = tuple(column.strip() for column in flags.text_columns.split(","))
        if not all(texts) or len(texts) > 2:
            raise UsageError(f"--text_columns {flags.text_columns} has to be one or two names.")
        return TableTask(name, Table("", texts, flags.label_column, None))
    near = did_you_mean(name, TASK_NAMES)
    raise UsageError(
        f"unknown task {name!r}.{near} Choose one of {', '.join(TASK_NAMES)}, or your own as FILE.py:CLASS."
    )
