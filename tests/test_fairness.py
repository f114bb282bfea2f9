"""Runs that did not do the same work are named before any ratio between them. A sweep over one setting is meant."""

import pytest
from report_records import attempt, edit, update, write_run

from cos598d.commands.report import load_records
from cos598d.errors import UserError
from cos598d.tools.report.fairness import ground_remark, work_remark
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import brief_parts, comparison

STEPS = 6


def run_like(folder, config=None, environment=None, epochs=96, summary=None, **changes):
    """A run's record with these values in its files; `epochs` is the number of examples in each."""

    def set_summary(found):
        found |= summary or {}
        for epoch in found["epochs"]:
            epoch["training"] = {"examples": epochs}

    write_run(folder, **{"seconds": [1.0] * STEPS} | changes)
    flags = {"learning_rate": 5e-5, "optimizer": "sgd", "gradient_accumulation_steps": 1, "max_steps": -1}
    flags |= {"lr_scheduler": "linear", "warmup_steps": 0, "max_grad_norm": 1.0, "max_train_examples": None}
    update(folder / "config.json", **flags | (config or {}))
    update(folder / "environment.json", **{"tf32": False} | (environment or {}))
    return edit(folder / "summary.json", set_summary)


def loaded(*folders):
    return [load_run(folder) for folder in folders]


def remark(*folders):
    return work_remark(loaded(*folders))


@pytest.fixture
def pair(tmp_path):
    """pair(**changes): the baseline of one process, and DDP on 4 ranks with these changes; the remark on both."""

    def make(**changes):
        baseline = run_like(tmp_path / "baseline", ranks=1, sync="none", environment={"threads_per_rank": 4})
        return remark(baseline, run_like(tmp_path / "ddp", **{"ranks": 4, "sync": "ddp"} | changes))

    return make


def test_the_same_work_needs_no_remark(pair):
    assert pair() == ""


LATER = [0.7, 0.69, 0.71, 0.70, 0.69, 0.68]  # those of the others only up to the second iteration
MISTAKES = {
    "a total batch that grows with the ranks": (
        {"batch": 64, "seconds": [1.0] * 3},
        "examples per step 16 in baseline and 64 in ddp; steps 6 in baseline and 3 in ddp",
    ),
    "TF32 on one side only": ({"environment": {"tf32": True}}, "TF32 no in baseline and yes in ddp"),
    "no sampler": ({"epochs": 4 * 96}, "examples per epoch 96 in baseline and 384 in ddp"),
    "an optimizer never wrapped, or backward called twice": (
        {"losses": LATER},
        "the losses of ddp part from those of baseline (by 0.0300 in iteration 3)",
    ),
    "another precision": ({"summary": {"precision": "bf16"}}, "precision fp32 in baseline and bf16 in ddp"),
    "accumulation": ({"config": {"gradient_accumulation_steps": 4}}, "accumulation 1 in baseline and 4 in ddp"),
    "another schedule": ({"config": {"lr_scheduler": "constant"}}, "schedule linear in baseline and constant in ddp"),
    "a warm-up on one side only": ({"config": {"warmup_steps": 10}}, "warm-up steps 0 in baseline and 10 in ddp"),
    "clipping on one side only": ({"config": {"max_grad_norm": 0.0}}, "clipping 1 in baseline and 0 in ddp"),
    "fewer examples": ({"config": {"max_train_examples": 48}}, "training examples all in baseline and 48 in ddp"),
    "other data": ({"words": "RTE"}, "data a sample in baseline and RTE in ddp"),
    "another seed": ({"summary": {"seed": 1}}, "seed 42 in baseline and 1 in ddp"),
    "dropout": ({"summary": {"dropout": None}}, "dropout 0 in baseline and the model's own in ddp"),
    "other steps": ({"seconds": [1.0] * 8}, "steps 6 in baseline and 8 in ddp"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_published_comparisons_that_a_record_can_show_is_named(pair, mistake):
    changes, words = MISTAKES[mistake]
    found = pair(**changes)
    assert words in found
    assert found.count(";") == words.count(";"), "nothing else differs"


def test_runs_on_different_machines_are_named(tmp_path):
    runs = loaded(
        *(
            run_like(tmp_path / name, sync=name, environment={"processor": processor, "cores": cores})
            for name, processor, cores in (("a", "old", 2), ("b", "new", 2), ("c", "old", None))
        )
    )
    words = ground_remark(runs)
    assert "processor old in a and c and new in b" in words
    assert comparison(runs).index(words) < comparison(runs).index("ratio to ddp")
    assert ground_remark([runs[0], runs[2]]) == ""


@pytest.mark.parametrize(
    ("name", "value"), [("precision", "bf16"), ("seed", 1), ("dropout", 0.1), ("sync", "ddp"), ("world_size", 4)]
)
def test_files_that_contradict_each_other_are_refused(tmp_path, name, value):
    with pytest.raises(UserError, match=f"has {name} .* in one file and .* in its config.json"):
        load_run(run_like(tmp_path / "run", config={name: value}))


def test_threads_are_compared_among_as_many_ranks(tmp_path):
    folders = [
        run_like(tmp_path / name, sync=sync, ranks=ranks, environment={"threads_per_rank": threads})
        for name, sync, ranks, threads in (("alone", "none", 1, 4), ("a", "ddp", 2, 2), ("b", "flat", 2, 1))
    ]
    assert "threads per rank 2 in a and 1 in b" in remark(*folders)
    assert remark(*folders[:2]) == ""


def test_what_an_older_record_lacks_is_no_difference(tmp_path):
    old = run_like(tmp_path / "old")
    for name in ("environment", "config"):
        (old / f"{name}.json").unlink()
    assert remark(old, run_like(tmp_path / "new", sync="ddp", environment={"tf32": True})) == ""


def test_a_sweep_over_the_batch_or_the_ranks_is_meant(tmp_path):
    folders = [
        run_like(tmp_path / f"{sync}-{batch}", sync=sync, batch=batch, seconds=[1.0] * (96 // batch))
        for sync in ("ddp", "flat")
        for batch in (16, 32)
    ]
    assert remark(*folders) == ""
    assert remark(folders[0], folders[3]) != "", "these differ in their sync too"
    threads = {ranks: {"threads_per_rank": 4 // ranks} for ranks in (1, 2, 4)}
    assert remark(*(run_like(tmp_path / f"{n}", ranks=n, environment=own) for n, own in threads.items())) == ""


def test_runs_of_other_lengths_are_meant_where_the_rest_is_alike(tmp_path):
    folders = [
        run_like(tmp_path / f"{sync}-{steps}", sync=sync, seconds=[1.0] * steps)
        for sync in ("ddp", "flat")
        for steps in (4, 8)
    ]
    assert remark(*folders) == ""
    assert "steps 4 in ddp-4 and 8 in flat-8" in remark(folders[0], folders[3])


@pytest.mark.parametrize("scheduler", ["linear", "constant"])
def test_runs_of_other_lengths_are_compared_where_their_learning_rates_are_the_same(tmp_path, scheduler):
    """Under a schedule that ends with the run, the same iteration has another learning rate, and so another loss."""
    folders = [
        run_like(
            tmp_path / f"{sync}-e{epochs}",
            {"num_train_epochs": epochs, "lr_scheduler": scheduler},
            sync=sync,
            losses=LATER if epochs == 5 else None,
            seconds=[float(epochs)] * STEPS,
        )
        for epochs in (2, 5)
        for sync in ("ddp", "flat")
    ]
    words = "its gradients differ"
    assert (words in remark(*folders)) == (scheduler == "constant")
    if scheduler == "linear":
        lines = [line.split() for line in comparison(loaded(*folders)).splitlines()]
        ratios = [line[6] for line in lines if line and line[0].startswith(("flat-e", "ddp-e"))]
        assert ratios[4:8] == ["itself", "1.00"] * 2
        odd = run_like(tmp_path / "odd", {"num_train_epochs": 5}, sync="ring")
        assert "the losses of odd part from those of ddp-e5" in remark(*folders, odd)


@pytest.mark.long
def test_a_run_s_speed_is_compared_with_runs_of_its_own_length(tmp_path):
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.page import build_page

    folders = [
        run_like(tmp_path / f"{sync}-e{epochs}", {"num_train_epochs": epochs}, sync=sync, ranks=ranks)
        for epochs in (2, 5)
        for sync, ranks in (("none", 1), ("ddp", 2), ("flat", 2))
    ]
    page = build_page(*load_records(folders))
    assert page.answer.cautions == []
    assert "ddp-e5" not in page.answer.sentences[0]
    (table,) = (section.blocks[0] for section in page.sections if section.title == "Scaling")
    assert {row[1] for row in table.rows[1:] if row[0].endswith("-e5")} == {"none-e5"}


def test_local_sgd_and_runs_with_lost_rows_are_not_compared(tmp_path):
    ddp = run_like(tmp_path / "ddp", {"sync_every": 1}, sync="ddp")
    far = run_like(tmp_path / "far", {"sync_every": 8}, sync="local_sgd", losses=LATER)
    lost = run_like(tmp_path / "lost", summary={"attempts": [attempt(to_iteration=STEPS + 3)]}, losses=LATER)
    assert remark(ddp, far) == remark(ddp, lost) == ""


def test_losses_of_the_floor_and_of_dropout_are_not_compared(tmp_path):
    folders = [run_like(tmp_path / "ddp", sync="ddp"), run_like(tmp_path / "floor", sync="none", losses=LATER)]
    assert remark(*folders) == ""
    dropped = [run_like(tmp_path / f"{n}", losses=n, summary={"dropout": 0.1}) for n in (None, LATER)]
    assert remark(*dropped) == ""


def test_of_two_parallel_runs_neither_is_accused_and_of_three_the_odd_one_is(tmp_path):
    a, b, c = (run_like(tmp_path / name, sync=name, losses=LATER if name == "a" else None) for name in "abc")
    for order in ((a, b), (b, a)):
        said = remark(*order)
        assert "their gradients differ" in said
        assert "part from" not in said
    assert "the losses of a part from those of b" in remark(a, b, c)
    assert "losses of c" not in remark(a, b, c)


@pytest.mark.long
@pytest.mark.parametrize("markdown", [False, True])
def test_the_remark_is_above_every_ratio_in_the_table_and_on_the_page(tmp_path, markdown):
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.page import build_page

    folders = [run_like(tmp_path / "a"), run_like(tmp_path / "b", sync="ddp", batch=32)]
    words, text = remark(*folders), comparison(loaded(*folders), markdown)
    assert "examples per step 16 in a and 32 in b" in words
    assert text.index(words) < text.index("first losses")
    assert build_page(*load_records(folders)).answer.cautions == [words]


def test_a_record_has_whether_its_device_rounds_to_tf32(monkeypatch):
    torch = pytest.importorskip("torch")
    from cos598d.measure.environment import computes_in_tf32

    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert [computes_in_tf32(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not computes_in_tf32(torch.device("cuda"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert computes_in_tf32(torch.device("cuda"))


def test_a_few_bytes_are_not_rounded_to_0(tmp_path):
    sent = {"bytes_sent_per_iteration": [21504.0, 21504.0]}
    run = load_run(run_like(tmp_path / "sign", sync="ddp")) | sent
    (_, row), _ = brief_parts([run])
    assert row[4] == "0.022 x 2"
