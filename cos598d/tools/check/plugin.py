"""pytest's side of `check`: `--sync` names what is tested, `--sizes` the numbers of ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cos598d.tools.check.driving import file_of
from cos598d.tools.exam.ranks import World, run

SIZES = "1,2,3,4"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flags."""
    group = parser.getgroup("check")
    group.addoption("--sync", help="FILE.py:CLASS, or the name of a built-in sync")
    group.addoption("--sizes", default=SIZES, help="numbers of ranks, with commas")


def pytest_configure(config: pytest.Config) -> None:
    """A sync's file is the one under test."""
    if config.getoption("--sync") and not config.getoption("--file"):
        config.option.file = file_of(config.getoption("--sync"))


@pytest.fixture(scope="session")
def sync(request: pytest.FixtureRequest) -> Callable[..., World]:
    """`sync(n, function, ...)` calls `function(comm, None, name, ...)` on n ranks, as exam's `run` does."""
    name = request.config.getoption("--sync")
    file: Path = request.config.getoption("--file")
    own = f"{file.resolve()}:{name.rpartition(':')[2]}" if ":" in name else name

    def on_ranks(n: int, function: Callable[..., Any], *arguments: Any, seconds: float = 8.0, name: str = own) -> World:
        return run(n, function, name, *arguments, file=file, seconds=seconds, loads=False)

    return functools.partial(on_ranks, name=own)
