"""What those who write records and those who read them have agreed on, said once."""

CHECKPOINT = "checkpoint"
# An iteration's phases, in the order in which they first begin. `checkpoint` is the copy of what is to be saved: of
# its own state, or of the state between the iteration before and this one.
PHASES = ("data", "forward", "backward", "sync", "clip", "step", CHECKPOINT)
PRECISIONS = ("fp32", "bf16", "fp16")
AUTO_PRECISION = "auto"  # --precision's word for the faster of fp32 and bf16
# What others are compared with: the run without any sync, and torch's own way.
FLOOR, DDP = "none", "ddp"
# The floor as it is where no rank computes a dense gradient of an embedding, which is zeros except for a few rows.
SPARSE_FLOOR = "none:sparse_embeddings"
FLOORS = (FLOOR, SPARSE_FLOOR)
# How many iterations at a run's start are not counted as its own. The first touches memory and fills caches;
# torch's DDP lays its buckets again in its second forward, by the order in which the first backward's gradients came.
WARM_UP = 2
# Who knows what a strategy sends: the ledger, which has an entry for every call, or the kernel's counters alone, where
# a library does not report.
BY_LEDGER, BY_COUNTERS = "ledger", "counters"
# What counts instead of an interface, where all ranks share a host: a rank's own connections, without packet headers.
OWN_SOCKETS = "own sockets"
# Said of records whose bytes are another backend's by formula.
ASSUMED_BYTES = "nccl chooses its own algorithms, and its calls are taken to move what gloo's do"
# How one of several runs of a command ended: `left out` is one that cannot run here.
FINISHED, FAILED, BROKEN_OFF, LEFT_OUT = OUTCOMES = ("finished", "failed", "broken off", "left out")
# What a task's examples come to, beside their number: a speed is told in these too.
COUNTED = ("tokens", "images")
# What an epoch's row has next to its metrics.
NOT_METRICS = frozenset(("epoch", "is_cut", "iterations", "last_iteration", "loss", "seconds_evaluation"))
# What a collective call was for. `GRADIENTS`, and `PARAMETERS` where ranks hold shards of the weights, are the cost of
# keeping the replicas equal. The rest is set-up and book-keeping.
STATE, GRADIENTS, AGREEMENT, LOSS, EVALUATION = "state", "gradients", "agreement", "loss", "evaluation"
BUFFERS = "buffers"  # a model's, such as running statistics
PARAMETERS = "parameters"  # weights that are sent because each rank holds, or steps, only its shard of them
WHOLE_WEIGHTS = "whole weights"  # weights gathered for an evaluation, where each rank holds only its shard of them
SYNCHRONIZING = (GRADIENTS, PARAMETERS)
# What is sent while training, between two evaluations.
OF_TRAINING = (GRADIENTS, PARAMETERS, AGREEMENT, LOSS, BUFFERS, WHOLE_WEIGHTS)
# The files of a run's record, while it goes on and when it has ended.
LIVE = "live"  # the folder of a run's folder that has the rows until it has ended well
# One file of each for every rank.
ITERATIONS, COMMUNICATION = "iterations.rank{rank}.jsonl", "communication.rank{rank}.jsonl"
# And of these where it has rows for them.
WIRE, HOST = "wire.rank{rank}.jsonl", "host.rank{rank}.jsonl"
MONITOR_ROWS = (WIRE, HOST)
ROWS = (ITERATIONS, COMMUNICATION, *MONITOR_ROWS)
# Of rank 0.
EPOCHS, EVALUATIONS = "epochs.jsonl", "evaluations.jsonl"
# Of rank 0 with --csv, for other programs.
CSV_STEPS, CSV_EVALUATIONS = "steps.csv", "evaluations.csv"
# What a summary will say of the run's setting, and who trained when.
SETTING, ATTEMPTS = "setting.json", "attempts.json"
# Whatever else rank 0 writes there.
CONFIG_FILE, ENVIRONMENT_FILE = "config.json", "environment.json"
# The other folders of a run's folder, and what files a model has there and in a checkpoint.
MODEL, CHECKPOINTS, TENSORBOARD = "model", "checkpoints", "tensorboard"
MODEL_FILES = frozenset(
    ("config.json", "pytorch_model.bin", "model.safetensors", "preprocessor_config.json")
    + ("vocab.txt", "vocab.json", "merges.txt", "spiece.model")
    + ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
)
# Why an attempt ended that has not FINISHED where nobody was left to write it down.
SILENT = "ended without a word"
