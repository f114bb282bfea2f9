"""Conventions shared by the code that writes records and the code that reads them."""

CHECKPOINT = "checkpoint"
# An iteration's phases, in the order in which they first begin. `checkpoint` is the copy of the state to save: an
# iteration's own, or the state between the previous iteration and this one.
PHASES = ("data", "forward", "backward", "sync", "clip", "step", CHECKPOINT)
PRECISIONS = ("fp32", "bf16", "fp16")
AUTO_PRECISION = "auto"  # --precision's value for the faster of fp32 and bf16
# The baselines: the run without a sync, and torch's own.
FLOOR, DDP = "none", "ddp"
# How many iterations at a run's start are excluded as warm-up. The first touches memory and fills caches. In its second
# forward, torch's DDP rebuilds its buckets in the order in which the first backward's gradients arrived.
WARM_UP = 2
# The source of a strategy's sent bytes: the ledger, which has every call, or only the kernel's counters, if a library
# does not report its calls.
BY_LEDGER, BY_COUNTERS = "ledger", "counters"
# For records whose bytes come from another backend's formulas.
ASSUMED_BYTES = "nccl chooses its own algorithms, and its calls are taken to move what gloo's do"
# Why an attempt ended that has done its work; and one that has not, if nothing was left to write it down.
FINISHED, SILENT = "finished", "ended without a word"
# Units of a task's examples in addition to their number: speeds are also given in these.
COUNTED = ("tokens", "images")
# The fields of an epoch's row other than its metrics.
NOT_METRICS = frozenset(("epoch", "is_cut", "iterations", "last_iteration", "loss", "seconds_evaluation"))
# The purpose of a collective call. `GRADIENTS`, and `PARAMETERS` if ranks hold shards of the weights, are the cost of
# keeping the replicas equal. The others are set-up and book-keeping.
STATE, GRADIENTS, AGREEMENT, LOSS, EVALUATION = "state", "gradients", "agreement", "loss", "evaluation"
BUFFERS = "buffers"  # a model's, such as running statistics
PARAMETERS = "parameters"  # weights that are sent because each rank holds, or steps, only its shard of them
WHOLE_WEIGHTS = "whole weights"  # weights gathered for an evaluation, if each rank holds only its shard of them
SYNCHRONIZING = (GRADIENTS, PARAMETERS)
# The files of a run's record. One of each per rank:
ITERATIONS, COMMUNICATION, HOST = (
    "iterations.rank{rank}.jsonl",
    "communication.rank{rank}.jsonl",
    "host.rank{rank}.jsonl",
)
# Only on rank 0: rows, and the run's facts. The summary is written last, when the run has ended well.
EPOCHS, EVALUATIONS, ATTEMPTS = "epochs.jsonl", "evaluations.jsonl", "attempts.jsonl"
SETTING, CONFIG_FILE, ENVIRONMENT_FILE = "setting.json", "config.json", "environment.json"
SUMMARY = "summary.json"
LOCK = ".lock"  # locked by the program that uses the folder
# The other folders of a run's folder.
MODEL, CHECKPOINTS, TENSORBOARD = "model", "checkpoints", "tensorboard"
