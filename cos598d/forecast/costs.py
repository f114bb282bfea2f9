"""What calls cost: fitted to benches that the user names, else as they were found on one machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cos598d.scale.fit import fit
from cos598d.scale.model import Costs
from cos598d.scale.records import load_records

# Over loopback, where each rank has a core of its own; how they were found is in docs/cost.md.
OF_A_CORE = Costs(3e-4, 1e-4, 3.5e-10, 0.95)
# What a step waits, beside that, for a rank to get a core, for each further rank that shares it.
WAIT_SECONDS = 8e-4


class CallCosts:
    """The costs of calls, and in words where they are from."""

    def __init__(self, benches: Sequence[Path] = ()):
        """Raises UserError for a record of a bench that cannot be used."""
        self._fitted = fit(load_records(benches)).costs if benches else None
        if benches:
            self.words = f"their costs are fitted to {len(benches)} bench{'es' if len(benches) > 1 else ''}"
        else:
            self.words = "their costs are another machine's (docs/cost.md), so name benches of this one by --from"

    def of(self, crowd: float) -> Costs:
        """Where so many ranks share a core: each waits for the others. Benches have what they cost where they ran."""
        if self._fitted is not None:
            return self._fitted
        return replace(
            OF_A_CORE,
            step_seconds=OF_A_CORE.step_seconds + WAIT_SECONDS * (crowd - 1),
            processor_seconds_per_byte=OF_A_CORE.processor_seconds_per_byte * crowd,
        )
