"""The flags that predict a run without starting it, and what they print."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cos598d.checkpoints.resume import is_ours, named_folder
from cos598d.config import RunConfig
from cos598d.errors import WARNING, UsageError
from cos598d.terminal.printable import printable


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flags to `parser`; `what` is printed by --dry_run."""
    section = parser.add_argument_group("dry run")
    section.add_argument(
        "--dry_run",
        action="store_true",
        help=f"start nothing; print {what}",
    )
    section.add_argument(
        "--from",
        dest="costs_from",
        nargs="+",
        type=Path,
        metavar="BENCH",
        help="folders of benches to predict seconds from (default: run a short bench now)",
    )


def check_dry_run(options: argparse.Namespace) -> None:
    """Raise UsageError for --from without --dry_run, and for a bench that does not exist, before any work begins."""
    if options.costs_from and not options.dry_run:
        raise UsageError(
            "--from is for --dry_run, which uses it to predict seconds. Add --dry_run, or leave --from out."
        )
    for path in options.costs_from or ():
        if not path.exists():
            raise UsageError(f"--from {path} does not exist. Give the folder of a bench, which `cos598d bench` writes.")


def print_forecast(config: RunConfig, world_size: int, costs_from: Sequence[Path] | None) -> None:
    """Print what the run would cost. Raises UserError as `forecast` does."""
    from cos598d.cost.forecast import forecast, forecast_lines
    from cos598d.cost.planned import Known

    known = Known(costs_from=tuple(costs_from or ()))
    lines = forecast_lines(config, world_size, forecast(config, world_size, timings=known))
    folder = named_folder(config)
    if folder is not None and not (config.overwrite_output_dir or is_ours(folder, config)) and _is_full(folder):
        lines.insert(0, f"{WARNING}the run would be refused, because --output_dir {folder} is not empty")
    print(*map(printable, lines), sep="\n")


def _is_full(folder: Path) -> bool:
    return folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
