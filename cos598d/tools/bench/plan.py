"""What a bench does: one frozen dataclass, checked once; its names are the command line's."""

from dataclasses import dataclass
from typing import Any

from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.terminal.fields import check_flags, flag, flag_like, flags_of
from cos598d.tools.bench.candidates import Candidate, parse_candidates, references

# The headings of the flags below in --help, in addition to those for ranks.
WHAT, HOW = "what", "how"


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, and how often. Without `sync`, every registered sync. Each field is a flag."""

    sync: str | None = flag(
        None,
        "syncs, separated by commas: NAME, FILE.py:CLASS, NAME+COMPRESSION (bucketed+fp16) or NAME:OPTION "
        "(bucketed:bucket_mb=5) (default: every sync that averages); none and ddp always run too",
        group=WHAT,
    )
    alone: bool = flag(False, "run only these syncs, without none and ddp", group=WHAT)
    step: bool = flag(False, "include clipping and AdamW (learning rate 0) in an iteration", group=WHAT)
    model: str = flag(
        "minilm",
        "a folder, a hub name, minilm, or random weights: tiny, bert-base; not a script",
        group=WHAT,
        metavar="MODEL",
        is_local=True,
    )
    batch: int = flag(4, "examples per rank and iteration", group=WHAT, least=1)
    precision: str = flag(
        "fp32",
        "precision of forward and backward, as in `train --precision`: {choices}",
        group=WHAT,
        choices=("fp32", "bf16"),  # a bench does not measure fp16's loss scale
    )
    tokens: int = flag(64, "tokens per example; examples are cut or padded to this", group=WHAT, least=8)
    rounds: int = flag(10, "number of rounds; each runs every sync once", group=HOW, least=1)
    seed: int = flag(42, "random seed of new weights and of the order within rounds", group=HOW, least=0)
    # Settings that a run and a bench share are checked by the run's rules.
    backend: str = flag_like(RunConfig, "backend")
    no_cuda: bool = flag_like(RunConfig, "no_cuda")
    threads: int | None = flag_like(RunConfig, "threads")
    timeout: float = flag_like(RunConfig, "timeout")

    def check(self, world_size: int) -> None:
        """Raise UsageError for the first value that cannot work on `world_size` ranks."""
        check_flags(self)
        RunConfig(backend=self.backend, no_cuda=self.no_cuda, threads=self.threads).check(world_size)
        self.candidates()

    def candidates(self) -> list[Candidate]:
        """The syncs to measure, in the order of the table. Raises UsageError for an unknown one."""
        found = parse_candidates(self.sync, self.backend)
        for candidate in found:
            if candidate.steps_itself and not self.step:
                raise UsageError(
                    f"--sync {candidate.label} takes the optimizer's step itself. Add --step, so that every sync's "
                    "step is measured."
                )
        return found if self.alone else references(found)

    def facts(self) -> dict[str, Any]:
        """The settings that must be equal on every rank, as JSON values."""
        return {name: getattr(self, name) for name, said in flags_of(BenchPlan).items() if not said.is_local}
