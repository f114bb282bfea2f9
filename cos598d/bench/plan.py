"""What a bench is to do: one frozen record, checked once; its names are the command line's."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cos598d.bench.candidates import Candidate, parse_candidates, references, sweep_candidates
from cos598d.config import BACKENDS, RunConfig
from cos598d.errors import UsageError

SWEEPS = ("bucket_mb", "message_size")
ATTACH = ("auto", "once", "turns")
# What may differ between the ranks: where each host keeps its model and traces, and how many threads it has to spare.
LOCAL_FIELDS = ("model", "threads", "trace")


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, and how often; without `sync` and `sweep` every registered sync."""

    sync: str | None = None
    sweep: str | None = None
    alone: bool = False
    step: bool = False
    model: str = "minilm"
    batch: int = 4
    tokens: int = 64
    rounds: int = 10
    attach: str = "auto"
    trace: str | None = None
    largest_mb: float = 256.0
    seed: int = 42
    backend: str = "gloo"
    no_cuda: bool = False
    threads: int | None = None
    timeout: float = 300.0

    def check(self, world_size: int) -> None:
        """Raise UsageError for the first value that cannot work in a world of `world_size` ranks."""
        for name, known in (("sweep", (None, *SWEEPS)), ("attach", ATTACH), ("backend", BACKENDS)):
            if getattr(self, name) not in known:
                words = ", ".join(word for word in known if word)
                raise UsageError(f"--{name} {getattr(self, name)}: the known ones are {words}.")
        if self.sweep and (self.sync or self.alone):
            raise UsageError(f"--sweep {self.sweep} chooses its candidates itself: leave --sync and --alone out.")
        if self.sweep and world_size < 2:
            raise UsageError(f"--sweep {self.sweep} measures what travels: give --world_size 2 or more.")
        if self.trace and self.sweep:
            raise UsageError(f"--trace is of candidates: leave --sweep {self.sweep} out, or --trace.")
        for name, least in (("batch", 1), ("tokens", 8), ("rounds", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)}: give a number of at least {least}.")
        if not 2**-10 <= self.largest_mb < math.inf:
            raise UsageError(f"--largest_mb {self.largest_mb:g}: give at least {2**-10:g} MiB, the smallest message.")
        # What a run and a bench have in common is checked by the run's rules.
        RunConfig(backend=self.backend, no_cuda=self.no_cuda, threads=self.threads, timeout=self.timeout).check(
            world_size
        )
        self.candidates()

    def candidates(self) -> list[Candidate]:
        """The syncs to measure, in the order of the table. Raises UsageError for one that there is not."""
        if self.sweep == "message_size":
            return []
        found = sweep_candidates() if self.sweep else parse_candidates(self.sync, self.backend)
        return found if self.alone else references(found)

    def facts(self) -> dict[str, Any]:
        """What every rank must have been started with alike, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in LOCAL_FIELDS}


def plan_from(values: Mapping[str, Any]) -> BenchPlan:
    """The plan of those `values` that it has a field for and that are not None."""
    known = {field.name for field in fields(BenchPlan)}
    return BenchPlan(**{name: value for name, value in values.items() if name in known and value is not None})
