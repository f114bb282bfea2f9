"""A plug-in of pytest: `audited(fn, world_size=2)` holds a project's own training step to the audit."""

import contextlib
import os
import pickle
import secrets
from collections.abc import Callable, Iterable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cos598d.terminal.children import end_all, wait_together

if TYPE_CHECKING:
    from cos598d.tools.audit.judge.verdict import AuditVerdict
    from cos598d.tools.audit.options import Told

Audited = Callable[..., "AuditVerdict"]
_FAILED_SECONDS = 10.0  # that the other ranks have when one has failed
_STOP_SECONDS = 5.0  # that a rank has to end when it is asked to


@pytest.fixture
def audited(tmp_path: Path) -> Audited:
    """`audited(fn, world_size=2, steps=3, ignore=(), seconds=120)` calls `fn()` on so many ranks, each a process of its
    own with a gloo group open, and returns the verdict.

    The test fails for a fault, for gradients that cannot be judged, for a rank that fails, and after so many `seconds`.
    `fn` is a function of a module; findings of the names in `ignore` do not count.
    """

    def run(
        fn: Callable[[], Any],
        world_size: int = 2,
        steps: int = 3,
        ignore: Iterable[str] = (),
        seconds: float = 120.0,
    ) -> "AuditVerdict":
        # Every run of pytest loads this module: what audits need is loaded by those that audit.
        from cos598d.errors import UserError
        from cos598d.tools.audit.end import card
        from cos598d.tools.audit.exchange import read_books
        from cos598d.tools.audit.judge import judge
        from cos598d.tools.audit.judge.verdict import FAULT
        from cos598d.tools.audit.options import Told

        __tracebackhide__ = True
        folder = tmp_path / f"audit-{secrets.token_hex(4)}"
        told = Told(str(folder), getattr(fn, "__name__", "fn"), steps, secrets.token_hex(8))
        (folder / "books").mkdir(parents=True)
        codes = _codes(told, fn, world_size, seconds)
        try:
            books, remarks = read_books(folder)
        except UserError:
            pytest.fail(
                f"nothing could be judged: the ranks ended with exit codes {codes}, and made no call.", pytrace=False
            )
        verdict = judge(books, remarks).without([*ignore])
        if verdict.of(FAULT) or not verdict.is_sure or any(codes):
            pytest.fail(f"exit codes {codes}\n{card(verdict, books)}", pytrace=False)
        return verdict

    return run


class _RankProcess(SpawnProcess):
    """A rank in a fresh interpreter, with the methods of a `Child`."""

    pid: int

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _codes(told: "Told", fn: Callable[[], Any], world_size: int, seconds: float) -> list[int | None]:
    """Start the ranks, wait for them, and return their exit codes; None of one that had to be stopped."""
    from cos598d.tools.audit.rank import begin
    from cos598d.tools.audit.script import Carried
    from cos598d.tools.audit.starter import free_port

    port = free_port()
    ranks: list[_RankProcess] = []
    try:
        for rank in range(world_size):
            process = _RankProcess(target=Carried(told, begin, _call), args=(fn, rank, world_size, port))
            process.start()
            ranks.append(process)
        with contextlib.suppress(TimeoutError):
            wait_together(ranks, lambda _: _FAILED_SECONDS, seconds)
        return [process.poll() for process in ranks]
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        pytest.fail(
            f"{told.script} cannot be given to another process ({error}). Make it a function of a module.",
            pytrace=False,
        )
    finally:
        end_all(ranks, _STOP_SECONDS)


def _call(fn: Callable[[], Any], rank: int, world_size: int, port: int) -> None:
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    try:
        fn()
    finally:
        dist.destroy_process_group()
