"""A run's record: the fields of each of its files, and how to read them."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cos598d.errors import UserError
from cos598d.records.bench import read_bench
from cos598d.records.conventions import BY_COUNTERS, BY_LEDGER, CHECKPOINT, COUNTED, PHASES, WITH_ACTIVATIONS
from cos598d.records.kinds import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SIZE,
    TEXT,
    WHOLE,
    Fields,
    FixedList,
    ListOf,
    MapOf,
    Number,
    OneOf,
    OrNone,
    ValueKind,
)
from cos598d.records.old_schema import check, read, read_rows
from cos598d.records.unfinished import is_unfinished
from cos598d.records.unfinished import read_summary as read_any

# Every record has the seconds of these; records of older versions have no checkpoint phase.
_OLD_PHASES = [f"seconds_{phase}" for phase in PHASES if phase != CHECKPOINT]
_NEW_PHASE = f"seconds_{CHECKPOINT}"

LIVE, WIRE = "live", "wire.rank{rank}.jsonl"  # of older versions


def live_folder(folder: Path) -> Path | None:
    """The folder, if its run has not ended well."""
    return folder if is_unfinished(folder) else None


def read_unfinished(folder: Path) -> "Summary":
    """What the summary would be if the run ended now."""
    return msgspec.to_builtins(read_any(folder, unfinished=True))


def read_record(path: Path) -> tuple[Path, dict[str, Any]]:
    """The record's file and contents, from a bench's output folder or its file. Raises UserError."""
    file, _ = read_bench(path)
    return file, msgspec.json.decode(file.read_bytes())


# A run's summary.json, checked by `summary_of`, plus what `tools/report/load` adds to it.
Summary = dict[str, Any]
REMEDY = "Run it again"

# Larger worlds have never met. Each rank has files of its own, which are looked for.
RANKS = Number("a number of ranks from 1 to 65536", is_whole=True, least=1, most=65536)
RANK = Number("a rank", is_whole=True, least=0, most=65535)
SECONDS = Fields(
    {
        **dict.fromkeys(("first", "mean", "median", "p90"), OrNone(POSITIVE)),
        "interval_95": OrNone(ListOf(NUMBER, count=2)),
    },
    {"counted": COUNT},
)
# How well each class was recognized, and how many examples of one class were taken for another.
CLASSES = {
    "by_class": ListOf(
        Fields({"class": TEXT, "examples": COUNT, **dict.fromkeys(("precision", "recall", "f1"), NOT_NEGATIVE)})
    ),
    "confusion": ListOf(ListOf(COUNT)),
}


def _epoch(world_size: int) -> ValueKind:
    """An epoch's row, of at least this many ranks: it has more if the run resumed with fewer."""
    by_rank, or_none = ListOf(NOT_NEGATIVE, least=world_size), ListOf(OrNone(NOT_NEGATIVE), least=world_size)
    training = {
        **dict.fromkeys(("examples", *COUNTED), COUNT),
        "wall_seconds": NOT_NEGATIVE,
        **dict.fromkeys((f"{name}_per_second_wall" for name in ("examples", *COUNTED)), OrNone(NOT_NEGATIVE)),
    }
    optional = {
        **CLASSES,
        **dict.fromkeys(("iterations", "last_iteration"), COUNT),
        "is_cut": FLAG,  # if it ended before its last iteration
        "loss": OrNone(NUMBER),
        "training": Fields({}, training),
        "seconds_evaluation": NOT_NEGATIVE,
        **dict.fromkeys(("predicted_bytes_sent", "predicted_bytes_received"), by_rank),
        **dict.fromkeys(("counted_bytes_sent", "counted_bytes_received"), OrNone(or_none)),
    }
    return Fields({"epoch": COUNT}, optional)


EPOCH = _epoch(0)
EVALUATION = Fields({"iteration": COUNT}, {"epoch": COUNT, **CLASSES})  # inside an epoch
# A rank's memory by category; a user's own strategy may have any categories.
HELD = MapOf(NOT_NEGATIVE)
# At these moments, as counted; and by formula, or why there is none.
MOMENTS = ("between_steps", "peak")
EXPECTED, UNSAID = {moment: f"expected_{moment}" for moment in MOMENTS}, "expected_unsaid"


def memory_of(held: ValueKind, expected: ValueKind, unsaid: ValueKind) -> dict[str, ValueKind]:
    """The fields for the memory of ranks, by name."""
    return dict.fromkeys(MOMENTS, held) | dict.fromkeys(EXPECTED.values(), expected) | {UNSAID: unsaid}


def _memory(world_size: int | None = None) -> ValueKind:
    return Fields(
        {
            "process_peak_bytes": ListOf(NOT_NEGATIVE, world_size),
            "gpu_peak_bytes": ListOf(OrNone(NOT_NEGATIVE), world_size),
        },
        memory_of(ListOf(HELD, world_size), ListOf(OrNone(HELD), world_size), ListOf(TEXT, world_size))
        | {WITH_ACTIVATIONS: ListOf(HELD, world_size)},
    )


MEMORY = _memory()
LEDGER = Fields(
    {},
    {
        "by_purpose": MapOf(
            Fields(
                dict.fromkeys(("calls", "payload_bytes"), COUNT)
                | dict.fromkeys(("bytes_sent", "bytes_received"), ListOf(NOT_NEGATIVE))
            )
        ),
    },
)
ATTEMPT = Fields(
    {
        "begun": TEXT,
        "ended": OrNone(TEXT),
        **dict.fromkeys(("from_iteration", "to_iteration", "lost_iterations"), COUNT),
        "ranks": RANKS,
        "why": OrNone(TEXT),
    }
)
ATTEMPTS_FILE = Fields({"attempts": ListOf(ATTEMPT)})
# Operations of matrix products, forward and backward, by formula; the peak of all ranks; and the share of it that was
# used.
OPERATIONS = Fields(
    {"per_example": POSITIVE},
    {"peak_per_second": OrNone(POSITIVE), "share_of_peak": OrNone(NOT_NEGATIVE)},
)
WALL = ("examples_per_second_clock", "examples_per_second_wall", "share_off_the_clock")
# The facts of a run that are known before it begins.
SETTING_FIELDS = {
    **dict.fromkeys(("task", "model", "data", "precision", "sync"), TEXT),
    **dict.fromkeys(("total_train_batch_size", "max_seq_length"), SIZE),
    "dropout": OrNone(NUMBER),
    "seed": WHOLE,
    "world_size": RANKS,
}
OPTIONAL_SETTING = {
    **dict.fromkeys(("label", "backend", "device"), TEXT),
    "bytes_from": OneOf((BY_LEDGER, BY_COUNTERS)),
    "parameters": COUNT,
    # The choice of --sync auto: see `Choice` in cos598d/cost/choice.py.
    "auto": Fields(
        {"sync": TEXT, "why": TEXT, "predicted": MapOf(POSITIVE), "left_out": MapOf(TEXT)}, {"measured": Fields()}
    ),
}
SETTING_FILE = Fields(SETTING_FIELDS, OPTIONAL_SETTING)
NETWORK = Fields({}, {"hosts": SIZE, **dict.fromkeys(("rate", "delay", "offload"), OrNone(TEXT))})
ENVIRONMENT = Fields(
    {},
    {
        **dict.fromkeys(("processor", "device"), OrNone(TEXT)),
        "cores": OrNone(SIZE),
        "tf32": FLAG,
        **dict.fromkeys(("threads_per_rank", "ranks_on_host"), SIZE),
        "network": OrNone(NETWORK),
        "python": TEXT,
        **dict.fromkeys(("cuda", "commit"), OrNone(TEXT)),
        "versions": MapOf(OrNone(TEXT)),
        # Of each rank.
        "places": OrNone(ListOf(Fields({}, {**dict.fromkeys(("node", "device"), TEXT), "gpu": OrNone(TEXT)}))),
    },
)
CONFIG = Fields(
    {},
    {
        "optimizer": TEXT,
        "max_steps": WHOLE,
        "learning_rate": NUMBER,
        "momentum": NUMBER,
        "lr_scheduler": TEXT,
        **dict.fromkeys(("weight_decay", "adam_epsilon", "max_grad_norm"), NUMBER),
        **dict.fromkeys(("warmup_steps", "doc_stride", "max_query_length"), WHOLE),
        "max_train_examples": OrNone(SIZE),
        "gradient_accumulation_steps": SIZE,
        "bucket_mb": OrNone(NUMBER),
        "compress": OrNone(TEXT),
        "sync_every": SIZE,
        "label": TEXT,
        "do_train": FLAG,
        "eval_steps": OrNone(SIZE),
        "num_train_epochs": POSITIVE,
    },
)
ITERATION_FIELDS = {"iteration": COUNT, "loss": NUMBER, "seconds": POSITIVE} | dict.fromkeys(_OLD_PHASES, NUMBER)
ITERATION_OPTIONAL = {
    "epoch": COUNT,
    _NEW_PHASE: NUMBER,
    "learning_rate": NUMBER,
    "examples": SIZE,
    "spans_seconds": ListOf(FixedList((OneOf(PHASES), NUMBER, NUMBER))),
    "wall_seconds": NUMBER,
    **dict.fromkeys(("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received"), NOT_NEGATIVE),
    **dict.fromkeys(("predicted_bytes_sent", "predicted_bytes_received"), NOT_NEGATIVE),
    **dict.fromkeys(("counted_bytes_sent", "counted_bytes_received"), OrNone(NOT_NEGATIVE)),
}
ITERATION = Fields(ITERATION_FIELDS, ITERATION_OPTIONAL)
CALL = Fields(
    {"iteration": COUNT, "purpose": TEXT, "op": TEXT, "tensor": TEXT, "bytes_sent": NOT_NEGATIVE},
    dict.fromkeys(("seconds", "started"), OrNone(NUMBER)),
)
HOST_ROW = Fields(
    {"iteration": COUNT, "process_cpu_seconds": NUMBER, "host_cpu_percent": NUMBER, "rss_bytes": NOT_NEGATIVE},
    {"seconds": NOT_NEGATIVE, **dict.fromkeys(("gpu_memory_bytes", "gpu_utilization_percent"), OrNone(NUMBER))},
)
WIRE_ROW = Fields(
    {"kind": TEXT, "seconds": NOT_NEGATIVE, "shared_by_ranks": SIZE}
    | dict.fromkeys(("bytes_sent", "bytes_received"), NOT_NEGATIVE)
)


def read_summary(folder: Path) -> Summary:
    """The summary of the run in a folder. Raises UserError if there is none, or if the run did not end well."""
    path = folder / "summary.json"
    summary = read_object(path, Fields({"world_size": RANKS}))
    if summary is None:
        lack = "has no summary.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {lack}. Give the folder of a finished run.")
    check(summary, summary_of(summary["world_size"]), path, REMEDY)
    summary["phases"].setdefault(_NEW_PHASE, 0.0)
    return summary


def read_object(path: Path, kind: ValueKind) -> dict[str, Any] | None:
    """The object in a JSON file of the record; None if there is no such file. Raises UserError for a damaged one."""
    try:
        return read(path, kind, REMEDY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Make it readable.") from None


def read_table(path: Path, kind: ValueKind, is_needed: bool = True, grows: bool = False) -> Iterator[Mapping[str, Any]]:
    """The rows of a file of the record. A file that is not needed may be missing: then there are none. In one that
    `grows`, the last row may be incomplete."""
    with reading(path, is_needed):
        yield from read_rows(path, kind, REMEDY, grows)


@contextlib.contextmanager
def reading(path: Path, is_needed: bool = True) -> Iterator[None]:
    """Convert errors while a file of rows is read into UserErrors. A file that is not needed may be missing."""
    try:
        yield
    except FileNotFoundError:
        if is_needed:
            raise UserError(f"{path} is missing. Give the folder of a finished run.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Make it readable.") from None


def summary_of(world_size: int) -> ValueKind:
    """The kind of a summary of a run with `world_size` ranks."""
    by_rank, or_none = ListOf(NOT_NEGATIVE, count=world_size), ListOf(OrNone(NOT_NEGATIVE), count=world_size)
    ways = [f"{way}_per_iteration" for way in ("sent", "received")]
    rank = Number(f"a rank of {world_size}", is_whole=True, least=0, most=world_size - 1)
    wire = Fields(
        {"ranks_by_interface": ListOf(ListOf(rank, least=1)), **{f"bytes_{way}": or_none for way in ways}},
        {
            "interface": TEXT,
            "shared_by_ranks": SIZE,
            **{f"{what}_{way}": or_none for what in ("packets", "predicted_bytes") for way in ways},
        },
    )
    needed = {
        **SETTING_FIELDS,
        "iterations": COUNT,
        "losses": ListOf(NUMBER),
        "seconds_per_iteration": SECONDS,
        "phases": Fields(dict.fromkeys(_OLD_PHASES, OrNone(NUMBER)), {_NEW_PHASE: OrNone(NUMBER)}),
        **{f"{name}_per_iteration": NOT_NEGATIVE for name in ("calls", "tensors", "payload_bytes")},
        **{f"bytes_{way}": by_rank for way in ways},
    }
    optional = {
        **OPTIONAL_SETTING,
        "epochs": ListOf(_epoch(world_size)),
        "evaluations": ListOf(EVALUATION),
        # The best evaluation; and that of the model that was kept for it, if it is not the last one.
        "best": Fields({"iteration": COUNT, "metric": TEXT, "value": NUMBER}, {"evaluated": Fields({}, CLASSES)}),
        "wire": OrNone(wire),
        "memory": _memory(world_size),
        "wall": OrNone(Fields({}, dict.fromkeys(WALL, OrNone(NUMBER)))),
        "attempts": ListOf(ATTEMPT),
        "ledger": LEDGER,
        "operations": OPERATIONS,
    }
    return Fields(needed, optional)
