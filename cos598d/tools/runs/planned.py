"""A run of many, before it is made: its place, its ranks and hosts, its flags, or why it cannot run."""

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
    """On how many hosts a run has how many ranks each: "2x2"."""

    hosts: int
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}"

    @classmethod
    def parse(cls, word: str) -> "Setup":
        """Raises UsageError for what is no HOSTSxRANKS."""
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
    label       as its config has it
    name        what it shares with its repeats under other seeds, in the table of --dry_run
    head        what is said when it begins
    values      RunConfig's, also those that all runs share
    settings    of a sweep: the axes' values in the user's words, in the axes' order; of links none on one host
    seed        of a sweep, too
    delay       seconds from host to host; `rate`: bits a second of each link, None without a limit
    refused     why it cannot run, in a sentence; "" where it can
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
