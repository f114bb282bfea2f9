"""Tasks and their data: from files to examples, texts to ids, batches, metrics. Independent of processes and syncs."""

from cos598d.data.task import Scores, Task
from cos598d.data.tasks import TASK_NAMES, get_task

__all__ = ["TASK_NAMES", "Scores", "Task", "get_task"]
