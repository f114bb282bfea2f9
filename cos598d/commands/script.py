"""The functions that a task folder's script calls."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cos598d.commands.flags import Parser
from cos598d.commands.start import exit_code_of, start


def script(label: str, sync: str, **options: Any) -> NoReturn:
    """A task folder's script: `run_script` with the same arguments, as a program."""

    def load() -> Callable[..., int]:
        from cos598d.commands import train  # noqa: F401 - takes seconds

        return run_script

    start(load, label, sync, **options)


def run_script(
    label: str, sync: str, arguments: Sequence[str] | None = None, single_process: bool = False, task: str = "glue"
) -> int:
    """Train with a task script's label and sync, on GLUE or on SQuAD (`task` "squad"), and return the exit code."""
    from cos598d.commands import train
    from cos598d.data.tasks import OWN_TEXTS

    words = list(sys.argv[1:] if arguments is None else arguments)
    example = "" if single_process else " --master_ip IP --master_port P --world_size N --local_rank R"
    parser = Parser(
        usage=f"%(prog)s{example} [FLAGS]", description=f"{label}: fine-tune BERT with the gradient sync {sync}."
    )
    lesson = {"label": label, "sync": sync} | ({"task_name": task} if task == "squad" else {})
    train.add_options(
        parser, ("task_name", "images", OWN_TEXTS) if task == "squad" else ("SQuAD",), lesson, single_process
    )
    parser.set_defaults(words=words)
    return exit_code_of(train.run, parser.parse_args(words))
