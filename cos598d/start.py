"""The first lines of every program: a Ctrl-C while torch is still loading is no traceback."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn


def start(load: Callable[[], Callable[..., int]], *arguments: Any, **options: Any) -> NoReturn:
    """Call `load`, which imports and returns a function, then that function, and exit with the code it returns."""
    try:
        sys.exit(load()(*arguments, **options))
    except KeyboardInterrupt:
        print("interrupted (Ctrl-C).", file=sys.stderr)
        sys.exit(130)


def script(label: str, sync: str, **options: Any) -> NoReturn:
    """A task folder's script: `cli.run_script` with the same arguments."""

    def load() -> Callable[..., int]:
        from cos598d.cli import run_script

        return run_script

    start(load, label, sync, **options)
