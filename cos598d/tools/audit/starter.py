"""`audit --world_size N -- script.py`: start the ranks of a script here, each under observation, and wait for them."""

import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cos598d.terminal.children import end_all, exit_code_of, wait_together
from cos598d.terminal.program import ends_with_parent, own_environment
from cos598d.tools.audit import script
from cos598d.tools.audit.anywhere import RUN, environment, install
from cos598d.tools.audit.exchange import remove_books
from cos598d.tools.audit.options import Told
from cos598d.world.network import DEFAULT_IP

if TYPE_CHECKING:
    from cos598d.tools.audit.rank import Rank

_FAILED_SECONDS = 10.0  # when a rank has failed, the others have this long to notice
_STOP_SECONDS = 5.0  # to end by themselves


def filled(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with {rank} and the other names in `values` filled in; other braces stay."""
    found = list(words)
    for name, value in values.items():
        found = [word.replace("{" + name + "}", str(value)) for word in found]
    return found


def audit_script(told: Told, words: Sequence[str], say: Callable[["Rank", int], int]) -> int:
    """Run the script under observation, as this rank, and return the exit code that `say` returns for its own."""
    from cos598d.tools.audit.rank import Rank  # it loads torch

    script.check(told.script)
    if not told.run:
        remove_books(Path(told.folder))  # no rank has a book before all are there
    # The ranks that it starts by itself do not judge: this process does, when they have ended.
    os.environ |= environment(told.folder, told.steps, told.run or secrets.token_hex(8))
    install()
    rank = Rank(told, say)
    exit_code, error = script.run(told.script, words)
    sys.stdout = sys.__stdout__ or sys.stdout  # the script may have put a file there
    return rank.end(exit_code, error)


def start_ranks(told: Told, words: Sequence[str], world_size: int, seconds: float = math.inf) -> int:
    """Start the script once for each rank and wait for all; return the first failure's exit code, or 0.

    When one fails the others are stopped, should they not end by themselves; when this process is killed, all are.
    Raises TimeoutError, when all are stopped, for a script that takes more than `seconds`.
    """
    with socket.socket() as probe:
        probe.bind((DEFAULT_IP, 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "master_ip": DEFAULT_IP, "master_port": port}
            environ = own_environment() | {
                **{name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                "MASTER_ADDR": DEFAULT_IP,
                "MASTER_PORT": str(port),
                RUN: told.run,
            }
            environ.setdefault("OMP_NUM_THREADS", "1")
            own = [
                "audit",
                "--steps",
                str(told.steps),
                "--output_dir",
                told.folder,
                "--",
                *script.words_of(told.script),
            ]
            command = [sys.executable, "-m", "cos598d", *own, *filled(words, place)]
            ranks.append(subprocess.Popen(ends_with_parent(command), env=environ))
        failed = wait_together(ranks, lambda _: _FAILED_SECONDS, seconds)
        return exit_code_of(failed[1]) if failed else 0
    finally:
        end_all(ranks, _STOP_SECONDS)


def run_of_starter() -> str:
    """The run's name where a starter of ours has started this rank; taken out of the environment, which is the
    script's."""
    return os.environ.pop(RUN, "")
