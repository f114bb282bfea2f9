"""The life of one rank of an exam, in a fork of the server that has torch loaded."""

import json
import linecache
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cos598d.comm.group import GLOO_RENDEZVOUS
from cos598d.terminal.own_code import load_file
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.own_order import compiled_for
from cos598d.tools.exam.wire import pack
from cos598d.world.network import choose_interface

_LONGEST = 500  # letters of an exception


@dataclass(frozen=True)
class Task:
    """Which rank this is of how many, the exam's folder, the file, the seconds that the rank may take, and whether the
    file is loaded."""

    rank: int
    size: int
    folder: str
    file: Path
    seconds: float
    loads: bool = True


def be_rank(task: Task, pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call `function(comm, module, *arguments)` and hand in what it returns, then wait for the end."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    tempfile.tempdir = task.folder
    torch.set_num_threads(1)
    np.random.seed(task.rank)  # forks would draw alike, and real ranks do not; Python's own generator sees to that
    lock = threading.Lock()

    def tell(data: bytes) -> None:
        with lock:
            pipe.send_bytes(data)

    def note(*words: Any) -> None:
        tell(b"J" + json.dumps(words).encode())

    def too_late() -> None:
        time.sleep(task.seconds)
        note("late", *_place(sys._current_frames()[threading.main_thread().ident or 0], task.file))

    try:
        choose_interface("127.0.0.1")
        os.environ.update(GLOO_RENDEZVOUS)
        store = dist.FileStore(f"{task.folder}/store", task.size)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.size)
        threading.Thread(target=too_late, daemon=True).start()
        comm = LessonComm(task.file, note)
        module = load_file(task.file, task.file.name, compiled_for(task.rank)) if task.loads else None
        value = pack(function(comm, module, *arguments))
        sys.stdout.flush()
        tell(b"V" + value)
    except BaseException as error:
        lines = [n for f, n in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == str(task.file)]
        line = lines[-1] if lines else 0
        note("raised", type(error).__name__, " ".join(str(error).split())[:_LONGEST], line, _code(task.file, line))
    sys.stdout.flush()
    pipe.recv_bytes()  # until the parent ends this process: other ranks may still need what it has sent
    os._exit(0)


def _place(frame: FrameType | None, file: Path) -> tuple[int, str]:
    """The file's innermost line on this stack, and its code."""
    while frame is not None and frame.f_code.co_filename != str(file):
        frame = frame.f_back
    return (frame.f_lineno, _code(file, frame.f_lineno)) if frame else (0, "")


def _code(file: Path, line: int) -> str:
    return linecache.getline(str(file), line).strip()
