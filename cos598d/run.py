"""One rank's run, from its flags to its record."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cos598d.attempt import attempt
from cos598d.auto import Choice, choose
from cos598d.checkpoints import Checkpoint
from cos598d.checkpoints.resume import facts_of, find_checkpoint, is_ours, named_folder, open_record, say_if_finished
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig, folder_name
from cos598d.data import Task
from cos598d.data.examples import Examples
from cos598d.errors import UsageError, UserError
from cos598d.evaluate import Evaluation
from cos598d.measure.claim import claim_folder
from cos598d.measure.environment import describe_environment, network_facts
from cos598d.measure.monitor import Monitor
from cos598d.measure.tensorboard import Board, check_tensorboard
from cos598d.measure.wire import find_interface
from cos598d.models.build import ModelSource, build_model, count_parameters, find_model, uses_every_parameter
from cos598d.models.checkpoint import save_description
from cos598d.plan import Plan
from cos598d.publish import leave, publish_record, save_run_model
from cos598d.rank import be_rank, take_station
from cos598d.records.conventions import BY_LEDGER
from cos598d.strategies import AUTO_SYNC, get_strategy
from cos598d.terminal.console import Console
from cos598d.terminal.locks import locked
from cos598d.world.devices import bf16_instructions
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.places import LAUNCHERS, launcher_facts, place_of, places_in_words

IN_BF16 = 0.80  # of fp32's seconds a step, as measured for ddp (docs/measured.md, in bf16)


@dataclass(frozen=True)
class RunInputs:
    """What a run's flags name, the same for all ranks of a host. `location` is as the task's `locate` says."""

    task: Task
    location: Any
    data_words: str
    source: ModelSource


def find(config: RunConfig, between: Callable[[], None] = lambda: None) -> RunInputs:
    """Find and check a run's data and its model, which may be downloaded from the hub; between the two call `between`.

    Raises UserError for whatever cannot work.
    """
    network_facts()  # so that a mistake in it is known now, not when the record is written
    if config.tensorboard:
        check_tensorboard()
    task = config.task()
    location, words = task.locate(config.data_dir)
    task.check(location, (["train"] if config.do_train else []) + list(task.evaluation_parts if config.do_eval else ()))
    between()
    return RunInputs(task, location, words, find_source(config, task))


def find_source(config: RunConfig, task: Task) -> ModelSource:
    """Find a run's model for its task. Raises UserError where there is none, or it cannot read texts so long."""
    source = find_model(
        config.model_name_or_path,
        config.model_type,
        config_name=config.config_name,
        tokenizer_name=config.tokenizer_name,
        cache_dir=config.cache_dir,
        do_lower_case=config.do_lower_case,
        form=task.image_form,
    )
    if source.longest_sequence and config.max_seq_length > source.longest_sequence:
        raise UsageError(
            f"--max_seq_length {config.max_seq_length} is longer than this model can read: "
            f"give at most {source.longest_sequence}."
        )
    return source


def run(config: RunConfig, identity: Identity, found: RunInputs | None = None) -> int:
    """Be one rank of a run and return the process's exit code; `be_rank` says how it ends when something fails.

    `found` is what `find` says, where somebody has asked it already. GOES_ON is the code of one that was asked to stop
    and has saved what it had.
    """
    began = time.monotonic()

    with contextlib.ExitStack() as claims:

        def prepare() -> RunInputs:
            """What a rank can do alone, before anybody waits for it."""
            config.check(identity.world_size)
            if found is None:
                return find(config, lambda: _claim(config, identity, claims))
            _claim(config, identity, claims)
            return found

        def work(prepared: RunInputs, meeting: Meeting | None) -> int:
            return _work(config, prepared, meeting, _console(identity), launcher_facts(identity), claims, began)

        return be_rank(identity, config.timeout, config.facts(), prepare, work)


def _claim(config: RunConfig, identity: Identity, claims: contextlib.ExitStack) -> None:
    """Claim the folder that the run is to write to. Raises UserError where it is not free."""
    named = named_folder(config)  # None: the run's folder will have a name in runs/ that no other has
    folder = named or Path("runs")
    may_be_full = named is None or config.overwrite_output_dir or is_ours(folder, config)
    claims.enter_context(claim_folder(folder, may_be_full, locks=named is not None and identity.rank == 0))


def _console(identity: Identity) -> Console:
    has_others = identity.world_size > 1 and not identity.shares_terminal
    return Console(f"rank {identity.rank}: " if has_others else "", identity.speaks)


def _work(
    config: RunConfig,
    prepared: RunInputs,
    meeting: Meeting | None,
    console: Console,
    launcher: dict[str, Any],
    claims: contextlib.ExitStack,
    began: float,
) -> int:
    """From the meeting to the record: group, model, data, training, evaluation. Returns the exit code."""
    task, source, asked = prepared.task, prepared.source, config
    comm, threads, ranks_on_host = take_station(meeting, config.backend, config.no_cuda, config.threads)
    device = comm.device
    _announce(config, prepared, comm, threads, console)
    places = comm.collect(place_of(device))  # for the record and the log, which are rank 0's
    if places and launcher["name"] in LAUNCHERS:
        console.say(places_in_words(launcher, places))
    output = _output_folder(config, comm, claims)
    if say_if_finished(output, config, comm, console):
        return 0

    encoder = source.load_encoder()
    model = build_model(source, task.head, task.num_labels, config.dropout, config.seed).to(device)
    may_be_unused = not uses_every_parameter(source.model_type, task.head)
    # Dropout masks must differ between the ranks: they stand for different examples of one batch.
    torch.manual_seed(config.seed + comm.rank)

    def load(part: str, limit: int | None) -> Examples:
        features = task.load(part, prepared.location, encoder, config.max_seq_length, config.overwrite_cache, limit)
        _same_on_all_ranks(comm, task.name, part, features)
        for line in task.remarks(part, features):
            console.say(line)
        return features

    parts = {part: load(part, config.max_eval_examples) for part in (task.evaluation_parts if config.do_eval else ())}
    evaluation = Evaluation(task, parts, model, comm, config.per_gpu_eval_batch_size, config.precision)
    training = load("train", config.max_train_examples) if config.do_train else None
    work: dict[str, Any] = {}  # what makes it this run, where it trains
    found: Checkpoint | None = None
    if training is not None:
        work = facts_of(config, Plan(config, len(training), comm.world_size), training, parts, source)
        found = find_checkpoint(output, config, work, comm, console)
    choice: Choice | None = None
    if training is not None and config.sync == AUTO_SYNC:
        before = found.sync if found is not None and found.world_size == comm.world_size else None
        choice = choose(config, comm, model, training, may_be_unused, before)
        config = replace(config, sync=choice.sync)
        if comm.rank == 0:
            console.say(choice.sentence)
    monitor = _monitor(config, comm, meeting, console) if training is not None else None
    board = Board(output, found.iteration if found else 0) if config.tensorboard and comm.rank == 0 else None
    with open_record(output, config, comm, found, monitor, board) as record:
        comm.ledger = record.ledger
        setting = _facts(config, prepared, comm, count_parameters(model), BY_LEDGER)
        setting |= {"auto": choice.as_record()} if choice else {}
        files: dict[str, Any] = {}
        if comm.rank == 0:
            environment = describe_environment(device, config.backend, threads, ranks_on_host)
            environment |= {"model_revisions": dict(source.revisions), "launcher": launcher, "places": places}
            files = {"environment.json": environment, "config.json": asdict(asked) | {"world_size": comm.world_size}}
            record.describe(files, setting)
            if record.remark:
                console.say(record.remark)
        if training is not None:
            strategy = get_strategy(config.sync)(comm, may_be_unused, config.sync_options(), config.precision)
            setting["bytes_from"] = strategy.bytes_from
            if line := strategy.remark(model):
                console.say(line)
            outcome = attempt(
                config,
                comm,
                model,
                strategy,
                training,
                evaluation,
                record,
                console,
                lambda folder: save_description(folder, model, encoder),
                work,
                found,
                began,
            )
            if outcome.stopped is not None:
                return leave(outcome, output, config, record.iterations, console)
            setting |= {"best": outcome.best} if outcome.best else {}
        else:
            record.epoch({"epoch": 0, "iterations": 0} | (evaluation() or {}))
            console.epoch(record.epochs[-1])
        saves_model = training is not None and config.save_model
        publish_record(record, comm, setting, evaluation.files | files, keeps_model=training is None or saves_model)
        # The largest of all, and the likeliest not to fit: by now the record is safe.
        if comm.rank == 0 and saves_model:
            save_run_model(output, model, encoder)
        comm.exchange("the model is saved")
    console.say(f"record: {output}")
    return 0


def _monitor(config: RunConfig, comm: Communicator, meeting: Meeting | None, console: Console) -> Monitor | None:
    """What samples this rank while it trains; None with --monitor_interval 0, which the other ranks need not have."""
    interface = find_interface(comm, meeting)
    if not config.monitor_interval:
        return None
    who = f"rank {comm.rank}: " if comm.world_size > 1 else ""
    return Monitor(config.monitor_interval, interface, comm.device, lambda sentence: console.warn(f"{who}{sentence}"))


def _announce(config: RunConfig, prepared: RunInputs, comm: Communicator, threads: int, console: Console) -> None:
    ranks = f"{comm.world_size} rank{'s' if comm.world_size > 1 else ''}"
    each = f"{threads} thread{'s' if threads > 1 else ''}{' each' if comm.world_size > 1 else ''}"
    console.say(
        f"{config.label}: {prepared.task.name}, sync {config.sync}, {ranks} ({config.backend}, {comm.device}, {each}); "
        f"model: {prepared.source.description}; data: {prepared.data_words}"
    )
    dropout = "the model's own" if config.dropout is None else f"{config.dropout:g}"
    console.say(
        f"{config.describe_batch(comm.world_size)}; learning rate {config.learning_rate:g}, dropout {dropout}, "
        f"{config.precision}, seed {config.seed}"
    )
    if line := bf16_remark(config, comm.device):
        console.say(line)


def bf16_remark(config: RunConfig, device: torch.device) -> str | None:
    """What --precision bf16 would do to this run's seconds, where its processor multiplies in bf16; None elsewhere."""
    if not config.do_train or config.precision != "fp32" or device.type != "cpu":
        return None
    instructions = bf16_instructions()
    return instructions and (
        f"this processor has {instructions}: with --precision bf16 an iteration took {IN_BF16:g} of fp32's seconds "
        "(MiniLM, 4 ranks, --sync ddp: docs/measured.md#in-bf16)"
    )


def _facts(
    config: RunConfig, prepared: RunInputs, comm: Communicator, parameters: int, bytes_from: str
) -> dict[str, Any]:
    return {
        "task": prepared.task.name,
        "label": config.label,
        "sync": config.sync,
        "world_size": comm.world_size,
        "backend": config.backend,
        "bytes_are_assumed": comm.bytes_are_assumed,
        "bytes_from": bytes_from,
        "device": comm.device.type,
        "model": prepared.source.description,
        "data": prepared.data_words,
        "parameters": parameters,
        "total_train_batch_size": config.total_batch_size(comm.world_size),
        "max_seq_length": config.max_seq_length,
        "dropout": config.dropout,
        "precision": config.precision,
        "seed": config.seed,
    }


def _same_on_all_ranks(comm: Communicator, task: str, part: str, features: Examples) -> None:
    """Raise UserError, the same on every rank, when a rank's data are not rank 0's."""
    found = comm.exchange([len(features), features.digest()])
    for rank, other in enumerate(found):
        if other != found[0]:
            raise UserError(
                f"the {part} part of {task} differs: rank {rank} has {other[0]} examples and rank 0 has {found[0][0]}"
                f"{', with other contents or another vocabulary' if other[0] == found[0][0] else ''}; "
                f"give every rank the same data and model."
            )


def _output_folder(config: RunConfig, comm: Communicator, claims: contextlib.ExitStack) -> Path:
    """The run's folder, which hosts may or may not share: rank 0's where this rank was given none."""
    named = named_folder(config)
    new = folder_name(config, comm.world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    first = comm.exchange(str(named or new))[0]
    folder = named if config.output_dir is not None and named else Path(first)
    folder.mkdir(parents=True, exist_ok=True)
    if comm.rank == 0 and named is None:
        claims.enter_context(locked(folder))  # for those who look whether it is at work
    return folder
