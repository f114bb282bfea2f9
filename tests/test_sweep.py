"""A sweep's grid, its combinations and the programs that run them, and what is refused before any run."""

import errno
import json
import os
import shlex
import sys

import pytest

from cos598d.commands import sweep
from cos598d.commands.cli import main
from cos598d.commands.flags import Parser
from cos598d.errors import UsageError
from cos598d.records.conventions import BROKEN_OFF, FINISHED, LEFT_OUT
from cos598d.tools.runs.experiments import EXPERIMENTS, TASKS, ready_made
from cos598d.tools.runs.folders import SweepFolder
from cos598d.tools.runs.plan import Setup, collapsed, combine, read_grid, read_value
from cos598d.tools.runs.programs import check_launch, program
from cos598d.tools.runs.results import seconds_words
from cos598d.tools.runs.runner import Progress

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
DIGITS = {"task_name": "digits"}


def combinations(*grid, flags=DIGITS, seeds=(42,), rate="1gbit"):
    return combine(read_grid(grid), flags, seeds, rate)


def asked(**changes):
    """What a sweep's state has of its command."""
    found = {"axes": {"batch": ["4", "16"]}, "seeds": [42], "flags": DIGITS, "rate": "1gbit", "launch": None}
    return found | changes


def train_digits(*words):
    """Run a sweep's command that trains digits; its exit code."""
    end = [] if "--" in words else ["--", "train"]
    return main(["sweep", *words, *end, "--task_name", "digits"])


def test_axes_keep_their_order_and_the_user_s_words():
    grid = read_grid(["batch=1, 4", "setup=1x1,2x2", "learning-rate=2e-4", "delay=0,10ms", "dropout=model,0.1"])
    assert list(grid.items()) == [
        ("batch", ("1", "4")),
        ("setup", ("1x1", "2x2")),
        ("learning_rate", ("2e-4",)),
        ("delay", ("0", "10ms")),
        ("dropout", ("model", "0.1")),
    ]


@pytest.mark.parametrize(
    ("axis", "word", "value"),
    [
        ("batch", "4", 4),
        ("setup", "2x4", Setup(2, 4)),
        ("delay", "10ms", 0.01),
        ("rate", "none", None),
        ("learning_rate", "2e-5", 2e-5),
        ("dropout", "model", None),
        ("augment", "on", True),
        ("sync", "ring", "ring"),
    ],
)
def test_a_word_is_read_as_its_axis_s_type(axis, word, value):
    assert read_value(axis, word) == value


def test_every_combination_is_a_run_in_the_order_of_the_seeds():
    found = combinations("batch=4,16", "setup=1x1,1x4", seeds=(42, 43))
    assert [one.label for one in found] == [
        f"batch{batch}-setup{setup}-seed{seed}" for seed in (42, 43) for batch in (4, 16) for setup in ("1x1", "1x4")
    ]
    first = found[0]
    assert first.settings == {"batch": "4", "setup": "1x1"}
    assert first.values == {"task_name": "digits", "per_gpu_train_batch_size": 4, "seed": 42}
    assert [one.setup.world_size for one in found[:2]] == [1, 4]


def test_one_host_is_run_once_for_all_delays_and_rates():
    grid = read_grid(["setup=1x1,2x2", "delay=0,10ms", "rate=1gbit,100mbit"])
    found = combine(grid, DIGITS, [1], "10mbit")
    assert [one.label for one in found] == [
        "setup1x1-seed1",
        "setup2x2-delay0-rate1gbit-seed1",
        "setup2x2-delay0-rate100mbit-seed1",
        "setup2x2-delay10ms-rate1gbit-seed1",
        "setup2x2-delay10ms-rate100mbit-seed1",
    ]
    assert [(one.delay, one.rate) for one in found[1::2]] == [(0, 1e9), (0.01, 1e9)]
    assert [(one.delay, one.rate) for one in found if one.setup.hosts == 1] == [(0, None)]  # no link is theirs
    assert collapsed(grid).startswith("delay and rate mean nothing to 1x1")
    assert collapsed(read_grid(["setup=2x2", "delay=0,1ms"])) == ""


def test_labels_are_different_names_of_folders():
    names = ["some/where", "some_where", "x" * 200, "x" * 201]
    found = combinations(f"model_name_or_path={','.join(names)}")
    assert len({one.label for one in found}) == len(names)
    for one in found:
        assert "/" not in one.label
        assert len(one.label) <= 100
    assert len({one.name for one in found}) == len(names)
    by_seed = combinations("data_dir=/some/where", seeds=(1, 2))
    assert len({one.label for one in by_seed}) == 2
    assert len({one.name for one in by_seed}) == 1  # without the seed, also in a digest


def test_a_combination_that_cannot_run_is_left_out_if_its_values_run_elsewhere(tmp_path):
    found = combinations("sync=none,ring", "setup=1x1,1x2")
    assert [bool(one.refused) for one in found] == [False, True, False, False]
    assert "lets the replicas drift apart" in found[1].refused
    entries = SweepFolder(tmp_path, asked()).entries(found)
    assert [entry.outcome for entry in entries] == [BROKEN_OFF, LEFT_OUT, BROKEN_OFF, BROKEN_OFF]
    assert entries[0].said == "it has not been run yet."


REFUSED = [
    (["--grid", "bach=1,4"], "--grid bach: unknown axis. Did you mean 'batch'?"),
    (["--grid", "batch"], "--grid batch has no value. Write an axis and its values"),
    (["--grid", "batch="], "--grid batch=: a value is empty"),
    (["--grid", "batch=1,,4"], "a value is empty"),
    (["--grid", "batch=1", "--grid", "batch=4"], "--grid batch is given twice"),
    (["--grid", "learning_rate=1e-3,0.001"], "0.001 appears twice"),
    (["--grid", "batch=0"], "--grid batch=0 is not valid. Give a whole number from 1 to 1,048,575"),
    (["--grid", "batch=many"], "--grid batch=many is not valid. Give a whole number"),
    (["--grid", "learning_rate=nan"], "--grid learning_rate=nan is not valid. Give a number"),
    (["--grid", "learning_rate=fast"], "--grid learning_rate=fast is not valid. Give a number"),
    (["--grid", "augment=yes"], "--grid augment=yes: it is a switch. Give on or off"),
    (["--grid", "optimizer=lion"], "unknown --grid optimizer=lion. Choose one of adamw, sgd"),
    (["--grid", "setup=4"], "--grid setup=4 is not valid. Give hosts and the ranks on each"),
    (["--grid", "setup=0x2"], "--grid setup=0x2 is not valid. Give hosts"),
    (["--grid", "setup=1x1", "--grid", "delay=10"], "--grid delay=10 is not valid. Give a time from 0 to 10s"),
    (["--grid", "setup=1x4", "--grid", "delay=10ms"], "--grid delay=10ms would change nothing"),
    (["--grid", "rate=1gbit"], "--grid rate=1gbit would change nothing"),
    (["--grid", "seed=1,2"], "--grid seed is not an axis: a sweep sets it. Give --seeds N"),
    (["--grid", "world_size=1,2"], "--grid world_size is not an axis: a sweep sets it. Use the axis setup"),
    (["--grid", "do_eval=on"], "--grid do_eval is not an axis: every run of a sweep trains"),
    (["--grid", "do_train=on,off"], "--grid do_train is not an axis: every run of a sweep trains"),
    (["--grid", "output_dir=a"], "--grid output_dir is not an axis: the sweep sets it itself"),
    (
        ["--grid", "sync=ddp,nonsense"],
        "--grid sync=nonsense does not work with any other axis here: unknown --sync nonsense",
    ),
    (["--grid", "batch=4", "--", "train", "--model_type", "bert"], "--model_type bert cannot do digits"),
    (["--grid", "batch=4", "--", "train", "--total_train_batch_size", "8"], "--total_train_batch_size is given after"),
    (["--grid", "learning_rate=1", "--", "train", "--learning_rate", "2"], "--learning_rate is given after -- and by"),
    (["--grid", "batch=4", "--", "train", "--world_size", "2"], "--world_size 2: a sweep sets it. Use the axis setup"),
    (["--grid", "batch=4", "--", "train", "--local_rank", "0"], "--local_rank 0: the sweep starts the ranks itself"),
    (["--grid", "batch=4", "--", "train", "--output_dir", "x"], "--output_dir after --: the sweep sets it itself"),
    (["--grid", "batch=4", "--", "train", "--config", "x.json"], "--config x.json cannot be used in a sweep"),
    (["--grid", "batch=4", "--", "train", "--do_eval"], "--do_eval without --do_train trains nothing"),
    (["--grid", "batch=4", "--", "train", "--dry_run"], "Write it before the --"),
    (["--grid", "batch=4", "--", "bench", "--rounds", "2"], "a sweep runs only train, not bench"),
    (["--grid", "batch=4", "--seeds", "0"], "--seeds 0 is not valid. Give a number of at least 1"),
    (["--grid", "batch=4", "--parallel", "0"], "--parallel 0 is not valid. Give a number of at least 1"),
    (["--grid", "batch=4", "--rate", "fast"], "--rate fast is not valid. Give a rate"),
    (["--grid", "setup=2x1", "--grid", "rate=1gbit", "--rate", "none"], "--rate none and --grid rate exclude"),
    (["--grid", "batch=4", "--model", "vit"], "--model vit is only for experiment1, experiment2, experiment3"),
    (["--grid", "batch=4", "--published"], "--published is only for experiment1"),
    (["--grid", "setup=65x1"], "--grid setup=65x1: one machine emulates at most 64 hosts"),
    (["--grid", "batch=4", "--launch", "mpirun -np 4"], "it has no {command}"),
    (["--grid", "batch=4", "--launch", "'{command}"], "a shell cannot parse it"),
    (["--grid", "batch=4", "--launch", "nowhere-at-all {command}"], "there is no program nowhere-at-all on this"),
    (
        ["--grid", "setup=2x1", "--grid", "delay=1ms", "--launch", "env {command}"],
        "--grid delay would change nothing: --launch has no {delay}",
    ),
    (
        ["--grid", "setup=1x2,2x1", "--launch", "env N={world_size} {command}"],
        "--grid setup=1x2,2x1 would change nothing: --launch starts both in the same way",
    ),
    (["--grid", "setup=1x2,1x4", "--launch", "env {command}"], "--launch starts both in the same way"),
    (["--grid", "batch=4", "--name", "../up"], "--name ../up is not valid. Give up to 100 letters"),
    (["--grid", "batch=4", "--name", "a", "--runs_dir", "b"], "--name a and --runs_dir b exclude each other"),
    ([], "sweep has nothing to vary. Give axes"),
]


@pytest.mark.parametrize(
    ("words", "sentence"), REFUSED, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_made(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_digits(*words) == 2
    found = capsys.readouterr()
    assert sentence in found.err
    assert len(found.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_starts_local_ranks_or_an_emulated_cluster():
    local, hosts = combinations("setup=1x4,2x2", "delay=10ms", rate="100mbit")
    words = program(local, ["--sync", "ring"], None, "mine")
    assert words == [sys.executable, "-m", "cos598d", "train", "--sync", "ring", "--world_size", "4"]
    words = program(hosts, ["--sync", "ring"], None, "mine")
    place = words.index("--")
    assert words[3:place] == shlex.split(
        "cluster run --hosts 2 --ranks_per_host 2 --rate 100mbit --delay 10ms --name mine"
    )
    assert words[place + 1 :] == [sys.executable, "-m", "cos598d", "train", "--sync", "ring"]


def test_a_launch_template_is_filled_and_a_quoted_command_stays_one_word():
    (one,) = combinations("setup=2x4", "delay=10ms")
    words = ["--label", "a b", "--output_dir", "it's {hosts}"]
    launch = "env -u X-{delay}-{rate} N={world_size} {command}"
    check_launch(launch, [one])
    check_launch("env {world_size} {ranks_per_host} {command}", combinations("setup=1x2,2x1,2x2"))
    training = [sys.executable, "-m", "cos598d", "train", *words]
    assert program(one, words, launch, "") == ["env", "-u", "X-10ms-1gbit", "N=8", *training]
    found = program(one, words, "sh -c '{hosts}:{ranks_per_host} {command}'", "")
    assert found[:2] == ["sh", "-c"]
    assert shlex.split(found[2]) == ["2:4", *training]


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize("published", [False, True])
def test_every_experiment_can_run_unchanged(name, model, published):
    grid, flags = ready_made(name, model, published, {}, {})
    found = combine(grid, flags, [42], "1gbit")
    assert len(found) == (9 if name != "experiment3" else 4)
    assert not any(one.refused for one in found)
    if published:
        assert {one.values["gradient_accumulation_steps"] for one in found} == {4}
        assert {one.values["max_train_examples"] for one in found} == {8000}


def test_the_user_s_values_replace_an_experiment_s_own():
    grid, flags = ready_made("experiment2", "vit", False, {"batch": ("2",)}, {"task_name": "cifar10"})
    assert flags["task_name"] == "cifar10"
    assert "per_gpu_train_batch_size" not in flags
    assert list(grid) == ["learning_rate", "setup", "batch"]
    assert ready_made("experiment1", "bert", False, {"batch": ("8",)}, {})[0]["batch"] == ("8",)
    _, flags = ready_made("experiment3", "vit", False, {}, {"total_train_batch_size": 8})
    assert "per_gpu_train_batch_size" not in flags


def test_the_words_after_the_dashes_are_train_s():
    parser = Parser()
    sweep.add_options(parser)
    found = parser.parse_args(["experiment1", "--model", "vit", "--", "train", "--seed", "7", "--", "x"])
    assert (found.experiment, found.model, found.program) == ("experiment1", "vit", ["train", "--seed", "7", "--", "x"])
    assert parser.parse_args(["--grid", "batch=1", "--grid", "setup=1x2"]).grid == ["batch=1", "setup=1x2"]


def test_time_left_is_estimated_from_the_runs_that_are_most_alike():
    found = combinations("batch=4,16", "setup=1x1,1x4", seeds=(1, 2))
    progress = Progress(1)
    assert progress.left(found) is None
    progress.add(found[0], 10.0)
    assert progress.left(found[4:5]) == 10  # the same settings, another seed
    progress.add(found[2], 30.0)
    assert progress.left(found[4:5]) == 10
    assert progress.left(found[1:2]) == 20  # of all
    progress.add(found[1], 100.0)
    assert progress.left(found[3:4]) == 100  # of its set-up
    assert Progress(2).left([]) is None
    at_once = Progress(2)
    at_once.add(found[0], 3.0)
    assert at_once.left(found[1:4]) == pytest.approx(3 * 3 / 2)
    assert at_once.left(found[1:2]) == 3
    assert [seconds_words(seconds) for seconds in (1.4, 89, 600, 7300)] == ["1 s", "89 s", "10 min", "2 h 2 min"]


def test_a_dry_run_lists_each_run_s_cost_and_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Timing takes seconds.
    words = ["--max_train_examples", "32", "--max_eval_examples", "8", "--num_train_epochs", "2", "--no_cuda"]
    grid = ["--grid", "setup=1x1,1x2", "--grid", "sync=none,all_reduce", "--seeds", "2"]
    assert main(["sweep", *grid, "--dry_run", "--", "train", "--task_name", "digits", *words]) == 0
    text = capsys.readouterr().out
    cells = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("setup1")}
    assert set(cells) == {"setup1x1-syncnone", "setup1x1-syncall_reduce", "setup1x2-syncall_reduce"}
    alone, both = cells["setup1x1-syncall_reduce"], cells["setup1x2-syncall_reduce"]
    # 2 epochs of 32 examples in steps of 64.
    assert alone[1:5] == ["2", "1", "2", "0.00"]
    assert both[1:4] == ["2", "2", "2"]
    weights = 4 * 537_000 / 1e6
    assert float(both[4]) == pytest.approx(weights, rel=0.1)  # 2(n-1)/n S, of about 0.54 M parameters
    assert text.count("setup 1x2, sync none is left out: --sync none on 2 ranks") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_s_folder_resumes_only_with_the_same_arguments(tmp_path):
    found = combinations("batch=4,16")
    folder = SweepFolder(tmp_path, asked())
    folder.begin(found[0])
    folder.end(found[1], FINISHED, seconds=2.5)
    again = SweepFolder(tmp_path, asked())
    assert again.said(found[0]) == "it was broken off."
    assert again.seconds(found[1]) == 2.5
    entries = again.entries(found)
    # A finished run without its record has no numbers.
    assert [entry.outcome for entry in entries] == [BROKEN_OFF, "failed"]
    assert entries[0].settings == {"batch": "4"}
    for changes, words in (
        ({"axes": {"batch": ["4"]}}, "(the axis batch: 4,16 there, 4 here)"),
        ({"axes": {"setup": ["1x1"]}}, "(the axes: batch there, setup here)"),
        ({"seeds": [42, 43]}, "(the seeds: 42 there, 42,43 here)"),
        ({"flags": {"task_name": "cifar10"}}, "(--task_name: digits there, cifar10 here)"),
        ({"flags": DIGITS | {"threads": 1}}, "(--threads: not given there, 1 here)"),
        ({"rate": "none"}, "(--rate: 1gbit there, none here)"),
        ({"launch": "env {command}"}, "(--launch: not given there, env {command} here)"),
    ):
        with pytest.raises(UsageError, match="was made by sweep with other arguments") as refused:
            SweepFolder(tmp_path, asked(**changes))
        assert words in str(refused.value)


LONG = "/x" * 100


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"cache_dir": f"{LONG}/a{LONG}"}, {"cache_dir": f"{LONG}/b{LONG}"}, ("/x/a/x", "/x/b/x")),
        ({"cache_dir": "not given"}, {}, ("--cache_dir: 'not given' there, not given here",)),
        ({"threads": 1}, {"threads": "1"}, ("--threads: 1 there, '1' here",)),
    ],
    ids=["the middle", "none", "kind"],
)
def test_flags_that_differ_are_shown_apart_even_if_they_are_long(before, now, words, tmp_path):
    SweepFolder(tmp_path, asked(flags=before)).write()
    SweepFolder(tmp_path, asked(flags=before))
    with pytest.raises(UsageError) as refused:
        SweepFolder(tmp_path, asked(flags=now))
    assert all(word in str(refused.value) for word in words)
    assert len(str(refused.value)) < 600


def test_a_flag_with_control_characters_is_the_same_when_it_is_read_again(tmp_path):
    flags = {"cache_dir": "a\x1b[31mb\\c"}
    SweepFolder(tmp_path, asked(flags=flags)).write()
    SweepFolder(tmp_path, asked(flags=flags))


@pytest.mark.parametrize("file", ["sweep.json", "logs"])
def test_a_file_that_cannot_be_written_is_one_sentence(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    if file == "logs":
        (tmp_path / "runs" / "sweep.json").write_text(json.dumps(asked(axes={"batch": ["4"]}) | {"combinations": {}}))
        (tmp_path / "runs" / "logs").write_text("in the way")
    else:
        monkeypatch.setattr("cos598d.tools.runs.folder.write_json", _full_disk)
    assert train_digits("--grid", "batch=4", "--runs_dir", "runs") == 1
    said = capsys.readouterr().err
    assert f"{file} cannot be written (" in said
    assert "repeat the command" in said
    assert said.count("\n") == 1


def _full_disk(path, value):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("notes.txt", "mine", "is not empty and has no sweep. Choose another folder"),
        ("sweep.json", '{"axes": ', "sweep.json is not JSON"),
        ("sweep.json", "[]", "sweep.json is damaged"),
        ("sweep.json", json.dumps(asked() | {"combinations": {"x": {}}}), "it has no combinations.x.settings"),
    ],
)
def test_a_folder_without_a_sweep_is_refused_and_unchanged(file, text, words, tmp_path, capsys):
    (tmp_path / file).write_text(text)
    assert train_digits("--grid", "batch=4", "--runs_dir", str(tmp_path)) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == text
