"""One rank's run, from its flags to its files."""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cos598d.attempt import train_and_checkpoint
from cos598d.checkpoints.folder import Found
from cos598d.checkpoints.resume import facts_of, find_checkpoint, is_ours, open_record, say_if_finished
from cos598d.checkpoints.saving import Checkpoints
from cos598d.comm.group import Ranks
from cos598d.config import OF_TRAINER, SYNC_FIELDS, RunConfig, folder_name
from cos598d.data.sampler import micro_batches
from cos598d.evaluate import Evaluation, predict_tests
from cos598d.inputs import (
    RunInputs,
    announced,
    find_data,
    find_source,
    load_examples,
    load_tests,
    summary_facts,
)
from cos598d.loop import Job
from cos598d.measure.claim import claim_folder
from cos598d.measure.environment import describe_environment
from cos598d.measure.monitor import Monitor
from cos598d.measure.peak import peak_of_all
from cos598d.measure.tensorboard import Board
from cos598d.models.build import build_model, count_parameters
from cos598d.models.checkpoint import save_description, save_run_model
from cos598d.models.operations import training_operations
from cos598d.models.products import core_peak
from cos598d.models.recompute import recompute_activations
from cos598d.optimizers import make_optimizer
from cos598d.plan import Plan
from cos598d.precision import autocast, slow_on_this_processor
from cos598d.rank import RankProcess, init_rank
from cos598d.records.conventions import CHECKPOINTS, MODEL
from cos598d.sync import AUTO_SYNC, get_sync
from cos598d.terminal.console import Console
from cos598d.terminal.signals import GOES_ON
from cos598d.world.devices import launcher_facts, place_of
from cos598d.world.identity import Identity

if TYPE_CHECKING:
    from cos598d.cost.tune import Choice
    from cos598d.data.examples import Examples


def run(config: RunConfig, identity: Identity, inputs: RunInputs | None = None) -> int:
    """Run one rank of a run; return the process's exit code. `RankProcess` decides how it ends when something fails.

    Pass `inputs` if you have already called `find`. A rank that was asked to stop, and has saved, returns GOES_ON.
    """
    with contextlib.ExitStack() as claims, RankProcess(identity) as process:
        process.exit_code = _run(config, identity, inputs, process, claims)
    return process.exit_code


def _run(
    config: RunConfig,
    identity: Identity,
    inputs: RunInputs | None,
    process: RankProcess,
    claims: contextlib.ExitStack,
) -> int:
    """Parse, join, load, build, train, save; return the exit code. The run's folder is locked until `claims` close."""
    # Parse: what this rank can check by itself, before other ranks wait for it.
    asked = config
    config.check(identity.world_size)
    task, words = inputs[:2] if inputs else find_data(config)
    _claim_folder(config, identity, claims)
    source = inputs.source if inputs else find_source(config, task)  # may download
    inputs = inputs or RunInputs(task, words, source)

    # Join: meet the other ranks, and agree on the run's folder.
    meeting = process.meet(config.timeout, config.facts())
    ranks, threads, ranks_on_host = init_rank(meeting, config.backend, config.no_cuda, config.threads)
    config = replace(config, backend=ranks.backend)
    has_others = identity.world_size > 1 and not identity.shares_terminal
    console = Console(f"rank {identity.rank}: " if has_others else "", identity.speaks)
    for line in announced(config, inputs, ranks, threads):
        console.say(line)
    if ranks.rank == 0 and (warning := slow_on_this_processor(config.precision, ranks.device)):
        console.warn(warning)
    launcher, places = launcher_facts(identity), ranks.collect(place_of(ranks.device))  # places: on rank 0 only
    output = _make_folder(config, ranks, claims)
    if say_if_finished(output, config, ranks, console):
        return 0

    # Load the examples, the same on every rank.
    parts = {part: load_examples(part, config, inputs, ranks) for part in (task.parts[1:] if config.do_eval else ())}
    training = load_examples("train", config, inputs, ranks) if config.do_train else None
    tests = load_tests(config, inputs, ranks) if config.do_predict else {}

    # Build the model, the same on every rank. Find the checkpoint to resume from, and the sync to train with.
    model = build_model(source, task.head, task.num_labels, config.dropout, config.seed).to(ranks.device)
    if config.activation_checkpointing:
        recompute_activations(model)
    # Dropout masks must differ between ranks, since each rank has other examples of the batch.
    torch.manual_seed(config.seed + ranks.rank)
    facts, saved, choice = {}, None, None
    if training is not None:
        facts = facts_of(config, Plan(config, len(training), ranks.world_size), training, parts, source)
        saved = find_checkpoint(output, config, facts, ranks, console)
        if config.sync == AUTO_SYNC:
            choice = _choose_sync(config, ranks, model, training, saved)
            config = replace(config, sync=choice.sync)
            console.say(choice.sentence)

    evaluation = Evaluation(task, parts, model, ranks, config.per_gpu_eval_batch_size, config.precision)
    monitor = _monitor(config, ranks, console) if training is not None else None
    board = Board() if config.tensorboard and ranks.rank == 0 else None
    with open_record(output, config, ranks, saved, monitor, board) as record, record.ledger:
        ranks.ledger = record.ledger
        setting = summary_facts(config, inputs, ranks, count_parameters(model))
        setting |= {"auto": choice.as_record()} if choice else {}
        files = {}
        if ranks.rank == 0:
            environment = describe_environment(ranks.device, config.backend, threads, ranks_on_host)
            environment |= {"model_revisions": dict(source.revisions), "launcher": launcher, "places": places}
            files = {"environment.json": environment, "config.json": asdict(asked) | {"world_size": ranks.world_size}}
            record.describe(files, setting)

        # Train, or only evaluate.
        if training is None:
            record.epoch({"epoch": 0, "iterations": 0} | (evaluation() or {}))
            console.epoch(record.epochs[-1])
        else:
            options = config.sync_options()
            setting["bytes_from"] = get_sync(config.sync).bytes_from
            job = Job(config, ranks, model, training, record, console, options)
            checkpoints = Checkpoints(
                output / CHECKPOINTS,
                ranks,
                config.keep,
                lambda folder: save_description(folder, model, source.encoder),
                {"sync": config.sync} | options,
                saved,
                console.warn,
                facts,
            )
            if train_and_checkpoint(job, evaluation, checkpoints):
                return GOES_ON
            needed = training_operations(source.model_type, source.config, task.head, task.num_labels, training.lengths)
            peak = peak_of_all(ranks, config.precision, threads, core_peak)
            setting["operations"] = {"per_example": float(needed.mean()), "peak_per_second": peak}

        # Predict the test set with the final model.
        tables = predict_tests(task, tests, evaluation)

        # Finish the record, then save the model: it is the largest file, so the likeliest not to fit on the disk.
        record.finish(ranks, setting, evaluation.files | tables | files)
        if ranks.rank == 0 and training is not None:
            if config.save_model:
                save_run_model(output, model, source.encoder)
            else:
                shutil.rmtree(output / MODEL, ignore_errors=True)  # an earlier run's
    console.say(f"output: {output}")
    return 0


def _claim_folder(config: RunConfig, identity: Identity, claims: contextlib.ExitStack) -> None:
    """Lock the folder that the run is to write to. Raises UserError if it is not free."""
    # None: the run's folder will get a unique name in runs/
    named = None if config.output_dir is None else Path(config.output_dir)
    folder = named or Path("runs")
    may_be_full = named is None or config.overwrite_output_dir or is_ours(folder, config)
    claims.enter_context(claim_folder(folder, may_be_full, locks=named is not None and identity.rank == 0))


def _make_folder(config: RunConfig, ranks: Ranks, claims: contextlib.ExitStack) -> Path:
    """The run's folder: this rank's own if it was given one, else rank 0's. Hosts need not share it."""
    named = None if config.output_dir is None else Path(config.output_dir)
    new = folder_name(config, ranks.world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    first = ranks.exchange(str(named or new))[0]
    folder = named or Path(first)
    folder.mkdir(parents=True, exist_ok=True)
    if ranks.rank == 0 and named is None:
        claims.enter_context(claim_folder(folder, overwrite=True))  # the lock shows others that the run is at work
    return folder


def _choose_sync(
    config: RunConfig, ranks: Ranks, model: torch.nn.Module, examples: "Examples", saved: Found | None
) -> "Choice":
    """The sync that is the fastest on the run's first batch, or that of the run that is resumed on as many ranks."""
    from cos598d.cost.tune import choose  # which few runs need

    plan = Plan(config, len(examples), ranks.world_size)
    epoch, batch = next(plan.batches(after=0))

    def loss_of(indices: Any, weight: float) -> Callable[[torch.nn.Module], torch.Tensor]:
        inputs = {k: v.to(ranks.device) for k, v in examples.collate(indices, (config.seed, epoch)).items()}

        def loss(wrapped: torch.nn.Module) -> torch.Tensor:
            with autocast(config.precision, ranks.device):
                return wrapped(**inputs)[0] * weight

        return loss

    parts = micro_batches(batch, ranks.rank, ranks.world_size, config.gradient_accumulation_steps)
    losses = [loss_of(part.indices, part.weight) for part in parts]
    before = saved.training.sync["sync"] if saved and saved.training.ranks == ranks.world_size else None
    options = OF_TRAINER | {name: getattr(config, name) for name in SYNC_FIELDS}
    return choose(ranks, model, lambda _: make_optimizer(model, config, config.precision), losses, options, before)


def _monitor(config: RunConfig, ranks: Ranks, console: Console) -> Monitor | None:
    """What samples this rank during training; None with --monitor_interval 0, which may differ between ranks."""
    if not config.monitor_interval:
        return None
    who = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
    return Monitor(
        config.monitor_interval, ranks.world_size > 1, ranks.device, lambda line: console.warn(f"{who}{line}")
    )
