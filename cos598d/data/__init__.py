"""Tasks and their data: files to examples, texts to ids, batches, metrics. Knows nothing of processes or syncs."""

from cos598d.data.task import Scores, Task
from cos598d.data.tasks import TASK_NAMES, get_task

__all__ = ["TASK_NAMES", "Scores", "Task", "get_task"]
