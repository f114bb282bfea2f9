"""A forecast as lines for the screen."""

from collections.abc import Mapping, Sequence

from cos598d.config import RunConfig
from cos598d.forecast.facts import Forecast


def forecast_lines(config: RunConfig, world_size: int, found: Forecast) -> list[str]:
    """What the run of `config` would come to, a line for each thing, what each rests on beside it."""
    ranks = f"{world_size} rank{'s'[: world_size != 1]}"
    lines = [
        f"{config.label}: {config.task_name}, sync {config.sync}, {ranks}; nothing is started (--dry_run)",
        f"parameters: {found.parameters:,}",
        f"iterations: {found.iterations:,}, {found.iterations_per_epoch:,} in an epoch; "
        f"{config.describe_batch(world_size)}",
        f"memory of a rank between two steps: {_held(found.memory, found.memory_unsaid)}",
        f"memory of a rank at a step's peak: {_held(found.peak, found.memory_unsaid)}",
        f"a rank sends in an iteration: {_sent(found.bytes_sent_per_iteration, found.bytes_unsaid)}",
        f"a rank sends in an epoch, all in all: {_sent(found.bytes_sent_per_epoch, found.bytes_unsaid)}",
        _seconds(found),
    ]
    lines += [f"would write {path}: about {_size(size)}" for path, size in found.writes]
    return lines


def _held(held: Mapping[str, int], unsaid: str) -> str:
    if not held:
        return f"not known: {unsaid or 'this strategy does not say'}"
    parts = ", ".join(f"{name} {_size(size)}" for name, size in held.items())
    return f"{_size(sum(held.values()))} ({parts}){f'; {unsaid}' if unsaid else ''}, and what a pass computes beside"


def _sent(by_rank: Sequence[int], unsaid: str) -> str:
    if not by_rank:
        return f"not known: {unsaid}"
    least, most = min(by_rank), max(by_rank)
    if least == most:
        return f"{most:,} bytes"
    return f"{', '.join(f'{size:,}' for size in by_rank)} bytes, rank by rank"


def _seconds(found: Forecast) -> str:
    if found.seconds_per_iteration is None or found.seconds_per_epoch is None or found.seconds is None:
        return f"seconds: not known, {found.seconds_from}"
    return (
        f"seconds: {found.seconds_per_iteration:.3g} an iteration, {found.seconds_per_epoch:.3g} an epoch, "
        f"{found.seconds:.3g} in all, without evaluation and checkpoints; {found.seconds_from}"
    )


def _size(size: float) -> str:
    """Bytes as "12.3 MB", by thousands."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
