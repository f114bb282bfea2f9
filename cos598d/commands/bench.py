"""`cos598d bench`: its flags, the ranks that it starts, and where the results go."""

import argparse
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cos598d.commands.flags import add_flags, given_flags, output_written
from cos598d.commands.run_flags import RankFlags, identity_from, on_ranks
from cos598d.errors import UsageError
from cos598d.records.bench import FILE_NAME, Bench
from cos598d.terminal.files import write_json
from cos598d.tools.bench.plan import BenchPlan
from cos598d.tools.report.benches import bench_table

WORLD_SIZE = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`; one that is not given stays None in the result."""
    add_flags(parser, BenchPlan, RankFlags, shown={"world_size": WORLD_SIZE})
    words = f"folder for {FILE_NAME} (default: a new one in runs/)"
    parser.add_argument_group("output").add_argument("--output", type=Path, metavar="FOLDER", help=words)


def run(options: argparse.Namespace) -> int:
    """Be a rank of the bench, or start its ranks here, and return the exit code."""
    from cos598d.tools.bench.rank import run_bench_rank  # it loads torch

    plan, ranks = BenchPlan(**given_flags(options, BenchPlan)), RankFlags(**given_flags(options, RankFlags))
    identity = identity_from(ranks)
    if ranks.world_size is None and identity is not None and identity.source == "alone":
        ranks, identity = replace(ranks, world_size=WORLD_SIZE), None  # neither a launcher nor the user said how many
    if identity is None:
        plan.check(ranks.world_size or WORLD_SIZE)
    folder = options.output or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.is_file() or (folder / FILE_NAME).exists():
        raise UsageError(f"--output {folder} is a file, or already has a {FILE_NAME}. Choose another folder.")
    return on_ranks(ranks, partial(run_bench_rank, plan, deliver=partial(_deliver, folder)))


def _deliver(folder: Path, record: dict[str, Any]) -> None:
    """Print the results, then write them. Raises UserError if they cannot be written."""
    print(bench_table(msgspec.convert(record, Bench)), flush=True)
    with output_written(f"--output {folder}"):
        write_json(folder / FILE_NAME, record)
    print(f"\noutput: {folder / FILE_NAME}; all columns: cos598d report {folder}")
