"""A real recording: three processes of a small network under torch.profiler, of which one sleeps in one layer.

Each step computes four layers, with an all-reduce in two buckets during backward. Only the events that the lesson's
page names are kept.
"""

import json
from importlib.resources import files
from typing import Any

SLOW_RANK, SLOW_LAYER, SLOW_SECONDS = 1, "mixer", 0.06


def recorded() -> list[dict[str, Any]]:
    """The recorded traces of all ranks."""
    return json.loads((files(__package__) / "recorded.json").read_text())
