"""`cos598d train`, and the tasks' scripts: one rank of a run, or the launcher of local ranks."""

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cos598d.checkpoints import AUTO, FOLDER, whole_in
from cos598d.checkpoints.resume import named_folder
from cos598d.commands.flags import given_flags
from cos598d.commands.replay import EarlierRun, add_replay
from cos598d.commands.run_flags import (
    RankFlags,
    add_dry_run,
    add_run_options,
    identity_from,
    print_forecast,
    restarts_from,
    run_values,
)
from cos598d.commands.start import exit_code_of
from cos598d.config import RunConfig, config_from, folder_name
from cos598d.data import get_task
from cos598d.errors import UsageError
from cos598d.inputs import find
from cos598d.run import run as run_rank
from cos598d.strategies import is_our_own
from cos598d.strategies.optimizers import load_compiler
from cos598d.terminal.own_code import is_own
from cos598d.world.launch import start_local_workers
from cos598d.world.workers import may_fork


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
    parser.set_defaults(lesson=lesson, single_process=single_process)


def run(options: argparse.Namespace) -> int:
    """Be one rank, or start all of them here with the same arguments, and return the exit code."""
    given, earlier = run_values(options), EarlierRun.of(options.config)
    config = config_from(earlier.values(options.lesson, given))
    ranks = earlier.ranks(RankFlags(**given_flags(options, RankFlags)))
    identity = identity_from(ranks)
    if options.single_process and (identity is None or identity.world_size > 1):
        raise UsageError(
            f"{config.label} runs in a single process. Leave --world_size out, or run task2a, task2b or task3."
        )
    max_restarts = restarts_from(options.max_restarts, identity)
    world_size = identity.world_size if identity else ranks.world_size
    assert world_size is not None  # ranks that are to be started here have a number
    if earlier.path is not None and (identity is None or (identity.speaks and identity.source != "local")):
        print(earlier.words(given, world_size), flush=True)
    if options.dry_run:
        if identity is None or identity.speaks:
            print_forecast(config, world_size)
        return 0
    if identity is not None:
        return run_rank(config, identity)
    config.check(world_size)
    words = list(options.words)
    if not max_restarts:
        # Other code may read the rank from the environment when it is imported, which needs a new interpreter.
        is_ours = is_our_own(config.sync) and not is_own(config.task_name) and config.logger is None
        be_rank = _rank_in_a_fork(config, ranks) if is_ours and may_fork() else None
        return start_local_workers(world_size, ranks.master_port, words, be_rank=be_rank)
    folder = named_folder(config)
    if folder is None:  # each start would make a new one
        folder = folder_name(config, world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
        words += ["--output_dir", str(folder)]
    before = whole_in(folder / FOLDER)
    return start_local_workers(
        world_size, ranks.master_port, words, max_restarts, lambda: _words_again(config, folder, before)
    )


def _rank_in_a_fork(config: RunConfig, ranks: RankFlags) -> Callable[[], int]:
    """The function that a fork of this process calls to be the rank of its environment, with shared work done here."""
    torch.set_num_threads(1)  # what is computed here must leave no threads behind
    found = find(config)
    if config.do_train:
        load_compiler()  # once for all ranks

    def be_rank() -> int:
        identity = identity_from(ranks)
        assert identity is not None  # it is in the environment
        return run_rank(config, identity, found)

    return lambda: exit_code_of(be_rank)


def _words_again(config: RunConfig, folder: Path, before: set[tuple[str, int]]) -> list[str]:
    """The additional flags of ranks that are restarted: they resume in `folder`, from its newest checkpoint.

    If no checkpoint is newer than those in `before`, a run that started from scratch does so again, and one that
    resumed from another folder resumes from there again.
    """
    begins_anew = config.resume is None and config.overwrite_output_dir
    goes_on_from_elsewhere = config.resume not in (None, AUTO)
    if (begins_anew or goes_on_from_elsewhere) and not whole_in(folder / FOLDER) - before:
        return ["--overwrite_output_dir"]
    return ["--resume", AUTO, "--output_dir", str(folder)]
