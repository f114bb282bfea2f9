"""One rank's run, from its flags to its record."""

import contextlib
import os
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cos598d.attempt import TrainResult, attempt, leave
from cos598d.checkpoints import Checkpoint
from cos598d.checkpoints.resume import facts_of, find_checkpoint, is_ours, named_folder, open_record, say_if_finished
from cos598d.checkpoints.saver import Saving
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig, folder_name
from cos598d.data.examples import Examples
from cos598d.evaluate import Evaluation
from cos598d.inputs import RunInputs, announced, check_same_on_all_ranks, find
from cos598d.measure.claim import claim_folder
from cos598d.measure.environment import describe_environment
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.measure.tensorboard import Board
from cos598d.measure.wire import find_interface
from cos598d.models.build import build_model, count_parameters, uses_every_parameter
from cos598d.models.checkpoint import save_description
from cos598d.plan import Plan, TrainingSetup
from cos598d.publish import publish_record, save_run_model, summary_facts
from cos598d.rank import be_rank, take_station
from cos598d.strategies import AUTO_SYNC, get_strategy
from cos598d.terminal.console import Console
from cos598d.terminal.locks import locked
from cos598d.world.devices import LAUNCHERS, launcher_facts, place_of, places_in_words
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting

if TYPE_CHECKING:
    from cos598d.cost.choice import Choice


def run(config: RunConfig, identity: Identity, inputs: RunInputs | None = None) -> int:
    """Be one rank of a run and return the process's exit code; `be_rank` tells how it ends when something fails.

    `inputs` are what `find` returns, where the caller has them already. GOES_ON is the code of a rank that was asked to
    stop and has saved what it had.
    """
    with contextlib.ExitStack() as claims:
        return be_rank(identity, config.timeout, config.facts(), RankRun(config, identity, inputs, claims))


class RankRun:
    """One rank's run, from its flags to its record. `be_rank` calls `prepare`, then `work` once the ranks have met."""

    comm: Communicator
    output: Path
    model: nn.Module
    encoder: Any

    def __init__(self, config: RunConfig, identity: Identity, inputs: RunInputs | None, claims: contextlib.ExitStack):
        self.config, self.identity, self.claims = config, identity, claims
        self._given = inputs
        self._began = time.monotonic()

    def prepare(self) -> None:
        """Check the flags, find data and model, and claim the folder, before other ranks wait for this one."""
        self.config.check(self.identity.world_size)
        if self._given is None:
            self.inputs = find(self.config, self._claim_folder)
        else:
            self.inputs = self._given
            self._claim_folder()

    def work(self, meeting: Meeting | None) -> int:
        """Join the other ranks, build the model, load the data, train, evaluate and save. Returns the exit code."""
        asked = self.config
        self._join(meeting)
        if say_if_finished(self.output, self.config, self.comm, self.console):
            return 0
        self._build()
        self._load()
        saved = self._find_checkpoint()
        choice = self._choose_sync(saved)
        with self._open_record(meeting, saved) as record:
            self.comm.ledger = record.ledger
            setting, files = self._describe(record, asked, choice)
            if self.training is None:
                record.epoch({"epoch": 0, "iterations": 0} | (self.evaluation() or {}))
                self.console.epoch(record.epochs[-1])
            else:
                outcome = self._train(record, setting, saved)
                if outcome.stopped is not None:
                    return leave(outcome, self.output, self.config, record.iterations, self.console)
            self._save(record, setting, files)
        self.console.say(f"record: {self.output}")
        return 0

    def _join(self, meeting: Meeting | None) -> None:
        """Open the process group, and make the run's folder."""
        config, identity = self.config, self.identity
        has_others = identity.world_size > 1 and not identity.shares_terminal
        self.console = Console(f"rank {identity.rank}: " if has_others else "", identity.speaks)
        launcher = launcher_facts(identity)
        self.comm, threads, ranks_on_host = take_station(meeting, config.backend, config.no_cuda, config.threads)
        for line in announced(config, self.inputs, self.comm, threads):
            self.console.say(line)
        places = self.comm.collect(place_of(self.comm.device))  # for the record and the log, which are rank 0's
        if places and launcher["name"] in LAUNCHERS:
            self.console.say(places_in_words(launcher, places))
        self.output = self._make_folder()
        self._surroundings = {"launcher": launcher, "places": places}
        self._threads, self._ranks_on_host = threads, ranks_on_host

    def _build(self) -> None:
        """Build the model, the same on every rank."""
        task, source, config = self.inputs.task, self.inputs.source, self.config
        self.encoder = source.load_encoder()
        model = build_model(source, task.head, task.num_labels, config.dropout, config.seed)
        self.model = model.to(self.comm.device)
        self._may_be_unused = not uses_every_parameter(source.model_type, task.head)
        # Dropout masks must differ between the ranks: they are for different examples of one batch.
        torch.manual_seed(config.seed + self.comm.rank)

    def _load(self) -> None:
        """Load the examples of training and evaluation, the same on every rank."""
        config, task = self.config, self.inputs.task
        parts = task.evaluation_parts if config.do_eval else ()
        self.parts = {part: self._examples(part, config.max_eval_examples) for part in parts}
        self.evaluation = Evaluation(
            task, self.parts, self.model, self.comm, config.per_gpu_eval_batch_size, config.precision
        )
        self.training = self._examples("train", config.max_train_examples) if config.do_train else None

    def _examples(self, part: str, limit: int | None) -> Examples:
        config, task = self.config, self.inputs.task
        examples = task.load(
            part, self.inputs.location, self.encoder, config.max_seq_length, config.overwrite_cache, limit
        )
        check_same_on_all_ranks(self.comm, task.name, part, examples)
        for line in task.remarks(part, examples):
            self.console.say(line)
        return examples

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint from which the training goes on; None where it begins."""
        self._facts: dict[str, Any] = {}  # what makes it this run, where it trains
        if self.training is None:
            return None
        plan = Plan(self.config, len(self.training), self.comm.world_size)
        self._facts = facts_of(self.config, plan, self.training, self.parts, self.inputs.source)
        return find_checkpoint(self.output, self.config, self._facts, self.comm, self.console)

    def _choose_sync(self, saved: Checkpoint | None) -> "Choice | None":
        """With --sync auto, what is measured to be the fastest here; None where the flags name a sync."""
        if self.training is None or self.config.sync != AUTO_SYNC:
            return None
        from cos598d.cost.choice import choose  # which few runs need

        before = saved.sync if saved is not None and saved.world_size == self.comm.world_size else None
        choice = choose(self.config, self.comm, self.model, self.training, self._may_be_unused, before)
        self.config = replace(self.config, sync=choice.sync)
        if self.comm.rank == 0:
            self.console.say(choice.sentence)
        return choice

    def _open_record(self, meeting: Meeting | None, saved: Checkpoint | None) -> RunRecord:
        monitor = self._monitor(meeting) if self.training is not None else None
        writes_board = self.config.tensorboard and self.comm.rank == 0
        board = Board(self.output, saved.iteration if saved else 0) if writes_board else None
        return open_record(self.output, self.config, self.comm, saved, monitor, board)

    def _describe(
        self, record: RunRecord, asked: RunConfig, choice: "Choice | None"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The summary's facts, and on rank 0 the files of the record that say what was run and where."""
        setting = summary_facts(self.config, self.inputs, self.comm, count_parameters(self.model))
        setting |= {"auto": choice.as_record()} if choice else {}
        if self.comm.rank != 0:
            return setting, {}
        environment = describe_environment(self.comm.device, asked.backend, self._threads, self._ranks_on_host)
        environment |= {"model_revisions": dict(self.inputs.source.revisions), **self._surroundings}
        files = {"environment.json": environment, "config.json": asdict(asked) | {"world_size": self.comm.world_size}}
        record.describe(files, setting)
        if record.remark:
            self.console.say(record.remark)
        return setting, files

    def _train(self, record: RunRecord, setting: dict[str, Any], saved: Checkpoint | None) -> TrainResult:
        """Train until the work is done or a signal asks for the end; `setting` learns what only the training tells."""
        config, comm = self.config, self.comm
        assert self.training is not None
        strategy = get_strategy(config.sync)(comm, self._may_be_unused, config.sync_options(), config.precision)
        setting["bytes_from"] = strategy.bytes_from
        if line := strategy.remark(self.model):
            self.console.say(line)
        setup = TrainingSetup(config, comm, self.model, strategy, self.training, record, self.console)
        saving = Saving(setup, lambda folder: save_description(folder, self.model, self.encoder), self._facts, saved)
        outcome = attempt(setup, self.evaluation, saving, self._began)
        setting |= {"best": outcome.best} if outcome.best else {}
        return outcome

    def _save(self, record: RunRecord, setting: dict[str, Any], files: dict[str, Any]) -> None:
        """Complete the record, then save the model: it is the largest, and the likeliest not to fit."""
        saves_model = self.training is not None and self.config.save_model
        keeps_model = self.training is None or saves_model
        publish_record(record, self.comm, setting, self.evaluation.files | files, keeps_model)
        if self.comm.rank == 0 and saves_model:
            save_run_model(self.output, self.model, self.encoder)
        self.comm.exchange("the model is saved")

    def _claim_folder(self) -> None:
        """Claim the folder that the run is to write to. Raises UserError where it is not free."""
        config = self.config
        named = named_folder(config)  # None: the run's folder will have a name in runs/ that no other has
        folder = named or Path("runs")
        may_be_full = named is None or config.overwrite_output_dir or is_ours(folder, config)
        locks = named is not None and self.identity.rank == 0
        self.claims.enter_context(claim_folder(folder, may_be_full, locks=locks))

    def _make_folder(self) -> Path:
        """The run's folder, which hosts may or may not share: rank 0's where this rank was given none."""
        named = named_folder(self.config)
        new = folder_name(self.config, self.comm.world_size, f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
        first = self.comm.exchange(str(named or new))[0]
        folder = named if self.config.output_dir is not None and named else Path(first)
        folder.mkdir(parents=True, exist_ok=True)
        if self.comm.rank == 0 and named is None:
            self.claims.enter_context(locked(folder))  # for those who look whether it is at work
        return folder

    def _monitor(self, meeting: Meeting | None) -> Monitor | None:
        """What samples this rank while it trains; None with --monitor_interval 0, which other ranks need not have."""
        comm = self.comm
        interface = find_interface(comm, meeting)
        if not self.config.monitor_interval:
            return None
        who = f"rank {comm.rank}: " if comm.world_size > 1 else ""
        warn = self.console.warn
        return Monitor(self.config.monitor_interval, interface, comm.device, lambda line: warn(f"{who}{line}"))
