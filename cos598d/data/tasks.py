"""The registry of tasks: GLUE's from its table, the others one class in one file each."""

from collections.abc import Callable
from dataclasses import dataclass

from cos598d.data.ag_news import AgNewsTask
from cos598d.data.glue.read import FORMATS
from cos598d.data.glue.task import GlueTask
from cos598d.data.images.cifar10 import Cifar10Task
from cos598d.data.images.digits import DigitsTask
from cos598d.data.images.folder import ImageFolderTask
from cos598d.data.images.mnist import MnistTask
from cos598d.data.images.task import ImageOptions
from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.task import SquadTask
from cos598d.data.task import Task
from cos598d.errors import UsageError


@dataclass(frozen=True)
class TaskOptions(SquadOptions, ImageOptions):
    """The flags that only some tasks have."""


_GLUE: dict[str, Task] = {name: GlueTask(form) for name, form in FORMATS.items()}
_OTHERS: dict[str, Callable[[TaskOptions], Task]] = {
    kind.name: kind for kind in (SquadTask, DigitsTask, MnistTask, Cifar10Task, ImageFolderTask, AgNewsTask)
}
TASK_NAMES: tuple[str, ...] = (*_GLUE, *_OTHERS)
_STANDARD = TaskOptions()


def get_task(name: str, options: TaskOptions = _STANDARD) -> Task:
    """The task of that name, in upper or lower case; `options` are the flags of tasks like it.

    Raises UsageError that lists the known names.
    """
    known = name.lower()
    if known in _GLUE:
        return _GLUE[known]
    if known not in _OTHERS:
        raise UsageError(f"unknown task {name!r}: choose one of {', '.join(TASK_NAMES)}.")
    return _OTHERS[known](options)
