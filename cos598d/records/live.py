"""Where a run's record stands while the run goes on, and what its files are called."""

LIVE = "live"  # the folder of a run's folder that has the rows until it has ended well
# One file of each for every rank.
ITERATIONS, COMMUNICATION = "iterations.rank{rank}.jsonl", "communication.rank{rank}.jsonl"
# And of these where it has rows for them.
WIRE, HOST = "wire.rank{rank}.jsonl", "host.rank{rank}.jsonl"
MONITOR_ROWS = (WIRE, HOST)
ROWS = (ITERATIONS, COMMUNICATION, *MONITOR_ROWS)
# Of rank 0.
EPOCHS, EVALUATIONS = "epochs.jsonl", "evaluations.jsonl"
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
# Why an attempt ended: its work was done, and nobody was left to write it down.
FINISHED, SILENT = "finished", "ended without a word"
