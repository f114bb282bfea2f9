"""The flags of a run, in groups; their defaults are RunConfig's."""

import argparse
from dataclasses import fields
from typing import Any

from cos598d.commands.flags import FLAG, Groups, Parser, add_groups
from cos598d.commands.flags import to_words as to_plain_words
from cos598d.config import BACKEND_WORDS, OPTIMIZERS, RunConfig
from cos598d.data import TASK_NAMES
from cos598d.models.build import MODEL_TYPES
from cos598d.records.conventions import PRECISIONS
from cos598d.sync import SYNCS
from cos598d.sync.codecs import CODECS

DEFAULTS = {field.name: field.default for field in fields(RunConfig)}
OWN_DROPOUT = -1.0


def _dropout(text: str) -> float:
    if text == "model":
        return OWN_DROPOUT
    value = float(text)
    if value < 0:
        raise ValueError
    return value


_dropout.__name__ = "probability"  # for argparse's sentence

# A default that is not None is added to the help.
GROUPS: Groups = {
    "ranks": [
        ("sync", str, f"gradient sync, one of {', '.join(SYNCS)}; or your own, FILE.py:CLASS"),
        ("bucket_mb", float, "capacity of a bucket in MiB, for the syncs that have buckets"),
        ("compress", str, f"what gradients travel as, for syncs with buckets: one of {', '.join(CODECS)} (ddp: fp16)"),
        ("bucket_view", FLAG, "gradients are views of the buckets, for ddp: torch's gradient_as_bucket_view"),
        ("sync_every", int, "steps from one average of the weights to the next, for local_sgd"),
        ("backend", str, BACKEND_WORDS),
        ("world_size", int, "ranks in all; without a rank, they are started here"),
        ("local_rank", int, "this process's rank in the world, from 0 (torchrun, srun and mpirun say it themselves)"),
        ("master_ip", str, "address of rank 0 (default: 127.0.0.1)"),
        ("master_port", int, "port where the ranks meet (default: 6585)"),
        ("timeout", float, "seconds to wait for ranks to come, and for a collective to end"),
        ("secret", str, "file with a secret that every rank must know (else $COS598D_SECRET; one host needs none)"),
        ("silence_seconds", int, "a host from which nothing is heard for so long counts as lost (default: 8)"),
        ("threads", int, "threads of this rank (default: its share of the host's cores)"),
        ("no_cuda", FLAG, "stay on the CPU where there is a GPU"),
    ],
    "task and data": [
        ("task_name", str, f"one of {', '.join(TASK_NAMES)}"),
        ("data_dir", str, "folder with the task's files (else $GLUE_DIR/TASK or $SQUAD_DIR, else the bundled sample)"),
        ("max_seq_length", int, "word pieces of an example, special tokens included; longer ones are cut"),
        ("max_train_examples", int, "train on this many examples only, spread evenly over the data"),
        ("max_eval_examples", int, "evaluate on this many examples only, spread evenly over the data"),
        ("overwrite_cache", FLAG, "build the cached features anew"),
    ],
    "SQuAD": [
        ("train_file", str, "file to train on, a path or a name in the data folder (default: train-v1.1.json there)"),
        ("predict_file", str, "file to evaluate on (default: dev-v1.1.json in the data folder)"),
        ("version_2_with_negative", FLAG, "SQuAD 2.0: questions may have no answer; default files are those of v2.0"),
        ("null_score_diff_threshold", float, "say 'no answer' where its score beats the best answer's by more"),
        ("doc_stride", int, "word pieces from one window over a long context to the next"),
        ("max_query_length", int, "word pieces of a question; longer ones are cut"),
        ("max_answer_length", int, "word pieces of the longest answer that is predicted"),
        ("n_best_size", int, "answers kept for each question in nbest_predictions.json"),
        ("verbose_logging", FLAG, "name every question whose answer's tokens are not exact"),
    ],
    "model": [
        ("model_type", str, f"one of {', '.join(MODEL_TYPES)}"),
        (
            "model_name_or_path",
            str,
            "a folder, a hub name (or NAME@REVISION), minilm, or tiny and bert-base (random weights)",
        ),
        ("config_name", str, "another folder or hub name for the model's configuration"),
        ("tokenizer_name", str, "another folder, file or hub name for the vocabulary"),
        ("cache_dir", str, "where models from the hub are kept"),
        (
            "do_lower_case",
            FLAG,
            "the vocabulary is uncased (known by itself for minilm, tiny and names with 'uncased')",
        ),
        ("dropout", _dropout, "probability for every dropout of the model: 0 for parity; 'model' for the model's own"),
    ],
    "training": [
        ("do_train", FLAG, "train (without --do_train and --do_eval: both)"),
        ("do_eval", FLAG, "evaluate after every epoch"),
        ("total_train_batch_size", int, "examples in a step of all ranks together, each takes its share (default: 64)"),
        ("per_gpu_train_batch_size", int, "instead: examples on each rank, in each of the accumulation steps"),
        ("per_gpu_eval_batch_size", int, "examples on each rank in a batch of evaluation"),
        ("gradient_accumulation_steps", int, "parts in which a step's batch is computed"),
        ("optimizer", str, f"one of {', '.join(OPTIMIZERS)}"),
        ("learning_rate", float, "the optimizer's peak learning rate"),
        ("weight_decay", float, "the optimizer's weight decay, on all but biases and layer norms"),
        ("adam_epsilon", float, "AdamW's epsilon"),
        ("momentum", float, "SGD's momentum"),
        ("max_grad_norm", float, "norm to which the averaged gradient is clipped; 0 clips nothing"),
        ("num_train_epochs", float, "epochs to train"),
        ("max_steps", int, "train exactly this many steps instead; -1: whole epochs"),
        ("warmup_steps", int, "steps over which the learning rate rises, before it falls linearly to 0"),
        ("seed", int, "for new weights, the order of examples, and dropout"),
        ("precision", str, f"one of {', '.join(PRECISIONS)}: torch's autocast"),
        ("fp16", FLAG, "the same as --precision fp16"),
        (
            "check_replicas",
            int,
            "steps from one check that all ranks' weights are equal to the next; 0: after every epoch alone",
        ),
    ],
    "record": [
        ("output_dir", str, "folder for the run's record and model (default: a new one in runs/)"),
        ("overwrite_output_dir", FLAG, "write there although it is not empty"),
        ("no_save_model", FLAG, "keep the record only"),
        ("monitor_interval", float, "seconds between samples of the interface's counters and the host; 0: no samples"),
        (
            "tensorboard",
            FLAG,
            "also write TensorBoard's events to tensorboard/ in that folder, while the run goes on (a run that fails "
            "leaves them)",
        ),
        ("label", str, "the run's name for itself in its record and in tables"),
    ],
}


def add_run_options(parser: argparse.ArgumentParser, but: frozenset[str] = frozenset(), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a lesson's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_groups(parser, GROUPS, DEFAULTS | defaults, but)


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """What the user gave, under RunConfig's names; what was not given is not in it."""
    values = {name: value for name, value in vars(options).items() if value is not None and name in DEFAULTS}
    if getattr(options, "no_save_model", None):
        values["save_model"] = False
    if getattr(options, "fp16", None):
        if values.get("precision", "fp16") != "fp16":
            Parser().error(f"--fp16 contradicts --precision {values['precision']}: give one.")
        values["precision"] = "fp16"
    if values.get("dropout") == OWN_DROPOUT:
        values["dropout"] = None
    return values


def to_words(values: dict[str, Any]) -> list[str]:
    """The flags that give `values`, as `run_values` returns them, on a command line."""
    own = {"no_save_model": values.get("save_model") is False}
    if "dropout" in values and values["dropout"] is None:
        own["dropout"] = "model"
    return to_plain_words({name: value for name, value in values.items() if name != "save_model"} | own)
