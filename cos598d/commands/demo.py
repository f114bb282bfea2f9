"""`cos598d demo`: the four tasks one after the other, and a fifth run without communication: `sweep demo`."""

import argparse

from cos598d.commands import sweep
from cos598d.commands.flags import given_flags
from cos598d.commands.run_flags import add_run_options
from cos598d.config import RunConfig
from cos598d.tools.sweeps.plan import SET_HERE, WORLD_SIZE, plan, presets

# Flags of a run that the tasks set, and those of ranks that somebody else starts.
NOT_HERE = {*SET_HERE, "sync", "do_train", "do_eval", "local_rank", "master_ip", "master_port"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of a run, to `parser`."""
    sweep.add_sweep_options(parser)
    add_run_options(parser, but=NOT_HERE, world_size=WORLD_SIZE, max_steps=presets()["demo"]["flags"]["max_steps"])


def run(options: argparse.Namespace) -> int:
    """Make the runs that are not finished, print one table, and return the exit code of `sweep`."""
    world_size = options.world_size or WORLD_SIZE
    runs = plan(presets()["demo"], {}, given_flags(options, RunConfig), repeats=options.repeats, world_size=world_size)
    return sweep.make(options, runs, "demo", compares=True)
