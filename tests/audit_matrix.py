"""Every script of the audit's matrix. As a program it counts what the audit finds, misses and accuses.

python tests/audit_matrix.py [NAME ...]      # all scripts, or those whose names have one of these words in them
"""

import sys
import tempfile
from collections import Counter
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import audit_cases
from audit_cases_blind import BLIND
from audit_cases_evaluation import EVALUATION
from audit_cases_field import DOUBTFUL, FIELD, OPEN, RIGHT, UNACCUSED
from audit_cases_reports import REPORTS
from audit_cases_styles import STYLES
from audit_scripts import audit, with_changes, words_of
from programs import programs_end

from cos598d.tools.audit.judge.verdict import FAULT
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.exam.server import PRELOADED

CLEAN = (RIGHT, OPEN, DOUBTFUL, UNACCUSED)
# Right scripts with gradients that cannot be judged: of shards, of tensor parallelism, whose ranks share batches by
# design, and of a step that throws a pass away.
UNCERTAIN = dict.fromkeys(("lbfgs", "clip_value_after", "tensor_parallel"), OPEN) | {"local_sgd": UNACCUSED}
UNCERTAIN |= dict.fromkeys(
    (
        "fsdp2",
        "fsdp2_kept_gathered",
        "fsdp2_accumulation_at_home",
        "fsdp2_bf16",
        "fsdp2_checkpointed",
        "fsdp2_replicated",
    ),
    OPEN,
)
UNCERTAIN |= dict.fromkeys(
    ("fsdp1", "fsdp1_views", "fsdp1_accumulation", "flat_parts", "flat_parts_divided_before", "sharpness_aware"), OPEN
)


class Case(NamedTuple):
    """A script, what the audit is to find in it (names of findings, or one of CLEAN), and how it is started."""

    source: str
    found: str
    ranks: int
    words: str = ""

    def is_wrong(self, name: str) -> bool:
        """Whether the script has a fault. Waste and notes are none."""
        if self.found in CLEAN:
            return self.found == DOUBTFUL or name.startswith("w_")
        return WORDS[self.found.split(",")[0]].level == FAULT


def _cases() -> dict[str, Case]:
    found = {}
    for name, (style, changes, expected, words) in audit_cases.FAULTS.items():
        found[name] = Case(with_changes(style, changes), expected, 2, words_of(style, words))
    for name, (style, changes, words) in audit_cases.RIGHT.items():
        expected = UNCERTAIN.get(name, RIGHT)
        source, words = with_changes(style, changes), words_of(style, words)
        found[f"right_{name}"] = Case(source, expected, 2, words)
    return found | {name: Case(*each) for name, each in {**FIELD, **EVALUATION, **STYLES, **BLIND, **REPORTS}.items()}


CASES = _cases()


def result(name: str, case: Case) -> tuple[str, str]:
    """Whether a script is right or wrong, and what becomes of it under audit."""
    with tempfile.TemporaryDirectory() as folder, programs_end():
        _, text, verdict = audit(Path(folder), case.source, case.words, case.ranks)
    names = [each["name"] for each in verdict["faults"]]
    if case.is_wrong(name):
        told = "found" if names and ",".join(names) == case.found else "found by another name" if names else ""
    else:
        told = "accused" if names else ""
    is_sure = "No fault found" in text
    return "wrong" if case.is_wrong(name) else "right", told or ("passes" if is_sure else "cannot tell, not judged")


def main() -> None:
    """Count, and print each script that is missed or accused."""
    set_forkserver_preload(PRELOADED)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for name, case in CASES.items():
        if len(sys.argv) == 1 or any(word in name for word in sys.argv[1:]):
            kind, told = result(name, case)
            print(f"{name}: {told}", file=sys.stderr, flush=True)
            counts.setdefault(("written without a look at the audit" if name in BLIND else "others", kind), Counter())[
                told
            ] += 1
            if (kind, told) in (("wrong", "passes"), ("right", "accused")):
                print(f"{name}, which is {kind}: {told}", flush=True)
    for (by, kind), told in sorted(counts.items()):
        print(f"{kind} scripts, {by}: {told.total()}; {', '.join(f'{n} {what}' for what, n in told.most_common())}")


if __name__ == "__main__":
    main()
