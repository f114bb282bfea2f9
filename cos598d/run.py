"""One rank's run, from its flags to its files."""

import contextlib
import os
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import torch

from cos598d.attempt import leave, publish_record, train_and_checkpoint
from cos598d.checkpoints import FOLDER, Checkpoints
from cos598d.checkpoints.resume import facts_of, find_checkpoint, is_ours, named_folder, open_record, say_if_finished
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig, folder_name, recorded
from cos598d.evaluate import Evaluation, predict_tests
from cos598d.inputs import (
    RunInputs,
    announced,
    find_data,
    find_loggers,
    find_source,
    load_examples,
    load_tests,
    summary_facts,
)
from cos598d.measure.claim import claim_folder
from cos598d.measure.environment import describe_environment
from cos598d.measure.monitor import Monitor
from cos598d.measure.peak import peak_of_all
from cos598d.measure.wire import find_interface
from cos598d.models.build import build_model, count_parameters
from cos598d.models.checkpoint import save_description, save_run_model
from cos598d.models.operations import training_operations
from cos598d.models.products import core_peak
from cos598d.models.recompute import recompute_activations
from cos598d.plan import Plan, TrainingSetup
from cos598d.rank import RankProcess, init_rank
from cos598d.records.conventions import AUTO_PRECISION
from cos598d.strategies import AUTO_SYNC, get_strategy
from cos598d.strategies.choose_precision import choose_precision
from cos598d.terminal.console import Console
from cos598d.terminal.locks import locked
from cos598d.world.devices import LAUNCHERS, launcher_facts, place_of, places_in_words
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


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
    began, asked = time.monotonic(), config
    config.check(identity.world_size)
    task, words = inputs[:2] if inputs else find_data(config)
    _claim_folder(config, identity, claims)
    source = inputs.source if inputs else find_source(config, task)  # may download
    inputs = RunInputs(task, words, source)

    # Join: meet the other ranks, and agree on the run's folder.
    meeting = process.meet(config.timeout, config.facts())
    comm, threads, ranks_on_host = init_rank(meeting, config.backend, config.no_cuda, config.threads)
    config = replace(config, backend=comm.backend)
    config.check(identity.world_size)  # again, because an option may not fit the backend that was chosen
    has_others = identity.world_size > 1 and not identity.shares_terminal
    console = Console(f"rank {identity.rank}: " if has_others else "", identity.speaks)
    precision = choose_precision(config.precision, source.product, comm)
    for line in announced(replace(config, precision=precision.precision), inputs, comm, threads):
        console.say(line)
    if precision.remark and (config.do_train or config.precision == AUTO_PRECISION):
        console.say(precision.remark)
    if precision.warning and comm.rank == 0:
        console.warn(precision.warning)
    launcher, places = launcher_facts(identity), comm.collect(place_of(comm.device))  # places: on rank 0 only
    if places and launcher["name"] in LAUNCHERS:
        console.say(places_in_words(launcher, places))
    output = _make_folder(config, comm, claims)
    if say_if_finished(output, config, comm, console):
        return 0
    config = replace(config, precision=precision.precision)

    # Load the examples, the same on every rank.
    parts = {part: load_examples(part, config, inputs, comm) for part in (task.parts[1:] if config.do_eval else ())}
    training = load_examples("train", config, inputs, comm) if config.do_train else None
    tests = load_tests(config, inputs, comm) if config.do_predict else {}

    # Build the model, the same on every rank. Find the checkpoint to resume from, and the sync to train with.
    model = build_model(source, task.head, task.num_labels, config.dropout, config.seed).to(comm.device)
    if config.activation_checkpointing:
        recompute_activations(model)
    # Dropout masks must differ between ranks, since each rank has other examples of the batch.
    torch.manual_seed(config.seed + comm.rank)
    facts, saved, choice = {}, None, None
    if training is not None:
        facts = facts_of(config, Plan(config, len(training), comm.world_size), training, parts, source)
        saved = find_checkpoint(output, config, facts, comm, console, asked.precision == AUTO_PRECISION)
        if saved is not None and asked.precision == AUTO_PRECISION:
            config = replace(config, precision=saved.training["facts"]["precision"])
            facts["precision"] = config.precision
        if config.sync == AUTO_SYNC:
            from cos598d.cost.choice import choose  # which few runs need

            before = saved.sync if saved is not None and saved.world_size == comm.world_size else None
            choice = choose(config, comm, model, training, False, before)
            config = replace(config, sync=choice.sync)
            if comm.rank == 0:
                console.say(choice.sentence)

    evaluation = Evaluation(task, parts, model, comm, config.per_gpu_eval_batch_size, config.precision)
    monitor = _monitor(config, comm, console, meeting) if training is not None else None
    loggers = [make() for make in find_loggers(config)] if comm.rank == 0 else []
    with open_record(output, config, comm, saved, monitor, loggers) as record:
        comm.ledger = record.ledger
        setting = summary_facts(config, inputs, comm, count_parameters(model))
        setting |= {"auto": choice.as_record()} if choice else {}
        files = {}
        if comm.rank == 0:
            environment = describe_environment(comm.device, config.backend, threads, ranks_on_host)
            environment |= {"model_revisions": dict(source.revisions), "launcher": launcher, "places": places}
            files = {"environment.json": environment, "config.json": asdict(asked) | {"world_size": comm.world_size}}
            record.describe(files, setting)
            if record.remark:
                console.say(record.remark)

        # Train, or only evaluate.
        if training is None:
            record.epoch({"epoch": 0, "iterations": 0} | (evaluation() or {}))
            console.epoch(record.epochs[-1])
        else:
            options = config.sync_options()
            strategy = get_strategy(config.sync)(comm, False, options, config.precision)
            setting["bytes_from"] = strategy.bytes_from
            if remark := strategy.remark(model):
                console.say(remark)
            setup = TrainingSetup(config, comm, model, strategy, training, record, console)
            checkpoints = Checkpoints(
                output / FOLDER,
                comm,
                config.keep,
                lambda folder: save_description(folder, model, source.encoder),
                {"sync": config.sync} | recorded(options),
                saved,
                console.warn,
            )
            result = train_and_checkpoint(setup, evaluation, checkpoints, facts, began)
            if result.stopped is not None:
                return leave(result, setup)
            setting |= {"best": result.best} if result.best else {}
            needed = training_operations(source.model_type, source.config, task.head, task.num_labels, training.lengths)
            peak = peak_of_all(comm, config.precision, threads, core_peak)
            setting["operations"] = {"per_example": float(needed.mean()), "peak_per_second": peak}

        # Predict the test set with the final model.
        tables = predict_tests(model, task, tests, config, comm)

        # Publish the record, then save the model: the model is the largest file, so the likeliest not to fit on the
        # disk.
        saves_model = training is not None and config.save_model
        publish_record(record, comm, setting, evaluation.files | tables | files, training is None or saves_model)
        if comm.rank == 0 and saves_model:
            save_run_model(output, model, source.encoder)
        comm.exchange("the model is saved")
    console.say(f"output: {output}")
    return 0


def _claim_folder(config: RunConfig, identity: Identity, claims: contextlib.ExitStack) -> None:
    """Lock the folder that the run is to write to. Raises UserError if it is not free."""
    named = named_folder(config)  # None: the run's folder will get a unique name in runs/
    folder = named or Path("runs")
    may_be_full = named is None or config.overwrite_output_dir or is_ours(folder, config)
    claims.enter_context(claim_folder(folder, may_be_full, locks=named is not None and identity.rank == 0))


def _make_folder(config: RunConfig, comm: Communicator, claims: contextlib.ExitStack) -> Path:
    """The run's folder: this rank's own if it was given one, else rank 0's. Hosts need not share it."""
    named = named_folder(config)
    new = folder_name(config, comm.world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    first = comm.exchange(str(named or new))[0]
    folder = named if config.output_dir is not None and named else Path(first)
    folder.mkdir(parents=True, exist_ok=True)
    if comm.rank == 0 and named is None:
        claims.enter_context(locked(folder))  # the lock shows others that the run is at work
    return folder


def _monitor(config: RunConfig, comm: Communicator, console: Console, meeting: Meeting | None) -> Monitor | None:
    """What samples this rank during training; None with --monitor_interval 0, which may differ between ranks."""
    interface = find_interface(comm, meeting)
    if not config.monitor_interval:
        return None
    who = f"rank {comm.rank}: " if comm.world_size > 1 else ""
    return Monitor(config.monitor_interval, interface, comm.device, lambda line: console.warn(f"{who}{line}"))
