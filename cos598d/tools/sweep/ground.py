"""Whether a finished run was on the hosts and links that its combination asks for, as its own record says."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.records.quantities import delay_words, rate_words
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run
from cos598d.tools.report.sweep_entries import DELAY, RATE
from cos598d.tools.sweep.plan import Combination


def check_ground(run: Run, one: Combination, folder: Path, is_launched: bool) -> None:
    """Raise AnotherRun for a record of other hosts, or of other links, than the combination's.

    Where the user's own template has started the ranks (`is_launched`), only axes say what the links should be.
    """
    network = run.environment.get("network") or {}
    found: dict[str, Any] = {"ranks_on_host": _most_on_a_node(run.environment), **network}
    asked: dict[str, Any] = {}
    if "hosts" not in found:
        asked["ranks_on_host"] = one.setup.ranks_per_host
    elif one.setup.hosts > 1 or is_launched:  # emulated hosts are one machine's, which has all ranks
        asked["hosts"] = one.setup.hosts
    if "hosts" in found and one.setup.hosts > 1:
        links = {RATE: rate_words(one.rate), DELAY: delay_words(one.delay)}
        asked |= {name: words for name, words in links.items() if name in one.settings or not is_launched}
    for name, value in asked.items():
        if found.get(name) != value:
            raise AnotherRun(
                f"{folder} is another run: its {name} is {printable(found.get(name), 60)} and should be {value}, for "
                f"set-up {one.setup}"
            )


def _most_on_a_node(environment: Mapping[str, Any]) -> int:
    """How many ranks the node has that has most, by SLURM's names where there are any; of older records rank 0's."""
    places = environment.get("places")
    if not isinstance(places, list) or not all(isinstance(place, dict) for place in places) or not places:
        return environment["ranks_on_host"]
    return max(Counter(str(place.get("node")) for place in places).values())
