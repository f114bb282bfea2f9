"""The tasks by name."""

from cos598d.data.glue import read as glue
from cos598d.data.glue.task import GlueTask
from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.task import SquadTask
from cos598d.data.task import Task
from cos598d.errors import UsageError

_GLUE: dict[str, Task] = {name: GlueTask(form) for name, form in glue.FORMATS.items()}
_STANDARD = SquadOptions()
TASK_NAMES: tuple[str, ...] = (*_GLUE, SquadTask.name)


def get_task(name: str, options: SquadOptions = _STANDARD) -> Task:
    """The task of that name, in upper or lower case; `options` are SQuAD's.

    Raises UsageError that lists the known names.
    """
    if name.lower() == SquadTask.name:
        return SquadTask(options)
    task = _GLUE.get(name.lower())
    if task is None:
        raise UsageError(f"unknown task {name!r}: choose one of {', '.join(TASK_NAMES)}.")
    return task
