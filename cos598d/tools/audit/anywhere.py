"""Ranks that any launcher starts: each becomes a rank under audit when it opens its process group.

Imported by `sitecustomize` of the folder `site`, or by a script's own first line. It does nothing where the variable
COS598D_AUDIT is not set; "1" there, or the folder for what the audit leaves.
"""

import atexit
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER, STEPS, RUN = "COS598D_AUDIT", "COS598D_AUDIT_STEPS", "COS598D_AUDIT_RUN"
SITE = Path(__file__).parent / "site"
_MODULE = "torch.distributed.distributed_c10d"


def environment(folder: str, steps: int, run: str) -> dict[str, str]:
    """What a launcher's environment needs so that the ranks that it starts are audited; `run` is the audit's name."""
    path = [str(SITE), str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    return {FOLDER: folder, STEPS: str(steps), RUN: run, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Begin to audit this process as soon as it opens a process group, if COS598D_AUDIT asks for it."""
    if environ.get(FOLDER) and not any(isinstance(each, _Finder) for each in sys.meta_path):
        if (module := sys.modules.get(_MODULE)) is not None:
            _wrap(module)
            _wrap(sys.modules["torch.distributed"])
        else:
            sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch's module of process groups as it is found without this, and wraps its function."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def execute(module: Any) -> None:
                original(module)
                _wrap(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        # Before the group opens: its functions would keep an open one, whose threads can abort the exit.
        importlib.import_module("torch.distributed.nn")
        _begin()
        return original(*arguments, **options)

    module.init_process_group = init_process_group


def _begin() -> None:
    """This process is a rank from here on, unless it is one already."""
    from cos598d.tools.audit import rank as ranks
    from cos598d.tools.audit import script as scripts
    from cos598d.tools.audit.end import conclude_on_rank
    from cos598d.tools.audit.options import Told

    asked, script = os.environ[FOLDER], sys.argv[0] or "script"
    folder = Path(f"runs/audit-{Path(script).stem}" if asked == "1" else asked).absolute()
    steps = os.environ.get(STEPS, "")
    told = Told(str(folder), script, int(steps) if steps.isdigit() and int(steps) else 3, os.environ.get(RUN, ""))
    rank = ranks.begin(told, None if told.run else conclude_on_rank)
    if rank is None:
        return
    failed: list[str] = []
    excepthook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.append(scripts.told(error))
        excepthook(kind, error, trace)

    sys.excepthook = note
    atexit.register(lambda: rank.end(int(bool(failed)), failed[0] if failed else ""))


install()
