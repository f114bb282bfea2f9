"""One of many runs, before it is made: its place, its ranks and hosts, its flags, or why it cannot run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.tools.report.sweep_entries import SETUP


@dataclass(frozen=True)
class Setup:
    """The number of hosts, and of ranks on each: "2x2"."""

    hosts: int
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}"

    @classmethod
    def parse(cls, word: str) -> "Setup":
        """Raises UsageError unless it is HOSTSxRANKS."""
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", word, re.ASCII)
        if not found:
            raise UsageError(
                f"--grid {SETUP}={printable(word, 40)} is not valid. Give hosts and the ranks on each, as 1x4 (four "
                "ranks of this host) or 2x2 (two ranks on each of two hosts)."
            )
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class PlannedRun:
    """One run of many.

    place       its folder in that of all runs, and its key in their state
    label       as in its config
    name        what it shares with its repeats under other seeds, in the table of --dry_run
    head        the line that is printed when it begins
    values      RunConfig's, also those that all runs share
    settings    of a sweep: the axes' values as the user wrote them, in the axes' order; without links on one host
    seed        of a sweep, too
    delay       seconds from host to host; `rate`: bits per second of each link, None without a limit
    refused     why it cannot run, as a sentence; "" if it can
    """

    place: str
    label: str
    name: str
    head: str
    setup: Setup
    values: Mapping[str, Any]
    settings: Mapping[str, str] = field(default_factory=dict)
    seed: int = RunConfig.seed
    delay: float = 0.0
    rate: float | None = None
    refused: str = ""
