"""`cos598d scale`: predict the seconds of an iteration on other links, batches and numbers of hosts, from benches."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from cos598d.commands.flags import add_flags, given_flags
from cos598d.errors import UsageError
from cos598d.records.bench import FILE_NAME
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.terminal.fields import check_flags, flag


@dataclass(frozen=True)
class ScaleFlags:
    """The flags of the command. None: as in the first bench."""

    to: int = flag(64, "the most hosts to predict", least=2, below=65537)
    rate: str | None = flag(None, "bandwidth of each link, such as 300mbit, or none (default: the first bench's)")
    delay: str | None = flag(None, "latency between two hosts, such as 10ms (default: the first bench's)")
    batch: int | None = flag(None, "examples on each host (default: the first bench's)", least=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    words = f"folder of a bench, or its {FILE_NAME} (default: all in runs/)"
    parser.add_argument("records", nargs="*", type=Path, metavar="BENCH", help=words)
    add_flags(parser, ScaleFlags)


def run(options: argparse.Namespace) -> int:
    """Fit the predictor, print what it predicts, and return the exit code."""
    flags = ScaleFlags(**given_flags(options, ScaleFlags))
    check_flags(flags)
    paths = options.records or sorted(path.parent for path in Path("runs").glob(f"*/{FILE_NAME}"))
    if not paths:
        raise UsageError(f"runs/ has no folder with a {FILE_NAME}. Give the folders of one or more benches.")

    from cos598d.cost.predict import Link, fit, load
    from cos598d.cost.scaling import scale_table

    benches = load(paths)
    link = benches[0].link
    link = Link(
        parse_rate(flags.rate) if flags.rate else link.rate, parse_delay(flags.delay) if flags.delay else link.delay
    )
    print(scale_table(fit(benches), flags.to, link, flags.batch or benches[0].batch))
    return 0
