"""What calls cost: fitted to benches that the user names, else to a short one that is made here."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.forecast.programs import answer_of
from cos598d.records.bench import FILE_NAME
from cos598d.scale.fit import fit
from cos598d.scale.model import Costs
from cos598d.scale.records import load_records

# Many small calls and one large one tell a call's own cost from that of its bytes.
SHORT_BENCH = ("--model", "tiny", "--batch", "2", "--tokens", "32", "--rounds", "15", "--sync", "all_reduce,flat")


@dataclass(frozen=True)
class CallCosts:
    """The costs of calls, and in words where they are from."""

    costs: Costs
    words: str


def costs_of(benches: Sequence[Path], ranks: int) -> CallCosts:
    """Fitted to `benches`; without one, to a short bench of `ranks` ranks side by side, made here over loopback.

    Raises UserError for a record of a bench that cannot be used, and where the short one fails.
    """
    if benches:
        words = f"their costs are fitted to {len(benches)} bench{'es' if len(benches) > 1 else ''}"
        return CallCosts(fit(load_records(benches)).costs, words)
    where = ["--world_size", str(ranks), "--no_cuda", "--json", "-"]
    said = answer_of(["-m", "cos598d", "bench", *SHORT_BENCH, *where], "what calls cost could not be measured here")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / FILE_NAME
        record.write_text(said, encoding="utf-8")
        return CallCosts(
            fit(load_records([record])).costs, "their costs are fitted to a short bench that was made here"
        )
