"""A command line made from dataclasses whose fields are flags, and back again. Loads nothing heavy."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cos598d.errors import ERROR, UsageError, UserError
from cos598d.terminal.fields import Flag, flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean

WIDTH = 118  # characters of a line of --help
METAVARS = {int: "N", float: "X", str: "NAME"}
ALL = "all"  # the word after --help for every flag, of a command that has many


def check_output_file(flag: str, path: Path | str | None, *endings: str) -> None:
    """Raise UsageError, before anything is computed for it, if the file that `flag` names cannot be written.

    The file's folder must exist, so that a mistyped one is noticed; only a flag that names a folder creates it. The
    name must have one of the `endings`, such as ".svg", if there are any. None, and "-" for standard output, pass.
    """
    if path is None or str(path) == "-":
        return
    path = Path(path)
    if endings and path.suffix.lower() not in endings:
        known = " or ".join(filter(None, [", ".join(endings[:-1]), endings[-1]]))
        raise UsageError(f"{flag} {path} is a file of another kind. Give a name that ends in {known}.")
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder. Give a file's name.")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path} cannot be written: there is no folder {path.parent}. Make it first.")


@contextlib.contextmanager
def output_written(what: object) -> Iterator[None]:
    """Convert an OSError in the block into a UserError: `what`, a flag and its file, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written ({error.strerror}). Give another path.") from None


def after(words: Sequence[str], *leading: str) -> list[str]:
    """`words` without those of `leading` with which they begin, such as the "--" that ends our own flags."""
    words = list(words)
    for word in leading:
        words = words[words[:1] == [word] :]
    return words


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence.

    If some flags are `frequent`, --help shows only those, and --help all shows all.
    """

    def __init__(self, **keywords: Any):
        # Wide enough that a flag and its help share a line.
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=WIDTH)
        settings: dict[str, Any] = {"allow_abbrev": False, "formatter_class": formatter, "add_help": False}
        super().__init__(**settings | keywords)
        self.add_argument("-h", "--help", action=_Help, nargs="?", help="show this help, and exit")
        self.frequent: Collection[str] = ()
        self.behind_dashes = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but if `behind_dashes` has a name, the words after the first `--` become that list."""
        words = list(sys.argv[1:] if args is None else args)
        place = words.index("--") if self.behind_dashes and "--" in words else len(words)
        found, unknown = super().parse_known_args(words[:place], namespace)
        if self.behind_dashes:
            setattr(found, self.behind_dashes, words[place + 1 :])
        return found, unknown

    def help_in_short(self) -> str:
        """The help without the flags that are not frequent."""
        names = {f"--{word}{name}" for name in (*self.frequent, "help") for word in ("", "no_")}
        hidden = [each for each in self._actions if each.option_strings and names.isdisjoint(each.option_strings)]
        said = [each.help for each in hidden]
        for each in hidden:
            each.help = argparse.SUPPRESS
        text = self.format_help()
        for each, words in zip(hidden, said, strict=True):
            each.help = words
        return f"{text}\n`--help {ALL}` shows {len(hidden)} more flags.\n"

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition(": ")
        near = did_you_mean(words.split()[0], self._flags()) if kind == "unrecognized arguments" else ""
        sentence = message if message.endswith(("?", ".")) else f"{message}."
        print(f"{ERROR}{printable(sentence)}{near} See --help.", file=sys.stderr)
        sys.exit(2)

    def _flags(self) -> set[str]:
        """Its flags, and those of its commands."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found = found.union(*(command._flags() for command in action.choices.values()))
        return found


class _Help(argparse.Action):
    """Prints the help, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, value: Any, __: str | None = None) -> NoReturn:
        assert isinstance(parser, Parser)
        if value not in (None, ALL):
            parser.error(f"--help {value}: give {ALL}, or nothing, after --help.")
        print(parser.help_in_short() if parser.frequent and value != ALL else parser.format_help(), end="")
        parser.exit()


def add_flags(
    parser: argparse.ArgumentParser,
    *kinds: type,
    shown: Mapping[str, Any] | None = None,
    but: Collection[str] = (),
) -> None:
    """Add the flags of the dataclasses `kinds` to `parser`, without those, or the groups, named in `but`.

    Flags of one group are listed together. `shown` are defaults for --help in place of the fields' own. A flag that is
    not given stays None in the result.
    """
    groups: dict[str, Any] = {}
    for kind in kinds:
        for name, said in flags_of(kind).items():
            if name not in but and said.group not in but:
                if said.group not in groups:
                    # A group without a name would be listed under a lone colon.
                    groups[said.group] = parser.add_argument_group(said.group) if said.group else parser
                _add_flag(groups[said.group], name, said, (shown or {}).get(name, said.default))


def _add_flag(group: Any, name: str, said: Flag, default: Any) -> None:
    words = said.words.replace("{choices}", ", ".join(said.choices or ()))
    if said.kind is bool:
        word = f"--no_{name}" if said.default else f"--{name}"
        group.add_argument(word, dest=name, action="store_const", const=not said.default, help=words)
        return
    if default is not None and "default:" not in words:
        words += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    read = said.kind if said.none is None else _or_none(said.kind, said.none)
    group.add_argument(f"--{name}", type=read, metavar=said.metavar or METAVARS[said.kind], help=words)


def _or_none(kind: type, word: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return text if text == word else kind(text)

    read.__name__ = kind.__name__  # for argparse's sentence
    return read


def given_flags(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The values of those flags of the dataclass `kind` that the user gave, by field."""
    values = {name: (getattr(options, name, None), said.none) for name, said in flags_of(kind).items()}
    return {name: None if value == none else value for name, (value, none) in values.items() if value is not None}


def to_words(values: Mapping[str, Any], kind: type | None = None) -> list[str]:
    """The flags that give `values` on a command line; `kind` is the dataclass whose flags they are, if it is one's.

    A switch takes no value, and is left out if it has its default. None is left out if no word means it.
    """
    known = flags_of(kind) if kind else {}
    words: list[str] = []
    for name, value in values.items():
        said = known.get(name)
        if isinstance(value, bool):
            is_on = bool(said and said.default)
            if value != is_on:
                words.append(f"--no_{name}" if is_on else f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
        elif said and said.none is not None:
            words += [f"--{name}", said.none]
    return words


def check_at_least_one(flag: str, number: int | None) -> None:
    """Raise UsageError if the number that `flag` gives is below 1; None passes."""
    Flag("", least=1).check(flag.removeprefix("--"), number)
