"""The function that a task folder's script calls."""

import gc
import sys
from typing import Any, NoReturn

from cos598d.commands.start import start


def script(label: str, sync: str, **options: Any) -> NoReturn:
    """Be a task folder's script: `run_script` with the same arguments, as a program."""
    start(run_script, label, sync, **options)


def run_script(label: str, sync: str, single_process: bool = False, task: str = "glue") -> int:
    """Train with a task script's label and sync, on GLUE or on SQuAD (`task` "squad"), and return the exit code."""
    from cos598d.commands import train  # takes seconds
    from cos598d.commands.flags import Parser
    from cos598d.data.tasks import OWN_TEXTS

    gc.freeze()
    gc.enable()
    example = "" if single_process else " --master_ip IP --master_port P --world_size N --local_rank R"
    parser = Parser(
        usage=f"%(prog)s{example} [FLAGS]", description=f"{label}: fine-tune BERT with the gradient sync {sync}."
    )
    lesson = {"label": label, "sync": sync} | ({"task_name": task} if task == "squad" else {})
    but = ("task_name", "images", OWN_TEXTS) if task == "squad" else ("SQuAD",)
    train.add_options(parser, but, lesson, single_process)
    return train.run(parser.parse_args(sys.argv[1:]))
