"""What the tests that need a GPU share: the device, their mark, and where their records stay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT

CUDA = torch.device("cuda", 0)
RECORDS = Path(os.environ.get("GPU_RECORDS", ROOT / "runs" / "gpu")).resolve()
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


def keep(name: str, value: Any) -> None:
    """Leave a JSON value among the records."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / name).write_text(json.dumps(value, indent=2))
