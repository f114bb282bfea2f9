"""A bench's record: the fields of its file, and how to read it."""

from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import BY_COUNTERS, BY_LEDGER
from cos598d.records.kinds import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    SIZE,
    TEXT,
    Fields,
    ListOf,
    MapOf,
    OneOf,
    OrNone,
)
from cos598d.records.old_schema import check, read
from cos598d.records.run import ENVIRONMENT, HELD, MOMENTS, RANKS, memory_of

FILE_NAME = "bench.json"
REMEDY = "Measure again"

SETTING = Fields(
    {},
    {
        **dict.fromkeys(("model", "task"), OrNone(TEXT)),
        **dict.fromkeys(("backend", "device", "attach", "precision", "precision_note"), TEXT),
        **dict.fromkeys(("gradient_bytes", "tokens", "batch"), OrNone(COUNT)),
        **dict.fromkeys(("threads_per_rank", "rounds"), SIZE),
        "world_size": RANKS,
        "step": FLAG,
        "operations": COUNT,  # of all ranks in an iteration, by formula
        "peak_per_second": OrNone(POSITIVE),
    },
)
RATIO = OrNone(Fields({"median": POSITIVE, "interval_95": OrNone(ListOf(POSITIVE, count=2))}))
SUMMARY = Fields(
    {"seconds_median": POSITIVE},
    {
        "seconds_quartiles": ListOf(POSITIVE, count=2),
        "seconds_exposed": OrNone(NUMBER),
        **dict.fromkeys(("ratio_to_ddp", "ratio_to_floor"), RATIO),
    },
)
TENSOR = Fields(
    {"name": TEXT, "shape": ListOf(COUNT), "dtype": TEXT, "bytes": COUNT, "seconds": OrNone(NOT_NEGATIVE)},
)
SAMPLE = Fields(
    {"candidate": TEXT},
    dict.fromkeys(("seconds_forward_by_rank", "seconds_backward_by_rank"), ListOf(NOT_NEGATIVE, least=1)),
)
MESSAGE = Fields(
    {"payload_bytes": COUNT}
    | dict.fromkeys(("seconds_median", "seconds_fitted"), NUMBER)
    | dict.fromkeys(("algbw_bytes_per_second", "busbw_bytes_per_second"), NUMBER)
)
CAPACITY = Fields(
    {"bucket_mb": POSITIVE, "buckets": ListOf(Fields()), "seconds_exposed_predicted": OrNone(NUMBER)}
    | {"candidate": TEXT},
    {"seconds_exposed_at_most": OrNone(NUMBER)},
)
CANDIDATE = Fields(
    {"label": TEXT},
    {"sync": TEXT, "options": Fields({"bucket_mb": POSITIVE}), "bytes_from": OneOf((BY_LEDGER, BY_COUNTERS))},
)
BENCH = Fields(
    {
        "candidates": ListOf(CANDIDATE),
        "setting": SETTING,
        "environment": ENVIRONMENT,
    },
    {
        "summary": MapOf(SUMMARY),
        "traffic": MapOf(
            Fields(dict.fromkeys(("calls", "payload_bytes", "bytes_sent"), ListOf(NOT_NEGATIVE, least=1)))
        ),
        "samples": ListOf(SAMPLE),
        "arrivals": Fields({"backward_seconds": POSITIVE, "tensors": ListOf(TENSOR)}),
        "message_size": Fields(
            {
                "sizes": ListOf(MESSAGE),
                "fit": Fields({"overhead_seconds": NUMBER, "bytes_per_second": POSITIVE}),
            }
        ),
        "bucket_mb": Fields(
            {"backward_seconds": OrNone(NUMBER), "best_predicted_mb": POSITIVE, "capacities": ListOf(CAPACITY, least=1)}
        ),
        "remarks": ListOf(TEXT),
        "gradient_norm": MapOf(ListOf(OrNone(NUMBER))),
        "memory": MapOf(
            Fields(
                dict.fromkeys(MOMENTS, ListOf(HELD, least=1)),
                memory_of(ListOf(HELD, least=1), ListOf(OrNone(HELD)), ListOf(TEXT)),
            )
        ),
        # Per rank, over the time in which the syncs were measured.
        "host": ListOf(
            Fields(dict.fromkeys(("seconds", "process_cpu_seconds", "host_cpu_percent"), NOT_NEGATIVE)), least=1
        ),
        "peak_memory_bytes": MapOf(ListOf(NOT_NEGATIVE, least=1)),
    },
)


def read_record(path: Path) -> tuple[Path, dict[str, Any]]:
    """The record's file and contents, from a bench's output folder or its file. Raises UserError."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        found = read(file, Fields(), REMEDY)
    except OSError:
        raise UserError(f"{file} cannot be read. Give a folder that `bench --output` has written.") from None
    if "candidates" not in found or "setting" not in found:
        raise UserError(f"{file} is not the result of a bench. Give a folder that `bench --output` has written.")
    check(found, BENCH, file, REMEDY)
    return file, found
