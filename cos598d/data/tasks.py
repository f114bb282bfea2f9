"""The registry of tasks: GLUE's from a table, others one file each, loaded when their name is used; and yours."""

import importlib
from dataclasses import dataclass

from cos598d.data.glue import read as glue
from cos598d.data.glue.task import GlueTask
from cos598d.data.images.task import ImageOptions
from cos598d.data.squad.options import SquadOptions
from cos598d.data.task import Task
from cos598d.data.text.table import TextOptions
from cos598d.errors import UsageError
from cos598d.terminal.own_code import is_own
from cos598d.terminal.words import did_you_mean


@dataclass(frozen=True)
class TaskOptions(SquadOptions, ImageOptions, TextOptions):
    """The flags that only some tasks have."""


_GLUE: dict[str, Task] = {name: GlueTask(form) for name, form in glue.FORMATS.items()}
# name on the command line -> module and class, which is called with the TaskOptions
_OTHERS = {
    "squad": "cos598d.data.squad.task:SquadTask",
    "digits": "cos598d.data.images.digits:DigitsTask",
    "mnist": "cos598d.data.images.mnist:MnistTask",
    "cifar10": "cos598d.data.images.cifar10:Cifar10Task",
    "image_folder": "cos598d.data.images.folder:ImageFolderTask",
    "ag_news": "cos598d.data.ag_news:AgNewsTask",
    "text": "cos598d.data.text.table:TextTask",
}
TASK_NAMES: tuple[str, ...] = (*_GLUE, *_OTHERS)
_STANDARD = TaskOptions()


def get_task(name: str, options: TaskOptions = _STANDARD) -> Task:
    """The task with that name, in upper or lower case, or your own as FILE.py:CLASS.

    `options` are the flags of tasks of its kind. Raises UsageError with the known names, or with a file's error.
    """
    if is_own(name):
        from cos598d.data.own import OwnTask

        return OwnTask(name)
    known = name.lower()
    if known in _GLUE:
        return _GLUE[known]
    if known not in _OTHERS:
        near = did_you_mean(known, TASK_NAMES)
        raise UsageError(
            f"unknown task {name!r}.{near} Choose one of {', '.join(TASK_NAMES)}, or your own as FILE.py:CLASS."
        )
    module, class_name = _OTHERS[known].split(":")
    return getattr(importlib.import_module(module), class_name)(options)
