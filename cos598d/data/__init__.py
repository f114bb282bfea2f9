"""Tasks and their data: from files to rows, rows to examples, batches, metrics. Independent of processes and syncs."""

from cos598d.data.task import Scores, Task
from cos598d.data.tasks import TASK_NAMES, TaskFlags, get_task

__all__ = ["TASK_NAMES", "Scores", "Task", "TaskFlags", "get_task"]
