"""One frozen record of what a run is to do, checked once, with every error a sentence."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cos598d.data import Task, get_task
from cos598d.data.squad.task import SquadOptions
from cos598d.errors import UsageError
from cos598d.models.build import MODEL_TYPES
from cos598d.records.conventions import PRECISIONS
from cos598d.sync import get_sync
from cos598d.sync.base import SyncOptions
from cos598d.sync.codecs import get_codec
from cos598d.sync.from_file import label_of
from cos598d.terminal.printable import printable

BACKENDS = ("gloo", "nccl")
BACKEND_WORDS = f"one of {', '.join(BACKENDS)} (nccl has never been run by us)"  # until `make gpu` has, on a GPU
OPTIMIZERS = ("adamw", "sgd")
# What may differ between the ranks of a run: where each host keeps its files, and how many threads it has to spare.
LOCAL_FIELDS = frozenset(
    ("data_dir", "train_file", "predict_file", "output_dir", "cache_dir", "model_name_or_path", "config_name")
    + ("tokenizer_name", "threads", "overwrite_output_dir", "overwrite_cache", "label", "verbose_logging")
    + ("monitor_interval", "tensorboard")
)
SYNC_FIELDS = ("bucket_mb", "compress", "sync_every", "bucket_view")
SQUAD_FIELDS = tuple(field.name for field in fields(SquadOptions))


@dataclass(frozen=True)
class RunConfig(SquadOptions):
    """What a run is to do; the names are the command line's. `check` says in a sentence what cannot work."""

    label: str = "train"  # the run's name for itself: task1, task2a, ...
    sync: str = "ddp"
    bucket_mb: float = SyncOptions.bucket_mb
    compress: str | None = None
    sync_every: int = 1
    bucket_view: bool = False
    task_name: str = "rte"
    data_dir: str | None = None
    max_seq_length: int = 128
    max_train_examples: int | None = None
    max_eval_examples: int | None = None
    overwrite_cache: bool = False

    model_type: str = "bert"
    model_name_or_path: str = "minilm"
    config_name: str | None = None
    tokenizer_name: str | None = None
    cache_dir: str | None = None
    do_lower_case: bool = False
    dropout: float | None = 0.0  # None: the model's own

    do_train: bool = False
    do_eval: bool = False
    total_train_batch_size: int | None = None
    per_gpu_train_batch_size: int | None = None
    per_gpu_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_epsilon: float = 1e-8
    momentum: float = 0.0
    max_grad_norm: float = 1.0
    num_train_epochs: float = 3.0
    max_steps: int = -1
    warmup_steps: int = 0
    seed: int = 42
    precision: str = "fp32"
    check_replicas: int = 0  # steps from one check to the next; 0: after every epoch alone

    output_dir: str | None = None
    overwrite_output_dir: bool = False
    save_model: bool = True
    monitor_interval: float = 1.0  # 0: no samples
    tensorboard: bool = False

    backend: str = "gloo"
    no_cuda: bool = False
    timeout: float = 300.0
    threads: int | None = None

    def check(self, world_size: int) -> None:
        """Raise UsageError for the first value that cannot work in a world of `world_size` ranks."""
        self._check_label()
        self._check_sync()
        task = self.task()
        self._one_of("model_type", MODEL_TYPES)
        if task.model_types and self.model_type not in task.model_types:
            raise UsageError(
                f"--model_type {self.model_type} cannot do {task.name}: choose {' or '.join(task.model_types)}."
            )
        self._check_squad(task)
        self._one_of("backend", BACKENDS)
        self._one_of("precision", PRECISIONS)
        self._check_optimizer()
        for name in ("per_gpu_eval_batch_size", "gradient_accumulation_steps"):
            self._at_least(name, 1)
        self._at_least("max_seq_length", 8)
        given = ("total_train_batch_size", "per_gpu_train_batch_size", "max_train_examples", "max_eval_examples")
        for name in (*given, "threads"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        rates = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
        for name in (*rates, "warmup_steps", "seed", "monitor_interval", "check_replicas"):
            self._at_least(name, 0)
        for name in ("timeout", "num_train_epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"--{name} {getattr(self, name):g}: give a number above 0.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise UsageError(f"--max_steps {self.max_steps}: give a number from 1, or -1 for whole epochs.")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout {self.dropout:g}: a probability from 0 to below 1 is needed.")
        if self.total_train_batch_size is not None and self.per_gpu_train_batch_size is not None:
            raise UsageError("--total_train_batch_size and --per_gpu_train_batch_size exclude each other: give one.")
        if self.sync == "none" and world_size > 1 and self.do_eval:
            raise UsageError(
                f"--sync none on {world_size} ranks lets the replicas drift apart, so no model is left to evaluate: "
                f"give --do_train alone, or another --sync."
            )
        if self.sync == "none" and world_size > 1 and self.check_replicas:
            raise UsageError(
                f"--check_replicas {self.check_replicas}: with --sync none on {world_size} ranks the replicas drift "
                f"apart; leave it out, or give another --sync."
            )
        if self.backend == "nccl" and (self.no_cuda or not torch.cuda.is_available()):
            reason = "--no_cuda was given" if self.no_cuda else "this host has none that torch can use"
            raise UsageError(f"--backend nccl needs a CUDA device, and {reason}: use --backend gloo.")

    def task(self) -> Task:
        """The task, with what the flags say of it. Raises UsageError for an unknown one."""
        return get_task(self.task_name, self)

    def sync_options(self) -> SyncOptions:
        """What the flags say of the sync."""
        return SyncOptions(**{name: getattr(self, name) for name in SYNC_FIELDS})

    def total_batch_size(self, world_size: int) -> int:
        """Examples in a global batch, i.e. in one optimizer step of all ranks together (64 by default)."""
        if self.per_gpu_train_batch_size is not None:
            return self.per_gpu_train_batch_size * world_size * self.gradient_accumulation_steps
        return self.total_train_batch_size or 64

    def facts(self) -> dict[str, Any]:
        """What every rank must have been started with alike, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in LOCAL_FIELDS}

    def describe_batch(self, world_size: int) -> str:
        """The global batch in words."""
        total = self.total_batch_size(world_size)
        per_rank = f"{total // world_size}" + ("" if total % world_size == 0 else f" or {total // world_size + 1}")
        parts = f" in {self.gradient_accumulation_steps} parts" if self.gradient_accumulation_steps > 1 else ""
        return f"{total} examples a step{parts}" + (f", {per_rank} on each rank" if world_size > 1 else "")

    def _check_label(self) -> None:
        """A label is a part of the name of the run's folder, and must not lead out of runs/."""
        if not re.fullmatch(r"[\w+=@][\w.+=@ -]{0,99}", self.label):
            raise UsageError(
                f"--label {printable(self.label, 100)}: give a name of up to 100 letters, digits and . _ - + = @, "
                "not beginning with a dot or dash."
            )

    def _check_sync(self) -> None:
        sync, defaults = get_sync(self.sync), SyncOptions()
        for name in SYNC_FIELDS:
            if getattr(self, name) != getattr(defaults, name) and name not in getattr(sync, "uses", ()):
                raise UsageError(f"--{name} means nothing to --sync {self.sync}: leave it out.")
        if self.compress is not None:
            get_codec(self.compress)
        if hasattr(sync, "check_options"):  # a sync of somebody's own need not have it
            sync.check_options(self.sync_options(), self.backend)
        self._at_least("sync_every", 1)
        if not 0 < self.bucket_mb < math.inf:
            raise UsageError(f"--bucket_mb {self.bucket_mb:g}: give a number of MiB above 0.")

    def _check_optimizer(self) -> None:
        self._one_of("optimizer", OPTIMIZERS)
        for name, owner in (("momentum", "sgd"), ("adam_epsilon", "adamw")):
            if getattr(self, name) != getattr(RunConfig, name) and self.optimizer != owner:
                raise UsageError(f"--{name} means nothing to --optimizer {self.optimizer}: leave it out.")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum {self.momentum:g}: a number from 0 to below 1 is needed.")

    def _check_squad(self, task: Task) -> None:
        defaults = SquadOptions()
        if task.name != "squad":
            for name in SQUAD_FIELDS:
                if getattr(self, name) != getattr(defaults, name):
                    raise UsageError(f"--{name} is SQuAD's, and the task is {task.name}: leave it out.")
            return
        for name in ("doc_stride", "max_query_length", "max_answer_length", "n_best_size"):
            self._at_least(name, 1)
        if not math.isfinite(self.null_score_diff_threshold):
            raise UsageError(f"--null_score_diff_threshold {self.null_score_diff_threshold}: give a number.")
        if self.null_score_diff_threshold and not self.version_2_with_negative:
            raise UsageError("--null_score_diff_threshold is SQuAD 2.0's: add --version_2_with_negative.")
        if self.max_seq_length < self.max_query_length + 4:
            raise UsageError(
                f"--max_seq_length {self.max_seq_length} leaves no room for text beside questions of "
                f"{self.max_query_length}: give at least {self.max_query_length + 4} or lower --max_query_length."
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not least <= value < math.inf:
            raise UsageError(f"--{name} {value:g}: give a number of at least {least}.")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise UsageError(f"--{name} {value}: the known ones are {', '.join(known)}.")


def config_from(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig of the `values` that it has a field for, else of the task's own defaults.

    Without do_train and do_eval, both are meant. Raises UsageError for an unknown task.
    """
    known = {field.name for field in fields(RunConfig)}
    given = {name: value for name, value in values.items() if name in known}
    defaults = dict(get_task(given.get("task_name", RunConfig.task_name)).defaults)
    if given.get("per_gpu_train_batch_size") is not None:
        defaults.pop("total_train_batch_size", None)
    given = defaults | given
    if not given.get("do_train") and not given.get("do_eval"):
        given |= {"do_train": True, "do_eval": True}
    return RunConfig(**given)


def folder_name(config: RunConfig, world_size: int, when: str) -> Path:
    """Where a run's record goes without --output_dir: runs/LABEL-TASK-SYNC-nN-WHEN."""
    words = dict.fromkeys((config.label, config.task_name.lower(), label_of(config.sync)))
    return Path("runs") / "-".join((*words, f"n{world_size}", when))
