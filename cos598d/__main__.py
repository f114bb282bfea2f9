"""`python -m cos598d`."""

from collections.abc import Callable

from cos598d.start import start


def _load() -> Callable[..., int]:
    from cos598d.cli import main

    return main


if __name__ == "__main__":
    start(_load)
