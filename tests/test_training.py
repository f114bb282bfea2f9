"""The scripts of the four tasks: the same losses on any ranks, in four shells, on texts, questions and images."""

import json

import pytest
from programs import TINY, Program, free_port, script

LONG = ["--max_seq_length", "96", "--doc_stride", "48", "--threads", "1", "--model_name_or_path", "tiny"]
SHORT = (*LONG, "--max_train_examples", "40", "--max_eval_examples", "20", "--total_train_batch_size", "8")
# A task's script, its ranks, and what each of them sends for a gradient of S bytes: (n-1) S from rank 0 of gather and
# scatter and S from the others; 2(n-1)/n S for an all-reduce.
TASKS = {"task2a": (3, [2, 1, 1]), "task2b": (3, [4 / 3] * 3), "task3": (4, [3 / 2] * 4)}


def run(folder, name, words, ranks=1):
    """Run a script on ranks that it starts itself, and return the summary."""
    more = ["--world_size", str(ranks), "--master_port", str(free_port())] if ranks > 1 else []
    program = Program(folder, name, [*words, *more, "--output_dir", str(folder / name)])
    assert program.wait() == 0, program.text
    return summary_of(folder / name)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    words = [script("task1/run_glue.py"), *TINY, "--num_train_epochs", "1", "--max_train_examples", "70"]
    return run(folder, "task1", [*words, "--eval_steps", "2"])


def words_of(task):
    words = [script(f"{task}/run_glue.py"), *TINY, "--num_train_epochs", "1", "--max_train_examples", "70"]
    return [*words, "--eval_steps", "2"]


def assert_same(found, alone, ranks):
    assert found["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    assert found["world_size"] == ranks
    for mine, right in zip(found["epochs"] + found["evaluations"], alone["epochs"] + alone["evaluations"], strict=True):
        assert mine["acc"] == right["acc"]
        assert mine["validation_loss"] == pytest.approx(right["validation_loss"], abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_the_losses_of_task_1_and_sends_what_its_formula_says(alone, tmp_path, task):
    ranks, shares = TASKS[task]
    found = run(tmp_path, task, words_of(task), ranks)
    assert len(alone["losses"]) == 5  # of 16 examples, the last of 6
    assert_same(found, alone, ranks)
    size = 4 * found["parameters"]
    assert found["bytes_sent_per_iteration"] == pytest.approx([share * size for share in shares], abs=200)


def test_task_2b_in_four_shells(alone, tmp_path):
    port, name = str(free_port()), str(tmp_path / "shells")
    place = ["--master_ip", "127.0.0.1", "--master_port", port, "--world_size", "4", "--output_dir", name]
    shells = [
        Program(tmp_path, f"shell{rank}", [*words_of("task2b"), *place, "--local_rank", str(rank)]) for rank in range(4)
    ]
    for shell in shells:
        assert shell.wait() == 0, shell.text
    assert_same(summary_of(tmp_path / "shells"), alone, 4)


def test_squad_has_the_losses_of_one_process(tmp_path):
    right, found = (
        run(tmp_path, task, [script(f"{task}/run_squad.py"), *SHORT, "--max_steps", "8"], ranks)
        for task, ranks in (("task1", 1), ("task3", 2))
    )
    assert len(right["losses"]) == 8
    assert found["losses"] == pytest.approx(right["losses"], abs=1e-5)
    assert found["epochs"][-1]["f1"] == right["epochs"][-1]["f1"]


def test_images_that_change_and_accumulation_under_zero3_and_checked_replicas(tmp_path):
    words = ["-m", "cos598d", "train", "--task_name", "digits", "--model_type", "vit", "--threads", "1"]
    words += ["--total_train_batch_size", "24", "--gradient_accumulation_steps", "2", "--max_steps", "4"]
    words += ["--max_train_examples", "96", "--max_eval_examples", "24", "--check_replicas", "2", "--augment"]
    right = run(tmp_path, "one", [*words, "--sync", "none"])
    found = run(tmp_path, "three", [*words, "--sync", "zero3"], 3)
    assert found["losses"] == pytest.approx(right["losses"], abs=1e-6)
    assert found["epochs"][-1]["acc"] == right["epochs"][-1]["acc"]
    memory = found["memory"]["peak"]
    assert memory[0]["optimizer"] < right["memory"]["peak"][0]["optimizer"] / 2


BROKEN = """
import torch.distributed as dist
from cos598d import GradientSync

class Mine(GradientSync):
    def average(self, name, gradient):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        {line}
"""


@pytest.mark.parametrize(
    ("line", "words", "said"),
    [
        ("", [], None),
        ("gradient += self.rank * 1e-3", ["--check_replicas", "1"], "weights differ between ranks after iteration 1"),
        ("gradient *= float('nan')", [], "not a finite number"),
    ],
    ids=["right", "drifts", "not finite"],
)
def test_a_sync_of_ones_own_trains_or_is_named(alone, tmp_path, line, words, said):
    (tmp_path / "own.py").write_text(BROKEN.format(line=line))
    words = ["-m", "cos598d", "train", "--sync", f"{tmp_path}/own.py:Mine", *TINY, *words, "--no_save_model"]
    words += ["--max_train_examples", "70", "--eval_steps", "2", "--num_train_epochs", "1", "--world_size", "2"]
    program = Program(tmp_path, "own", [*words, "--output_dir", str(tmp_path / "out")])
    assert (program.wait() == 0) == (said is None), program.text
    if said is None:
        assert_same(summary_of(tmp_path / "out"), alone, 2)
    else:
        assert said in program.text
        assert "Traceback" not in program.text
