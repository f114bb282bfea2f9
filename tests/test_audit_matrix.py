"""The matrix of the audit: every planted fault is named rightly and alone, and no right script is accused."""

import pytest
from audit_cases import FAULTS, RIGHT
from audit_cases_field import FIELD, OPEN, UNACCUSED
from audit_cases_field import RIGHT as CERTIFIED
from audit_cases_sharded import NOT_JUDGED
from audit_scripts import FLAGS, marked_line, with_changes
from audits import audit, words_of
from programs import ROOT, TINY_TRAINING

from cos598d.tools.audit.judge.verdict import NOTE
from cos598d.tools.audit.judge.words import WORDS

LESSON = " ".join([*TINY_TRAINING, "--max_steps", "5", "--output_dir", "out"])
# Scripts of the project's own, and their words.
OURS = {
    "task2a/run_glue.py": LESSON,
    "task2b/run_glue.py": LESSON,
    "task3/run_glue.py": LESSON,
    "task3/run_glue.py --sync ring": f"{LESSON} --sync ring",
    "task3/run_glue.py --sync zero1": f"{LESSON} --sync zero1",
    "task3/run_glue.py --sync zero3": f"{LESSON} --sync zero3",
    "task3/run_glue.py --sync torch_fsdp": f"{LESSON} --sync torch_fsdp",
    "task3/run_glue.py --sync torch_zero1": f"{LESSON} --sync torch_zero1",
    "examples/digits.py": None,
    "examples/digits_ddp.py": None,
}
IN_SHARDS = ("task3/run_glue.py --sync zero1", "task3/run_glue.py --sync zero3")  # no gradient of these is judged
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


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_alone(name, start, tmp_path):
    style, changes, expected, words = FAULTS[name]
    source = with_changes(style, changes)
    codes, text, verdict = audit(start, tmp_path, source, words_of(style, words))
    assert codes == [0, 0], text
    found = verdict["faults"] + verdict["wastes"]
    if WORDS[expected].level == NOTE:
        assert found == [], text
        found = [each for each in verdict["notes"] if each["name"] == expected]
    assert [each["name"] for each in found] == [expected], text
    line = marked_line(source)
    assert line is None or (found[0]["file"], found[0]["line"]) == (str(tmp_path / "train.py"), line), text
    assert found[0]["title"] in text
    assert found[0]["mend"].split()[0] in text
    assert all(any(letter.isdigit() for letter in each) for each in found[0]["evidence"][:1]), text


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_accused_of_nothing(name, start, tmp_path):
    style, changes, words = RIGHT[name]
    is_fresh = name == "ddp_workers"  # torch's workers do not come up in a fork of the tests' server
    source = with_changes(style, changes)
    codes, text, verdict = audit(start, tmp_path, source, words_of(style, words), is_fresh=is_fresh)
    assert codes == [0, 0], text
    assert verdict["faults"] + verdict["wastes"] == [], text
    assert verdict["seen"]["steps"] > 0, text
    # Silence without judgement is not worth much: only these cannot be judged.
    if name not in ("lbfgs", "clip_value_after", "local_sgd", *NOT_JUDGED):
        assert verdict["seen"]["judged"] == 3, text
        assert not [each for each in verdict["not_judged"] if each.startswith("gradients")], text
        assert "No fault found" in text
    elif name != "local_sgd":
        assert "Cannot tell" in text or "NOT JUDGED" in text


@pytest.mark.parametrize("name", FIELD)
def test_what_scripts_in_the_field_asked_for(name, start, tmp_path):
    source, expected, ranks = FIELD[name]
    codes, text, verdict = audit(start, tmp_path, source, ranks=ranks)
    assert codes == [0] * ranks, text
    found = verdict["faults"] + verdict["wastes"]
    if expected in (CERTIFIED, OPEN, UNACCUSED):
        assert found == [], text
        assert expected == UNACCUSED or ("No fault found" in text) == (expected == CERTIFIED), text
        return
    assert [each["name"] for each in found] == [expected], text
    line = marked_line(source)
    assert line is None or found[0]["line"] == line, text


@pytest.mark.parametrize("name", OURS)
def test_our_own_scripts_are_accused_of_nothing(name, start, tmp_path):
    words = OURS[name]
    codes, text, verdict = audit(start, tmp_path, ROOT / name.split()[0], f"{words} {FLAGS}" if words else "")
    assert codes == [0, 0], text
    assert verdict["faults"] + verdict["wastes"] == [], text
    assert verdict["seen"]["steps"] >= 5, text
    assert (verdict["seen"]["judged"] == 0) == ("NOT JUDGED" in text) == (name in IN_SHARDS), text


@pytest.mark.parametrize(("strategy", "clip"), [("zero1", "model.clip_grad_norm_(0.1)"), ("zero3", "")])
def test_shards_of_parallelize_are_not_judged_and_the_audit_makes_no_error(strategy, clip, start, tmp_path):
    codes, text, verdict = audit(start, tmp_path, PARALLELIZED.format(strategy=strategy, clip=clip))
    assert codes == [0, 0], text
    assert (verdict["faults"], verdict["wastes"], verdict["remarks"]) == ([], [], []), text
    assert (verdict["seen"]["steps"], verdict["seen"]["judged"]) == (4, 0), text
    assert any(each.startswith("gradients of steps 1 to 3: each rank steps shards") for each in verdict["not_judged"])
    assert not any("no optimizer" in each or "no step" in each for each in verdict["not_judged"]), text
