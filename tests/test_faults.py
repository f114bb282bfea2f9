"""Whatever goes wrong, every rank prints a sentence, ends with another code than 0 and leaves nothing half-written."""

import re
import socket

import pytest
from programs import ROOT, TINY, TINY_TRAINING, free_port, script
from report_records import read as rows_of

LONG = (*TINY_TRAINING, "--max_steps", "100000")
TASK2B = "task2b/run_glue.py"


def is_in_a_sentence(code, text, sentence, exit_code=None):
    """What has ended did not end with 0, nor with a traceback, and its last line holds `sentence`."""
    assert code == exit_code if exit_code is not None else code > 0, f"exit code {code}:\n{text}"
    assert "Traceback" not in text, text
    last = text.strip().splitlines()[-1]
    assert sentence in last, text


def ends_in_a_sentence(program, sentence):
    """The same of a program, which may still run."""
    is_in_a_sentence(program.wait(), program.text, sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task_name", "nosuch"], "nosuch"),
        (["--sync", "nosuch"], "unknown sync nosuch. Choose one of none, gather_scatter"),
        (["--max_steps", "many"], "--max_steps: invalid int value: 'many'."),
        (["--learning_rate", "nan"], "--learning_rate nan"),
        (["--nosuch", "1"], "unrecognized arguments: --nosuch 1"),
        (["--total_train_batch_size", "8", "--per_gpu_train_batch_size", "2"], "exclude each other"),
        (["--world_size", "2", "--local_rank", "2"], "rank 2 does not exist"),
        (["--backend", "nccl", "--no_cuda"], "--backend nccl needs a CUDA device"),
        (["--sync", "none", "--world_size", "2", "--do_eval"], "drift apart"),
        (["--sync", "dp", "--world_size", "2"], "one process with all of its GPUs"),
        (["--sync", "bucketed", "--compress", "int9"], "unknown compression"),
        (
            ["--sync", "zero3", "--compress", "bf16"],
            "--compress has no effect with --sync zero3. Leave it out, or choo",
        ),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(run_here, words, sentence):
    is_in_a_sentence(*run_here(TASK2B, words), sentence, exit_code=2)
    is_in_a_sentence(*run_here("task1/run_glue.py", ["--world_size", 2]), "single process", exit_code=2)


def test_data_that_are_missing_or_cannot_be_read_are_named_and_nothing_is_left(run_here, start, tmp_path):
    (tmp_path / "RTE").mkdir()
    program = start("launcher", [script(TASK2B), *TINY, "--world_size", 2, "--data_dir", "nowhere"])
    ends_in_a_sentence(program, "error: the data folder nowhere of --data_dir does not exist. ")
    assert program.text.count("\n") == 1, "no rank was started"
    words = [*TINY_TRAINING, "--data_dir", "RTE", "--output_dir", "out"]
    is_in_a_sentence(*run_here(TASK2B, words), "train.tsv")
    (tmp_path / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n1\tA\tB\n")
    is_in_a_sentence(*run_here(TASK2B, words), "train.tsv, line 3")
    assert left_in(tmp_path / "out") == []


def test_an_output_folder_with_files_is_kept_unless_overwritten(run_here, tmp_path):
    mine = tmp_path / "out" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    words = [*TINY_TRAINING, "--max_steps", 2, "--output_dir", "out"]
    is_in_a_sentence(*run_here(TASK2B, words), "--overwrite_output_dir")
    assert left_in(mine.parent) == ["mine.txt"]
    assert run_here(TASK2B, [*words, "--overwrite_output_dir"])[0] == 0
    assert "summary.json" in left_in(mine.parent)
    assert mine.read_text() == "keep"


@pytest.mark.parametrize("name", ["global_step10/mp_rank_00_model_states.pt", "__0_0.distcp"])
def test_a_checkpoint_in_an_engine_s_own_form_is_no_model(run_here, tmp_path, name):
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x80\x02}q\x00.")  # a pickle, which nobody opens
    words = [*TINY_TRAINING, "--sync", "zero3", "--model_name_or_path", tmp_path / "theirs"]
    is_in_a_sentence(*run_here(TASK2B, words), "theirs has no model.safetensors or pytorch_model.bin. Give", 1)


def test_ranks_with_other_flags_are_refused_by_rank_and_flag(start_ranks):
    for rank in start_ranks(TASK2B, 2, LONG, {1: ["--seed", 7]}):
        ends_in_a_sentence(rank, "rank 1 was started with --seed 7 and rank 0 with 42")


OTHERS = [  # how many ranks are started, without which; the place and words of another; what it and they are told
    (2, 1, 3, 1, (), "rank 1 was started with --world_size 3 and rank 0 with 2"),
    (3, 2, 5, 4, (), "rank 4 was started with --world_size 5 and rank 0 with 3"),
    (3, 1, 3, 1, ("--data_dir", "nowhere"), "the data folder nowhere"),
]


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize(("size", "missing", "other_size", "rank", "more", "sentence"), OTHERS)
def test_a_rank_that_does_not_fit_or_fails_ends_those_that_wait(
    start, start_ranks, size, missing, other_size, rank, more, sentence
):
    port = free_port()
    ranks = start_ranks(TASK2B, size, LONG, {missing: None}, port=port)
    ranks[0].wait_for(f"waiting for rank {missing} at")
    place = ["--master_port", port, "--world_size", other_size, "--local_rank", rank]
    ends_in_a_sentence(start("other", [script(TASK2B), *LONG, *place, *more]), sentence)
    for waiting in ranks:
        ends_in_a_sentence(waiting, f"rank {rank} could not start: {sentence}" if more else sentence)


@pytest.mark.long
def test_a_rank_killed_while_others_wait_is_named_when_all_have_come(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 3, LONG, {2: None}, port=port)
    ranks[0].wait_for("waiting for rank 2 at")
    ranks[1].stop()
    last = start("last", [script(TASK2B), *LONG, "--master_port", port, "--world_size", 3, "--local_rank", 2])
    for rank in (ranks[0], last):
        ends_in_a_sentence(rank, "lost connection to rank 1")


def test_an_address_at_which_rank_0_cannot_listen_is_named(run_here):
    words = [*LONG, "--world_size", 2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        for place, said in (
            (["--local_rank", 0, "--master_ip", "192.0.2.1"], "192.0.2.1:6585 (Cannot assign"),
            (["--local_rank", 0, "--master_ip", "no.such.host.invalid"], "no.such.host.invalid:6585"),
            (["--local_rank", 0, "--master_port", taken], f"127.0.0.1:{taken} (Address already"),
            (["--master_port", taken], f"127.0.0.1:{taken} (Address already"),
        ):
            is_in_a_sentence(*run_here(TASK2B, [*words, *place]), f"cannot listen at {said}")


def test_another_model_on_one_rank_names_rank_and_parameter(run_here, start_ranks, tmp_path):
    from cos598d.models.build import build_model, find_model
    from cos598d.models.checkpoint import save_model

    source, model = find_model("tiny"), tmp_path / "model"
    source.config.intermediate_size = 48
    save_model(model, build_model(source, "sequence_classification", 2, None, 1), source.encoder)
    by_rank = {1: ["--model_name_or_path", model]}
    for rank in start_ranks(TASK2B, 2, LONG, by_rank):
        ends_in_a_sentence(rank, "rank 1 has bert.encoder.layer.0.intermediate.dense.weight (48, 64)")


@pytest.mark.long
def test_a_port_of_another_program_is_named(start_ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks = start_ranks(TASK2B, 2, LONG, {0: None}, port=server.getsockname()[1])
        ends_in_a_sentence(*ranks, "something other than rank 0 answers")


def test_ranks_that_arrived_name_those_that_did_not(start_ranks):
    absent = start_ranks(TASK2B, 2, [*LONG, "--timeout", 3], {0: None})
    for rank in start_ranks(TASK2B, 4, [*LONG, "--timeout", 6], {1: None, 3: None}):
        ends_in_a_sentence(rank, "ranks 1, 3 did not come to 127.0.0.1")
    ends_in_a_sentence(*absent, "rank 0 is missing")


def left_in(folder):
    """What a program has left in its output folder. A `.lock` is no result: a folder in use has one, and keeps it."""
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock")


def test_a_loss_that_is_not_finite_stops_every_rank_at_the_same_iteration(start_ranks):
    for rank in start_ranks(TASK2B, 2, [*LONG, "--learning_rate", "1e38", "--max_grad_norm", "0"]):
        ends_in_a_sentence(rank, "not a finite number")


def test_weights_that_are_not_finite_are_not_saved(run_here, tmp_path):
    words = [*TINY, "--max_steps", 1, "--learning_rate", "1e38", "--output_dir", "out"]
    is_in_a_sentence(*run_here(TASK2B, words), "has a value that is not a finite number after iteration 1")
    assert "summary.json" not in left_in(tmp_path / "out")
    assert [row["iteration"] for row in rows_of(tmp_path / "out" / "iterations.rank0.jsonl")] == [1]


@pytest.mark.long
def test_the_scripts_print_no_warnings_of_libraries(start):
    words = [script(TASK2B), *TINY_TRAINING, "--max_steps", 2, "--world_size", 2]
    program = start("program", words, is_fresh=True)
    assert program.wait() == 0
    assert not re.search(r"[Ww]arning:|W\d{4}", program.text), program.text
    assert str(ROOT) not in program.text, program.text
