"""The settings of a run: one frozen dataclass, checked once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cos598d.checkpoint_flags import CheckpointFlags
from cos598d.data import TASK_NAMES, Task, TaskFlags, get_task
from cos598d.data.squad import MOST_QUERY
from cos598d.data.tasks import TASKS_WITH
from cos598d.errors import UsageError
from cos598d.optimizers import OPTIMIZERS, TRAINING, OptimizerFlags
from cos598d.records.conventions import PRECISIONS
from cos598d.sync import AUTO_SYNC, KNOWN, get_sync
from cos598d.sync.codecs import get_codec
from cos598d.sync.options import SYNC_GROUP, SyncFlags, or_choose
from cos598d.terminal.fields import check_flags, defaults_of, flag, flags_of, given
from cos598d.terminal.own_code import label_of
from cos598d.terminal.printable import printable
from cos598d.world.devices import AUTO_BACKEND, check_threads

BACKENDS = (AUTO_BACKEND, "gloo", "nccl")
SYNC_FIELDS = tuple(defaults_of(SyncFlags))
# What the trainer knows of its models: every parameter is used, no buffer changes, no script reads weights or gradients
# between two steps.
OF_TRAINER = {
    "find_unused_parameters": False,
    "broadcast_buffers": False,
    "gather_in_forward": True,
    "gradient_as_bucket_view": True,
}
# Flags without effect on tasks of images.
TEXT_FLAGS = ("max_seq_length", "do_lower_case")
# The model types, each with the default of --model_name_or_path.
USUAL_MODELS = {"bert": "minilm", "roberta": "roberta-base", "distilbert": "distilbert-base-uncased", "vit": "vit-tiny"}
# The headings of the flags below in --help.
RANKS, DATA, MODEL, RECORD = "ranks", "task and data", "model", "output"

MOST_EXAMPLES = 1 << 20  # per step, or per micro-batch


@dataclass(frozen=True)
class RunConfig(TaskFlags, SyncFlags, OptimizerFlags, CheckpointFlags):
    """The settings of a run. Each field is the flag of its name; `check` raises an error for what cannot work.

    A flag is one line here or in a base class. The parser, --help, its range check and the comparison between ranks
    follow from it.
    """

    sync: str = flag(
        "ddp",
        f"how ranks cooperate: {', '.join(KNOWN)}; FILE.py:CLASS for your own; {AUTO_SYNC} tries some and "
        "takes the fastest",
        group=SYNC_GROUP,
    )
    check_replicas: int = flag(
        0, "check every N steps that all ranks' weights are equal; 0: only after every epoch", group=SYNC_GROUP, least=0
    )

    backend: str = flag(
        AUTO_BACKEND,
        "torch's backend: {choices}; auto: nccl if every rank has its own GPU, else gloo "
        "(nccl was run with one rank only)",
        group=RANKS,
        choices=BACKENDS,
    )
    no_cuda: bool = flag(False, "use the CPU even if there is a GPU", group=RANKS)
    threads: int | None = flag(
        None, "threads per rank (default: its share of the host's cores)", group=RANKS, least=1, is_local=True
    )
    timeout: float = flag(
        300.0, "seconds to wait for other ranks to arrive and for a collective to end", group=RANKS, above=0
    )

    task_name: str = flag("rte", f"task to train: {', '.join(TASK_NAMES)}; FILE.py:CLASS for your own", group=DATA)
    data_dir: str | None = flag(
        None,
        "folder of the task's files (else $GLUE_DIR/TASK, $SQUAD_DIR or $IMAGE_DIR, or a sample)",
        group=DATA,
        metavar="FOLDER",
        is_local=True,
    )
    max_seq_length: int = flag(
        128, "word pieces per example, with special tokens; longer ones are cut", group=DATA, least=8
    )
    max_train_examples: int | None = flag(
        None, "train on only this many examples, spread evenly over the data", group=DATA, least=1
    )
    max_eval_examples: int | None = flag(
        None, "evaluate on only this many examples, spread evenly over the data", group=DATA, least=1
    )

    model_type: str | None = flag(
        None, "architecture: {choices} (default: the model's own)", group=MODEL, choices=tuple(USUAL_MODELS)
    )
    model_name_or_path: str = flag(
        "minilm",
        "a folder, a hub name (NAME or NAME@REVISION), minilm, or random weights: tiny, bert-base, vit-tiny, vit-base; "
        "other --model_type: its usual hub name, such as distilbert-base-uncased",
        group=MODEL,
        metavar="MODEL",
        is_local=True,
    )
    cache_dir: str | None = flag(None, "folder for models from the hub", group=MODEL, metavar="FOLDER", is_local=True)
    do_lower_case: bool = flag(
        False, "use an uncased vocabulary (implied by minilm, tiny and names with 'uncased')", group=MODEL
    )
    dropout: float | None = flag(
        0.0, "dropout probability, 0 for parity; 'model': the model's own", group=MODEL, least=0, below=1, none="model"
    )

    do_train: bool = flag(False, "train (without --do_train and --do_eval: do both)", group=TRAINING)
    do_eval: bool = flag(False, "evaluate after every epoch", group=TRAINING)
    do_predict: bool = flag(False, "at the end, predict the data's test set, as `cos598d predict` does", group=TRAINING)
    total_train_batch_size: int | None = flag(
        None, "examples per step, divided among all ranks (default: 64)", group=TRAINING, least=1, below=MOST_EXAMPLES
    )
    per_gpu_train_batch_size: int | None = flag(
        None, "instead: examples per rank and accumulation step", group=TRAINING, least=1, below=MOST_EXAMPLES
    )
    per_gpu_eval_batch_size: int = flag(8, "examples per rank in a batch of evaluation", group=TRAINING, least=1)
    gradient_accumulation_steps: int = flag(1, "micro-batches per step", group=TRAINING, least=1, below=MOST_EXAMPLES)
    max_grad_norm: float = flag(1.0, "clip the averaged gradient to this norm; 0: do not clip", group=TRAINING, least=0)
    num_train_epochs: float = flag(3.0, "train for this many epochs", group=TRAINING, above=0, below=1e9)
    max_steps: int = flag(-1, "train for exactly this many steps instead; -1: whole epochs", group=TRAINING)
    seed: int = flag(42, "random seed of new weights, the order of examples, and dropout", group=TRAINING, least=0)
    activation_checkpointing: bool = flag(
        False, "recompute activations in backward: less memory, more time, the same gradients", group=TRAINING
    )
    precision: str = flag(
        "fp32",
        "precision of torch's autocast: {choices}",
        group=TRAINING,
        choices=PRECISIONS,
    )

    output_dir: str | None = flag(
        None,
        "the folder of the run's files (default: a new one in runs/)",
        group=RECORD,
        metavar="FOLDER",
        is_local=True,
    )
    overwrite_output_dir: bool = flag(False, "overwrite a non-empty output folder", group=RECORD, is_local=True)
    save_model: bool = flag(True, "do not write the trained model", group=RECORD)
    monitor_interval: float = flag(
        1.0, "seconds between samples of network and host; 0: no samples", group=RECORD, least=0, is_local=True
    )
    tensorboard: bool = flag(
        False, "also write TensorBoard events to tensorboard/ in the output folder", group=RECORD, is_local=True
    )
    # task1, task2a, ... in the four task scripts
    label: str = flag("train", "name of the run in its files and in tables", group=RECORD, is_local=True)

    def check(self, world_size: int) -> None:
        """Raise UsageError for the first value that cannot work on `world_size` ranks."""
        self._check_label()
        check_threads(self.threads)
        task = self.task()
        check_flags(self)
        self._check_sync(world_size)
        if self.model_type and (self.model_type == "vit") != (task.image_form is not None):
            able = [name for name in USUAL_MODELS if (name == "vit") == (task.image_form is not None)]
            raise UsageError(f"--model_type {self.model_type} cannot do {task.name}. Choose {' or '.join(able)}.")
        if self.do_predict and task.head != "sequence_classification":
            raise UsageError(f"--do_predict: {task.name} has no test set. Give files to `cos598d predict`.")
        self._check_task_flags(task)
        self.check_life(self.do_train, self.do_eval, self.output_dir)
        for owner, names in OPTIMIZERS.items():
            for name in given(self, names) if self.optimizer != owner else ():
                raise UsageError(f"--{name} has no effect with --optimizer {self.optimizer}. Leave it out.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise UsageError(f"--max_steps {self.max_steps} is not valid. Give 1 or more, or -1 for whole epochs.")
        if self.total_train_batch_size is not None and self.per_gpu_train_batch_size is not None:
            raise UsageError("--total_train_batch_size and --per_gpu_train_batch_size exclude each other. Give one.")
        if self.sync == "none" and world_size > 1 and (self.do_eval or self.do_predict or self.check_replicas):
            raise UsageError(
                f"--sync none on {world_size} ranks lets the replicas drift apart, so there is no model to evaluate or "
                "to check. Give only --do_train, or another --sync."
            )
        if self.backend == "nccl" and (self.no_cuda or not torch.cuda.is_available()):
            reason = "--no_cuda was given" if self.no_cuda else "torch cannot use one on this machine"
            raise UsageError(f"--backend nccl needs a CUDA device, and {reason}. Use --backend gloo.")

    def task(self) -> Task:
        """The task, with its flags applied. Raises UsageError for an unknown one."""
        return get_task(self.task_name, self)

    def sync_options(self) -> dict[str, Any]:
        """The options of the sync that --sync names: its flags, and what the trainer knows."""
        names = get_sync(self.sync).takes
        known = OF_TRAINER | {name: getattr(self, name) for name in SYNC_FIELDS}
        return {name: known[name] for name in names if name in known}

    def total_batch_size(self, world_size: int) -> int:
        """Examples in a global batch, i.e. in one optimizer step of all ranks together (64 by default)."""
        if self.per_gpu_train_batch_size is not None:
            return self.per_gpu_train_batch_size * world_size * self.gradient_accumulation_steps
        return self.total_train_batch_size or 64

    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on every rank, as JSON values."""
        return {name: getattr(self, name) for name, said in flags_of(RunConfig).items() if not said.is_local}

    def describe_batch(self, world_size: int) -> str:
        """The global batch as a phrase for the user."""
        total = self.total_batch_size(world_size)
        per_rank = f"{total // world_size}" + ("" if total % world_size == 0 else f" or {total // world_size + 1}")
        parts = f" in {self.gradient_accumulation_steps} parts" if self.gradient_accumulation_steps > 1 else ""
        return f"{total} examples per step{parts}" + (f", {per_rank} on each rank" if world_size > 1 else "")

    def _check_label(self) -> None:
        """Raise UsageError if the label, a part of the run folder's name, would lead out of runs/."""
        if not re.fullmatch(r"[\w+=@][\w.+=@ -]{0,99}", self.label):
            shown = printable(self.label, 100)
            raise UsageError(f"--label {shown} is not valid. Give a name of up to 100 letters, digits and ._-+=@.")

    def _check_sync(self, world_size: int) -> None:
        if self.sync == AUTO_SYNC:
            for name in given(self, SYNC_FIELDS):
                raise UsageError(
                    f"--{name} cannot be combined with --sync {AUTO_SYNC}, which uses the defaults. Name a sync."
                )
            return
        sync = get_sync(self.sync)
        for name in given(self, SYNC_FIELDS):
            if name not in sync.takes:
                raise UsageError(f"--{name} has no effect with --sync {self.sync}. Leave it out{or_choose(name)}.")
        if self.compress is not None:
            get_codec(self.compress)
        sync.check_run(world_size, self.precision)

    def _check_task_flags(self, task: Task) -> None:
        flags = flags_of(TaskFlags)
        for name in given(self, flags):
            tasks = TASKS_WITH.get(flags[name].group, (task.name,))
            if task.name not in tasks:
                raise UsageError(f"--{name} is for {', '.join(tasks)}, and the task is {task.name}. Leave it out.")
        if task.image_form:
            for name in given(self, TEXT_FLAGS):
                raise UsageError(f"--{name} is for texts, and the task is {task.name}. Leave it out.")
        if self.null_score_diff_threshold and not self.version_2_with_negative:
            raise UsageError("--null_score_diff_threshold is for SQuAD 2.0. Add --version_2_with_negative.")
        if task.head == "question_answering" and self.max_seq_length < MOST_QUERY + 4:
            words = f"leaves no room for text next to questions of {MOST_QUERY} tokens. Give at least {MOST_QUERY + 4}"
            raise UsageError(f"--max_seq_length {self.max_seq_length} {words}.")


def config_from(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from `values`, with defaults of the task and of the model type for the rest.

    Keys of `values` that are no field are ignored. Without do_train and do_eval, both are on. Raises UsageError for an
    unknown task.
    """
    known = flags_of(RunConfig)
    chosen = {name: value for name, value in values.items() if name in known}
    defaults = dict(get_task(chosen.get("task_name", RunConfig.task_name)).defaults)
    if chosen.get("per_gpu_train_batch_size") is not None:
        defaults.pop("total_train_batch_size", None)
    if chosen.get("model_type") in USUAL_MODELS:
        defaults["model_name_or_path"] = USUAL_MODELS[chosen["model_type"]]
    chosen = defaults | chosen
    if not chosen.get("do_train") and not chosen.get("do_eval"):
        chosen |= {"do_train": True, "do_eval": True}
    return RunConfig(**chosen)


def folder_name(config: RunConfig, world_size: int, when: str) -> Path:
    """The default of --output_dir: runs/LABEL-TASK-SYNC-nN-WHEN."""
    words = dict.fromkeys((config.label, label_of(config.task_name).lower(), label_of(config.sync)))
    return Path("runs") / "-".join((*words, f"n{world_size}", when))
