"""One iteration of a candidate under torch's profiler, as a trace for timeline viewers."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from cos598d.comm.group import Ranks
from cos598d.measure.clock import IterationClock
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.turns import make_turn
from cos598d.tools.bench.workload import Stepper, Workload


class MarkedClock(IterationClock):
    """A clock whose phases appear by name in the profiler's trace."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with record_function(name), super().phase(name):
            yield


def trace_candidate(folder: Path, candidate: Candidate, workload: Workload, ranks: Ranks, step: bool) -> None:
    """Write one iteration of `candidate`, after its warm-up, to LABEL.rankR.json in `folder`.

    The format is Chrome's trace events; https://ui.perfetto.dev and chrome://tracing show it. Forward, backward and
    sync are marked. Backward's functions are events of the thread that computes them. A collective call is an event
    c10d::... where it was started, and gloo:... from there to its end. The profiler costs time itself, so durations are
    longer than in a bench; use the trace for the order.
    """
    turn = make_turn(candidate, workload, ranks, Stepper(workload.model) if step else None)
    turn.timed_by(MarkedClock(ranks.device))
    inputs = workload.inputs(0, ranks.rank, ranks.world_size)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        turn.iterate(inputs)
    turn.detach()
    label = re.sub(r"[^A-Za-z0-9_.=+-]", "_", candidate.label)
    path = folder / f"{label}.rank{ranks.rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
