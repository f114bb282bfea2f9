"""The script for sbatch: every word of it safe, and wrong ones refused before the job has waited for its turn."""

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


def printed(capsys, *words):
    """The script that the words print."""
    assert main(["sbatch", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def started(text):
    """The words that srun is given in a script, as the shell reads them."""
    command = re.search(r"^    srun (.*?)\n    code=", text, flags=re.DOTALL | re.MULTILINE)[1]
    return shlex.split(command.replace("\\\n", " "))


def test_it_asks_for_what_the_flags_say_and_is_a_script_of_bash(capsys, tmp_path):
    text = printed(capsys, "--nodes", 4, "--ranks_per_node", 2, "--time", "01:00:00", "--gpus_per_node", 2, *TRAIN)
    asked = re.findall(r"^#SBATCH --(.*)$", text, flags=re.MULTILINE)
    assert asked == [
        *("job-name=cos598d", "nodes=4", "ntasks=8", "ntasks-per-node=2", "time=01:00:00", "signal=USR1@60"),
        *("gpus-per-node=2", "output=%x-%j.out", "open-mode=append", "requeue"),
    ]
    words = started(text)
    assert words[:5] == ["--kill-on-bad-exit=0", sys.executable, "-m", "cos598d", "train"]
    assert words[5:] == [*TRAIN[2:], "--output_dir", "runs/job-$SLURM_JOB_ID", "--resume", "auto"]
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", tmp_path / "job.sh"], check=False).returncode == 0


def test_what_is_given_stands_in_place_of_what_it_would_add(capsys):
    own = ["--output_dir", "out put", "--resume", "auto", "--world_size", "2"]
    words = started(printed(capsys, "--nodes", 2, "--cpus_per_rank", 3, *TRAIN, *own))
    assert words == [*("--kill-on-bad-exit=0", "--cpus-per-task=3", sys.executable, "-m", "cos598d", *TRAIN[1:], *own)]
    text = printed(capsys, "--option=--constraint=a100", "--setup", "module load cuda/12", "--mem", "16G", *TRAIN)
    assert "\n#SBATCH --constraint=a100\n" in text
    assert "\nmodule load cuda/12\n" in text
    assert "\n#SBATCH --mem=16G\n" in text


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"$(touch HERE)`touch HERE`', "@COMMAND@ @PATH@", "ä;*?[x]{a,b}~&|>x"])
def test_no_word_means_anything_to_the_shell(name, capsys, tmp_path):
    """Run by bash, with an srun that only tells its words."""
    text = printed(capsys, *TRAIN, "--output_dir", name)
    (tmp_path / "srun").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[2:]))\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")

    assert json.loads(done.stdout)[4:] == [*TRAIN[2:], "--output_dir", name, "--resume", "auto"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sh", "srun"]


@pytest.mark.parametrize("program", [["task2b/run_glue.py"], ["python", "task3/run_squad.py", "--doc_stride", "64"]])
def test_a_lesson_s_script_is_started_too(program, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = started(printed(capsys, "--", *program))
    assert words[1:3] == [sys.executable, program[-3] if len(program) > 1 else program[0]]


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
    ],
)
def test_what_cannot_be_is_one_sentence(words, sentence, capsys):
    try:
        exit_code = main(["sbatch", *words])
    except SystemExit as ended:  # the parser's own
        exit_code = ended.code
    found = capsys.readouterr()
    assert (exit_code, found.out) == (2, "")
    assert sentence in found.err
    assert len(found.err.splitlines()) == 1


# A script's last lines decide by srun's exit code; `scontrol` and `srun` only tell that they were called.
CALLS = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
[ "$(basename "$0")" = srun ] || exit 0
{does}
"""


def ended(capsys, tmp_path, does, *words, environ=None):
    """How a script ends whose srun `does` so: its exit code, what was called, and its standard error."""
    (tmp_path / "job.sh").write_text(printed(capsys, *words, *TRAIN))
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(CALLS.format(does=does))
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"} | (environ or {})
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    return done.returncode, [" ".join(call) if call[0] == "scontrol" else call[0] for call in calls], done.stderr


@pytest.mark.parametrize(
    ("does", "words", "environ", "code", "calls"),
    [
        ("exit 0", (), {}, 0, ["srun"]),
        ("exit 75", (), {}, 75, ["srun", "scontrol requeue 7"]),
        (
            "kill -USR1 $$",
            ("--max_restarts", 2),
            {},
            138,
            ["srun", "scontrol requeue 7"],
        ),  # before a rank could hear it
        ("exit 75", (), {"SLURM_RESTART_COUNT": "100"}, 75, ["srun"]),
        ("exit 75", ("--max_requeues", 0), {}, 75, ["srun"]),
        ("kill -TERM $PPID; exit 75", (), {}, 75, ["srun"]),  # SLURM's own way to cancel, or to requeue
        ("kill -USR1 $PPID; exit 75", (), {}, 75, ["srun", "scontrol requeue 7"]),
        ("exit 1", (), {}, 1, ["srun"]),
        ("exit 137", ("--max_restarts", 2), {}, 137, ["srun"] * 3),
        ("exit 2", ("--max_restarts", 2), {}, 2, ["srun"]),
        ("kill -TERM $PPID; exit 1", ("--max_restarts", 2), {}, 1, ["srun"]),
        (
            "[ -e once ] && exit 75; touch once; exit 1",
            ("--max_restarts", 2),
            {},
            75,
            ["srun", "srun", "scontrol requeue 7"],
        ),
    ],
)
def test_the_exit_code_decides_whether_the_job_comes_back(does, words, environ, code, calls, capsys, tmp_path):
    found = ended(capsys, tmp_path, does, *words, environ=environ)
    assert found[:2] == (code, calls)


def test_each_start_has_a_secret_of_its_own_and_each_job_a_port(capsys, tmp_path):
    does = 'echo "secret $COS598D_SECRET at $MASTER_PORT" >> told; exit 1'
    ended(capsys, tmp_path, does, "--max_restarts", 1, environ={"SLURM_JOB_ID": "123456"})
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [len(line[1]) for line in told] == [64, 64]
    assert told[0][1] != told[1][1]
    assert {line[3] for line in told} == {"13456"}
    assert not any(line[1] in (tmp_path / "job.sh").read_text() for line in told)
