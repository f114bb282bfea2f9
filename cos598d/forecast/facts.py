"""A forecast: numbers of a run that has not begun, and in words what they rest on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Forecast:
    """What a run of some ranks will come to.

    parameters                  of the model, frozen ones included
    memory                      bytes by category that a rank holds between two steps, by the strategy's own formula;
                                of the rank that holds most at the peak
    peak                        the same at the moment of a step when it holds most
    memory_unsaid               why the two are empty, or what they lack; "" where nothing is missing
    iterations                  of the run, and of a whole epoch
    bytes_sent_per_iteration    by rank, of gradients and of weights that are held in shards: what a record has under
                                this name; empty where nobody can say
    bytes_sent_per_epoch        by rank, of all that an epoch's training makes travel: what its row predicts
    bytes_unsaid                why the two are empty; "" where they are not
    seconds_per_iteration       None where none were asked for, or nothing tells
    seconds_per_epoch           of training alone, without evaluation and checkpoints
    seconds_from                in words, what the seconds rest on, or why there are none
    writes                      what the run would leave on the disk, and about how many bytes
    """

    parameters: int
    memory: Mapping[str, int]
    peak: Mapping[str, int]
    memory_unsaid: str
    iterations: int
    iterations_per_epoch: int
    bytes_sent_per_iteration: Sequence[int]
    bytes_sent_per_epoch: Sequence[int]
    bytes_unsaid: str
    seconds_per_iteration: float | None
    seconds_per_epoch: float | None
    seconds_from: str
    writes: Sequence[tuple[Path, int]]

    @property
    def peak_bytes(self) -> int:
        """What the rank holds at the peak of a step, all categories together; 0 where nobody can say."""
        return sum(self.peak.values())

    @property
    def seconds(self) -> float | None:
        """Of all iterations of the run."""
        return None if self.seconds_per_iteration is None else self.seconds_per_iteration * self.iterations
