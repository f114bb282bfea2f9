"""The settings in a record, under the names that pages use."""

from collections.abc import Mapping
from typing import Any

# (Name on the page, place of the value, key). A run's places: the summary, its config and its environment.
OF_RUNS = (
    ("sync", "summary", "sync"),
    ("ranks", "summary", "world_size"),
    ("examples per step", "summary", "total_train_batch_size"),
    ("rate", "network", "rate"),
    ("delay", "network", "delay"),
    ("offload", "network", "offload"),
    ("task", "summary", "task"),
    ("model", "summary", "model"),
    ("data", "summary", "data"),
    ("longest sequence", "summary", "max_seq_length"),
    ("dropout", "summary", "dropout"),
    ("precision", "summary", "precision"),
    ("TF32", "environment", "tf32"),
    ("seed", "summary", "seed"),
    ("optimizer", "config", "optimizer"),
    ("learning rate", "config", "learning_rate"),
    ("momentum", "config", "momentum"),
    ("gradient accumulation", "config", "gradient_accumulation_steps"),
    ("bucket MB", "config", "bucket_mb"),
    ("compression", "config", "compress"),
    ("bucket views", "config", "bucket_view"),
    ("steps between averages", "config", "sync_every"),
    ("backend", "summary", "backend"),
    ("device", "environment", "device"),
    ("processor", "environment", "processor"),
    ("cores", "environment", "cores"),
    ("threads per rank", "environment", "threads_per_rank"),
    ("ranks per machine", "environment", "ranks_on_host"),
)
# Those of them that make two runs the same workload, whatever their syncs and machines.
OF_WORK = frozenset(
    ("examples per step", "task", "model", "data", "longest sequence", "dropout", "precision", "TF32", "seed")
    + ("optimizer", "learning rate", "momentum", "gradient accumulation", "threads per rank")
)
# Flags that also make it another workload, although the page does not list them as settings.
ALSO_OF_WORK = (
    ("learning rate's schedule", "lr_scheduler"),
    ("warm-up steps", "warmup_steps"),
    ("weight decay", "weight_decay"),
    ("Adam's epsilon", "adam_epsilon"),
    ("clipping", "max_grad_norm"),
    ("training examples", "max_train_examples"),
    ("stride of windows", "doc_stride"),
    ("longest question", "max_query_length"),
)
# Those parts of the workload that do not change the loss of an iteration.
NOT_OF_A_STEP = frozenset(("steps", "threads per rank", "TF32", "examples per epoch", "gradient accumulation"))
# What the seconds of two runs depend on in addition to their workload.
GROUND = ("processor", "cores", "device")
# The code that made them, in addition to the versions of packages.
CODE = (("commit", "commit"), ("Python", "python"), ("CUDA", "cuda"))
# A bench's places: the record's setting, its network and its environment.
OF_BENCHES = (
    ("ranks", "setting", "world_size"),
    ("rate", "network", "rate"),
    ("delay", "network", "delay"),
    ("offload", "network", "offload"),
    ("examples on each rank", "setting", "batch"),
    ("tokens", "setting", "tokens"),
    ("model", "setting", "model"),
    ("with the optimizer", "setting", "step"),
    ("precision", "setting", "precision"),
    ("backend", "setting", "backend"),
    ("device", "environment", "device"),
    ("processor", "environment", "processor"),
    ("cores", "environment", "cores"),
    ("threads per rank", "setting", "threads_per_rank"),
    ("ranks per machine", "environment", "ranks_on_host"),
    ("seconds are", "setting", "seconds_of"),
    ("rounds", "setting", "rounds"),
)


def collect(words: tuple[tuple[str, str, str], ...], places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values for OF_RUNS or OF_BENCHES, by name; None if the record does not have it."""
    return {word: places[place].get(name) for word, place, name in words}
