"""What a record says of its setting, by the page's words."""

from collections.abc import Mapping
from typing import Any

# Word for the page, and where the value is. Of a run: in the summary, its config or its environment.
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
# Of those what makes the work of two runs the same, whatever their syncs and the ground under them.
OF_WORK = frozenset(
    ("examples per step", "task", "model", "data", "longest sequence", "dropout", "precision", "TF32", "seed")
    + ("optimizer", "learning rate", "momentum", "gradient accumulation", "threads per rank")
)
# And of a run's flags what makes its work another without having a place among its settings on the page.
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
# Of all that work what does not change the loss of an iteration.
NOT_OF_A_STEP = frozenset(("steps", "threads per rank", "TF32", "examples per epoch", "gradient accumulation"))
# What the seconds of two runs are of, beside their work.
GROUND = ("processor", "cores", "device")
# And by which code they were made, next to the versions of packages.
CODE = (("commit", "commit"), ("Python", "python"), ("CUDA", "cuda"))
# Of a bench: in the record's setting, its network or its environment.
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
    """The value of each of OF_RUNS or OF_BENCHES, None where the record does not say."""
    return {word: places[place].get(name) for word, place, name in words}
