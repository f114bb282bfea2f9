"""Scripts for sbatch, of one training and of a sweep's array job: every word is safe, and wrong ones are refused."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from programs import ROOT, TINY_TRAINING

from cos598d.commands.cli import main

TRAIN = ["--", "train", *TINY_TRAINING, "--sync", "all_reduce"]
DIGITS = ["--", "train", "--task_name", "digits"]
SWEEP = ["sweep", "--grid", "batch=4", "--grid", "setup=1x1,1x4,2x2"]
ARRAY = [*SWEEP, "--sbatch", "--name", "x"]
SAYS_ITS_WORDS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
# A script's last lines decide by srun's exit code; `scontrol` and `srun` only write down that they were called.
CALLS = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
[ "$(basename "$0")" = srun ] || exit 0
{does}
"""
ONCE = "[ -e once ] && exit 75; touch once"


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """printed(*words): the script that a command prints, also in job.sh; `printed.err` has what else it prints."""
    monkeypatch.chdir(tmp_path)

    def _printed(*words):
        assert main(list(map(str, words))) == 0, capsys.readouterr()
        text, _printed.err = capsys.readouterr()
        (tmp_path / "job.sh").write_text(text)
        assert subprocess.run(["bash", "-n", "job.sh"], check=False).returncode == 0
        if shutil.which("shellcheck"):
            assert subprocess.run(["shellcheck", "job.sh"], check=False).returncode == 0
        return text

    return _printed


@pytest.fixture
def submitted(tmp_path):
    """submitted(programs, **variables): run job.sh in a shell that finds these programs, given by name and text."""

    def _submitted(programs, **variables):
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        words = {"cwd": tmp_path, "env": {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"} | variables}
        return subprocess.run(["bash", "job.sh"], **words, capture_output=True, text=True, timeout=60, check=False)

    return _submitted


def asked(text):
    return re.findall(r"^#SBATCH --(.*)$", text, flags=re.MULTILINE)


def started(text):
    """The words that srun is given in a script, as the shell reads them."""
    command = re.search(r"^    srun (.*?)\n    code=", text, flags=re.DOTALL | re.MULTILINE)[1]
    return shlex.split(command.replace("\\\n", " "))


def test_the_script_asks_for_what_the_flags_name(printed):
    words = ["--nodes", 4, "--ranks_per_node", 2, "--time", "01:00:00", "--gpus_per_node", 2]
    text = printed("sbatch", *words, *TRAIN)
    assert asked(text) == [
        *("job-name=cos598d", "nodes=4", "ntasks=8", "ntasks-per-node=2", "time=01:00:00", "signal=USR1@60"),
        *("gpus-per-node=2", "output=%x-%j.out", "open-mode=append", "requeue"),
    ]
    words = started(text)
    assert words[:5] == ["--kill-on-bad-exit=0", sys.executable, "-m", "cos598d", "train"]
    assert words[5:] == [*TRAIN[2:], "--output_dir", "runs/job-$SLURM_JOB_ID", "--resume", "auto"]


def test_an_array_job_asks_for_the_largest_shape_and_a_task_per_run(printed, tmp_path):
    words = ["--name", "mine", "--time", "60", "--parallel", 2, "--setup", "module load cuda", "--cpus_per_rank", 3]
    text = printed(*SWEEP, "--sbatch", *words, *DIGITS)
    assert asked(text) == [
        *("array=0-2%2", "job-name=cos598d", "nodes=2", "ntasks=8", "ntasks-per-node=4", "time=60", "signal=USR1@60"),
        *("cpus-per-task=3", "output=%x-%A_%a.out", "open-mode=append", "requeue"),
    ]
    assert "\nmodule load cuda\n" in text
    assert "an array job of 3 tasks, with its runs in runs/mine" in printed.err
    state = json.loads((tmp_path / "runs" / "mine" / "sweep.json").read_text())
    assert state["axes"] == {"batch": ["4"], "setup": ["1x1", "1x4", "2x2"]}
    assert state["combinations"] == {}


def test_given_flags_replace_those_that_it_adds(printed):
    own = ["--output_dir", "out put", "--resume", "auto", "--world_size", "2"]
    words = started(printed("sbatch", "--nodes", 2, "--cpus_per_rank", 3, *TRAIN, *own))
    assert words == [*("--kill-on-bad-exit=0", "--cpus-per-task=3", sys.executable, "-m", "cos598d", *TRAIN[1:], *own)]
    own = ["--option=--constraint=a100", "--setup", "module load cuda/12", "--mem", "16G"]
    lines = printed("sbatch", *own, *TRAIN).splitlines()
    assert {"#SBATCH --constraint=a100", "module load cuda/12", "#SBATCH --mem=16G"} <= set(lines)


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"$(touch HERE)`touch HERE`', "@COMMAND@ @PATH@", "ä;*?[x]{a,b}~&|>x"])
def test_no_word_means_anything_to_the_shell(name, printed, submitted, tmp_path):
    printed("sbatch", *TRAIN, "--output_dir", name)
    done = submitted({"srun": SAYS_ITS_WORDS})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[5:] == [*TRAIN[2:], "--output_dir", name, "--resume", "auto"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sh", "srun"]


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (0, ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]),
        (1, ["--nodes=1", "--ntasks=4", "--ntasks-per-node=4"]),
        (2, ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]),
    ],
)
def test_each_task_of_an_array_job_starts_its_own_run(task, shape, printed, submitted, tmp_path):
    name = "it's $(touch HERE) ;*"
    printed(*SWEEP, "--sbatch", "--runs_dir", "a sweep", *DIGITS, "--cache_dir", name)
    done = submitted({"srun": SAYS_ITS_WORDS}, SLURM_ARRAY_TASK_ID=str(task))
    assert (done.returncode, done.stderr) == (0, "")
    words = json.loads(done.stdout)
    assert words[:8] == ["--kill-on-bad-exit=0", *shape, sys.executable, "-m", "cos598d", "train"]
    label = f"batch4-setup{('1x1', '1x4', '2x2')[task]}-seed42"
    given = {flag: words[words.index(flag) + 1] for flag in ("--output_dir", "--label", "--cache_dir")}
    assert given == {"--output_dir": str(tmp_path / "a sweep" / label), "--label": label, "--cache_dir": name}
    assert "--world_size" not in words
    assert words[-2:] == ["--resume", "auto"]
    assert not (tmp_path / "HERE").exists()


def test_an_array_job_s_script_is_refused_outside_of_an_array(printed, submitted):
    printed(*SWEEP, "--sbatch", "--name", "mine", *DIGITS)
    done = submitted({})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this is an array job. Submit it with sbatch.\n"


@pytest.mark.parametrize("program", [["task2b/run_glue.py"], ["python", "task3/run_squad.py", "--doc_stride", "64"]])
def test_a_task_s_script_is_started_too(program, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["sbatch", "--", *program]) == 0
    path = program[-3] if len(program) > 1 else program[0]
    assert started(capsys.readouterr().out)[1:3] == [sys.executable, path]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no training was given. Write it after --"),
        (["--", "report", "x"], "cannot start report. Give train, or a task's script"),
        (["--", "nowhere.py"], "cannot start nowhere.py"),
        (["--", "train", "--max_step", "4"], "unrecognized arguments: --max_step 4"),
        (["--", "train", "--sync", "nonsense"], "--sync nonsense"),
        (["--", "train", "--local_rank", "0"], "--local_rank 0 is not needed, since srun sets it"),
        (["--nodes", "2", "--", "train", "--world_size", "3"], "--world_size 3 does not fit the job of 2 ranks"),
        (["--", "train", "--resume", "runs/x"], "--resume runs/x would take a requeued job back"),
        (["--", "train", "--output_dir", "a\nb"], r"a\x0ab is not one line of text"),
        (["--nodes", "0", *TRAIN], "--nodes 0 is not valid. Give a number of at least 1"),
        (["--time", "soon", *TRAIN], "--time soon is not valid. Give minutes, or HH:MM:SS"),
        (["--time", "10\n#SBATCH --mem=1", *TRAIN], "--time 10\\x0a#SBATCH --mem=1 is not valid. Give minutes"),
        (
            ["--signal_seconds", "70000", *TRAIN],
            "--signal_seconds 70000 is not valid. Give a whole number from 1 to 65,535",
        ),
        (["--partition", "a b", *TRAIN], "--partition 'a b' is not valid. Leave out spaces"),
        (["--job_name", "x #y", *TRAIN], "--job_name 'x #y' is not valid. Leave out spaces, quotes, #"),
        (["--option=constraint=a100", *TRAIN], "--option constraint=a100 is not valid. Give one of sbatch's own flags"),
        (["--option=--x\n#SBATCH --y", *TRAIN], "--option"),
        (["--setup", "one\ntwo", *TRAIN], r"--setup one\x0atwo is not one line of text"),
        ([*SWEEP, "--sbatch", *DIGITS], "--sbatch needs the folder of the sweep. Give --name or --runs_dir"),
        ([*SWEEP, "--time", "60", *DIGITS], "--time is only for --sbatch. Leave --time out, or add --sbatch."),
        ([*SWEEP, "--setup", "2x2", *DIGITS], "or add --sbatch. For the axis setup, write --grid setup"),
        ([*ARRAY, "--grid", "delay=1ms", *DIGITS], "--grid delay is for emulated hosts"),
        ([*ARRAY, "--launch", "env {command}", *DIGITS], "--launch and --sbatch exclude each other"),
        ([*ARRAY, "--time", "soon", *DIGITS], "--time soon is not valid. Give minutes"),
        ([*ARRAY, "--mem", "a b", *DIGITS], "--mem 'a b' is not valid. Leave out spaces"),
    ],
)
def test_a_wrong_argument_is_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = words if words[:1] == ["sweep"] else ["sbatch", *words]
    try:
        exit_code = main(words)
    except SystemExit as ended:  # the parser's own
        exit_code = ended.code
    found = capsys.readouterr()
    assert (exit_code, found.out) == (2, "")
    assert sentence in found.err
    assert len(found.err.splitlines()) == 1
    assert not list(tmp_path.glob("runs/x/*"))


@pytest.fixture
def ended(printed, submitted, tmp_path):
    """ended(does, *words, **variables): the exit code of a script whose srun `does` so, and what it called."""

    def _ended(does, *words, **variables):
        printed("sbatch", *words, *TRAIN)
        done = submitted(dict.fromkeys(("srun", "scontrol"), CALLS.format(does=does)), **variables)
        calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
        return done.returncode, [" ".join(call) if call[0] == "scontrol" else call[0] for call in calls]

    return _ended


@pytest.mark.parametrize(
    ("does", "words", "environ", "code", "calls"),
    [
        ("exit 0", (), {}, 0, ["srun"]),
        ("exit 75", (), {}, 75, ["srun", "scontrol requeue 7"]),
        # Before a rank listens.
        ("kill -USR1 $$", ("--max_restarts", 2), {}, 138, ["srun", "scontrol requeue 7"]),
        ("exit 75", (), {"SLURM_RESTART_COUNT": "100"}, 75, ["srun"]),
        ("exit 75", ("--max_requeues", 0), {}, 75, ["srun"]),
        ("kill -TERM $PPID; exit 75", (), {}, 75, ["srun"]),  # SLURM's own way to cancel, or to requeue
        ("kill -USR1 $PPID; exit 75", (), {}, 75, ["srun", "scontrol requeue 7"]),
        ("exit 1", (), {}, 1, ["srun"]),
        ("exit 137", ("--max_restarts", 2), {}, 137, ["srun"] * 3),
        ("exit 2", ("--max_restarts", 2), {}, 2, ["srun"]),
        ("kill -TERM $PPID; exit 1", ("--max_restarts", 2), {}, 1, ["srun"]),
        (f"{ONCE}; exit 1", ("--max_restarts", 2), {}, 75, ["srun", "srun", "scontrol requeue 7"]),
    ],
)
def test_the_exit_code_decides_whether_the_job_is_requeued(does, words, environ, code, calls, ended):
    assert ended(does, *words, **environ) == (code, calls)


def test_each_start_has_its_own_secret_and_each_job_its_own_port(ended, tmp_path):
    does = 'echo "secret $COS598D_SECRET at $MASTER_PORT" >> told; exit 1'
    ended(does, "--max_restarts", 1, SLURM_JOB_ID="123456")
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [len(line[1]) for line in told] == [64, 64]
    assert told[0][1] != told[1][1]
    assert {line[3] for line in told} == {"13456"}
    assert not any(line[1] in (tmp_path / "job.sh").read_text() for line in told)
