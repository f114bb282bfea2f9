"""Conventions shared by the code that writes records and the code that reads them."""

CHECKPOINT = "checkpoint"
# An iteration's phases, in the order in which they first begin. `checkpoint` is the copy of the state to save: an
# iteration's own, or the state between the previous iteration and this one.
PHASES = ("data", "forward", "backward", "sync", "clip", "step", CHECKPOINT)
PRECISIONS = ("fp32", "bf16", "fp16")
AUTO_PRECISION = "auto"  # --precision's value for the faster of fp32 and bf16
# The baselines: the run without a sync, and torch's own.
FLOOR, DDP = "none", "ddp"
# The same baseline when no rank computes a dense gradient of an embedding, which is zeros except for a few rows.
SPARSE_FLOOR = "none:sparse_embeddings"
FLOORS = (FLOOR, SPARSE_FLOOR)
# How many iterations at a run's start are excluded as warm-up. The first touches memory and fills caches. In its second
# forward, torch's DDP rebuilds its buckets in the order in which the first backward's gradients arrived.
WARM_UP = 2
# In `memory` of a summary: the bytes by category at the peak, with activations; {} if the bytes in use are not known.
WITH_ACTIVATIONS = "peak_with_activations"
# The source of a strategy's sent bytes: the ledger, which has every call, or only the kernel's counters, if a library
# does not report its calls.
BY_LEDGER, BY_COUNTERS = "ledger", "counters"
# Counted instead of an interface, if all ranks share a host: a rank's own connections, without packet headers.
OWN_SOCKETS = "own sockets"
# For records whose bytes come from another backend's formulas.
ASSUMED_BYTES = "nccl chooses its own algorithms, and its calls are taken to move what gloo's do"
# How one of a command's runs ended; `left out` is a run that cannot work here.
FINISHED, FAILED, BROKEN_OFF, LEFT_OUT = OUTCOMES = ("finished", "failed", "broken off", "left out")
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
# Sent during training, between two evaluations.
OF_TRAINING = (GRADIENTS, PARAMETERS, AGREEMENT, LOSS, BUFFERS, WHOLE_WEIGHTS)
# The files of a run's record, during the run and after it.
LIVE = "live"  # the folder inside a run's folder that has the rows until the run has ended well
# One file of each per rank.
ITERATIONS, COMMUNICATION = "iterations.rank{rank}.jsonl", "communication.rank{rank}.jsonl"
# And of these, if it has rows for them.
WIRE, HOST = "wire.rank{rank}.jsonl", "host.rank{rank}.jsonl"
MONITOR_ROWS = (WIRE, HOST)
ROWS = (ITERATIONS, COMMUNICATION, *MONITOR_ROWS)
# Only on rank 0.
EPOCHS, EVALUATIONS = "epochs.jsonl", "evaluations.jsonl"
# Only on rank 0 with --csv, for other programs.
CSV_STEPS, CSV_EVALUATIONS = "steps.csv", "evaluations.csv"
# The summary's facts about the setting, and the run's attempts.
SETTING, ATTEMPTS = "setting.json", "attempts.json"
# Rank 0's other files there.
CONFIG_FILE, ENVIRONMENT_FILE = "config.json", "environment.json"
# The other folders of a run's folder, and a model's files there and in a checkpoint.
MODEL, CHECKPOINTS, TENSORBOARD = "model", "checkpoints", "tensorboard"
MODEL_FILES = frozenset(
    ("config.json", "pytorch_model.bin", "model.safetensors", "preprocessor_config.json")
    + ("vocab.txt", "vocab.json", "merges.txt", "spiece.model")
    + ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
)
# Why an attempt ended that has not FINISHED, if nothing was left to write it down.
SILENT = "ended without a word"
