"""Complete runs of the tasks' scripts: the same losses however they are started, and records that add up."""

from collections import defaultdict
from statistics import median

import pytest
import torch
from data_files import write_task
from programs import ROOT, TINY, TINY_TRAINING, Program, free_port, script
from report_records import read

from cos598d.commands import cli
from cos598d.commands.script import run_script
from cos598d.data.tables import GLUE
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import comparison

METRICS = {
    "cola": {"mcc"},
    "mrpc": {"acc", "f1", "acc_and_f1"},
    "qqp": {"acc", "f1", "acc_and_f1"},
    "sts-b": {"pearson", "spearmanr", "corr"},
    "mnli": {"acc", "acc_mismatched"},
}
LESSONS = {"task1": 1, "task2a": 3, "task2b": 3, "task3": 3}


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """The four tasks on the bundled sample: 6 iterations, task 1 on one rank and the others on 3."""
    folder = tmp_path_factory.mktemp("lessons")
    environ = {"COS598D_CACHE": str(folder / "cache")}
    for lesson, ranks in LESSONS.items():
        words = [script(f"{lesson}/run_glue.py"), *TINY, "--max_steps", "6", "--output_dir", lesson]
        words += [] if ranks == 1 else ["--world_size", str(ranks)]
        program = Program(folder, lesson, words, environ)
        assert program.wait() == 0, program.text
    return folder


@pytest.mark.parametrize("lesson", ["task2a", "task2b", "task3"])
def test_every_task_has_the_losses_and_metrics_of_task_1(lessons, lesson):
    alone, run = (load_run(lessons / name) for name in ("task1", lesson))
    assert run["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert [epoch["acc"] for epoch in run["epochs"]] == [epoch["acc"] for epoch in alone["epochs"]]
    losses = [[epoch["validation_loss"] for epoch in one["epochs"]] for one in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_first_five_losses_and_the_metric_are_printed_with_model_and_data(lessons):
    text = (lessons / "task2b.txt").read_text()
    summary = load_run(lessons / "task2b")
    for iteration, loss in enumerate(summary["losses"][:5], start=1):
        assert f"iteration {iteration}: loss {loss:.6f} over 16 examples" in text
    assert f"acc {summary['epochs'][-1]['acc']:.4f}" in text
    assert "data: the bundled sample" in text
    assert "model: " in text


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_summary_can_be_recomputed_from_the_rows(lessons, lesson):
    folder, ranks = lessons / lesson, LESSONS[lesson]
    summary = load_run(folder)
    iterations = [read(folder / f"iterations.rank{rank}.jsonl") for rank in range(ranks)]
    calls = [read(folder / f"communication.rank{rank}.jsonl") for rank in range(ranks)]
    assert summary["losses"] == [row["loss"] for row in iterations[0]]
    assert all([row["loss"] for row in rows] == summary["losses"] for rows in iterations)
    seconds = [row["seconds"] for row in iterations[0][2:]]
    assert summary["seconds_per_iteration"]["mean"] == pytest.approx(sum(seconds) / len(seconds))
    for phase, mean in summary["phases"].items():
        assert mean == pytest.approx(sum(row[phase] for rows in iterations for row in rows[2:]) / ranks / 4)
    for rank in range(ranks):
        sent = defaultdict(int)
        for row in calls[rank]:
            if row["purpose"] == "gradients":
                sent[row["iteration"]] += row["bytes_sent"]
        assert summary["bytes_sent_per_iteration"][rank] == sent[6]
    assert summary["epochs"] == read(folder / "epochs.jsonl")


def test_phases_fill_the_iteration(lessons):
    shares = []
    for row in read(lessons / "task2b" / "iterations.rank0.jsonl"):
        phases = sum(value for name, value in row.items() if name.startswith("seconds_"))
        assert phases <= row["seconds"]
        shares.append(phases / row["seconds"])
    assert median(shares) > 0.5  # not each: a busy machine may stop a rank between two phases


def test_rows_have_the_start_of_each_phase_and_call(lessons):
    iterations = read(lessons / "task2b" / "iterations.rank1.jsonl")
    calls = read(lessons / "task2b" / "communication.rank1.jsonl")
    assert all(call["started"] is None for call in calls if call["iteration"] == 0)
    for row in iterations:
        seconds = defaultdict(float)
        for phase, started, lasted in row["spans_seconds"]:
            assert 0 <= started <= started + lasted <= row["seconds"]
            seconds[phase] += lasted
        assert all(row[f"seconds_{phase}"] == pytest.approx(total) for phase, total in seconds.items())
        backward = max(started for phase, started, _ in row["spans_seconds"] if phase == "backward")
        of_it = [call for call in calls if call["iteration"] == row["iteration"] and call["purpose"] == "gradients"]
        # Task 2(b) calls after backward, one after the other.
        assert backward < of_it[0]["started"]
        assert of_it[-1]["started"] + of_it[-1]["seconds"] <= row["seconds"]
        assert all(a["started"] + a["seconds"] <= b["started"] for a, b in zip(of_it, of_it[1:]))


def test_the_log_names_every_gradient_with_its_bytes(lessons):
    summary = load_run(lessons / "task2b")
    rows = [row for row in read(lessons / "task2b" / "communication.rank1.jsonl") if row["iteration"] == 4]
    gradients = [row for row in rows if row["purpose"] == "gradients"]
    names = set(torch.load(lessons / "task2b" / "model" / "pytorch_model.bin", weights_only=True))
    assert {row["tensor"] for row in gradients} == names
    assert sum(row["payload_bytes"] for row in gradients) == 4 * summary["parameters"]
    assert [row["purpose"] for row in rows if row["purpose"] != "gradients"] == ["loss"]
    for row in gradients:
        assert row["payload_bytes"] == 4 * torch.Size(row["shape"]).numel()
        assert row["bytes_sent"] == row["bytes_received"] == round(4 / 3 * row["payload_bytes"])
        assert row["seconds"] > 0


def test_rank_0_carries_the_traffic_of_gather_and_scatter(lessons):
    summary = load_run(lessons / "task2a")
    size = 4 * summary["parameters"]
    assert summary["payload_bytes_per_iteration"] == size
    assert summary["calls_per_iteration"] == 2 * summary["tensors_per_iteration"]
    assert summary["bytes_sent_per_iteration"] == [2 * size, size, size]
    assert summary["bytes_received_per_iteration"] == [2 * size, size, size]


def test_ddp_is_logged_by_bucket_with_the_same_payload(lessons):
    summary = load_run(lessons / "task3")
    assert summary["payload_bytes_per_iteration"] == 4 * summary["parameters"]
    rows = read(lessons / "task3" / "communication.rank0.jsonl")
    assert {row["tensor"] for row in rows if row["iteration"] == 3 and row["purpose"] == "gradients"} == {"bucket 0"}


def test_compare_prints_a_table_from_the_records(lessons, monkeypatch, capsys):
    monkeypatch.setattr("cos598d.tools.report.disturbed.LEAST_SHARE", 2.0)  # other tests may keep the machine busy
    monkeypatch.chdir(lessons)
    assert cli.main(["compare", "--verbose", *LESSONS]) == 0
    text = capsys.readouterr().out
    assert "ratio to ddp" in text
    assert all(lesson in text for lesson in LESSONS)
    runs = [load_run(lessons / lesson) for lesson in LESSONS]
    ratio = runs[1]["seconds_per_iteration"]["mean"] / runs[3]["seconds_per_iteration"]["mean"]
    assert f"{ratio:.2f}" in comparison(runs)
    assert cli.main(["compare", *LESSONS, "nowhere"]) == 1
    assert capsys.readouterr().err == "error: nowhere does not exist. Give the folder of a finished run.\n"


def test_the_model_loads_into_a_bare_bert(lessons):
    from pytorch_transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(str(lessons / "task3" / "model"))
    assert model.classifier.weight.shape[0] == 2


def test_shells_torchrun_and_self_started_ranks_have_the_same_losses_to_the_last_digit(start, start_ranks, tmp_path):
    words = [*TINY_TRAINING, "--max_steps", "4"]
    for rank in start_ranks("task2b/run_glue.py", 2, [*words, "--output_dir", "shells"]):
        assert rank.wait() == 0, rank.text
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    path = script("task2b/run_glue.py")
    torchrun = start("torchrun", [*launcher, path, *words, "--output_dir", "torchrun"])
    assert torchrun.wait() == 0, torchrun.text
    alone = start("self", [path, *words, "--world_size", 2, "--output_dir", "self"])
    assert alone.wait() == 0, alone.text
    losses = [load_run(tmp_path / name)["losses"] for name in ("shells", "torchrun", "self")]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_the_variables_of_srun_and_mpirun_start_a_world(start, tmp_path, launcher):
    port = free_port()
    programs = []
    for rank in range(2):
        environ = {
            "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": f"{rank}", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1"},
            "mpirun": {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": "2"},
        }[launcher]
        words = [script("task3/run_glue.py"), *TINY_TRAINING, "--max_steps", 2, "--output_dir", "out"]
        programs.append(start(f"rank{rank}", words, environ | {"MASTER_PORT": str(port)}))
    for program in programs:
        assert program.wait() == 0, program.text
    assert load_run(tmp_path / "out")["world_size"] == 2
    # Rank 1 prints only that it waits, if rank 0 is late.
    assert [line for line in programs[1].text.splitlines() if "waiting for rank 0 at" not in line] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--fp16", "--dropout", "model"],
        ["--precision", "bf16", "--per_gpu_train_batch_size", 4, "--gradient_accumulation_steps", 2]
        + ["--weight_decay", 0.1, "--warmup_steps", 2, "--max_grad_norm", 0],
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_flag_keeps_the_syncs_alike(start_ranks, tmp_path, words):
    losses = []
    for lesson in ("task2b", "task3"):
        run = [*TINY[:4], *TINY[6:], "--do_train", "--no_save_model", "--max_steps", 4, *words, "--output_dir", lesson]
        for rank in start_ranks(f"{lesson}/run_glue.py", 2, run):
            assert rank.wait() == 0, rank.text
        losses.append(load_run(tmp_path / lesson)["losses"])
    assert len(losses[0]) == 4
    assert read(tmp_path / "task2b" / "config.json")["dropout"] == (None if "--dropout" in words else 0.0)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("task", GLUE)
def test_every_glue_task_trains_and_is_scored_by_its_metrics(task, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "data", task)
    words = ["--task_name", task, "--data_dir", "data", *TINY, "--num_train_epochs", "2", "--output_dir", "out"]
    assert run_script("task1", "none", [*words, "--no_save_model"]) == 0, capfd.readouterr().err
    epochs = load_run(tmp_path / "out")["epochs"]
    assert len(epochs) == 2
    assert set(METRICS.get(task, {"acc"})) <= set(epochs[1]), epochs[1]


def test_max_steps_continue_over_epochs_and_each_is_evaluated(run_here, tmp_path):
    words = [*TINY, "--total_train_batch_size", 32, "--max_train_examples", 80, "--max_eval_examples", 16]
    code, text = run_here("task1/run_glue.py", [*words, "--no_save_model", "--max_steps", 4, "--output_dir", "out"])
    assert code == 0, text
    epochs = load_run(tmp_path / "out")["epochs"]
    assert [epoch["iterations"] for epoch in epochs] == [3, 1]
    assert all("acc" in epoch for epoch in epochs)


def test_evaluation_repeats_the_trained_model_s_metric(lessons, start_ranks, tmp_path):
    words = [*TINY, "--model_name_or_path", lessons / "task3" / "model", "--do_eval", "--output_dir", "out"]
    for rank in start_ranks("task2b/run_glue.py", 2, words):
        assert rank.wait() == 0, rank.text
    (epoch,) = load_run(tmp_path / "out")["epochs"]
    assert epoch["acc"] == load_run(lessons / "task3")["epochs"][-1]["acc"]


def test_the_demo_runs_the_tasks_and_prints_the_table(start, tmp_path):
    words = ["-m", "cos598d", "demo", *TINY, "--max_steps", 3, "--world_size", 2, "--runs_dir", "demo"]
    program = start("program", words, {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    assert sorted(path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()) == ["floor", *LESSONS]
    rows = [line.split() for line in program.text.splitlines() if line.startswith((*LESSONS, "floor"))]
    ranks = {row[0]: row[2] for row in rows if not row[0].endswith(":")}
    assert ranks == {"task1": "1", **dict.fromkeys(("task2a", "task2b", "task3", "floor"), "2")}
    assert "Sent per step by the busiest rank: " in program.text
    assert "Losses differ from one rank's by at most " in program.text
    assert "drift apart: floor." in program.text
    assert "exposed s" not in program.text
