"""Which syncs `--sync auto` may choose from here, and why not from the others."""

from collections.abc import Sequence
from dataclasses import replace

from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.records.conventions import FLOOR
from cos598d.strategies import STRATEGIES, class_of, is_our_own
from cos598d.sync import SYNCS


def candidates(
    config: RunConfig, hosts: Sequence[Sequence[int]], shares_memory: bool
) -> tuple[list[str], dict[str, str]]:
    """The names, in the order of the ladder, and of those left out the reason in words.

    hosts: the ranks of each host; shares_memory: whether those of a host can.
    """
    chosen, left_out = [], {}
    ranks = sum(map(len, hosts))
    for name in (*SYNCS, *STRATEGIES):
        if name == FLOOR:
            continue
        reason = _reason(name, config, ranks, len(hosts), shares_memory)
        if reason:
            left_out[name] = reason
        else:
            chosen.append(name)
    return chosen, left_out


def _reason(name: str, config: RunConfig, ranks: int, hosts: int, shares_memory: bool) -> str:
    """Why not; "" for a candidate."""
    if not is_our_own(name):
        return "another library's engine"
    kind = class_of(name)
    if not getattr(kind, "exact", True):
        return "not exact"
    if kind.one_host and hosts > 1:
        return "for one host only"
    if kind.shares_memory and not shares_memory:
        return "memory cannot be shared here"
    try:
        replace(config, sync=name).check(ranks)
    except UsageError as error:
        return str(error).rstrip(".")
    return ""
