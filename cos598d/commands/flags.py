"""Flags on a command line, as tables: what they are called, what they take, what they mean. Loads nothing heavy."""

import argparse
import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable

FLAG = "flag"  # the kind of one that stands alone
METAVARS = {int: "N", float: "X", str: "WORD", Path: "FOLDER"}
# group -> (name, a type or a function that reads a word, or FLAG; what it means)
Groups = Mapping[str, Sequence[tuple[str, Any, str]]]


def check_output_file(flag: str, path: Path | str | None) -> None:
    """Raise UsageError, before anything is computed for it, where the file that `flag` names can have no place.

    A file goes into a folder that is there: who mistypes one shall not find the file elsewhere. (A flag that names a
    folder makes it.) None and "-", standard output, are no files.
    """
    if path is None or str(path) == "-":
        return
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder: give a file's name.")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path} cannot be written: there is no folder {path.parent}, so make it first.")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def __init__(self, *args: Any, **kwargs: Any):
        # Wide enough that a flag and its help share a line.
        formatter = functools.partial(argparse.HelpFormatter, max_help_position=34, width=118)
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": formatter} | kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"{printable(message)} (--help lists what there is)", file=sys.stderr)
        sys.exit(2)


def add_groups(
    parser: argparse.ArgumentParser, groups: Groups, shown: Mapping[str, Any], but: Collection[str] = ()
) -> None:
    """Add flags to `parser` without those, or the groups, named in `but`; `shown` are the defaults for their help.

    A flag that is not given stays None in the result.
    """
    for group, options in groups.items():
        if group in but:
            continue
        section = parser.add_argument_group(group)
        for name, kind, words in options:
            if name in but:
                continue
            if kind == FLAG:
                section.add_argument(f"--{name}", action="store_true", default=None, help=words)
                continue
            default = shown.get(name)
            if default is not None and "default:" not in words:
                words += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
            metavar = METAVARS.get(kind) or getattr(kind, "metavar", "P")
            section.add_argument(f"--{name}", type=kind, metavar=metavar, help=words)


def to_words(values: Mapping[str, Any]) -> list[str]:
    """The flags that give `values` on a command line: True stands alone, False and None are left out."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return words
