"""`cos598d train`, and the tasks' scripts: one rank of a run, or the launcher of local ranks."""

import argparse
import importlib
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cos598d.commands.flags import Parser, given_flags
from cos598d.commands.replay import repeated
from cos598d.commands.run_flags import FREQUENT, RankFlags, add_run_options, identity_from, on_ranks
from cos598d.config import RunConfig, config_from
from cos598d.data import get_task
from cos598d.errors import UsageError
from cos598d.inputs import find, load_for_all
from cos598d.run import run as run_rank
from cos598d.terminal.printable import printable
from cos598d.world.launch import may_fork
from cos598d.world.waiting import wait


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
    words = "start nothing; print iterations, parameters, memory and bytes"
    parser.add_argument_group("dry run").add_argument("--dry_run", action="store_true", help=words)
    words = "repeat the run with this config.json: the same flags and --world_size, except for those that you give"
    parser.add_argument_group("repeat a run").add_argument("--config", type=Path, metavar="FILE", help=words)
    if isinstance(parser, Parser):
        parser.frequent = FREQUENT
        parser.usage = parser.usage or "%(prog)s [FLAGS]"
    parser.set_defaults(lesson=lesson, single_process=single_process)


def run(options: argparse.Namespace) -> int:
    """Be one rank, or start all of them here, and return the exit code."""
    values = {**options.lesson, **given_flags(options, RunConfig)}
    ranks = RankFlags(**given_flags(options, RankFlags))
    if options.config is not None:
        values = repeated(options.config, values)
        alone = identity_from(ranks)
        if ranks.world_size is None and alone is not None and alone.source == "alone":
            ranks = replace(ranks, world_size=values["world_size"])
    config = config_from(values)
    identity = identity_from(ranks)
    if options.single_process and (identity is None or identity.world_size > 1):
        raise UsageError(
            f"{config.label} runs in a single process. Leave --world_size out, or run task2a, task2b or task3."
        )
    world_size = identity.world_size if identity else ranks.world_size
    assert world_size is not None  # ranks that are to be started here have a number
    speaks = identity is None or identity.speaks
    if options.config is not None and speaks:
        print(printable(f"repeats {options.config}"), flush=True)
    if options.dry_run:
        from cos598d.cost.forecast import forecast, forecast_lines  # which few runs need

        if speaks:
            print(*map(printable, forecast_lines(config, world_size, forecast(config, world_size))), sep="\n")
        return 0
    found = None
    if identity is None:
        config.check(world_size)
        if may_fork():  # what is computed here is shared by all ranks, and must leave no threads behind
            torch.set_num_threads(1)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            with ThreadPoolExecutor(1) as other:
                if config.do_train:
                    # torch's compiler, which its first optimizer needs: once for all ranks, while texts are encoded
                    # without Python's lock. It takes a second.
                    other.submit(importlib.import_module, "torch._dynamo")
                found = load_for_all(config, find(config))
            wait(may_fork, seconds=1.0)  # a thread that has ended is gone a moment later
    return on_ranks(ranks, partial(run_rank, config, inputs=found))
