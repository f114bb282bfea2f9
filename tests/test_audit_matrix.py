"""The matrix of the audit: it names every planted fault and no other, and accuses no right script."""

from typing import NamedTuple

import audit_cases
import pytest
from audit_cases_blind import BLIND
from audit_cases_evaluation import EVALUATION
from audit_cases_field import DOUBTFUL, FIELD, OPEN, RIGHT, UNACCUSED
from audit_cases_reports import REPORTS
from audit_cases_styles import STYLES
from audit_scripts import FLAGS, audit, marked_line, with_changes, words_of
from programs import ROOT, TINY_TRAINING

from cos598d.tools.audit.judge.verdict import NOTE
from cos598d.tools.audit.judge.words import WORDS

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
LESSON = " ".join([*TINY_TRAINING, "--max_steps", "5", "--output_dir", "out"])
SYNCS = ("ring", "zero1", "zero3", "torch_fsdp")
# Scripts of the project's own, and their words.
OURS = {
    **dict.fromkeys(("task2a/run_glue.py", "task2b/run_glue.py", "task3/run_glue.py"), LESSON),
    **{f"task3/run_glue.py --sync {sync}": f"{LESSON} --sync {sync}" for sync in SYNCS},
    **dict.fromkeys(("examples/digits.py", "examples/digits_ddp.py")),
}
IN_SHARDS = tuple(f"task3/run_glue.py --sync {sync}" for sync in ("zero1", "zero3", "torch_fsdp"))  # not judged
PARALLELIZED = """
import torch
import torch.distributed as dist

import cos598d

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 3)
model, optimizer = cos598d.parallelize(model, lambda params: torch.optim.AdamW(params, lr=0.01), "{strategy}")
torch.manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    {clip}
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.long(one_in=34)
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_script_is_named_and_a_right_one_accused_of_nothing(name, tmp_path):
    case = CASES[name]
    codes, text, verdict = audit(tmp_path, case.source, case.words, case.ranks)
    assert codes == [0] * case.ranks, text
    found = verdict["faults"] + ([] if name.startswith("r_") else verdict["wastes"])
    if case.found in CLEAN:
        assert found == [], text
        assert case.found == UNACCUSED or ("No fault found" in text) == (case.found == RIGHT), text
        return
    if WORDS[case.found.split(",")[0]].level == NOTE:
        assert found == [], text
        found = [each for each in verdict["notes"] if each["name"] == case.found]
    assert ",".join(each["name"] for each in found) == case.found, text
    line = marked_line(case.source)
    assert line is None or (found[0]["file"], found[0]["line"]) == (str(tmp_path / "train.py"), line), text
    assert found[0]["title"] in text
    assert found[0]["mend"].split()[0] in text
    assert all(any(letter.isdigit() for letter in each) for each in found[0]["evidence"][:1]), text


@pytest.mark.long(one_in=10)
@pytest.mark.parametrize("name", OURS)
def test_our_own_scripts_are_accused_of_nothing(name, tmp_path):
    words = OURS[name]
    codes, text, verdict = audit(tmp_path, ROOT / name.split()[0], f"{words} {FLAGS}" if words else "")
    assert codes == [0, 0], text
    assert verdict["faults"] + verdict["wastes"] == [], text
    assert verdict["seen"]["steps"] >= 5, text
    assert (verdict["seen"]["judged"] == 0) == ("NOT JUDGED" in text) == (name in IN_SHARDS), text


@pytest.mark.parametrize(("strategy", "clip"), [("zero1", "model.clip_grad_norm_(0.1)"), ("zero3", "")])
def test_shards_of_parallelize_are_not_judged(strategy, clip, tmp_path):
    codes, text, verdict = audit(tmp_path, PARALLELIZED.format(strategy=strategy, clip=clip))
    assert codes == [0, 0], text
    assert (verdict["faults"], verdict["wastes"], verdict["remarks"]) == ([], [], []), text
    assert (verdict["seen"]["steps"], verdict["seen"]["judged"]) == (4, 0), text
    assert any(each.startswith("gradients of steps 1 to 3: each rank steps shards") for each in verdict["not_judged"])
    assert not any("no optimizer" in each or "no step" in each for each in verdict["not_judged"]), text
