"""The records that lesson 13 reads: benches of this library, cut down to what a comparison asks for.

What was left out of a bench, such as a floor, stands in its `left_out`.
"""

import json
from importlib.resources import files
from typing import Any

NAMES = ("one_host", "slow_link", "two_alone", "single", "half", "busy")


def given(name: str) -> dict[str, Any]:
    """A record by its name: `made_by`, `setting`, and `seconds` of each candidate by round."""
    return json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8"))
