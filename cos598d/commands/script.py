"""What a task folder's script calls."""

from collections.abc import Callable
from typing import Any, NoReturn

from cos598d.commands.start import start


def script(label: str, sync: str, **options: Any) -> NoReturn:
    """A task folder's script: `cli.run_script` with the same arguments."""

    def load() -> Callable[..., int]:
        from cos598d.commands.cli import run_script

        return run_script

    start(load, label, sync, **options)
