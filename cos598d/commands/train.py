"""`python -m cos598d train`, and the lessons' scripts: one rank of a run, or the starter of local ranks."""

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from cos598d.commands.rank_flags import identity_from
from cos598d.commands.run_flags import add_run_options, run_values
from cos598d.config import RunConfig, config_from
from cos598d.data import get_task
from cos598d.errors import UsageError
from cos598d.run import run as be_one_rank
from cos598d.world.launch import start_local_workers


def add_options(
    parser: argparse.ArgumentParser,
    but: Collection[str] = (),
    lesson: Mapping[str, Any] | None = None,
    single_process: bool = False,
) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `lesson` are RunConfig's values which a lesson's script sets; `single_process` says that it knows no other rank.
    """
    lesson = dict(lesson or {})
    defaults = get_task(lesson.get("task_name", RunConfig.task_name)).defaults
    add_run_options(parser, but, **lesson | dict(defaults))
    parser.set_defaults(lesson=lesson, single_process=single_process)


def run(options: argparse.Namespace) -> int:
    """Be one rank, or start all of them here with the same words, and return the exit code."""
    config = config_from(options.lesson | run_values(options))
    identity = identity_from(options)
    if options.single_process and (identity is None or identity.world_size > 1):
        raise UsageError(f"{config.label} is a single process: leave --world_size out, or run task2a, task2b or task3.")
    if identity is None:
        config.check(options.world_size)
        return start_local_workers(options.world_size, options.master_port, options.words)
    return be_one_rank(config, identity)
