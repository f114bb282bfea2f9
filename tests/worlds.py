"""Worlds of real ranks for tests: processes that meet through a file, so that no two test runs share a port."""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import FileStore

# Forked from a server that has torch loaded already: a rank starts in a blink, and from a clean process.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["cos598d.conformance", "cos598d.run"])


class RankFailure(AssertionError):
    """One or more ranks failed; `texts[r]` is what rank r said."""

    def __init__(self, texts: dict[int, str]):
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(texts.items())))
        self.texts = texts


def run_ranks(world_size: int, function: Callable, *arguments: Any, seconds: float = 60) -> list[Any]:
    """Call `function(comm, *arguments)` on `world_size` ranks at once; return their results (JSON), in order of rank.

    Raises RankFailure with the tracebacks of the ranks that failed; a rank that hangs is killed after `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_be_rank, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + seconds
        failures = {}
        for rank, process in enumerate(ranks):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                failures[rank] = f"still running after {seconds:g} s"
        results = []
        for rank, process in enumerate(ranks):
            answer = Path(folder) / f"answer{rank}.json"
            if answer.exists():
                value, failure = json.loads(answer.read_text())
                results.append(value)
                if failure:
                    failures[rank] = failure
            else:
                failures.setdefault(rank, f"ended with exit code {process.exitcode} and no answer")
        if failures:
            raise RankFailure(failures)
        return results


def _be_rank(rank: int, world_size: int, folder: str, function: Callable, arguments: tuple) -> None:
    import torch

    from cos598d import comm as communication
    from cos598d.launch import Identity
    from cos598d.lifeline import Lifeline
    from cos598d.rendezvous import Meeting, choose_interface

    torch.set_num_threads(1)
    answer = Path(folder) / f"answer{rank}.json"
    # Ranks whose peer failed end by themselves in a sentence; that sentence is not the test's output.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    meeting = lifeline = None
    if world_size > 1:
        choose_interface("127.0.0.1")
        store = FileStore(str(Path(folder) / "store"), world_size)
        meeting = Meeting(Identity(rank, world_size), store, ["here"] * world_size, seconds=20)
        lifeline = Lifeline(meeting)
    value, failure = None, ""
    try:
        communication.open_group(meeting, "gloo")
        value = function(communication.Communicator(meeting, "gloo", torch.device("cpu")), *arguments)
    except BaseException:
        failure = traceback.format_exc()
    beside = answer.with_suffix(".part")
    beside.write_text(json.dumps([value, failure]))
    beside.rename(answer)
    if failure:
        if lifeline:
            lifeline.fail("failed its test")
        os._exit(1)
    if lifeline:
        lifeline.close()
    communication.close_group()
