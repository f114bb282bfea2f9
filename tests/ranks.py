"""Ranks that a test file starts once, and that run its functions.

    with world(4) as ranks:
        values = ranks.run(function, "an argument", count=3)  # on ranks 0 to 2; the value of each, in order

Each run has a process group of its own (gloo), so a failure in one does not reach the next. A function takes no rank:
`dist.get_rank()` is there. What it returns must be made of tensors, numbers, words, lists and dictionaries.
"""

import contextlib
import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS, GROUP_SECONDS = 240, 60
_context = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def world(count: int) -> Iterator["World"]:
    """A context with this many ranks. They end with it."""
    ranks = World(count)
    try:
        yield ranks
    finally:
        ranks.close()


def on_ranks(ranks: int, function: Callable, *arguments: Any, seconds: float = GROUP_SECONDS) -> list[Any]:
    """What `function(rank, ranks, *arguments)` returns on each of new ranks, for a single run."""
    with world(ranks) as started:
        return started.run(_numbered, function, *arguments, seconds=seconds)


class World:
    """Processes that wait for functions to run."""

    def __init__(self, count: int):
        self._folder = tempfile.TemporaryDirectory()
        self._count, self._runs = count, 0
        self._start()

    def _start(self) -> None:
        pairs = [_context.Pipe() for _ in range(self._count)]
        self._pipes = [here for here, _ in pairs]
        self._processes = [_context.Process(target=_serve, args=(there,), daemon=True) for _, there in pairs]
        for process, (_, there) in zip(self._processes, pairs, strict=True):
            process.start()
            there.close()

    def run(
        self, function: Callable, *arguments: Any, count: int | None = None, seconds: float = GROUP_SECONDS
    ) -> list[Any]:
        """What the function returned on each of `count` ranks, by default all. Raises AssertionError if one raised.

        seconds: how long a collective may wait.
        """
        self._runs += 1
        used = self._pipes[:count]
        store = str(Path(self._folder.name) / f"store{self._runs}")
        for rank, pipe in enumerate(used):
            pipe.send((function, arguments, rank, len(used), store, seconds))
        replies = []
        try:
            for rank, pipe in enumerate(used):
                assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} does not answer"
                replies.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True))
        except (EOFError, OSError, AssertionError) as error:  # as when gloo ends a process
            self._end()
            self._start()
            raise AssertionError(f"rank {len(replies)} has ended, or hangs") from error
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(replies) if error]
        assert not errors, "\n".join(errors)
        return [value for _, value in replies]

    def close(self) -> None:
        """End all ranks, whatever they do."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            process.kill()
            process.join()


def _numbered(function: Callable, *arguments: Any) -> Any:
    return function(dist.get_rank(), dist.get_world_size(), *arguments)


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments, rank, count, store, seconds = pipe.recv()
            error, value = "", None
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=count,
                    timeout=timedelta(seconds=seconds),
                )
                torch.manual_seed(0)
                value = function(*arguments)
            except Exception:
                error = traceback.format_exc()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            buffer = io.BytesIO()
            torch.save((error, value), buffer)
            pipe.send_bytes(buffer.getvalue())
