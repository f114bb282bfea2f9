"""`cos598d`."""

from collections.abc import Callable
from typing import NoReturn

from cos598d.commands.start import start


def _load() -> Callable[..., int]:
    from cos598d.commands.cli import main

    return main


def main() -> NoReturn:
    """The program `cos598d`."""
    start(_load)


if __name__ == "__main__":
    main()
