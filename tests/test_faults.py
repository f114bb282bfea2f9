"""Whatever goes wrong, every rank says so in a sentence, leaves with a code other than 0, and nothing half-written."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from programs import ROOT, TINY, TINY_TRAINING, children_of, free_port, is_alive, script, wait_until, worker_of_rank

from cos598d.world import watchdog
from cos598d.world.exit import lost_rank

LONG = (*TINY_TRAINING, "--max_steps", "100000")
TASK2B = "task2b/run_glue.py"


def ends_in_a_sentence(program, sentence, exit_code=None):
    """The program ends, not with 0 and without a traceback, and its last line holds `sentence`."""
    is_in_a_sentence(program.wait(), program.text, sentence, exit_code)


def is_in_a_sentence(code, text, sentence, exit_code=None):
    """The same of what has ended."""
    assert code == exit_code if exit_code is not None else code > 0, f"exit code {code}:\n{text}"
    assert "Traceback" not in text, text
    last = text.strip().splitlines()[-1]
    assert sentence in last, text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task_name", "nosuch"], "nosuch"),
        (["--sync", "nosuch"], "unknown --sync nosuch. Choose one of none, gather_scatter"),
        (["--max_steps", "many"], "--max_steps 'many' is not a whole number."),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--learning_rate", "nan"], "--learning_rate nan"),
        (["--dropout", "1.5"], "--dropout 1.5"),
        (["--nosuch", "1"], "unrecognized arguments: --nosuch 1"),
        (["--total_train_batch_size", "8", "--per_gpu_train_batch_size", "2"], "exclude each other"),
        (["--fp16", "--precision", "bf16"], "--fp16 contradicts --precision bf16"),
        (["--world_size", "2", "--local_rank", "2"], "rank 2 does not exist"),
        (["--backend", "nccl", "--no_cuda"], "--backend nccl needs a CUDA device"),
        (["--sync", "none", "--world_size", "2", "--do_eval"], "drift apart"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_starts(run_here, words, sentence):
    is_in_a_sentence(*run_here(TASK2B, words), sentence, exit_code=2)


def test_task_1_is_a_single_process(start):
    ends_in_a_sentence(start("program", [script("task1/run_glue.py"), "--world_size", 2]), "single process", 2)


@pytest.mark.long
def test_help_is_grouped_and_names_every_flag(start):
    program = start("program", [script(TASK2B), "--help"], is_fresh=True)
    assert program.wait() == 0
    for word in ("task and data:", "ranks:", "--master_ip", "--fp16", "--tokenizer_name", "(default: all_reduce)"):
        assert word in " ".join(program.text.split())


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (None, "train.tsv"),
        ("", "train.tsv"),
        ("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n1\tA\tB\n", "line 3"),
        ("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tmaybe\n", "maybe"),
    ],
)
def test_data_that_cannot_be_read_name_file_and_line(run_here, tmp_path, rows, sentence):
    folder = tmp_path / "RTE"
    folder.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        if rows is not None:
            (folder / name).write_text(rows)
    code, text = run_here(TASK2B, [*TINY_TRAINING, "--data_dir", folder, "--output_dir", "out"])
    is_in_a_sentence(code, text, sentence)
    assert "train.tsv" in text
    assert not list((tmp_path / "out").glob("**/*"))


def test_a_missing_data_folder_is_named(run_here):
    is_in_a_sentence(*run_here(TASK2B, [*TINY, "--data_dir", "nowhere"]), "nowhere")


def test_an_output_folder_that_is_not_empty_is_left_alone(run_here, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    words = [*TINY_TRAINING, "--max_steps", 2, "--output_dir", "out"]
    is_in_a_sentence(*run_here(TASK2B, words), "--overwrite_output_dir")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert run_here(TASK2B, [*words, "--overwrite_output_dir"])[0] == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["iterations"] == 2
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_weights_that_do_not_fit_the_config_name_the_tensor(run_here, tmp_path):
    assert run_here(TASK2B, [*TINY, "--do_train", "--max_steps", 1, "--output_dir", "out"])[0] == 0
    path = tmp_path / "out" / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 48}))
    words = [*TINY_TRAINING, "--model_name_or_path", path.parent]
    is_in_a_sentence(*run_here(TASK2B, words), "intermediate.dense")


def test_ranks_started_differently_are_told_which_rank_and_what(start_ranks):
    for rank in start_ranks(TASK2B, 2, LONG, {1: ["--seed", 7]}):
        ends_in_a_sentence(rank, "rank 1 was started with --seed 7 and rank 0 with 42")


def test_another_world_size_is_told_on_every_rank(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 2, LONG, {1: None}, port=port)
    words = ["--master_port", port, "--world_size", 3, "--local_rank", 1]
    ranks.append(start("other", [script(TASK2B), *LONG, *words]))
    for rank in ranks:
        ends_in_a_sentence(rank, "rank 1 was started with --world_size 3 and rank 0 with 2")


@pytest.mark.long
def test_a_rank_of_a_larger_world_is_told_and_stops_those_who_wait(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 3, LONG, {2: None}, port=port)
    ranks[0].wait_for("waiting for rank 2 at")
    words = ["--master_port", port, "--world_size", 5, "--local_rank", 4]
    ranks.append(start("other", [script(TASK2B), *LONG, *words]))
    for rank in ranks:
        ends_in_a_sentence(rank, "rank 4 was started with --world_size 5 and rank 0 with 3")


def test_a_rank_that_fails_before_the_meeting_tells_those_who_wait(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 3, LONG, {1: None}, port=port)
    ranks[0].wait_for("waiting for rank")
    place = ["--master_port", port, "--world_size", 3, "--local_rank", 1]
    ends_in_a_sentence(start("failing", [script(TASK2B), *LONG, *place, "--data_dir", "nowhere"]), "nowhere")
    for rank in ranks:
        ends_in_a_sentence(rank, "rank 1 could not start: the data folder nowhere")


@pytest.mark.long
def test_a_rank_killed_while_others_wait_is_named_when_all_have_come(start, start_ranks):
    port = free_port()
    ranks = start_ranks(TASK2B, 3, LONG, {2: None}, port=port)
    ranks[0].wait_for("waiting for rank 2 at")
    ranks[1].stop()
    last = start("last", [script(TASK2B), *LONG, "--master_port", port, "--world_size", 3, "--local_rank", 2])
    for rank in (ranks[0], last):
        ends_in_a_sentence(rank, "lost connection to rank 1")


def test_a_rank_interrupted_while_it_waits_can_be_started_again(start, start_ranks):
    port = free_port()
    words = [*TINY_TRAINING, "--max_steps", 2]
    ranks = start_ranks(TASK2B, 3, words, {2: None}, port=port)
    ranks[0].wait_for("waiting for rank 2 at")
    ranks[1].process.send_signal(signal.SIGINT)
    assert ranks[1].wait() == 130
    for number in (1, 2):
        place = ["--master_port", port, "--world_size", 3, "--local_rank", number]
        ranks.append(start(f"again{number}", [script(TASK2B), *words, *place]))
    for rank in (ranks[0], *ranks[2:]):
        assert rank.wait() == 0, rank.text


def test_an_address_that_is_not_rank_0_s_own_is_refused_by_rank_0(run_here):
    words = [*LONG, "--world_size", 2, "--local_rank", 0, "--master_ip"]
    is_in_a_sentence(*run_here(TASK2B, [*words, "192.0.2.1"]), "--master_ip 192.0.2.1 is not an address of this host")
    is_in_a_sentence(*run_here(TASK2B, [*words, "no.such.host.invalid"]), "cannot be resolved on this machine")


def test_another_model_on_one_rank_names_rank_and_parameter(run_here, start_ranks, tmp_path):
    assert run_here(TASK2B, [*TINY, "--do_train", "--max_steps", 1, "--output_dir", "out"])[0] == 0
    model = tmp_path / "out" / "model"
    config = json.loads((model / "config.json").read_text())
    for path in model.glob("*.bin"):
        path.unlink()
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    by_rank = {1: ["--config_name", folder]}
    for rank in start_ranks(TASK2B, 2, LONG, by_rank):
        ends_in_a_sentence(rank, "rank 1 has bert.encoder.layer.0.intermediate.dense.weight (48, 64)")


@pytest.mark.long
def test_a_rank_started_twice_does_not_disturb_the_others_unseen(start, start_ranks):
    port = free_port()
    first = start_ranks(TASK2B, 3, LONG, {2: None}, port=port)
    first[0].wait_for("waiting for rank 2 at")
    twin = start("twin", [script(TASK2B), *LONG, "--master_port", port, "--world_size", 3, "--local_rank", 1])
    for rank in (*first, twin):
        ends_in_a_sentence(rank, "rank 1 was started twice")


def test_a_taken_port_is_named(run_here):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [*LONG, "--master_port", port, "--world_size", 2]
        for place in ([], ["--local_rank", 0]):
            is_in_a_sentence(*run_here(TASK2B, [*words, *place]), f"port {port} on this host is taken")


@pytest.mark.long
def test_a_port_where_something_else_answers_is_no_meeting_point(start_ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        (rank,) = start_ranks(TASK2B, 2, LONG, {0: None}, port=server.getsockname()[1])
        ends_in_a_sentence(rank, "something other than rank 0 of this run answers")


@pytest.mark.long
def test_ranks_that_never_arrive_are_named_to_all_who_came(start_ranks):
    for rank in start_ranks(TASK2B, 4, [*LONG, "--timeout", 6], {1: None, 3: None}):
        ends_in_a_sentence(rank, "ranks 1, 3 did not come to 127.0.0.1")


def test_a_missing_rank_0_is_named(start_ranks):
    (rank,) = start_ranks(TASK2B, 2, [*LONG, "--timeout", 3], {0: None})
    ends_in_a_sentence(rank, "rank 0 is missing")


def left_its_rows(folder, iterations):
    """A run that failed has left no record as of one that ended well, and the rows of what it has done."""
    assert [path.name for path in folder.iterdir()] == ["live"]
    rows = [json.loads(line) for line in (folder / "live" / "iterations.rank0.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= iterations


@pytest.mark.parametrize(
    ("path", "victim"), [(TASK2B, 0), (TASK2B, 2), ("task2a/run_glue.py", 2), ("task3/run_glue.py", 0)]
)
def test_a_killed_rank_takes_the_others_with_it_by_name(start_ranks, tmp_path, path, victim):
    ranks = start_ranks(path, 3, [*LONG, "--output_dir", "out"])
    ranks[victim].wait_for("iteration 5:")
    ranks[victim].process.send_signal(signal.SIGKILL)
    for rank in ranks:
        if rank is not ranks[victim]:
            ends_in_a_sentence(rank, f"lost connection to rank {victim}", exit_code=1)
    left_its_rows(tmp_path / "out", 5)
    (attempt,) = json.loads((tmp_path / "out" / "live" / "attempts.json").read_text())["attempts"]
    if victim:  # rank 0 writes it down
        assert attempt["why"] == lost_rank(victim)
        assert attempt["to_iteration"] >= 5
    else:
        assert attempt["why"] is None


def test_the_advice_after_a_killed_rank_resumes_the_run(start_ranks):
    """As it is printed, without --output_dir too."""
    flags = [*LONG, "--save_steps", 1]
    ranks = start_ranks(TASK2B, 2, flags)
    ranks[0].wait_for("iteration 3:")
    ranks[1].process.send_signal(signal.SIGKILL)
    ends_in_a_sentence(ranks[0], "lost connection to rank 1", exit_code=1)
    advice = re.search(r"repeat the command on every rank, with (--resume \S+) if", ranks[0].text)[1]
    again = start_ranks(TASK2B, 2, [*flags, *advice.split()])
    again[0].wait_for(r"iteration [3-9]\d*:|iteration \d\d+:")
    assert "iteration 1:" not in again[0].text


def test_local_workers_stop_with_their_starter(start):
    for number, expected in ((signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)):
        program = start(f"starter{number}", [script(TASK2B), *LONG, "--world_size", 2])
        program.wait_for("iteration 5:")
        workers = children_of(program.process.pid)
        assert len(workers) >= 2
        program.process.send_signal(number)
        assert program.wait() == expected, program.text
        wait_until(lambda workers=workers: not any(is_alive(worker) for worker in workers))
        assert "Traceback" not in program.text, program.text


def test_a_killed_local_worker_is_named_and_the_starter_fails(start):
    program = start("starter", [script(TASK2B), *LONG, "--world_size", 2])
    program.wait_for("iteration 5:")
    os.kill(worker_of_rank(program.process.pid, 1), signal.SIGKILL)
    assert program.wait() > 0
    assert "rank 0: lost connection to rank 1" in program.text
    assert "Traceback" not in program.text


def test_a_loss_that_is_not_finite_stops_every_rank_at_the_same_iteration(start_ranks):
    for rank in start_ranks(TASK2B, 2, [*LONG, "--learning_rate", "1e38", "--max_grad_norm", "0"]):
        code = rank.wait()
        assert code == 1
        assert "not a finite number" in rank.text.strip().splitlines()[-1], rank.text


def test_weights_that_are_not_finite_are_not_saved(run_here, tmp_path):
    words = [*TINY, "--max_steps", 1, "--learning_rate", "1e38", "--output_dir", "out"]
    is_in_a_sentence(*run_here(TASK2B, words), "some weights are not finite numbers after iteration 1")
    left_its_rows(tmp_path / "out", 1)


def test_a_ctrl_c_while_torch_still_loads_is_no_traceback(start):
    program = start("program", [script(TASK2B), *LONG], is_fresh=True)
    wait_until(lambda: "libtorch" in Path(f"/proc/{program.process.pid}/maps").read_text())
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130
    assert program.text.strip() == "interrupted (Ctrl-C)."


@pytest.mark.long
def test_the_scripts_say_nothing_but_their_own(start):
    """No warnings of libraries among a run's lines."""
    words = [script(TASK2B), *TINY_TRAINING, "--max_steps", 2, "--world_size", 2]
    program = start("program", words, is_fresh=True)
    assert program.wait() == 0
    assert not re.search(r"[Ww]arning:|W\d{4}", program.text), program.text
    assert str(ROOT) not in program.text, program.text


@pytest.mark.parametrize(
    ("unheard", "linked", "interface", "named"),
    [
        (
            True,
            False,
            "eth0",
            "lost connection to this rank, 2: its network interface eth0 has no link. Check that network.",
        ),
        (True, True, "eth0", "lost connection to rank 0: "),  # nothing came, and it is not for want of a link here
        (False, False, "eth0", "lost connection to rank 0: "),  # word came that the peer is gone, so there is a way
        (True, False, None, "lost connection to rank 0: "),  # it could never be told whether there is a link
    ],
)
def test_a_rank_names_itself_only_when_no_word_came_and_its_link_is_gone(
    unheard, linked, interface, named, monkeypatch
):
    mine = object.__new__(watchdog.Watchdog)
    mine.rank, mine._finished, mine._interface, said = 2, set(), interface, []
    monkeypatch.setattr(mine, "_tell", lambda message, but: None)
    monkeypatch.setattr(watchdog, "has_link", lambda _: linked)
    monkeypatch.setattr(mine, "_end", said.append)
    mine._on_end(0, unheard)
    assert said[0].startswith(named)
