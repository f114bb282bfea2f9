"""`cos598d train`, and the tasks' scripts: one rank of a run, or the launcher of local ranks."""

import argparse
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from cos598d.commands.flags import Parser, given_flags
from cos598d.commands.replay import EarlierRun, add_replay
from cos598d.commands.run_flags import (
    FREQUENT,
    RankFlags,
    add_dry_run,
    add_run_options,
    identity_from,
    print_forecast,
    run_values,
)
from cos598d.commands.start import exit_code_of
from cos598d.config import RunConfig, config_from
from cos598d.data import get_task
from cos598d.errors import UsageError
from cos598d.inputs import RunInputs, find
from cos598d.optimizers import load_compiler
from cos598d.run import run as run_rank
from cos598d.world.launch import may_fork, start_local_workers


def add_options(
    parser: argparse.ArgumentParser,
    but: Collection[str] = (),
    lesson: Mapping[str, Any] | None = None,
    single_process: bool = False,
) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `lesson` are RunConfig's values that a task's script sets; `single_process`: it runs without other ranks.
    """
    lesson = dict(lesson or {})
    defaults = get_task(lesson.get("task_name", RunConfig.task_name)).defaults
    add_run_options(parser, but, **lesson | dict(defaults))
    add_dry_run(parser, "iterations, parameters, memory and bytes")
    add_replay(parser)
    if isinstance(parser, Parser):
        parser.frequent = FREQUENT
        parser.usage = parser.usage or "%(prog)s [FLAGS]"
    parser.set_defaults(lesson=lesson, single_process=single_process)


def run(options: argparse.Namespace) -> int:
    """Be one rank, or start all of them here, and return the exit code."""
    given, earlier = run_values(options), EarlierRun.of(options.config)
    config = config_from(earlier.values(options.lesson, given))
    ranks = earlier.ranks(RankFlags(**given_flags(options, RankFlags)))
    identity = identity_from(ranks)
    if options.single_process and (identity is None or identity.world_size > 1):
        raise UsageError(
            f"{config.label} runs in a single process. Leave --world_size out, or run task2a, task2b or task3."
        )
    world_size = identity.world_size if identity else ranks.world_size
    assert world_size is not None  # ranks that are to be started here have a number
    if earlier.path is not None and (identity is None or identity.speaks):
        print(earlier.words(given, world_size), flush=True)
    if options.dry_run:
        if identity is None or identity.speaks:
            print_forecast(config, world_size)
        return 0
    if identity is not None:
        return run_rank(config, identity)
    config.check(world_size)
    found = None
    if may_fork():  # what is computed here is shared by all ranks, and must leave no threads behind
        torch.set_num_threads(1)
        found = find(config)
        if config.do_train:
            load_compiler()  # once for all ranks
    be_rank = partial(exit_code_of, partial(_be_rank, config, ranks, found))
    return start_local_workers(world_size, ranks.master_port, be_rank)


def _be_rank(config: RunConfig, ranks: RankFlags, found: RunInputs | None) -> int:
    """In a process that was started here: be the rank that its environment names."""
    identity = identity_from(ranks)
    assert identity is not None  # it is in the environment
    return run_rank(config, identity, found)
