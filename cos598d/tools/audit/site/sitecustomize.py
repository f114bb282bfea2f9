"""Python imports this at its start where the folder is in PYTHONPATH: the process is audited if it is a rank.

Another `sitecustomize`, which this one hides, is imported, too.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != _here]
_other = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
import cos598d.tools.audit.anywhere  # noqa: E402, F401
