"""`--json`: where a command's result goes. Loads nothing heavy."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from cos598d.commands.flags import output_written
from cos598d.terminal.files import write_json


def add_json(parser: argparse.ArgumentParser, instead: str) -> None:
    """Add --json, which `printer` and `give_result` obey; `instead` is what it may replace."""
    parser.add_argument(
        "--json", metavar="FILE", help=f"also write the result as JSON; -: print it instead of the {instead}"
    )


def printer(json_file: str | None) -> Callable[[str], None]:
    """The function that prints a command's lines as they come: nothing where standard output has the JSON."""
    return (lambda _: None) if json_file == "-" else partial(print, flush=True)


def give_result(json_file: str | None, result: dict[str, Any]) -> None:
    """Do with a result what --json says: print it for "-", write it into a file, or nothing. Raises UserError."""
    if json_file == "-":
        print(json.dumps(result, indent=2))
    elif json_file:
        with output_written(f"--json {json_file}"):
            write_json(json_file, result)
