"""A plug-in of pytest: `audited(fn, world_size=2)` holds a project's own training step to the audit."""

import inspect
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cos598d.tools.audit.judge.verdict import AuditVerdict

Audited = Callable[..., "AuditVerdict"]
_SCRIPT = """import sys

import torch.distributed as dist

sys.path[:0] = {path}
from {module} import {name}

dist.init_process_group("gloo")
{name}()
dist.destroy_process_group()
"""


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
        from cos598d.tools.audit.starter import start_ranks

        __tracebackhide__ = True
        folder = tmp_path / f"audit-{secrets.token_hex(4)}"
        (folder / "books").mkdir(parents=True)
        told = Told(str(folder), str(_script_of(fn, folder)), steps, secrets.token_hex(8))
        try:
            code = start_ranks(told, [], world_size, None, seconds)
            books, remarks = read_books(folder)
        except (UserError, TimeoutError) as error:
            pytest.fail(f"nothing could be judged: {error}", pytrace=False)
        verdict = judge(books, remarks).without([*ignore])
        if verdict.of(FAULT) or not verdict.is_sure or code:
            pytest.fail(f"exit code {code}\n{card(verdict, books)}", pytrace=False)
        return verdict

    return run


def _script_of(fn: Callable[[], Any], folder: Path) -> Path:
    """A script that calls the function on a rank."""
    module = inspect.getmodule(fn)
    if module is None or getattr(module, getattr(fn, "__name__", ""), None) is not fn:
        pytest.fail(f"{fn} cannot be given to another process. Make it a function of a module.", pytrace=False)
    place = Path(inspect.getfile(fn)).parents[module.__name__.count(".")]
    path = folder / "step.py"
    path.write_text(_SCRIPT.format(path=[str(place)], module=module.__name__, name=fn.__name__), encoding="utf-8")
    return path
