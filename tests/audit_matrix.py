"""Every script of the audit's matrix, and what the audit is to find in it."""

from typing import NamedTuple

import audit_cases
from audit_cases_blind import BLIND
from audit_cases_evaluation import EVALUATION
from audit_cases_field import DOUBTFUL, FIELD, OPEN, RIGHT, UNACCUSED
from audit_cases_reports import REPORTS
from audit_cases_styles import STYLES
from audit_scripts import with_changes, words_of

CLEAN = (RIGHT, OPEN, DOUBTFUL, UNACCUSED)
# Right scripts with gradients that cannot be judged: of shards, of tensor parallelism, whose ranks share batches by
# design, and of a step that throws a pass away.
UNCERTAIN = dict.fromkeys(("lbfgs", "clip_value_after", "tensor_parallel", "sharpness_aware"), OPEN)
UNCERTAIN |= dict.fromkeys(("fsdp2", "fsdp2_accumulation_at_home", "fsdp2_bf16", "fsdp1", "fsdp1_accumulation"), OPEN)
UNCERTAIN["local_sgd"] = UNACCUSED


class Case(NamedTuple):
    """A script, what the audit is to find in it (names of findings, or one of CLEAN), and how it is started."""

    source: str
    found: str
    ranks: int
    words: str = ""


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
