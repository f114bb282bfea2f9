"""`cos598d bench`: its flags, the ranks that it starts, and where the results go."""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cos598d.commands.flags import add_flags, check_output_file, given_flags
from cos598d.commands.run_flags import RankFlags, identity_from
from cos598d.commands.start import exit_code_of
from cos598d.errors import UsageError, UserError
from cos598d.records.bench import FILE_NAME
from cos598d.terminal.files import write_json
from cos598d.tools.bench.plan import BenchPlan, plan_from
from cos598d.tools.report.answer import fastest_in
from cos598d.tools.report.bench_table import bench_table
from cos598d.tools.report.benches import bench_of
from cos598d.world.identity import Identity
from cos598d.world.launch import start_local_workers

WORLD_SIZE = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`; one that is not given stays None in the result."""
    add_flags(parser, BenchPlan, RankFlags, shown={"world_size": WORLD_SIZE})
    record = parser.add_argument_group("output")
    record.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"folder for {FILE_NAME} (default: a new one in runs/, unless --json is given)",
    )
    record.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results to this file; -: to standard output, in place of the table",
    )


def run(options: argparse.Namespace) -> int:
    """Be a rank of the bench, or start its ranks here, and return the exit code."""
    plan = plan_from(vars(options))
    identity = identity_from(RankFlags(**given_flags(options, RankFlags)))
    if identity is not None and identity.source == "alone" and options.world_size is None:
        identity = None  # neither a launcher nor the user said how many ranks
    if identity is None or identity.rank == 0:  # the others write nothing
        check_output_file("--json", options.json)
    folder = options.output or (None if options.json else Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    if folder and (folder / FILE_NAME).exists():
        raise UsageError(f"--output {folder} already has a {FILE_NAME}. Choose another folder.")
    deliver = partial(_deliver, folder=folder, json_file=options.json)
    if identity is not None:
        from cos598d.tools.bench.rank import run_bench_rank

        return run_bench_rank(plan, identity, deliver)
    world_size = options.world_size or WORLD_SIZE
    Identity(0, world_size)  # for its checks
    plan.check(world_size)
    try:
        record = _measured_here(plan, world_size, options)
    except RanksFailed as failed:
        return failed.exit_code
    deliver(record)
    return 0


class RanksFailed(Exception):
    """Ranks that were started here have failed, and have printed the reason."""

    def __init__(self, exit_code: int):
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def _measured_here(plan: BenchPlan, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of `plan`, measured by ranks that are started on this host."""
    with tempfile.TemporaryDirectory(prefix="cos598d-bench-") as folder:
        path = Path(folder) / FILE_NAME
        deliver = partial(write_json, path)
        ranks = RankFlags(**given_flags(options, RankFlags))
        be_rank = partial(exit_code_of, partial(_be_rank, plan, replace(ranks, world_size=world_size), deliver))
        exit_code = start_local_workers(world_size, options.master_port, be_rank)
        if exit_code:
            raise RanksFailed(exit_code)
        return json.loads(path.read_text(encoding="utf-8"))


def _be_rank(plan: BenchPlan, ranks: RankFlags, deliver: Callable[[dict[str, Any]], None]) -> int:
    """In a process that was started here: be the rank that its environment names."""
    from cos598d.tools.bench.rank import run_bench_rank

    identity = identity_from(ranks)
    assert identity is not None  # it is in the environment
    return run_bench_rank(plan, identity, deliver)


def _deliver(record: dict[str, Any], folder: Path | None, json_file: str | None) -> None:
    """Write and print the results as the flags ask. Raises UserError if they cannot be written."""
    try:
        if folder:
            write_json(folder / FILE_NAME, record)
        if json_file and json_file != "-":
            write_json(json_file, record)
    except OSError as error:
        # What was measured is not lost with it.
        print(json.dumps(record, indent=2) if json_file == "-" else _printed(record))
        raise UserError(
            f"the results cannot be written to {error.filename} ({error.strerror}), so they were printed instead. "
            "Make room there before you measure again."
        ) from None
    if json_file == "-":
        print(json.dumps(record, indent=2))
    else:
        file = folder / FILE_NAME if folder else json_file
        print(f"{_printed(record)}\n\noutput: {file}; all columns: cos598d report {folder or file}")


def _printed(record: dict[str, Any]) -> str:
    """Which sync is the fastest, then all tables."""
    bench = bench_of(record, "this bench", Path(FILE_NAME))
    return f"{fastest_in(bench)}\n\n{bench_table(record)}" if bench.ranked else bench_table(record)
