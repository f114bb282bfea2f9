"""Tasks and their data: files to examples, texts to ids, batches, metrics. Knows nothing of processes or syncs."""

from cos598d.data.task import TASK_NAMES, Task, get_task, locate_data

__all__ = ["TASK_NAMES", "Task", "get_task", "locate_data"]
