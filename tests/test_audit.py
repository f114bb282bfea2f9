"""The audit: sketches, fits, books and verdicts; the script runs unchanged, and bad input is refused in one line."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from audit_cases import AVERAGE, FAULTS
from audit_cases_field import DOUBTFUL
from audit_scripts import BY_HAND, audit, with_changes
from programs import ROOT, free_port

from cos598d.commands.cli import main
from cos598d.tools.audit.end import card
from cos598d.tools.audit.exchange import read_books
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import CONSEQUENCES
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.sketch import Sketcher, from_text, to_text

RIGHT = BY_HAND
NEVER = with_changes("by_hand", [(AVERAGE, "")])


def test_sketches_are_linear_and_leave_random_states_unchanged():
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sketch = Sketcher()
    one, other = (torch.arange(70_000.0).sin().reshape(7, -1) * scale for scale in (1, 3))
    combined = sketch(2 * one - other.cos())
    assert np.allclose(combined, 2 * sketch(one) - sketch(other.cos()), rtol=0, atol=1e-2)
    assert np.linalg.norm(combined) > 100
    sparse = torch.sparse_coo_tensor([[1, 3]], [2.0, 5.0], (9,))
    assert np.array_equal(sketch(sparse), sketch(sparse.to_dense()))
    assert np.array_equal(from_text(to_text(sketch(sparse))), sketch(sparse))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_right_script_passes_and_computes_the_same(start, tmp_path):
    printed = '    print(rank, step, f"{loss.item():.9f}", torch.rand(1).item(), flush=True)\n'
    source = with_changes("by_hand", [("    optimizer.step()\n", "    optimizer.step()\n" + printed)])
    codes, text, verdict = audit(tmp_path, source)
    assert codes == [0, 0], text
    assert (verdict["faults"], verdict["wastes"]) == ([], [])
    assert verdict["notes"] == []
    assert [verdict["seen"][name] for name in ("world_size", "judged", "steps")] == [2, 3, 5]
    assert "No fault found; gradients judged in 3 of 5 steps" in text
    # The same numbers as without the audit, random ones too.
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    plain = [start(f"plain{r}", [tmp_path / "train.py"], port | {"RANK": str(r), "WORLD_SIZE": "2"}) for r in range(2)]
    assert [program.wait() for program in plain] == [0, 0]
    assert [line for line in text.splitlines() if line[:2] == "0 "] == plain[0].text.splitlines()


def test_a_folder_is_judged_again_also_without_a_book(tmp_path, capsys):
    codes, text, verdict = audit(tmp_path, NEVER, flags=["--strict"])
    assert codes == [3, 0], text
    (fault_found,) = verdict["faults"]
    assert fault_found["name"] == "never_averaged"
    assert fault_found["consequences"] == ["weights_drift"]
    folder = tmp_path / "audit"
    assert main(["audit", str(folder)]) == 0
    assert "never averaged" in capsys.readouterr().out
    assert main(["audit", "--strict", str(folder)]) == 3
    (folder / "books" / "rank1.json").unlink()
    assert main(["audit", str(folder)]) == 0
    assert main(["audit", "--strict", str(folder)]) == 5
    out = capsys.readouterr().out
    assert "Rank 1 wrote no results" in out
    assert "only one rank wrote its results" in out


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda book: b"{", "is damaged: Input data was truncated"),
        (lambda book: b"\x80\x04N.", "is damaged: JSON is malformed"),
        (lambda book: json.dumps(book | {"rank": 0}).encode(), "rank 0 of 2"),
        (lambda book: json.dumps(book | {"steps": "many"}).encode(), "steps"),
        (lambda book: json.dumps(book | {"start": {"weights": {"a": "AAAA"}}}).encode(), "start"),
        (lambda book: json.dumps(book | {"run": "another"}).encode(), "another run"),
        (lambda book: json.dumps(book | {"seconds": 1e999}).encode(), "JSON"),
    ],
)
def test_read_books_refuses_forged_and_damaged_books(damage, says, tmp_path, finished):
    for rank, book in enumerate(finished):
        (tmp_path / "books").mkdir(exist_ok=True)
        data = json.dumps(book).encode() if rank == 0 else damage(book)
        (tmp_path / "books" / f"rank{rank}.json").write_bytes(data)
    books, remarks = read_books(tmp_path)
    assert [book["rank"] for book in books] == [0]
    (said,) = remarks
    assert says in said
    assert "\n" not in said
    assert judge(books, remarks).seen.ranks == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The books of a right script of two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    codes, text, _ = audit(folder, RIGHT)
    assert codes == [0, 0], text
    return [json.loads((folder / "audit" / "books" / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_consequence_and_planted_fault_has_words():
    assert len(FAULTS) >= 60
    assert {name for _, _, name, _ in FAULTS.values()} - {DOUBTFUL} <= WORDS.keys()
    assert {*CONSEQUENCES, *(effect for effects in CONSEQUENCES.values() for effect in effects)} <= WORDS.keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs a script"),
        (["nowhere.py"], "does not exist"),
        (["--steps", "0", "right.py"], "--steps 0"),
        (["--output_dir", "right.py", "right.py"], "is a file"),
        (["--timeout", "9", "right.py"], "Add --world_size"),
        (["empty"], "no results of an audit"),
        (["--ignore", "never_averged", "right.py"], "Did you mean 'never_averaged'"),
        (["--timeout", "0", "right.py"], "--timeout 0"),
        (["--", "-m"], "-m needs a module"),
        (["--world_size", "2", "--", "-m", "nowhere.at_all"], "is not a module here"),
    ],
)
def test_bad_arguments_print_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "empty").mkdir()
    assert main(["audit", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_findings_are_ignored_counted_and_written_as_json(finished, tmp_path, capsys):
    (tmp_path / "books").mkdir()
    for rank, book in enumerate(edited(finished, applied=summed)):
        (tmp_path / "books" / f"rank{rank}.json").write_text(json.dumps(book))
    assert main(["audit", "--strict", str(tmp_path)]) == 3
    assert "not averaged" in capsys.readouterr().out
    verdict = json.loads((tmp_path / "audit.json").read_text())
    assert ([each["name"] for each in verdict["faults"]], verdict["notes"]) == (["summed"], [])
    assert main(["audit", "--strict", "--ignore", "summed", str(tmp_path)]) == 0
    assert "Ignored as asked: summed." in capsys.readouterr().out


def edited(books, applied=None, micro=None, steps=(1, 2, 3), **of_micro):
    """Copies of two ranks' books. `applied` (rank, step, name, of all ranks' own gradients) gives what is applied;
    `of_micro` is put into every backward pass, `micro` (rank, row of it) changes it."""
    copies = json.loads(json.dumps(books))
    local = [{step["iteration"]: step["local"] for step in book["steps"]} for book in books]
    for rank, book in enumerate(copies):
        book["ledger"] = [entry for entry in book["ledger"] if entry["kind"] != "weight"]
        for step in book["steps"]:
            number = step["iteration"]
            step["events"] = [event for event in step["events"] if event["kind"] != "clip"]
            for name in step["applied"]:
                own = [from_text(of[number][name][0]) for of in local]
                new = sum(own) / 2 if applied is None or number not in steps else applied(rank, number, name, own)
                step["applied"][name] = to_text(new)
            for each in step["micro"]:
                each.update(of_micro)
                if micro:
                    micro(rank, each)
    return copies


def divided(by):
    """All gradients are the sum over the ranks, divided by `by`, a number or a function of step and name."""
    return lambda rank, step, name, own: sum(own) / (by(step, name) if callable(by) else by)


def bent(rank, step, name, own):
    return np.abs(sum(own)) if name == "0.bias" else sum(own) / 2


summed = divided(1)
HALF = {"weight": 0.5, "divided": [2.0]}
SCALED = HALF | {"weight": 2**15, "scaler": 2.0**16}  # by a gradient scaler, 2**16
# A sum over the examples of both ranks.
OF_ALL = {"weight": 1 / 16, "is_sum": True, "divided": [16.0]}


def own_sum(rank, row):
    row.update(weight=1 / (6 + rank), is_sum=True, examples=6 + rank)


JUDGED = {  # changes of a right script's books -> the fault; "" for none, None if the audit cannot decide
    "right": ({}, ""),
    "sum": ({"applied": summed}, "summed"),
    "sum_of_biases": ({"applied": divided(lambda step, name: 1 if "bias" in name else 2)}, "summed"),
    "a_wrong_number": ({"applied": divided(3)}, "wrong_factor"),
    "a_hundredth": ({"applied": divided(200)}, "wrong_factor"),
    "a_clip_by_hand": ({"applied": lambda rank, step, name, own: sum(own) / 2 * (1, 1, 0.7, 0.9)[step]}, ""),
    "more_in_some_steps": ({"applied": lambda rank, step, name, own: sum(own) / 2 * (1, 1, 1.7, 0.9)[step]}, None),
    "one_layer_by_less": ({"applied": divided(lambda step, name: 20 if name == "0.bias" else 2)}, None),
    "one_tensor_changed": ({"applied": bent}, None),
    "one_ranks_for_all": ({"applied": lambda rank, step, name, own: own[0]}, "partial_average"),
    "not_in_one_step": ({"applied": lambda rank, step, name, own: own[rank], "steps": (2,)}, "different_gradients"),
    "in_one_step": ({"applied": lambda rank, step, name, own: own[rank], "steps": (1, 3)}, "different_gradients"),
    "nothing": ({"applied": lambda rank, step, name, own: 0 * own[0]}, "lost_micro_batches"),
    "divided_by_two_of_two_ranks": (HALF, None),
    "multiplied_by_the_ranks": ({"weight": 2.0, "multiplied": [2.0]}, "loss_times_ranks"),
    "a_scale_left_in": ({"weight": 1024.0, "scaler": 1024.0}, "scale_left_in"),
    "multiplied": ({"weight": 0.5, "multiplied": [0.5]}, None),
    "a_divided_loss_summed": (HALF | {"applied": summed}, ""),
    "a_sum_over_all": (OF_ALL | {"applied": summed}, ""),
    "a_sum_over_all_averaged": (OF_ALL, "averaged_twice"),
    "a_sum_over_its_own": ({"micro": own_sum}, None),
    "a_mean_over_its_own": ({"micro": lambda rank, row: row.update(examples=6 + rank)}, None),
    "a_mean_over_as_many": ({"micro": lambda rank, row: row.update(examples=6)}, ""),
    "an_unknown_sum_over_its_own": ({"weight": None, "micro": lambda rank, row: row.update(divided=[6 + rank])}, None),
    "an_unknown_mean_by_share": (
        {"weight": None, "micro": lambda rank, row: row.update(size=6 + rank, multiplied=[6 + rank])},
        "",
    ),
    "an_unknown_sum_over_all": ({"weight": None, "divided": [13], "applied": summed}, None),
    "no_known_scale": ({"weight": None}, ""),
    "no_known_scale_summed": ({"weight": None, "applied": summed}, None),
    "no_known_scale_divided": ({"weight": None, "divided": [2.0]}, None),
    "half_an_error_under_a_scaler": (SCALED | {"applied": divided(2**17)}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_judge_names_the_fault_from_applied_gradients_and_loss_scales(name, finished):
    changes, expected = JUDGED[name]
    verdict = judge(edited(finished, **changes))
    faults = [each.name for each in verdict.of("fault")]
    assert faults == ([expected] if expected else []), verdict
    assert verdict.is_sure or expected != "", verdict.not_judged
    assert not (expected is None and verdict.is_sure)
    head = card(verdict).split("gradients judged in")[0]
    assert ("No fault found" in head, "Cannot tell" in head) == (expected == "", expected is None)


def test_fewer_than_half_of_the_steps_give_no_verdict(finished):
    skipped = edited(finished)
    for book in skipped:
        book["steps"][0]["is_skipped"] = True
    assert judge(skipped).is_sure  # a gradient scaler leaves the first one out
    for book in skipped:
        book["steps"][1]["is_skipped"] = True
    assert not judge(skipped).is_sure
    assert not judge(finished[:1]).is_sure


def test_judging_again_loads_no_torch():
    code = "import sys, cos598d.commands.audit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
